"""From the lengths and pointers of a Megatron index to runs of ids in its `.bin`, with checks of both.

    lengths 3 2 4, uint16, pointers 0 6 10    ->  one extent   [byte 0, 9 ids]
    lengths 3 2 4, uint16, pointers 8 0 14    ->  extents      [8, 3] [0, 2] [14, 4]

Pointers decide, but they must stay inside the `.bin`, and sequences must not overlap: writers with 32-bit counters
leave pointers that are negative or lead into the data of earlier sequences.
"""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from dali_pipes.corpus.data_file import Int64Array
from dali_pipes.errors import CorpusFormatError
from dali_pipes.uris import FilePath


class SequenceBlock(NamedTuple):
    """Consecutive sequences from number `first` on: lengths in ids and pointers in bytes, both int64 (n,)."""

    first: int
    lengths: Int64Array
    pointers: Int64Array


def build_extents(
    blocks: Iterable[SequenceBlock], width: int, index_path: FilePath, bin_path: FilePath, bin_size: int
) -> Int64Array:
    """Runs of ids in reading order: int64 (E, 2), [first byte in .bin, number of ids], none empty.

    width: bytes of an id. bin_size: bytes of the `.bin`, which the sequences must account for up to its end.
    Raises CorpusFormatError naming file and entry.
    """
    found: list[Int64Array] = []
    end = 0  # byte where the previous sequence ends
    for block in blocks:
        _check_block(block, width, index_path, bin_path, bin_size)
        entries = np.flatnonzero(block.lengths)  # a sequence without ids may point anywhere
        if len(entries) == 0:
            continue
        starts, sizes = block.pointers[entries], block.lengths[entries] * width
        ends = starts + sizes
        expected = np.concatenate(([end], ends[:-1]))
        breaks = np.flatnonzero(starts != expected)
        _check_wrapped(index_path, block.first + entries[breaks], starts[breaks], expected[breaks])
        # A run that goes on from the block before starts anew here, and is joined to it below.
        cuts = breaks if starts[0] != expected[0] else np.concatenate(([0], breaks))
        ids = np.add.reduceat(block.lengths[entries], cuts)
        found.append(np.stack([starts[cuts], ids, block.first + entries[cuts]], axis=1))
        end = int(ends[-1])
    runs = _joined(np.concatenate(found), width) if found else np.zeros((0, 3), np.int64)
    _check_cover(runs, width, index_path, bin_path, bin_size)
    return np.ascontiguousarray(runs[:, :2])


def _joined(runs: Int64Array, width: int) -> Int64Array:
    """`runs`, (E, 3) [first byte, ids, entry], with those that follow on one another made one."""
    ends = runs[:, 0] + runs[:, 1] * width
    heads = np.flatnonzero(np.concatenate(([True], runs[1:, 0] != ends[:-1])))
    return np.stack([runs[heads, 0], np.add.reduceat(runs[:, 1], heads), runs[heads, 2]], axis=1)


def _check_block(block: SequenceBlock, width: int, index_path: FilePath, bin_path: FilePath, bin_size: int) -> None:
    first, lengths, pointers = block
    negative = lengths < 0
    if negative.any():
        at = int(np.argmax(negative))
        raise CorpusFormatError(
            f"{index_path}: entry {first + at:,} has length {lengths[at]:,}, expected 0 or more: the index is damaged. "
            "Recreate it."
        )
    negative = pointers < 0
    if negative.any():
        at = int(np.argmax(negative))
        raise CorpusFormatError(
            f"{index_path}: entry {first + at:,} has pointer {pointers[at]:,}, expected 0 or more: its writer "
            "overflowed 32 bits. Recreate the index."
        )
    # This cannot overflow: a pointer beyond the file is replaced, and a size has at most 35 bits.
    outside = (pointers > bin_size) | (lengths * width > bin_size - np.minimum(pointers, bin_size))
    if outside.any():
        at = int(np.argmax(outside))
        needed = int(pointers[at]) + int(lengths[at]) * width
        raise CorpusFormatError(
            f"{index_path}: entry {first + at:,} has {lengths[at]:,} ids of {width} bytes at byte {pointers[at]:,}, up "
            f"to byte {needed:,}, but {bin_path} has {bin_size:,} bytes: it is truncated or belongs to another index"
        )
    unaligned = pointers % width != 0
    if unaligned.any():
        at = int(np.argmax(unaligned))
        raise CorpusFormatError(
            f"{index_path}: entry {first + at:,} has pointer {pointers[at]:,}, expected a multiple of {width}, the "
            "width of an id: the index is damaged. Recreate it."
        )


def _check_wrapped(path: FilePath, entries: Int64Array, starts: Int64Array, expected: Int64Array) -> None:
    """Refuse pointers that are wrong by a multiple of 2^32, as a 32-bit counter leaves them."""
    wrapped = (starts < expected) & ((expected - starts) % 2**32 == 0)
    if wrapped.any():
        at = int(np.argmax(wrapped))
        raise CorpusFormatError(
            f"{path}: entry {entries[at]:,} has pointer {starts[at]:,}, expected {expected[at]:,}, where the sequence "
            "before ends: its writer truncated it to 32 bits. Recreate the index."
        )


def _check_cover(runs: Int64Array, width: int, index_path: FilePath, bin_path: FilePath, bin_size: int) -> None:
    """Refuse sequences that share bytes, and a `.bin` that goes on after the last one."""
    ordered = runs[np.argsort(runs[:, 0], kind="stable")]
    ends = ordered[:, 0] + ordered[:, 1] * width
    shared = np.flatnonzero(ordered[1:, 0] < ends[:-1])
    if len(shared):
        one, other = sorted(ordered[shared[0] : shared[0] + 2].tolist(), key=lambda run: int(run[2]))
        raise CorpusFormatError(
            f"{index_path}: entry {other[2]:,} ({other[1]:,} ids at byte {other[0]:,}) overlaps entry {one[2]:,} "
            f"({one[1]:,} ids at byte {one[0]:,}): the index is damaged. Recreate it."
        )
    expected = int(ends[-1]) if len(ends) else 0
    if expected != bin_size:
        raise CorpusFormatError(
            f"{bin_path}: has {bin_size:,} bytes, but its index {index_path} accounts for {expected:,}: they do not "
            "belong together, or one of them was rewritten. Copy or recreate both."
        )
