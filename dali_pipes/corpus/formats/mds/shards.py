"""The shards that an MDS index lists: the file of each, its expected content, and the ids of a whole shard."""

from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.columns.row_columns import Cells
from dali_pipes.corpus.formats.mds.columns import TYPE_CODES, Column, parse_column
from dali_pipes.corpus.formats.mds.samples import Content, Samples, locate_samples, needs_reading, read_offsets
from dali_pipes.corpus.formats.shard_index import Entry, listed_size, read_index
from dali_pipes.errors import CorpusError, CorpusFormatError, CorpusReadError
from dali_pipes.storage.byte_file import ByteFile, file_size, open_file
from dali_pipes.storage.checksums import check_content, check_file
from dali_pipes.storage.decompress import check_claim, check_method, inflate
from dali_pipes.uris import FilePath

Ids: TypeAlias = npt.NDArray[Any]

_SMALL_BYTES = 256 << 10


@dataclass(frozen=True)
class ShardFile:
    """The file of one shard, by the index.

    where:       the index, and the shard's place in it, for messages
    path:        the file: the shard itself, or compressed
    size:        bytes of the file
    raw_bytes:   bytes of the shard itself
    suffix:      of the compression; None: not compressed
    hashes:      hex digests of the file at `path`, by algorithm
    raw_hashes:  hex digests of its decompressed content
    """

    where: str
    path: FilePath
    size: int
    raw_bytes: int
    suffix: str | None
    hashes: dict[str, str]
    raw_hashes: dict[str, str]


@dataclass(frozen=True)
class Shard(ShardFile):
    """One shard with its number of samples, and the column of it that is read."""

    num_samples: int
    column: Column

    @property
    def must_be_read(self) -> bool:
        """Whether the number of ids of each sample is known only after reading all of the shard."""
        return self.column.fixed_ids is None if self.suffix else needs_reading(self.column)


def list_shard_files(index: FilePath) -> list[FilePath]:
    """The file of each shard that `index` lists, in its order. Blocks for look-ups.

    Raises CorpusFormatError for a damaged index, and a file that is missing or of another size; CorpusError without
    any.
    """
    return [_find_file(entry, index.parent).path for entry in list_shards(index)]


def list_shards(index: FilePath) -> list[Entry]:
    """The entries of an index. Raises CorpusFormatError for a damaged or unknown one, CorpusError for no shards."""
    entry = read_index(index)
    if entry.get("version") != 2:
        raise CorpusFormatError(f"{index}: has MDS version {entry.get('version')!r}; expected 2")
    entries = entry.children("shards")
    if not entries:
        raise CorpusError(f"{index}: does not list any shards, so the corpus is empty")
    return entries


def find_shard(entry: Entry, folder: FilePath, column: str, id_type: np.dtype[Any] | None) -> Shard:
    """The shard of an entry, after a check of its file's size. One or two look-ups.

    Raises CorpusFormatError for a file that is missing or of another size, or an invalid entry.
    """
    file = _find_file(entry, folder)
    num_samples, layout = entry.integer("samples"), parse_column(entry, column, id_type)
    fewest = 4 * (num_samples + 2) + num_samples * (4 * layout.num_variable + layout.fixed_bytes)
    if fewest > file.raw_bytes:
        raise CorpusFormatError(
            f"{entry.where}: {num_samples:,} samples of these columns take at least {fewest:,} bytes, but the shard "
            f"has {file.raw_bytes:,}: the index is damaged. Copy or recreate the set."
        )
    return Shard(**vars(file), num_samples=num_samples, column=layout)


def _find_file(entry: Entry, folder: FilePath) -> ShardFile:
    kind = entry.text("format")
    if kind != "mds":
        raise CorpusFormatError(f"{entry.where}: has format {kind!r}; expected 'mds'")
    raw = entry.child("raw_data")
    path, size, suffix = raw.path_in(folder, "basename"), raw.integer("bytes"), None
    raw_bytes = size
    hashes, raw_hashes = _hashes(raw), {}
    method = entry.optional_text("compression")
    if method is not None and file_size(path) != raw_bytes:  # a reader may have decompressed it in place
        packed = entry.child("zip_data")
        suffix = check_method(method, f"{entry.where}.compression")
        path, size = packed.path_in(folder, "basename"), packed.integer("bytes", 2**63 - 1)
        hashes, raw_hashes = _hashes(packed), hashes
    found = listed_size(path, entry.where)
    if found != size:
        raise CorpusFormatError(
            f"{path}: has {found:,} bytes, but {entry.where} expects {size:,}: it is truncated or was rewritten. Make "
            "or copy the set again."
        )
    if suffix is not None:
        check_claim(path, suffix, size, raw_bytes, entry.where)
    return ShardFile(entry.where, path, size, raw_bytes, suffix, hashes, raw_hashes)


def verify_shard(shard: Shard) -> None:
    """Compare all checksums that the index has of the shard. Reads, and decompresses, all of it; blocks.

    Raises CorpusFormatError for one that differs, or without any.
    """
    if not shard.hashes and not shard.raw_hashes:
        raise CorpusFormatError(
            f"{shard.where}: does not record a checksum for {shard.path}, so it cannot be verified. Set "
            "verify_checksums = False, or write the set with hashes."
        )
    check_file(shard.path, shard.size, shard.hashes)
    if shard.raw_hashes:
        check_content(shard.path, read_content(shard).data, shard.raw_hashes)


def find_samples(shard: Shard) -> Samples:
    """Where the ids are in the shard itself. Blocks: reads the offsets, and the samples where the column needs it."""
    if shard.suffix is not None:
        return _samples(shard, read_content(shard))
    with open_file(shard.path) as file:
        if file.size != shard.size:
            refuse_change(shard.path, shard.size, file.size)
        # A small shard is read whole: four reads here and there cost more.
        return _samples(shard, Content(shard.path, file.read(0, file.size)) if file.size <= _SMALL_BYTES else file)


def decode_shard(shard: Shard, stored: np.dtype[Any], chunk: int) -> Ids:
    """All ids of the column, (n,) of `stored`. Reads, and decompresses, all of the shard; blocks.

    `chunk` is 0: a shard is one chunk.
    """
    assert chunk == 0
    return as_type(read_cells(shard, read_content(shard)).values, stored)


def read_cells(shard: Shard, content: Content) -> Cells:
    """The values of the column in every sample, of the type that they are stored in."""
    samples = _samples(shard, content)
    codes = np.unique(samples.codes)
    if not len(codes):
        return Cells(samples.counts, np.zeros(0, np.int64))
    if len(codes) > 1:
        columns = (samples.codes.tolist(), samples.counts.tolist(), samples.starts.tolist())
        parts = [np.frombuffer(content.data, TYPE_CODES[code], *place) for code, *place in zip(*columns, strict=True)]
        return Cells(samples.counts, np.concatenate(parts))
    own = shard.column.stored or TYPE_CODES[int(codes[0])]
    view = memoryview(content.data)
    ends = samples.starts + samples.counts * own.itemsize
    joined = b"".join([view[start:end] for start, end in zip(samples.starts.tolist(), ends.tolist(), strict=True)])
    return Cells(samples.counts, np.frombuffer(joined, own))


def as_type(ids: Ids, stored: np.dtype[Any]) -> Ids:
    """In a wider type; for a mask, whether each is nonzero."""
    return ids.astype(stored, copy=False) if np.can_cast(ids.dtype, stored) else (ids != 0).astype(stored)


def _samples(shard: Shard, source: ByteFile | Content) -> Samples:
    return locate_samples(source, read_offsets(source, shard.num_samples), shard.column)


def read_content(shard: Shard) -> Content:
    """The shard, decompressed. Blocks. Raises CorpusReadError if its size changed after the corpus was opened."""
    if shard.suffix is not None:
        return Content(shard.path, inflate(shard.path, shard.suffix, shard.size, shard.raw_bytes))
    with open_file(shard.path) as file:
        if file.size != shard.size:
            raise CorpusReadError(
                f"{shard.path}: was replaced or modified after the corpus was opened ({shard.size:,} bytes then, "
                f"{file.size:,} now). Open the corpus again."
            )
        return Content(shard.path, file.read(0, file.size))


def refuse_change(path: FilePath, expected: int, found: int) -> NoReturn:
    """Raise CorpusFormatError for a file whose size changed while the set was being opened."""
    raise CorpusFormatError(
        f"{path}: had {expected:,} bytes a moment ago, {found:,} now: it is still being written. Wait for its writer "
        "to finish."
    )


def _hashes(data: Entry) -> dict[str, str]:
    return data.child("hashes").texts() if data.get("hashes") is not None else {}
