"""MosaicML Streaming sets (MDS): an `index.json` and shards of samples, whose columns hold tokens among other things.

    index.json             {"version": 2, "shards": [{"raw_data": {"basename": "shard.00000.mds", ...}, ...}, ...]}
    shard.00000.mds        ids between the sizes of each sample: an extent a sample, read where they lie
    shard.00001.mds.zstd   decompressed as a whole when a row needs it: one chunk

Each sample is a document; a column `loss_mask` is the mask of its ids. The index says how many samples a shard has; how
many ids these have is in the shard, before the ids of each, so it is looked up once and kept. The order is that of the
index.
"""

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dali_pipes import kept_files
from dali_pipes.corpus.column_scans import ColumnScans
from dali_pipes.corpus.datafile import DataFile, Int64Array
from dali_pipes.corpus.fingerprint import digest_content, digest_file, read_samples
from dali_pipes.corpus.mds_columns import TYPE_CODES, choose_column
from dali_pipes.corpus.mds_shards import Shard, decode_shard, find_samples, find_shard, list_shards, verify_shard
from dali_pipes.corpus.reader import OpenFile
from dali_pipes.corpus.set_index import Entry
from dali_pipes.corpus.token_columns import LOSS_MASK
from dali_pipes.errors import CorpusError, CorpusFormatError

_KEPT_FROM_BYTES = 64 << 20
"""Shards as they are, of fewer bytes than that, are looked through at every start."""
_CODES = list(TYPE_CODES)
_MASK_TYPE = np.dtype(np.uint8)
Counts: TypeAlias = npt.NDArray[np.uint32]


class _Mark(NamedTuple):
    """What a shard is known by: digest of its name, size and samples, and when it was last changed before that."""

    digest: bytes
    modified_ns: int


class _Found(NamedTuple):
    """Of one shard: types of its ids, int64 (N,) ids of each sample and byte of the first (None: not known)."""

    types: list[np.dtype[Any]]
    counts: Int64Array
    starts: Int64Array | None


def inspect_mds(
    index: Path,
    scans: ColumnScans,
    id_type: np.dtype[Any] | None = None,
    token_column: str | None = None,
    verify: bool = False,
) -> list[DataFile]:
    """The shards of the set that `index` lists, checked. Blocks for a few reads a shard.

    Where the number of ids is not known without that, reads or decompresses all shards, in threads, and keeps the
    numbers in the user's cache.

    id_type:      type of the ids of a `bytes` column; for others it is compared
    token_column: by default `tokens`, `input_ids`, or the only column of integer arrays
    verify:       compare all checksums of the index; reads everything

    Samples of several integer types are served as the narrowest that holds them all, shards of another decoded.
    Raises CorpusFormatError for a damaged set or no ids, ConfigError for a column that cannot be chosen.
    """
    entries = list_shards(index)
    column = choose_column(entries[0], index, token_column)
    shards = [find_shard(one, index.parent, column, id_type) for one in entries]
    if verify:
        scans.for_chunks(lambda at: verify_shard(shards[at]), [shard.raw_bytes for shard in shards])
    marks = [_mark(shard) for shard in shards]
    found = _find_all(index, shards, marks, scans)
    stored = _common_type(index, column, found, id_type)
    masks = _find_masks(index, entries, found, scans)
    files = [_data_file(*one, stored) for one in zip(shards, marks, found, strict=True)]
    return [file if mask is None else replace(file, loss_mask=mask) for file, mask in zip(files, masks, strict=True)]


def _find_masks(index: Path, entries: list[Entry], tokens: list[_Found], scans: ColumnScans) -> list[DataFile | None]:
    """The mask of each shard that has a column of that name, which is as long as the tokens in every sample."""
    numbers = [number for number, entry in enumerate(entries) if LOSS_MASK in entry.items("column_names")]
    shards = [find_shard(entries[number], index.parent, LOSS_MASK, _MASK_TYPE) for number in numbers]
    marks = [_mark(shard) for shard in shards]
    masks: list[DataFile | None] = [None] * len(entries)
    for number, shard, mark, found in zip(numbers, shards, marks, _find_all(index, shards, marks, scans), strict=True):
        differs = np.flatnonzero(found.counts != tokens[number].counts)
        if len(differs):
            at = int(differs[0])
            raise CorpusFormatError(
                f"{shard.path}: sample {at}: {LOSS_MASK} has {found.counts[at]} entries, expected "
                f"{tokens[number].counts[at]}, one for each id"
            )
        masks[number] = _data_file(shard, mark, found, _MASK_TYPE)
    return masks


def _mark(shard: Shard) -> _Mark:
    with OpenFile(shard.path) as file:
        if file.size != shard.size:
            raise CorpusFormatError(f"{shard.path}: had {shard.size} bytes a moment ago, {file.size} now")
        about = f"{shard.column.name} {shard.num_samples}".encode()
        stored = shard.column.stored or np.dtype("V1")
        return _Mark(digest_file(shard.path, shard.size, stored, about, read_samples(file)), file.modified_ns)


def _find_all(index: Path, shards: list[Shard], marks: list[_Mark], scans: ColumnScans) -> list[_Found]:
    """What is in the shards: of those that have to be read for it, what was kept of that."""
    numbers = [number for number, shard in enumerate(shards) if shard.must_be_read]
    slow = [shards[number] for number in numbers]

    def scan() -> Int64Array:
        parts = scans.for_chunks(lambda at: _packed(slow[at]), [shard.raw_bytes for shard in slow])
        return np.concatenate([np.zeros(0, np.int64), *parts])

    borders = np.cumsum([0] + [1 + 2 * shard.num_samples for shard in slow]).tolist()

    def is_plausible(kept: Int64Array) -> bool:
        return len(kept) == borders[-1] and all(
            _fits(shard, _unpacked(shard, kept[begin:end]))
            for shard, (begin, end) in zip(slow, itertools.pairwise(borders), strict=True)
        )

    if any(shard.suffix for shard in slow) or sum(shard.size for shard in slow) >= _KEPT_FROM_BYTES:
        keys = [digest_content(marks[n].digest, [marks[n].modified_ns]) + repr(shards[n].column) for n in numbers]
        about = f"dali_pipes mds 1 {''.join(keys)}".encode()
        # Where it cannot be kept nothing is lost but time.
        packed, _ = kept_files.find_or_make([shard.path for shard in slow], "mds", about, is_plausible, scan)
    else:
        packed = scan()
    found = {
        number: _unpacked(shards[number], packed[begin:end])
        for number, (begin, end) in zip(numbers, itertools.pairwise(borders), strict=True)
    }
    return [found[number] if number in found else _known(shard) for number, shard in enumerate(shards)]


def _packed(shard: Shard) -> Int64Array:
    """int64 (1 + 2 N,): a bit for each type of ids, ids of each sample, byte of the first of each."""
    samples = find_samples(shard)
    codes = [] if shard.column.stored is not None else np.unique(samples.codes).tolist()
    types = sum(1 << _CODES.index(code) for code in codes)
    return np.concatenate([[types], samples.counts, samples.starts])


def _unpacked(shard: Shard, packed: Int64Array) -> _Found:
    counts, starts = packed[1 : 1 + shard.num_samples], packed[1 + shard.num_samples :]
    own = shard.column.stored
    types = [TYPE_CODES[code] for bit, code in enumerate(_CODES) if packed[0] >> bit & 1] if own is None else [own]
    return _Found(types, counts, None if shard.suffix else starts)


def _known(shard: Shard) -> _Found:
    """Of a shard that need not be read: its index and offsets tell."""
    stored, fixed = shard.column.stored, shard.column.fixed_ids
    assert stored is not None
    if shard.suffix is not None:
        assert fixed is not None
        return _Found([stored], np.broadcast_to(np.int64(fixed), shard.num_samples), None)
    samples = find_samples(shard)
    return _Found([stored], samples.counts, samples.starts)


def _fits(shard: Shard, found: _Found) -> bool:
    """Whether kept lengths may be those of the shard."""
    width = max((one.itemsize for one in found.types), default=1)
    if found.counts.min(initial=0) < 0 or found.counts.max(initial=0) > shard.raw_bytes:
        return False
    ends = found.counts * (width if len(found.types) == 1 else 1)
    if found.starts is None:
        return int(ends.sum()) <= shard.raw_bytes
    ends += found.starts
    return bool((ends[:-1] <= found.starts[1:]).all() and ends.max(initial=0) <= shard.raw_bytes)


def _common_type(index: Path, column: str, found: list[_Found], id_type: np.dtype[Any] | None) -> np.dtype[Any]:
    types = sorted({one for shard in found for one in shard.types}, key=str)
    if not types:
        raise CorpusError(f"{index}: its shards have no samples, so there are no tokens")
    common: np.dtype[Any] = np.result_type(*types)
    names = ", ".join(one.name for one in types)
    if common.kind not in "iu":
        raise CorpusFormatError(f"{index}: column {column!r} has ids of {names}, which no integer type holds")
    if id_type is not None and common != id_type:
        raise CorpusFormatError(f"{index}: column {column!r} has ids of {names}, but dtype={id_type.name!r} was given")
    return common


def _data_file(shard: Shard, mark: _Mark, found: _Found, stored: np.dtype[Any]) -> DataFile:
    as_they_lie = found.starts is not None and all(one == stored for one in found.types)
    total = int(found.counts.sum())
    if as_they_lie:
        assert found.starts is not None
        extents = _extents(found.starts, found.counts, stored.itemsize)
    else:
        extents = np.array([[0, total]] if total else [], np.int64).reshape(-1, 2)
    counts: Counts = found.counts.astype(np.uint32)  # of shards of less than 4 GiB
    if len(counts) and (counts == counts[0]).all():  # one place is enough
        counts = np.broadcast_to(counts[:1].copy(), len(counts))
    return DataFile(
        path=shard.path,
        format="mds",
        size=shard.size,
        stored=stored,
        data_offset=None,
        extents=extents,
        digest=mark.digest,
        num_documents=len(counts),
        read_document_offsets=partial(_offsets, counts),
        decode=None if as_they_lie else partial(decode_shard, shard, stored),
    )


def _extents(starts: Int64Array, counts: Int64Array, width: int) -> Int64Array:
    """Runs of ids, int64 (E, 2): of samples without ids none, of those that follow on one another one."""
    filled = np.flatnonzero(counts)
    starts, counts = starts[filled], counts[filled]
    if not len(starts):
        return np.zeros((0, 2), np.int64)
    heads = np.flatnonzero(np.concatenate(([True], starts[1:] != (starts + counts * width)[:-1])))
    return np.stack([starts[heads], np.add.reduceat(counts, heads)], axis=1)


def _offsets(counts: Counts) -> Int64Array:
    offsets = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets
