"""From the lengths and pointers of a Megatron index to runs of ids in its `.bin`, refusing what cannot be right.

    lengths 3 2 4, uint16, pointers 0 6 10    ->  one extent   [byte 0, 9 ids]
    lengths 3 2 4, uint16, pointers 8 0 14    ->  extents      [8, 3] [0, 2] [14, 4]

Pointers are what counts, but they must stay inside the `.bin`, and no byte may belong to two sequences: writers whose
counters have 32 bits leave pointers that are negative or lead into the data of earlier sequences.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from dali_pipes.corpus.data_file import Int64Array
from dali_pipes.errors import CorpusFormatError


class SequenceBlock(NamedTuple):
    """Consecutive sequences from number `first` on: lengths in ids and pointers in bytes, both int64 (n,)."""

    first: int
    lengths: Int64Array
    pointers: Int64Array


def build_extents(
    blocks: Iterable[SequenceBlock], width: int, index_path: Path, bin_path: Path, bin_size: int
) -> Int64Array:
    """Runs of ids in reading order: int64 (E, 2), [first byte in .bin, number of ids], none empty.

    width: bytes of an id. bin_size: bytes of the `.bin`, which the sequences must account for up to its end.
    Raises CorpusFormatError naming file and entry.
    """
    found: list[Int64Array] = []
    end = 0  # byte where the sequence before ends
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


def _check_block(block: SequenceBlock, width: int, index_path: Path, bin_path: Path, bin_size: int) -> None:
    first, lengths, pointers = block
    negative = lengths < 0
    if negative.any():
        at = int(np.argmax(negative))
        raise CorpusFormatError(
            f"{index_path}: entry {first + at}: length {lengths[at]} is negative: the index is damaged"
        )
    negative = pointers < 0
    if negative.any():
        at = int(np.argmax(negative))
        raise CorpusFormatError(
            f"{index_path}: entry {first + at}: pointer {pointers[at]} is negative, as after an overflow of 32 bits "
            f"when the index was written. Make the index again."
        )
    # Nothing overflows here: a pointer beyond the file is replaced, and a size has at most 35 bits.
    outside = (pointers > bin_size) | (lengths * width > bin_size - np.minimum(pointers, bin_size))
    if outside.any():
        at = int(np.argmax(outside))
        needed = int(pointers[at]) + int(lengths[at]) * width
        raise CorpusFormatError(
            f"{index_path}: entry {first + at}: {lengths[at]} ids of {width} bytes from byte {pointers[at]} on need "
            f"{needed} bytes, but {bin_path} has {bin_size}: it is truncated, or belongs to another index"
        )
    unaligned = pointers % width != 0
    if unaligned.any():
        at = int(np.argmax(unaligned))
        raise CorpusFormatError(
            f"{index_path}: entry {first + at}: pointer {pointers[at]} is not a multiple of {width}, the width of an id"
        )


def _check_wrapped(path: Path, entries: Int64Array, starts: Int64Array, expected: Int64Array) -> None:
    """Refuse pointers that are right but for a multiple of 2^32: what a 32-bit counter leaves behind."""
    wrapped = (starts < expected) & ((expected - starts) % 2**32 == 0)
    if wrapped.any():
        at = int(np.argmax(wrapped))
        raise CorpusFormatError(
            f"{path}: entry {entries[at]}: pointer {starts[at]}, but the sequence before ends at byte {expected[at]}: "
            f"the pointer was cut to 32 bits when the index was written. Make the index again."
        )


def _check_cover(runs: Int64Array, width: int, index_path: Path, bin_path: Path, bin_size: int) -> None:
    """Refuse sequences that share bytes, and a `.bin` that goes on after the last one."""
    ordered = runs[np.argsort(runs[:, 0], kind="stable")]
    ends = ordered[:, 0] + ordered[:, 1] * width
    shared = np.flatnonzero(ordered[1:, 0] < ends[:-1])
    if len(shared):
        one, other = sorted(ordered[shared[0] : shared[0] + 2].tolist(), key=lambda run: int(run[2]))
        raise CorpusFormatError(
            f"{index_path}: entry {other[2]}: from its pointer {other[0]} on, {other[1]} ids are read that overlap the "
            f"{one[1]} ids from entry {one[2]} on, pointer {one[0]}: the index is damaged. Make it again."
        )
    expected = int(ends[-1]) if len(ends) else 0
    if expected != bin_size:
        raise CorpusFormatError(
            f"{bin_path}: the index {index_path} accounts for {expected} bytes, but the file has {bin_size}: they do "
            f"not belong together, or one of them was rewritten"
        )
