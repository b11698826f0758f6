"""Entries of the cache of a node: their names, what is in their files, and how they are read.

    b5f2c...-200000-400000.ids     ids 0x200000 to 0x3fffff of the corpus with content key 5f2c...
    header                         magic, bytes of ids, their CRC-32, a number of this file

Files are read by calls: a map would end the process with SIGBUS if the disk failed. zlib's CRC-32 is C code, which
takes half a nanosecond a byte and lets other threads run; `crc32c` takes seven.
"""

import os
import re
import struct
import zlib
from typing import Self, TypeAlias

from dali_pipes.storage.eviction import Entry

_MAGIC = b"dpnode1\n"
_HEADER = struct.Struct("<8sQI4x8s")
_NAME = re.compile(r"([a-z][0-9a-f]+)-([0-9a-f]+)-([0-9a-f]+)\.ids")
_STEP_BYTES = 1 << 20

HEADER_BYTES = _HEADER.size


class Found:
    """An entry that is open for reading, as a context manager. For one thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, first: int, out: memoryview) -> bool:
        """Fill `out` with the bytes from `first` on. False if the disk fails, or the file has been cut."""
        done = 0
        try:
            while done < len(out):
                got = os.preadv(self._descriptor, [out[done:]], HEADER_BYTES + first + done)
                if got == 0:
                    return False
                done += got
        except OSError:
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class Made:
    """The bytes of an entry that was just made, or of one that is not stored, to be read as `Found`."""

    def __init__(self, content: memoryview) -> None:
        self._content = content

    def read(self, first: int, out: memoryview) -> bool:
        """Fill `out` with the bytes from `first` on. True."""
        out[:] = self._content[first : first + len(out)]
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


Content: TypeAlias = Found | Made


def entry_of(kind: str, corpus: str, begin: int, end: int, num_bytes: int) -> Entry:
    """The entry of ids `begin` to `end` - 1. kind: a letter for each way in which ids are stored."""
    return Entry(f"{kind}{corpus}-{begin:x}-{end:x}.ids", corpus, begin, end, num_bytes)


def entry_named(name: str, file_bytes: int, used_at: int) -> Entry | None:
    """The entry in a file; None if its name is not that of an entry."""
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    begin, end = (int(number, 16) for number in found.groups()[1:])
    return Entry(name, found[1][1:], begin, end, ids_bytes(file_bytes), used_at)


def ids_bytes(file_bytes: int) -> int:
    """Bytes of ids in a file of this size."""
    return max(0, file_bytes - HEADER_BYTES)


def header_of(data: memoryview) -> tuple[bytes, bytes]:
    """The header of a new file with these ids, and its number."""
    number = os.urandom(8)
    return _HEADER.pack(_MAGIC, len(data), zlib.crc32(data), number), number


def intact_number(entry: Entry, descriptor: int, known: bytes | None) -> bytes | None:
    """The number of the file of an entry, None if it is damaged. Blocks to read all of it, unless `known` is it."""
    try:
        header = os.pread(descriptor, HEADER_BYTES, 0)
        if len(header) < HEADER_BYTES or os.fstat(descriptor).st_size != HEADER_BYTES + entry.num_bytes:
            return None
        magic, num_bytes, expected, number = _HEADER.unpack(header)
        if magic != _MAGIC or num_bytes != entry.num_bytes:
            return None
        if number != known:
            crc = 0
            for first in range(0, entry.num_bytes, _STEP_BYTES):
                crc = zlib.crc32(os.pread(descriptor, _STEP_BYTES, HEADER_BYTES + first), crc)
            if crc != expected:
                return None
    except OSError:
        return None
    return bytes(number)
