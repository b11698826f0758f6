"""Documents of MosaicML MDS shards: one per sample, from its column of text.

The header of a shard lists its columns, so a shard is read without its index, which only gives the order. A column of
text is `str`, or UTF-8 as `bytes`. Whole records contain the columns of encoding `str` or `json`, which is parsed, and
the names of the others, so that a conversation with images is not read without them.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from dali_pipes.corpus.columns.token_columns import NAMES
from dali_pipes.corpus.formats.mds.columns import choose_column, encodings_of, parse_bytes_column
from dali_pipes.corpus.formats.mds.samples import Content, locate_samples, read_offsets
from dali_pipes.corpus.formats.shard_index import MOST_SHARD_BYTES, Entry
from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.text.documents import Document
from dali_pipes.text.formats.record_text import missing_column, text_of
from dali_pipes.text.formats.text_format import TextFile, TextFormat
from dali_pipes.text.json_values import decode_utf8, parse_json
from dali_pipes.text.streams import ByteMeter, ChunkReader, Compression, read_chunks
from dali_pipes.uris import FilePath

_OF_RECORDS = ("str", "json")
_READABLE = (*_OF_RECORDS, "bytes")


def read_mds(path: FilePath, chunks: Iterator[bytes], key: str | None) -> Iterator[Document]:
    """The text in column `key` of each sample; whole records, as dicts, if `key` is None.

    chunks: of the shard, decompressed. Memory holds the whole shard.
    Raises CorpusFormatError for a damaged shard, and for a column that is missing or not text.
    """
    reader = ChunkReader(chunks)
    header, start = _read_header(path, reader)
    content = Content(path, start + reader.read(MOST_SHARD_BYTES + 1 - len(start)))
    encodings = encodings_of(header)
    names = [name for name, encoding in encodings.items() if encoding in _OF_RECORDS]
    if key is not None:
        if key not in encodings:
            raise CorpusFormatError(f"{path}: {missing_column(key, list(encodings))}")
        if encodings[key] not in _READABLE:
            raise CorpusFormatError(
                f"{path}: column {key!r} is of encoding {encodings[key]!r}; expected text: {', '.join(_READABLE)}"
            )
        names = [key]
    offsets = read_offsets(content, int(np.frombuffer(start, "<u4", 1)[0]))
    found = [locate_samples(content, offsets, parse_bytes_column(header, name)) for name in names]
    others = {} if key is not None else {n: f"a column of {e!r}" for n, e in encodings.items() if n not in names}
    places = [zip(samples.starts.tolist(), samples.counts.tolist(), strict=True) for samples in found]
    for number in range(1, len(offsets)):
        place, record = f"{path}: sample {number}", dict(others)
        for name, (begin, size) in zip(names, map(next, places), strict=True):
            record[name] = _parse(f"{place}: column {name!r}", encodings[name], content.data[begin : begin + size])
        yield Document(record if key is None else text_of(record, key, place), path, "sample", number)


def _read(file: TextFile, key: str | None, _: str | None, meter: ByteMeter) -> Iterator[Document]:
    return read_mds(file.path, file.chunks(meter), key)


def _holds_tokens(path: FilePath, compression: Compression, has_dtype: bool) -> bool:
    """Whether the shard holds token ids: in a column with one of the usual names, or in one without text next to it."""
    header, _ = _read_header(path, ChunkReader(read_chunks(path, compression, ByteMeter())))
    try:
        column = choose_column(header, path, None)
    except ConfigError:
        return False
    return column in NAMES or "str" not in encodings_of(header).values()


def _read_header(path: FilePath, reader: ChunkReader) -> tuple[Entry, bytes]:
    """The columns of a shard, as in its index, and the bytes that were read for them."""
    start = reader.read(4)
    count = int.from_bytes(start, "little")
    start += reader.read(4 * (count + 1))
    if len(start) < 4 * (count + 2):
        raise CorpusFormatError(
            f"{path}: ends at byte {len(start):,}, inside the offsets of {count:,} samples; the file is truncated, or "
            "not an MDS shard. Copy or recreate it"
        )
    first = int.from_bytes(start[4:8], "little")
    columns = reader.read(max(0, first - len(start)))
    try:
        return Entry(f"{path}: columns", json.loads(columns)), start + columns
    except (ValueError, RecursionError) as error:
        if isinstance(error, CorpusFormatError):
            raise
        raise CorpusFormatError(
            f"{path}: the list of columns, bytes {len(start):,} to {first:,}, is not valid JSON ({error}); the file is "
            "damaged, or not an MDS shard. Copy or recreate it"
        ) from None


def _parse(place: str, encoding: object, value: bytes) -> Any:
    text = decode_utf8(value, place)
    return parse_json(text, place) if encoding == "json" else text


MDS = TextFormat("MDS", lambda start: start.suffix == ".mds", _read, holds_tokens=_holds_tokens)
