"""The folder of the cache of a node, and how many bytes its entries have.

b5f2c...-200000-400000.ids     an entry (`cache_entries`)
0f3a....ids.tmp                being written, and locked, by its writer
used                           bytes of all entries; its lock is that of the folder
"""

import contextlib
import os
import struct
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from dali_pipes.runtime.locks import hold, locked, remove_unlocked
from dali_pipes.storage.cache_entries import HEADER_BYTES, entry_named, ids_bytes
from dali_pipes.storage.eviction import Entry

_USED = struct.Struct("<q")
_BEING_WRITTEN = ".ids.tmp"
_STALE_S = 60.0
"""Age from which an unlocked temporary file is of a killed process; a new one may not be locked yet."""


class CacheFolder:
    """The files in a folder. Safe for several threads and processes: what changes them is called inside `locked`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Inside, no other process or thread adds or removes entries. Blocks. OSError if the folder is read-only."""
        with (self.path / "used").open("ab"):
            pass
        with locked(self.path / "used"):
            yield

    def used_bytes(self) -> int:
        """Bytes of the entries, as far as they have been counted. OSError."""
        data = (self.path / "used").read_bytes()
        return int(_USED.unpack(data)[0]) if len(data) == _USED.size else 0

    def set_used(self, count: int) -> None:
        """Replace the count. OSError."""
        with (self.path / "used").open("r+b") as file:
            file.write(_USED.pack(max(0, count)))

    def add_used(self, count: int) -> None:
        """Add to the count, or subtract. OSError."""
        self.set_used(self.used_bytes() + count)

    def reserve(self, num_bytes: int) -> BinaryIO:
        """A temporary file for an entry of this size, counted and locked. OSError."""
        file = (self.path / f"{uuid.uuid4().hex}{_BEING_WRITTEN}").open("xb")
        hold(file.fileno())
        file.truncate(HEADER_BYTES + num_bytes)
        self.add_used(num_bytes)
        return file

    def entries(self) -> Iterator[Entry]:
        """All entries that are whole. Blocks to look through the folder. OSError."""
        with os.scandir(self.path) as listing:
            for one in listing:
                if one.name.endswith(".ids"):
                    with contextlib.suppress(OSError):
                        about = one.stat()
                        entry = entry_named(one.name, about.st_size, about.st_mtime_ns)
                        if entry is not None:
                            yield entry

    def count(self, entries: list[Entry]) -> int:
        """Bytes of these entries, and of those that are being written. Blocks to look through the folder."""
        total = sum(entry.num_bytes for entry in entries)
        for path in self.path.glob(f"*{_BEING_WRITTEN}"):
            with contextlib.suppress(OSError):
                total += ids_bytes(path.stat().st_size)
        return total

    def free_bytes(self) -> int:
        """Of the disk, but for a hundredth of it, which is left to others. OSError."""
        about = os.statvfs(self.path)
        return (about.f_bavail - about.f_blocks // 100) * about.f_frsize

    def remove_leftovers(self) -> None:
        """Remove temporary files of processes that were killed."""
        for path in self.path.glob("*.tmp"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime >= _STALE_S:
                    remove_unlocked(path)
