"""Open an MDS set: what each of its shards holds, from its index, the shards themselves and what was cached of them."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.columns.row_columns import LEARNED, names_in
from dali_pipes.corpus.columns.row_facts import RowFacts, used_columns, with_names
from dali_pipes.corpus.columns.scans import ColumnScans
from dali_pipes.corpus.columns.token_columns import LOSS_MASK
from dali_pipes.corpus.data_file import DataFile, Int64Array, UsedColumns
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.corpus.formats.mds.columns import TYPE_CODES, choose_column
from dali_pipes.corpus.formats.mds.rows import ShardRows, columns_beside, find_facts, unused_columns
from dali_pipes.corpus.formats.mds.shards import (
    Shard,
    decode_shard,
    find_samples,
    find_shard,
    list_shards,
    refuse_change,
    verify_shard,
)
from dali_pipes.corpus.formats.shard_index import Entry
from dali_pipes.errors import CorpusError, CorpusFormatError
from dali_pipes.runtime import offset_cache
from dali_pipes.storage.byte_file import ByteFile, open_file
from dali_pipes.storage.fingerprint import digest_content, digest_file, read_samples
from dali_pipes.uris import FilePath

_KEPT_FROM_BYTES = 64 << 20
"""Uncompressed shards of fewer bytes in total are read again at every start."""
_CODES = list(TYPE_CODES)
_MASK_TYPE = np.dtype(np.uint8)
Counts: TypeAlias = npt.NDArray[np.uint32]


class _Mark(NamedTuple):
    """What identifies a shard: digest of its name, size and samples, and its identity when that was taken."""

    digest: bytes
    identity: str


class _Found(NamedTuple):
    """In one shard: types of its ids, int64 (N,) ids of each sample and byte of the first (None: unknown)."""

    types: list[np.dtype[Any]]
    counts: Int64Array
    starts: Int64Array | None


def inspect(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    """As `Format.inspect`, for the shards that an index lists. Blocks for a few reads a shard.

    Where the number of ids is unknown without that, reads or decompresses all shards, in threads, and keeps the numbers
    in the user's cache.

    The type that the user gave is that of the ids of a `bytes` column; for others it is compared. Without a token
    column given, it is `tokens`, `input_ids`, or the only column of integer arrays. Samples of several integer types
    are served as the narrowest that holds them all; shards of another one are decoded.
    """
    index, scans, id_type = file.path, options.scans, options.id_type
    entries = list_shards(index)
    column = choose_column(entries[0], index, options.token_column)
    shards = [find_shard(one, index.parent, column, id_type) for one in entries]
    if options.verify:
        scans.for_chunks(lambda at: verify_shard(shards[at]), [shard.raw_bytes for shard in shards])
    marks = [_mark(shard) for shard in shards]
    found = _find_all(index, shards, marks, scans)
    stored = _common_type(index, column, found, id_type)
    files = [_data_file(*one, stored) for one in zip(shards, marks, found, strict=True)]
    beside = [columns_beside(entry, column, use_masks=options.use_masks) for entry in entries]
    files = _with_columns(index, entries, files, shards, marks, beside, id_type, scans)
    masks = _find_masks(index, entries, files, beside, found, scans)
    return [file if mask is None else replace(file, loss_mask=mask) for file, mask in zip(files, masks, strict=True)]


def _with_columns(
    index: FilePath,
    entries: list[Entry],
    files: list[DataFile],
    shards: list[Shard],
    marks: list[_Mark],
    beside: list[tuple[str, ...]],
    id_type: np.dtype[Any] | None,
    scans: ColumnScans,
) -> list[DataFile]:
    """The files with what the columns next to their ids mean; a mask alone, in the usual column, needs nothing."""
    unused = [unused_columns(entry, shard.column.name) for entry, shard in zip(entries, shards, strict=True)]
    files = [
        replace(file, columns=UsedColumns(masks=names, unused=others))
        for file, names, others in zip(files, beside, unused, strict=True)
    ]
    numbers = [number for number, names in enumerate(beside) if not set(names) <= {LOSS_MASK}]
    rows = [ShardRows.find(entries[n], index.parent, shards[n], beside[n], id_type) for n in numbers]

    def keep(is_plausible: Callable[[Int64Array], bool], scan: Callable[[], Int64Array]) -> Int64Array:
        if not _is_kept([shards[number] for number in numbers]):
            return scan()
        keys = [digest_content(with_names(marks[n].digest, beside[n]), [marks[n].identity]) for n in numbers]
        about = f"dali_pipes mds columns 1 {''.join(keys)}".encode()
        return offset_cache.find_or_make([index], "mds", about, is_plausible, scan)[0]

    for number, row, facts in zip(numbers, rows, find_facts(rows, scans, keep) if rows else [], strict=True):
        used = used_columns(beside[number], facts.totals, shards[number].num_samples, unused[number])
        files[number] = _with_facts(replace(files[number], columns=used), row, facts)
    return files


def _with_facts(file: DataFile, rows: ShardRows, facts: RowFacts) -> DataFile:
    used, total = file.columns, int(facts.offsets[-1])
    file = replace(file, digest=with_names(file.digest, (*used.padding, *used.packing)))
    whole = np.array([[0, total]] if total else [], np.int64).reshape(-1, 2)
    if used.padding or used.packing:
        file = replace(file, num_documents=len(facts.offsets) - 1, read_document_offsets=lambda: facts.offsets)
    if used.padding:
        file = replace(file, extents=whole, decode=partial(rows.decode, used.padding, file.stored))
    if not used.masks or (used.masks == (LOSS_MASK,) and not used.padding):
        return file
    mask = replace(
        file,
        stored=_MASK_TYPE,
        extents=whole,
        digest=with_names(file.digest, used.masks),
        decode=partial(rows.decode_mask, used.masks, used.padding),
    )
    return replace(file, loss_mask=mask)


def _find_masks(
    index: FilePath,
    entries: list[Entry],
    files: list[DataFile],
    beside: list[tuple[str, ...]],
    tokens: list[_Found],
    scans: ColumnScans,
) -> list[DataFile | None]:
    """The mask of each shard that has it in the usual column alone, as long as the tokens in every sample."""
    numbers = [
        number
        for number, (file, names) in enumerate(zip(files, beside, strict=True))
        if names_in(LEARNED, names) == (LOSS_MASK,) and file.loss_mask is None
    ]
    shards = [find_shard(entries[number], index.parent, LOSS_MASK, _MASK_TYPE) for number in numbers]
    marks = [_mark(shard) for shard in shards]
    masks: list[DataFile | None] = [None] * len(entries)
    for number, shard, mark, found in zip(numbers, shards, marks, _find_all(index, shards, marks, scans), strict=True):
        differs = np.flatnonzero(found.counts != tokens[number].counts)
        if len(differs):
            at = int(differs[0])
            raise CorpusFormatError(
                f"{shard.path}: sample {at:,}: {LOSS_MASK} has {found.counts[at]:,} entries, expected "
                f"{tokens[number].counts[at]:,}, one for each id"
            )
        masks[number] = _data_file(shard, mark, found, _MASK_TYPE)
    return masks


def _mark(shard: Shard) -> _Mark:
    with open_file(shard.path) as file:
        if file.size != shard.size:
            refuse_change(shard.path, shard.size, file.size)
        about = f"{shard.column.name} {shard.num_samples}".encode()
        stored = shard.column.stored or np.dtype("V1")
        return _Mark(digest_file(shard.path, shard.size, stored, about, read_samples(file)), file.identity)


def _find_all(index: FilePath, shards: list[Shard], marks: list[_Mark], scans: ColumnScans) -> list[_Found]:
    """What is in the shards, from the cache for those that have to be read whole."""
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

    if _is_kept(slow):
        keys = [digest_content(marks[n].digest, [marks[n].identity]) + repr(shards[n].column) for n in numbers]
        about = f"dali_pipes mds 1 {''.join(keys)}".encode()
        # Without a cache this only takes time at the next start.
        packed, _ = offset_cache.find_or_make([shard.path for shard in slow], "mds", about, is_plausible, scan)
    else:
        packed = scan()
    found = {
        number: _unpacked(shards[number], packed[begin:end])
        for number, (begin, end) in zip(numbers, itertools.pairwise(borders), strict=True)
    }
    return [found[number] if number in found else _known(shard) for number, shard in enumerate(shards)]


def _is_kept(shards: list[Shard]) -> bool:
    """Whether what is found by reading those shards is cached for the next start."""
    return any(shard.suffix for shard in shards) or sum(shard.size for shard in shards) >= _KEPT_FROM_BYTES


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
    """For a shard whose index and offsets suffice."""
    stored, fixed = shard.column.stored, shard.column.fixed_ids
    assert stored is not None
    if shard.suffix is not None:
        assert fixed is not None
        return _Found([stored], np.broadcast_to(np.int64(fixed), shard.num_samples), None)
    samples = find_samples(shard)
    return _Found([stored], samples.counts, samples.starts)


def _fits(shard: Shard, found: _Found) -> bool:
    """Whether cached lengths are plausible for the shard."""
    width = max((one.itemsize for one in found.types), default=1)
    if found.counts.min(initial=0) < 0 or found.counts.max(initial=0) > shard.raw_bytes:
        return False
    ends = found.counts * (width if len(found.types) == 1 else 1)
    if found.starts is None:
        return int(ends.sum()) <= shard.raw_bytes
    ends += found.starts
    return bool((ends[:-1] <= found.starts[1:]).all() and ends.max(initial=0) <= shard.raw_bytes)


def _common_type(index: FilePath, column: str, found: list[_Found], id_type: np.dtype[Any] | None) -> np.dtype[Any]:
    types = sorted({one for shard in found for one in shard.types}, key=str)
    if not types:
        raise CorpusError(f"{index}: its shards do not contain any samples, so the corpus is empty")
    common: np.dtype[Any] = np.result_type(*types)
    names = ", ".join(one.name for one in types)
    if common.kind not in "iu":
        raise CorpusFormatError(
            f"{index}: column {column!r} mixes {names}, which do not fit one integer type. Write it with one type."
        )
    if id_type is not None and common != id_type:
        raise CorpusFormatError(
            f"{index}: column {column!r} holds {names} ids, but dtype = {id_type.name!r} was given. Leave dtype out."
        )
    return common


def _data_file(shard: Shard, mark: _Mark, found: _Found, stored: np.dtype[Any]) -> DataFile:
    is_plain = found.starts is not None and all(one == stored for one in found.types)
    total = int(found.counts.sum())
    if is_plain:
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
        identity=mark.identity,
        stored=stored,
        data_offset=None,
        extents=extents,
        digest=mark.digest,
        num_documents=len(counts),
        read_document_offsets=partial(_offsets, counts),
        decode=None if is_plain else partial(decode_shard, shard, stored),
    )


def _extents(starts: Int64Array, counts: Int64Array, width: int) -> Int64Array:
    """Runs of ids, int64 (E, 2): none for samples without ids, one for samples that follow on one another."""
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
