"""Documents of MosaicML MDS shards: a sample each, its column of text.

What columns a shard has stands in its own header too, so a shard is read without its index, which gives the order.
A column of text is `str`, or UTF-8 as `bytes`. Whole records are made of the columns that are `str` or `json`, which is
parsed; of the others they have the name, so that a conversation with images is not read without them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dali_pipes.corpus.columns.token_columns import NAMES
from dali_pipes.corpus.formats.mds.columns import choose_column, encodings_of, parse_bytes_column
from dali_pipes.corpus.formats.mds.samples import Content, locate_samples, read_offsets
from dali_pipes.corpus.formats.shard_index import MOST_SHARD_BYTES, Entry
from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.text.documents import Document
from dali_pipes.text.lines import missing_column, text_of
from dali_pipes.text.streams import ByteMeter, ChunkReader, Compression, read_chunks

_OF_RECORDS = ("str", "json")
_READABLE = (*_OF_RECORDS, "bytes")


def read_mds(path: Path, chunks: Iterator[bytes], key: str | None) -> Iterator[Document]:
    """The text in column `key` of each sample; the columns of whole records, as dicts, if it is None.

    chunks: of the shard, decompressed. The memory is that of the shard.
    Raises CorpusFormatError for a damaged shard, a column that is not there or holds no text.
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
                f"{path}: column {key!r} is of encoding {encodings[key]!r}; one of text is expected: "
                f"{', '.join(_READABLE)}"
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


def holds_tokens(path: Path, compression: Compression) -> bool:
    """Whether the shard holds tokens: a column of ids with one of the usual names, or one and no text beside it.

    Reads its header; raises as `read_mds`.
    """
    header, _ = _read_header(path, ChunkReader(read_chunks(path, compression, ByteMeter())))
    try:
        column = choose_column(header, path, None)
    except ConfigError:
        return False
    return column in NAMES or "str" not in encodings_of(header).values()


def _read_header(path: Path, reader: ChunkReader) -> tuple[Entry, bytes]:
    """The columns of a shard, as its index has them, and all that was read for it."""
    start = reader.read(4)
    count = int.from_bytes(start, "little")
    start += reader.read(4 * (count + 1))
    if len(start) < 4 * (count + 2):
        raise CorpusFormatError(
            f"{path}: ends at byte {len(start)}, inside of the offsets of its {count} samples: it is truncated, or no "
            "MDS shard. Make or copy it again."
        )
    first = int.from_bytes(start[4:8], "little")
    columns = reader.read(max(0, first - len(start)))
    try:
        return Entry(f"{path}: columns", json.loads(columns)), start + columns
    except (ValueError, RecursionError) as error:
        if isinstance(error, CorpusFormatError):
            raise
        raise CorpusFormatError(
            f"{path}: its columns, from byte {len(start)} to {first}, are no JSON ({error}): it is damaged, or no MDS "
            "shard. Make or copy it again."
        ) from None


def _parse(where: str, encoding: object, value: bytes) -> Any:
    try:
        return json.loads(value) if encoding == "json" else value.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusFormatError(f"{where}: the text is not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise CorpusFormatError(f"{where}: the value cannot be parsed as JSON: {error}") from None
