"""What opening found in the tables of a corpus, cached in the user's cache folder (`user_cache`): one file for all.

    dali_pipes tables 1       and the SHA-256 of the rest
    {"columns": [["input_ids", "<i4", [], [], false]], "tables": [["9f86...", 0, 11], ...]}
    chunks documents removed unlearned | counts ... | rows ... | sizes ... | offsets ... | inode ctime      int64

A table is found by a hash of its file's name, size, identity, footer and sampled bytes, which each start reads. So the
folder may move, and a file that changed is opened anew; also one that was rewritten in place under its old time, as in
`offset_cache`. Offsets of documents are here for small tables; a large one has a separate file for them.
"""

import contextlib
import hashlib
import json
import os
import struct
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dali_pipes.corpus.data_file import Int64Array
from dali_pipes.errors import CorpusReadError
from dali_pipes.runtime import offset_cache, user_cache
from dali_pipes.storage.byte_file import ByteFile, file_identity
from dali_pipes.uris import FilePath

if TYPE_CHECKING:
    from dali_pipes.corpus.columns.row_facts import RowFacts, RowTotals
    from dali_pipes.corpus.columns.token_columns import TokenColumns

LEAST_FILES = 16
"""Fewer files are opened anew at each start, which takes milliseconds."""

_MAGIC = b"dali_pipes tables 1\n"
_HASH_BYTES = 32
_TOTALS = 4
_INODE = 2


class KeptTable(NamedTuple):
    """What opening found in a table. rows, sizes: as in `RowChunks`. facts: of a small table, else None."""

    columns: "TokenColumns"
    rows: list[int]
    sizes: list[int]
    totals: "RowTotals"
    facts: "RowFacts | None"


class KeptTables:
    """The kept tables of one corpus. Thread-safe.

    settings: of the user, that decide what is found in a file
    """

    def __init__(self, files: Sequence[FilePath], settings: object) -> None:
        self._files, self._settings = files, settings
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._known: dict[bytes, _Entry] | None = None
        self._used: dict[bytes, _Entry] = {}
        self._has_new = False

    def place(self, file: ByteFile) -> "KeptPlace":
        """The place of a file among them, before the file is read. Blocks for a look-up."""
        return KeptPlace(self, file)

    def store(self) -> None:
        """Keep what was found for the next start, if it is not there yet. A cache that fails never fails a run."""
        if self._path is None or not self._has_new:
            return
        with contextlib.suppress(OSError):
            user_cache.replace_whole(self._path, *_to_bytes(self._used))

    def _find(self, key: bytes) -> "_Entry | None":
        with self._lock:
            if self._known is None:
                self._known = self._load()
            return self._known.get(key)

    def _use(self, key: bytes, entry: "_Entry", *, is_new: bool) -> None:
        with self._lock:
            self._used[key] = entry
            self._has_new |= is_new

    def _load(self) -> "dict[bytes, _Entry]":
        if len(self._files) < LEAST_FILES:
            return {}
        folder, _ = user_cache.cache_folder(self._files)
        if folder is None:
            return {}
        from dali_pipes.corpus.columns.row_facts import KEPT_VERSION  # with the first table

        first = self._files[0]
        try:
            about = f"dali_pipes tables {KEPT_VERSION} {first.name} {file_identity(first)} {self._settings}"
        except CorpusReadError:  # opening it says so
            return {}
        self._path = folder / user_cache.kept_name("tables", os.fsencode(about))
        return {} if offset_cache.are_made_anew() else _of_bytes(self._path)


class KeptPlace:
    """Where what is found in one file is kept. Made before the file is read."""

    def __init__(self, tables: KeptTables, file: ByteFile) -> None:
        self._tables, self._file = tables, file
        self._inode = offset_cache.inodes_of([file.path])[0]
        self._key = b""

    def find(self, footer: bytes, samples: Sequence[bytes]) -> KeptTable | None:
        """What an earlier start found in a file with these bytes."""
        file = self._file
        parts = (os.fsencode(file.path.name), file.identity.encode(), footer, *samples)
        sizes = struct.pack(f"<{len(parts) + 1}Q", file.size, *map(len, parts))
        self._key = hashlib.sha256(b"".join((sizes, *parts))).digest()
        entry = self._tables._find(self._key)
        if entry is None:
            return None
        inode, ctime = entry.numbers[-_INODE:].tolist()
        if inode == self._inode[0] and ctime != self._inode[1]:
            return None
        self._tables._use(self._key, entry, is_new=False)
        return entry.unpack()

    def keep(self, table: KeptTable) -> None:
        """Keep this after `find` did not find anything."""
        self._tables._use(self._key, _Entry.pack(table, self._inode), is_new=True)


class _Entry(NamedTuple):
    columns: "TokenColumns"
    numbers: Int64Array

    @classmethod
    def pack(cls, table: KeptTable, inode: Int64Array) -> "_Entry":
        totals, facts = table.totals, table.facts
        few = [len(table.rows), totals.documents, totals.removed, totals.unlearned]
        numbers = [totals.counts, table.rows, table.sizes, [] if facts is None else facts.offsets, inode]
        return cls(table.columns, np.concatenate([np.array(part, np.int64) for part in (few, *numbers)]))

    def unpack(self) -> KeptTable:
        from dali_pipes.corpus.columns.row_facts import RowFacts, RowTotals  # with the first table

        chunks, documents, removed, unlearned = self.numbers[:_TOTALS].tolist()
        borders = [_TOTALS + chunks * column for column in range(4)]
        counts, rows, sizes = (self.numbers[begin : begin + chunks] for begin in borders[:3])
        offsets = self.numbers[borders[3] : -_INODE]
        facts = RowFacts(counts, offsets, removed, unlearned) if len(offsets) else None
        totals = RowTotals(counts, documents, removed, unlearned)
        return KeptTable(self.columns, rows.tolist(), sizes.tolist(), totals, facts)


def _to_bytes(entries: "dict[bytes, _Entry]") -> Iterator[bytes]:
    columns = list(dict.fromkeys(entry.columns for entry in entries.values()))
    numbered = {one: number for number, one in enumerate(columns)}
    head = {
        "columns": [[one.tokens, one.stored.str, one.beside, one.unused, one.has_mask] for one in columns],
        "tables": [[key.hex(), numbered[one.columns], len(one.numbers)] for key, one in entries.items()],
    }
    numbers = np.concatenate([entry.numbers for entry in entries.values()])
    content = json.dumps(head).encode() + b"\n" + numbers.tobytes()
    yield _MAGIC + hashlib.sha256(content).digest()
    yield content


def _of_bytes(path: Path) -> "dict[bytes, _Entry]":
    """The entries in a file; empty without a file, or if it is damaged."""
    from dali_pipes.corpus.columns.token_columns import TokenColumns  # with the first table

    try:
        content = path.read_bytes()
    except OSError:
        return {}
    start = len(_MAGIC) + _HASH_BYTES
    if content[:start] != _MAGIC + hashlib.sha256(memoryview(content)[start:]).digest():
        return {}
    end = content.index(b"\n", start) + 1
    head = json.loads(content[start:end])
    columns = [
        TokenColumns(tokens, np.dtype(stored), tuple(beside), tuple(unused), has_mask)
        for tokens, stored, beside, unused, has_mask in head["columns"]
    ]
    numbers = np.frombuffer(content[end:], np.int64)
    found, done = {}, 0
    for key, number, count in head["tables"]:
        found[bytes.fromhex(key)] = _Entry(columns[number], numbers[done : done + count])
        done += count
    return found
