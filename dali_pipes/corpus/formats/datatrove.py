"""Files of datatrove's tokenizer (`.ds`), as Nanoset reads them too: ids alone, and two files next to them.

    00000_unshuffled.ds              ids, back to back
    00000_unshuffled.ds.index        u64 a document: where it ends, in ids                        5 8 8 12
    00000_unshuffled.ds.metadata     text: "TOKENIZER|WIDTH", number of ids, that number rounded  gpt2/tokenizer.json|2

Either may be missing: without an index the documents are unknown, without metadata the width of an id. Where datatrove
shuffled chunks of a fixed length, the index holds the ends of these as well, so the documents are unknown, too. Merged
files have one metadata for all: 000_NAME.ds, 001_NAME.ds ... and NAME.ds.metadata.
"""

import re
import zlib
from functools import partial
from typing import Any, NamedTuple, NoReturn

import numpy as np

from dali_pipes.corpus.data_file import DataFile, Int64Array
from dali_pipes.corpus.formats.flat import refuse_wider_ids
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.corpus.formats.marks import DATATROVE_SUFFIX
from dali_pipes.corpus.formats.token_run import Layout, check_stated_type
from dali_pipes.errors import CorpusFormatError, CorpusReadError
from dali_pipes.storage.byte_file import ByteFile, file_size, open_file
from dali_pipes.storage.fingerprint import digest_file, read_samples
from dali_pipes.uris import FilePath

_STORED: dict[str, np.dtype[Any]] = {"2": np.dtype("<u2"), "4": np.dtype("<u4")}
_MOST_METADATA_BYTES = 1 << 16
_BLOCK_ENTRIES = 1 << 20


class _Index(NamedTuple):
    path: FilePath
    num_entries: int
    checksum: int


def recognize(file: ByteFile, head: bytes) -> bool:
    """Whether it is a `.ds` file with an index or metadata next to it."""
    path = file.path
    return path.suffix == DATATROVE_SUFFIX and (
        file_size(_index_path(path)) is not None or _metadata_path(path) is not None
    )


def inspect(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    """As `Format.inspect`. Without metadata the ids are of the type that the user gave, else uint16."""
    path, id_type = file.path, options.id_type
    metadata = _metadata_path(path)
    stored, stated = (id_type or np.dtype("<u2"), None) if metadata is None else _parse_metadata(metadata)
    if metadata is not None:
        check_stated_type(metadata, "datatrove", stored, id_type)
    if file.size % stored.itemsize:
        _refuse(path, f"{file.size:,} bytes are not a multiple of {stored.itemsize}, the width of {stored.name}")
    num_tokens = file.size // stored.itemsize
    if stated is not None and str(metadata) == f"{path}.metadata" and stated != num_tokens:
        _refuse(path, f"{metadata} claims {stated:,} ids, but the file has {num_tokens:,} of {stored.name}")
    index = _check_index(path, num_tokens, stored.itemsize)
    samples = read_samples(file)
    if metadata is None and id_type is None:
        refuse_wider_ids(file, samples)
    about = b"" if index is None else f"{index.num_entries} {index.checksum}".encode()
    has_documents = index is not None and "chunk_shuffled" not in path.name
    return [
        DataFile(
            path=path,
            format="datatrove",
            size=file.size,
            identity=file.identity,
            stored=stored,
            data_offset=0,
            extents=Layout(stored, 0, num_tokens).extents,
            digest=digest_file(path, file.size, stored, about, samples),
            num_documents=index.num_entries if index is not None and has_documents else None,
            read_document_offsets=partial(_document_offsets, index) if index is not None and has_documents else None,
        )
    ]


def _index_path(path: FilePath) -> FilePath:
    return path.with_name(f"{path.name}.index")


def _metadata_path(path: FilePath) -> FilePath | None:
    own, of_merged = (path.with_name(f"{name}.metadata") for name in (path.name, re.sub(r"^\d+_", "", path.name)))
    return next((one for one in (own, of_merged) if file_size(one) is not None), None)


def _parse_metadata(path: FilePath) -> tuple[np.dtype[Any], int]:
    """Type and number of ids."""
    with open_file(path) as file:
        lines = file.read(0, min(file.size, _MOST_METADATA_BYTES)).decode("utf-8", "replace").split("\n")
    # The name of the tokenizer may be a path with a | in it or at its end.
    width = lines[0].rpartition("|")[2].strip()
    count = lines[1].strip() if len(lines) > 1 else ""
    if width not in _STORED:
        _refuse(path, f"line 1 is {lines[0][-100:]!r}, expected TOKENIZER|WIDTH with WIDTH 2 or 4 (bytes)")
    if not (count.isascii() and count.isdecimal() and len(count) < 20):
        _refuse(path, f"line 2 is {count[:100]!r}, expected the number of ids")
    return _STORED[width], int(count)


def _check_index(path: FilePath, num_tokens: int, width: int) -> _Index | None:
    """The index of the file at `path`, after a check that it increases to its number of ids; None if there is none.

    Blocks to read all of it.
    """
    index_path = _index_path(path)
    if file_size(index_path) is None:
        return None
    with open_file(index_path) as file:
        if file.size % 8:
            _refuse(index_path, f"{file.size:,} bytes are not a multiple of 8, the width of an entry")
        entries, before, checksum = file.size // 8, 0, 0
        for first in range(0, entries, _BLOCK_ENTRIES):
            data = file.read(8 * first, 8 * min(_BLOCK_ENTRIES, entries - first))
            checksum = zlib.crc32(data, checksum)
            ends = np.frombuffer(data, "<u8")
            earlier = np.concatenate((np.array([before], np.uint64), ends[:-1]))
            falls = np.flatnonzero(ends < earlier)
            if len(falls):
                at = int(falls[0])
                _refuse(
                    index_path,
                    f"entry {first + at:,} is {ends[at]:,}, expected at least {earlier[at]:,}, the entry before it",
                )
            before = int(ends[-1])
    if before != num_tokens:
        _refuse(
            index_path,
            f"the last entry is {before:,}, but {path} has {num_tokens:,} ids of {width} bytes",
        )
    return _Index(index_path, entries, checksum)


def _document_offsets(index: _Index) -> Int64Array:
    """Int64 (documents + 1,), from 0. Reads the index again; blocks."""
    with open_file(index.path) as file:
        data = file.read(0, file.size)
    if len(data) != 8 * index.num_entries or zlib.crc32(data) != index.checksum:
        raise CorpusReadError(f"{index.path}: changed after the corpus was opened. Open the corpus again.")
    return np.concatenate(([0], np.frombuffer(data, "<i8")))


def _refuse(path: FilePath, reason: str) -> NoReturn:
    raise CorpusFormatError(
        f"{path}: {reason}. It is truncated, damaged or belongs to another file; copy or recreate it."
    )
