"""Runs of ids from lengths and pointers: tiny cases with the whole result."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from dali_pipes.corpus.formats.megatron_extents import SequenceBlock, build_extents
from dali_pipes.errors import CorpusFormatError


def extents(*blocks: tuple[Sequence[int], Sequence[int]], size: int, width: int = 2) -> list[list[int]]:
    """Extents of blocks of (lengths, pointers)."""
    found, first = [], 0
    for lengths, pointers in blocks:
        found.append(SequenceBlock(first, np.array(lengths, np.int64), np.array(pointers, np.int64)))
        first += len(lengths)
    runs = build_extents(found, width, Path("a.idx"), Path("a.bin"), size)
    assert runs.dtype == np.int64
    assert runs.flags.c_contiguous
    return [[int(value) for value in run] for run in runs]


def test_sequences_that_follow_one_another_are_one_run() -> None:
    assert extents(([3, 2, 4], [0, 6, 10]), size=18) == [[0, 9]]
    assert extents(([3, 2, 4], [0, 12, 20]), size=36, width=4) == [[0, 9]]
    assert extents(([3], [0]), ([2], [6]), ([4], [10]), size=18) == [[0, 9]]


def test_runs_are_in_the_order_of_the_sequences() -> None:
    assert extents(([3, 2, 4], [8, 0, 14]), size=22) == [[8, 3], [0, 2], [14, 4]]
    assert extents(([3, 2, 4], [12, 18, 0]), size=22) == [[12, 5], [0, 4]]
    assert extents(([3], [12]), ([2], [18]), ([4], [0]), size=22) == [[12, 5], [0, 4]]


def test_sequences_without_ids_may_point_anywhere_and_break_nothing() -> None:
    assert extents(([3, 0, 2, 0], [0, 2, 6, 10]), size=10) == [[0, 5]]
    assert extents(([0, 0], [0, 0]), ([5], [0]), size=10) == [[0, 5]]
    assert extents(([0], [0]), size=0) == []
    assert extents(size=0) == []


def test_gap_before_the_first_sequence() -> None:
    assert extents(([3], [4]), size=10) == [[4, 3]]


@pytest.mark.parametrize(
    ("lengths", "pointers", "size", "message"),
    [
        (
            [3, 2, 1],
            [0, 6, 4],
            10,
            "entry 2 (1 ids at byte 4) overlaps entry 0 (5 ids at byte 0)",
        ),
        ([3, 3], [4, 0], 10, "entry 1 (3 ids at byte 0) overlaps entry 0 (3 ids at byte 4)"),
        ([1, 2], [0, 2], 8, "a.bin: has 8 bytes, but its index a.idx accounts for 6"),
        ([], [], 8, "a.bin: has 8 bytes, but its index a.idx accounts for 0"),
        ([5], [0], 8, "a.idx: entry 0 has 5 ids of 2 bytes at byte 0, up to byte 10, but a.bin has 8"),
    ],
)
def test_what_cannot_be_right_is_refused(lengths: list[int], pointers: list[int], size: int, message: str) -> None:
    with pytest.raises(CorpusFormatError) as error:
        extents((lengths, pointers), size=size)
    assert message in str(error.value)
