"""Files of datatrove's tokenizer (`.ds`), which Nanoset reads too: ids alone, and two files that tell of them.

    00000_unshuffled.ds              ids, back to back
    00000_unshuffled.ds.index        u64 a document: where it ends, in ids                        5 8 8 12
    00000_unshuffled.ds.metadata     text: "TOKENIZER|WIDTH", number of ids, that number rounded  gpt2/tokenizer.json|2

Either may be missing: without an index the documents are not known, without metadata the width of an id is not. Where
datatrove shuffled chunks of a fixed length, the index also has the ends of these, so it tells nothing of documents.
Merged files have one metadata for all: 000_NAME.ds, 001_NAME.ds ... and NAME.ds.metadata.
"""

import os
import re
import zlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from dali_pipes.corpus.data_file import DataFile, Int64Array, Layout, one_extent
from dali_pipes.corpus.formats.flat import refuse_wider_ids
from dali_pipes.errors import CorpusFormatError, CorpusReadError
from dali_pipes.storage.fingerprint import digest_file, read_samples
from dali_pipes.storage.local import OpenFile

SUFFIX = ".ds"
_STORED: dict[str, np.dtype[Any]] = {"2": np.dtype("<u2"), "4": np.dtype("<u4")}
_MOST_METADATA_BYTES = 1 << 16
_BLOCK_ENTRIES = 1 << 20


class _Index(NamedTuple):
    path: Path
    num_entries: int
    checksum: int


def is_datatrove(path: Path) -> bool:
    """Whether `path` is a `.ds` file with an index or metadata. Two look-ups."""
    return path.suffix == SUFFIX and (os.path.exists(f"{path}.index") or _metadata_path(path) is not None)


def inspect_datatrove(path: Path, id_type: np.dtype[Any] | None = None) -> DataFile:
    """The file at `path`, checked against its index and metadata. Blocks: reads the index, and a few times the file.

    id_type: compared with the metadata; without any, the type of the ids, uint16 if not given.
    Raises CorpusFormatError, naming file, entry, what was found and expected, for files that do not go together.
    """
    metadata = _metadata_path(path)
    stored, stated = (id_type or np.dtype("<u2"), None) if metadata is None else _parse_metadata(metadata)
    if id_type is not None and id_type.newbyteorder("=") != stored.newbyteorder("="):
        raise CorpusFormatError(f"{metadata}: says that ids are {stored.name}, but dtype={id_type.name!r} was given")
    with OpenFile(path) as file:
        if file.size % stored.itemsize:
            _refuse(path, f"{file.size} bytes are no whole number of ids of {stored.itemsize} bytes ({stored.name})")
        num_tokens = file.size // stored.itemsize
        if stated is not None and str(metadata) == f"{path}.metadata" and stated != num_tokens:
            _refuse(path, f"{metadata} claims {stated} ids, but the file has {num_tokens} of {stored.name}")
        index = _check_index(path, num_tokens, stored.itemsize)
        samples = read_samples(file)
        if metadata is None and id_type is None:
            refuse_wider_ids(file, samples)
        about = b"" if index is None else f"{index.num_entries} {index.checksum}".encode()
        digest = digest_file(path, file.size, stored, about, samples)
        size = file.size
    has_documents = index is not None and "chunk_shuffled" not in path.name
    return DataFile(
        path=path,
        format="datatrove",
        size=size,
        stored=stored,
        data_offset=0,
        extents=one_extent(Layout(stored, 0, num_tokens)),
        digest=digest,
        num_documents=index.num_entries if index is not None and has_documents else None,
        read_document_offsets=partial(_document_offsets, index) if index is not None and has_documents else None,
    )


def _metadata_path(path: Path) -> Path | None:
    if os.path.isfile(f"{path}.metadata"):
        return Path(f"{path}.metadata")
    of_merged = path.with_name(re.sub(r"^\d+_", "", path.name) + ".metadata")
    return of_merged if of_merged.is_file() else None


def _parse_metadata(path: Path) -> tuple[np.dtype[Any], int]:
    """Type and number of ids."""
    with OpenFile(path) as file:
        lines = file.read(0, min(file.size, _MOST_METADATA_BYTES)).decode("utf-8", "replace").split("\n")
    # The name of the tokenizer may be a path with a | of its own, or end in one.
    width = lines[0].rpartition("|")[2].strip()
    count = lines[1].strip() if len(lines) > 1 else ""
    if width not in _STORED:
        _refuse(path, f"line 1 is {lines[0][-100:]!r}, expected TOKENIZER|WIDTH with a width of 2 or 4 bytes")
    if not (count.isascii() and count.isdecimal() and len(count) < 20):
        _refuse(path, f"line 2 is {count[:100]!r}, expected the number of ids")
    return _STORED[width], int(count)


def _check_index(path: Path, num_tokens: int, width: int) -> _Index | None:
    """The index of the file at `path`, found to rise to its number of ids; None if there is none. Reads it; blocks."""
    index_path = Path(f"{path}.index")
    if not index_path.exists():
        return None
    with OpenFile(index_path) as file:
        if file.size % 8:
            _refuse(index_path, f"{file.size} bytes are no whole number of entries of 8 bytes")
        entries, before, checksum = file.size // 8, 0, 0
        for first in range(0, entries, _BLOCK_ENTRIES):
            data = file.read(8 * first, 8 * min(_BLOCK_ENTRIES, entries - first))
            checksum = zlib.crc32(data, checksum)
            ends = np.frombuffer(data, "<u8")
            earlier = np.concatenate((np.array([before], np.uint64), ends[:-1]))
            falls = np.flatnonzero(ends < earlier)
            if len(falls):
                at = int(falls[0])
                _refuse(index_path, f"entry {first + at} is {ends[at]}, less than {earlier[at]}, the entry before")
            before = int(ends[-1])
    if before != num_tokens:
        _refuse(
            index_path,
            f"the last entry is {before}, but {path} has {num_tokens} ids of {width} bytes: they do not agree",
        )
    return _Index(index_path, entries, checksum)


def _document_offsets(index: _Index) -> Int64Array:
    """Int64 (documents + 1,), from 0. Reads the index again; blocks."""
    with OpenFile(index.path) as file:
        data = file.read(0, file.size)
    if len(data) != 8 * index.num_entries or zlib.crc32(data) != index.checksum:
        raise CorpusReadError(f"{index.path}: changed since the corpus was opened. Open the corpus again.")
    return np.concatenate(([0], np.frombuffer(data, "<i8")))


def _refuse(path: Path, reason: str) -> NoReturn:
    raise CorpusFormatError(
        f"{path}: {reason}: it is truncated or damaged, or belongs to another file. Make or copy it again."
    )
