"""LitData sets of tokens (`optimize` with TokensLoader): an `index.json` and chunks, each one run of ids.

    index.json               {"chunks": [{"filename": "chunk-0-0.bin", ...}, ...], "config": {"data_format": ...}}
    chunk-0-0.bin            u32 N, u32 x (N + 1) offsets, ids of item 0, ids of item 1 ...     read in place
    chunk-0-1.zstd.bin       the same, compressed as a whole: decompressed when a row needs it

An item is a document. The number of ids is in the index, so opening a set decompresses nothing. LitData decompresses
chunks in place, so either name may be there. The order is that of the index.
"""

import zlib
from functools import partial
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.data_file import DataFile, Int64Array
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.corpus.formats.shard_index import Entry, listed_size, read_index
from dali_pipes.corpus.formats.token_run import Layout, check_stated_type
from dali_pipes.errors import CorpusError, CorpusFormatError, CorpusReadError
from dali_pipes.storage.byte_file import ByteFile, file_size, open_file
from dali_pipes.storage.decompress import check_claim, check_method, inflate
from dali_pipes.storage.fingerprint import digest_file, read_samples
from dali_pipes.uris import FilePath

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

    path: FilePath
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


def inspect(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    """As `Format.inspect`, for the chunks that an index lists. Blocks for a few reads a chunk."""
    index = file.path
    entry = read_index(index)
    config = entry.child("config")
    stored = _id_type(config)
    check_stated_type(index, "litdata", stored, options.id_type)
    method = config.optional_text("compression")
    suffix = None if method is None else check_method(method, f"{config.where}.compression")
    chunks = entry.children("chunks")
    if not chunks:
        raise CorpusError(f"{index}: does not list any chunks, so the corpus is empty")
    return [_data_file(_find_chunk(one, index.parent, method, suffix, stored)) for one in chunks]


def _id_type(config: Entry) -> np.dtype[Any]:
    for key, what in (("encryption", "encrypted"), ("compression_batch_size", "compressed in batches")):
        if config.get(key):
            raise CorpusFormatError(
                f"{config.where}: the chunks are {what} ({key}), which is not supported. Write the set without it."
            )
    loader = config.optional_text("item_loader")
    if loader not in (None, "TokensLoader"):
        raise CorpusFormatError(
            f"{config.where}.item_loader is {loader!r}, expected TokensLoader, whose items are token ids. Write the "
            "set for TokensLoader."
        )
    formats = config.get("data_format")
    text = formats[0] if isinstance(formats, list) and len(formats) == 1 else formats
    kind, _, number = text.partition(":") if isinstance(text, str) else ("", "", "")
    if kind not in _TYPES or not (number.isascii() and number.isdecimal() and len(number) < 4):
        raise CorpusFormatError(
            f"{config.where}.data_format is {formats!r}, expected one no_header_numpy:... or no_header_tensor:..., as "
            "TokensLoader has it"
        )
    stored = _TYPES[kind].get(int(number))
    if stored is None:
        codes = ", ".join(f"{number} ({np.dtype(name).name})" for number, name in _TYPES[kind].items())
        raise CorpusFormatError(f"{config.where}.data_format is {text!r}, expected a code of integers: {codes}")
    return np.dtype(stored)


def _find_chunk(
    entry: Entry, folder: FilePath, method: str | None, suffix: str | None, stored: np.dtype[Any]
) -> _Chunk:
    path, content_bytes = entry.path_in(folder, "filename"), entry.integer("chunk_bytes")
    if suffix is not None:
        inflated = path.with_name(path.name.replace(f".{method}", ""))
        if inflated != path and file_size(path) is None and file_size(inflated) is not None:
            path, suffix = inflated, None
    size = listed_size(path, entry.where)
    if suffix is None and size != content_bytes:
        _refuse(path, f"has {size:,} bytes, but {entry.where} expects {content_bytes:,}")
    if suffix is not None:
        check_claim(path, suffix, size, content_bytes, entry.where)
    chunk = _Chunk(path, size, content_bytes, suffix, entry.integer("chunk_size"), stored)
    if content_bytes < chunk.header_bytes:
        _refuse(
            path,
            f"has {content_bytes:,} bytes, fewer than the header of {chunk.num_items:,} items ({chunk.header_bytes:,})",
        )
    if (content_bytes - chunk.header_bytes) % stored.itemsize:
        _refuse(
            path,
            f"{content_bytes - chunk.header_bytes:,} bytes after the header of {chunk.num_items:,} items are not a "
            f"multiple of {stored.itemsize}, the width of {stored.name}",
        )
    ids = entry.get("dim")  # null if the first item is empty
    if ids is not None and ids != chunk.num_tokens:
        _refuse(path, f"{entry.where} claims {ids!r} ids, but its bytes are {chunk.num_tokens:,} of {stored.name}")
    return chunk


def _data_file(chunk: _Chunk) -> DataFile:
    with open_file(chunk.path) as file:
        if file.size != chunk.size:
            _refuse(chunk.path, f"had {chunk.size:,} bytes a moment ago, {file.size:,} now")
        identity, checksum = file.identity, None
        if chunk.suffix is None:
            header = file.read(0, chunk.header_bytes)
            _check_header(chunk, header)
            checksum = zlib.crc32(header)
        about = f"{chunk.num_items} {chunk.content_bytes} {checksum}".encode()
        digest = digest_file(chunk.path, chunk.size, chunk.stored, about, read_samples(file))
    first = 0 if chunk.suffix else chunk.header_bytes
    return DataFile(
        path=chunk.path,
        format="litdata",
        size=chunk.size,
        identity=identity,
        stored=chunk.stored,
        data_offset=None if chunk.suffix else first,
        extents=Layout(chunk.stored, first, chunk.num_tokens).extents,
        digest=digest,
        num_documents=chunk.num_items,
        read_document_offsets=partial(_document_offsets, chunk, checksum),
        decode=partial(_decode, chunk) if chunk.suffix else None,
    )


def _check_header(chunk: _Chunk, header: bytes) -> Int64Array:
    """The offsets of the items in the chunk, int64 (N + 1,), after checks."""
    table = np.frombuffer(header, "<u4").astype(np.int64)
    offsets = table[1:]
    if table[0] != chunk.num_items:
        _refuse(chunk.path, f"the index claims {chunk.num_items:,} items, but the chunk {table[0]:,}")
    if offsets[0] != chunk.header_bytes:
        _refuse(chunk.path, f"item 0 starts at byte {offsets[0]:,}, expected {chunk.header_bytes:,}, after the header")
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        at = int(falls[0])
        _refuse(
            chunk.path,
            f"item {at:,} starts at byte {offsets[at]:,} but ends before that, at byte {offsets[at + 1]:,}: 32-bit "
            "offsets overflow in chunks over 4 GiB",
        )
    if offsets[-1] != chunk.content_bytes:
        _refuse(chunk.path, f"the items end at byte {offsets[-1]:,}, but the chunk at byte {chunk.content_bytes:,}")
    broken = np.flatnonzero((offsets - chunk.header_bytes) % chunk.stored.itemsize)
    if len(broken):
        at = int(broken[0])
        _refuse(chunk.path, f"item {at:,} starts at byte {offsets[at]:,}, inside an id of {chunk.stored.name}")
    return offsets


def _document_offsets(chunk: _Chunk, checksum: int | None) -> Int64Array:
    """In ids from the first of the chunk. Reads the header again, or decompresses the chunk; blocks."""
    if chunk.suffix is not None:
        header = inflate(chunk.path, chunk.suffix, chunk.size, chunk.content_bytes)[: chunk.header_bytes]
    else:
        with open_file(chunk.path) as file:
            header = file.read(0, chunk.header_bytes) if file.size == chunk.size else b""
        if zlib.crc32(header) != checksum:
            raise CorpusReadError(f"{chunk.path}: changed after the corpus was opened. Open the corpus again.")
    return (_check_header(chunk, header) - chunk.header_bytes) // chunk.stored.itemsize


def _decode(chunk: _Chunk, number: int) -> Ids:
    """All ids of a compressed chunk."""
    assert number == 0
    assert chunk.suffix is not None
    content = inflate(chunk.path, chunk.suffix, chunk.size, chunk.content_bytes)
    _check_header(chunk, content[: chunk.header_bytes])
    return np.frombuffer(content, chunk.stored, offset=chunk.header_bytes)


def _refuse(path: FilePath, reason: str) -> NoReturn:
    raise CorpusFormatError(
        f"{path}: {reason}. The chunk is truncated, damaged or belongs to another index; copy or recreate it."
    )
