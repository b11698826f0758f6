"""LitData sets of tokens (`optimize` with TokensLoader): an `index.json` and chunks, each one run of ids.

    index.json               {"chunks": [{"filename": "chunk-0-0.bin", ...}, ...], "config": {"data_format": ...}}
    chunk-0-0.bin            u32 N, u32 x (N + 1) offsets, ids of item 0, ids of item 1 ...     read where they lie
    chunk-0-1.zstd.bin       the same, compressed as a whole: decompressed when a row needs it

An item is a document. The number of ids is in the index, so no chunk is decompressed to open a set. LitData
decompresses chunks in place, so either name may be there. The order is that of the index.
"""

import zlib
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.data_file import DataFile, Int64Array
from dali_pipes.corpus.formats.shard_index import Entry, file_size, read_index, size_or_none
from dali_pipes.errors import CorpusError, CorpusFormatError, CorpusReadError
from dali_pipes.storage.decompress import check_claim, check_method, inflate
from dali_pipes.storage.fingerprint import digest_file, read_samples
from dali_pipes.storage.local import OpenFile

Ids: TypeAlias = npt.NDArray[Any]

# The numbers of two tables of LitData's; others are floating-point numbers and the like. Aliases are there.
_NUMPY_TYPES = {0: "<i1", 1: "<i2", 2: "<i4", 3: "<i8", 4: "<u1", 5: "<u2", 6: "<u4", 7: "<u8"}
_TENSOR_TYPES = {
    11: "<u1",
    12: "<i1",
    13: "<i2",
    14: "<i2",
    15: "<i4",
    16: "<i4",
    17: "<i8",
    18: "<i8",
    20: "<u2",
}
_TYPES = {"no_header_numpy": _NUMPY_TYPES, "no_header_tensor": _TENSOR_TYPES}


class _Chunk(NamedTuple):
    """One chunk, as the index has it: its file, the bytes of that and, if compressed (`suffix`), of its content."""

    path: Path
    size: int
    content_bytes: int
    suffix: str | None
    num_items: int
    stored: np.dtype[Any]

    @property
    def header_bytes(self) -> int:
        """Bytes before the first id."""
        return 4 * (self.num_items + 2)

    @property
    def num_tokens(self) -> int:
        """Ids in the chunk."""
        return (self.content_bytes - self.header_bytes) // self.stored.itemsize


def inspect_litdata(index: Path, id_type: np.dtype[Any] | None = None) -> list[DataFile]:
    """The chunks of the set that `index` lists, checked. Blocks for a few reads a chunk.

    id_type: compared with what the index says. Raises CorpusFormatError for a damaged set or one of no ids.
    """
    entry = read_index(index)
    config = entry.child("config")
    stored = _id_type(config)
    if id_type is not None and id_type.newbyteorder("=") != stored.newbyteorder("="):
        raise CorpusFormatError(f"{index}: says that ids are {stored.name}, but dtype={id_type.name!r} was given")
    method = config.optional_text("compression")
    suffix = None if method is None else check_method(method, f"{config.where}.compression")
    chunks = entry.children("chunks")
    if not chunks:
        raise CorpusError(f"{index}: lists no chunks, so there are no tokens")
    return [_data_file(_find_chunk(one, index.parent, method, suffix, stored)) for one in chunks]


def _id_type(config: Entry) -> np.dtype[Any]:
    for key, what in (("encryption", "encrypted"), ("compression_batch_size", "compressed by batches")):
        if config.get(key):
            raise CorpusFormatError(f"{config.where}: the chunks are {what} ({key}), which is not read")
    loader = config.optional_text("item_loader")
    if loader not in (None, "TokensLoader"):
        raise CorpusFormatError(
            f"{config.where}.item_loader is {loader!r}: its items are not runs of token ids; sets for TokensLoader are"
        )
    formats = config.get("data_format")
    text = formats[0] if isinstance(formats, list) and len(formats) == 1 else formats
    kind, _, number = text.partition(":") if isinstance(text, str) else ("", "", "")
    if kind not in _TYPES or not (number.isascii() and number.isdecimal() and len(number) < 4):
        raise CorpusFormatError(
            f"{config.where}.data_format is {formats!r}: not one run of numbers, as TokensLoader has "
            f"(no_header_numpy:... or no_header_tensor:...)"
        )
    stored = _TYPES[kind].get(int(number))
    if stored is None:
        raise CorpusFormatError(f"{config.where}.data_format is {text!r}: no integers; those are {_TYPES[kind]}")
    return np.dtype(stored)


def _find_chunk(entry: Entry, folder: Path, method: str | None, suffix: str | None, stored: np.dtype[Any]) -> _Chunk:
    path, content_bytes = entry.path_in(folder, "filename"), entry.integer("chunk_bytes")
    if suffix is not None:
        inflated = path.with_name(path.name.replace(f".{method}", ""))
        if inflated != path and size_or_none(path) is None and size_or_none(inflated) is not None:
            path, suffix = inflated, None
    size = file_size(path, entry.where)
    if suffix is None and size != content_bytes:
        _refuse(path, f"has {size} bytes, but {entry.where} expects {content_bytes}")
    if suffix is not None:
        check_claim(path, suffix, size, content_bytes, entry.where)
    chunk = _Chunk(path, size, content_bytes, suffix, entry.integer("chunk_size"), stored)
    if content_bytes < chunk.header_bytes or (content_bytes - chunk.header_bytes) % stored.itemsize:
        _refuse(
            path,
            f"{content_bytes} bytes less {chunk.header_bytes} of the header of {chunk.num_items} items are no whole "
            f"number of {stored.name}",
        )
    ids = entry.get("dim")  # null if the first item is empty
    if ids is not None and ids != chunk.num_tokens:
        _refuse(path, f"{entry.where} claims {ids!r} ids, but its bytes are {chunk.num_tokens} of {stored.name}")
    return chunk


def _data_file(chunk: _Chunk) -> DataFile:
    with OpenFile(chunk.path) as file:
        if file.size != chunk.size:
            _refuse(chunk.path, f"had {chunk.size} bytes a moment ago, {file.size} now")
        checksum = None
        if chunk.suffix is None:
            header = file.read(0, chunk.header_bytes)
            _check_header(chunk, header)
            checksum = zlib.crc32(header)
        about = f"{chunk.num_items} {chunk.content_bytes} {checksum}".encode()
        digest = digest_file(chunk.path, chunk.size, chunk.stored, about, read_samples(file))
    first = 0 if chunk.suffix else chunk.header_bytes
    extents = np.array([[first, chunk.num_tokens]] if chunk.num_tokens else [], np.int64).reshape(-1, 2)
    return DataFile(
        path=chunk.path,
        format="litdata",
        size=chunk.size,
        stored=chunk.stored,
        data_offset=None if chunk.suffix else first,
        extents=extents,
        digest=digest,
        num_documents=chunk.num_items,
        read_document_offsets=partial(_document_offsets, chunk, checksum),
        decode=partial(_decode, chunk) if chunk.suffix else None,
    )


def _check_header(chunk: _Chunk, header: bytes) -> Int64Array:
    """The offsets of the items in the chunk, int64 (N + 1,), found to be right."""
    table = np.frombuffer(header, "<u4").astype(np.int64)
    offsets = table[1:]
    if table[0] != chunk.num_items:
        _refuse(chunk.path, f"the index claims {chunk.num_items} items, but the chunk {table[0]}")
    if offsets[0] != chunk.header_bytes:
        _refuse(
            chunk.path, f"item 0 is said to start at byte {offsets[0]}, but the header ends at {chunk.header_bytes}"
        )
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        at = int(falls[0])
        _refuse(
            chunk.path,
            f"item {at} starts at byte {offsets[at]} and ends at byte {offsets[at + 1]}, before that: offsets have 32 "
            f"bits, and start again at 0 in a chunk of more than 4 GiB",
        )
    if offsets[-1] != chunk.content_bytes:
        _refuse(chunk.path, f"the items should end at byte {offsets[-1]}, but there are {chunk.content_bytes} bytes")
    broken = np.flatnonzero((offsets - chunk.header_bytes) % chunk.stored.itemsize)
    if len(broken):
        at = int(broken[0])
        _refuse(chunk.path, f"item {at} starts at byte {offsets[at]}, within an id of {chunk.stored.name}")
    return offsets


def _document_offsets(chunk: _Chunk, checksum: int | None) -> Int64Array:
    """In ids from the first of the chunk. Reads the header again, or decompresses the chunk; blocks."""
    if chunk.suffix is not None:
        header = inflate(chunk.path, chunk.suffix, chunk.size, chunk.content_bytes)[: chunk.header_bytes]
    else:
        with OpenFile(chunk.path) as file:
            header = file.read(0, chunk.header_bytes) if file.size == chunk.size else b""
        if zlib.crc32(header) != checksum:
            raise CorpusReadError(f"{chunk.path}: changed since the corpus was opened. Open the corpus again.")
    return (_check_header(chunk, header) - chunk.header_bytes) // chunk.stored.itemsize


def _decode(chunk: _Chunk, number: int) -> Ids:
    """All ids of a compressed chunk."""
    assert number == 0
    assert chunk.suffix is not None
    content = inflate(chunk.path, chunk.suffix, chunk.size, chunk.content_bytes)
    _check_header(chunk, content[: chunk.header_bytes])
    return np.frombuffer(content, chunk.stored, offset=chunk.header_bytes)


def _refuse(path: Path, reason: str) -> NoReturn:
    raise CorpusFormatError(
        f"{path}: {reason}: the chunk is truncated or damaged, or belongs to another index. Make or copy it again."
    )
