"""Windows are cut where documents end, and only there; pieces of a window tile it."""

from itertools import pairwise

import numpy as np
import pytest
from document_oracle import pieces_of
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.documents import Pieces, chosen_rows, pieces_of_windows, some_rows, staged


def as_lists(pieces: Pieces) -> list[list[tuple[int, int, int]]]:
    """(start, length, document end) of the pieces of each window."""
    assert all(part.dtype == np.int64 for part in pieces[:4])
    flat = list(zip(*(part.tolist() for part in pieces[1:4]), strict=True))
    borders = pieces.row_offsets.tolist()
    assert borders[-1] == len(flat)
    return [flat[begin:end] for begin, end in pairwise(borders)]


def test_by_hand() -> None:
    offsets = np.array([0, 3, 5, 5, 9])
    assert as_lists(pieces_of_windows(offsets, [0, 1, 4, 5], 4)) == [
        [(0, 3, 3), (3, 1, 5)],
        [(1, 2, 3), (3, 2, 5)],
        [(4, 1, 5), (5, 3, 9)],
        [(5, 4, 9)],
    ]


def test_empty_documents_first_last_and_between() -> None:
    offsets = np.cumsum([0, 0, 5, 0, 0, 3, 1, 0])
    assert as_lists(pieces_of_windows(offsets, [0, 4, 5], 4)) == [
        [(0, 4, 5)],
        [(4, 1, 5), (5, 3, 8)],
        [(5, 3, 8), (8, 1, 9)],
    ]
    assert as_lists(pieces_of_windows(offsets, [0], 9)) == [[(0, 5, 5), (5, 3, 8), (8, 1, 9)]]


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=30).filter(any),
    rows=st.integers(0, 8),
    dtype=st.sampled_from(["int64", "int32", "uint64"]),
    data=st.data(),
)
def test_pieces_equal_a_plain_loop(lengths: list[int], rows: int, dtype: str, data: st.DataObject) -> None:
    offsets = np.cumsum([0, *lengths])
    offsets.flags.writeable = False
    length = data.draw(st.integers(0, sum(lengths)))
    starts = data.draw(st.lists(st.integers(0, sum(lengths) - length), min_size=rows, max_size=rows))
    found = as_lists(pieces_of_windows(offsets, np.array(starts, dtype), length))
    assert found == [pieces_of(offsets.tolist(), start, length) for start in starts]


def test_positions_past_32_bits() -> None:
    offsets = np.array([0, 2**31, 2**33 + 5, 2**40])
    assert as_lists(pieces_of_windows(offsets, [2**33, 2**31 - 1], 8)) == [
        [(2**33, 5, 2**33 + 5), (2**33 + 5, 3, 2**40)],
        [(2**31 - 1, 1, 2**31), (2**31, 7, 2**33 + 5)],
    ]


@pytest.mark.parametrize("start", [-1, 6])
def test_windows_outside_the_corpus(start: int) -> None:
    with pytest.raises(AssertionError, match="outside"):
        pieces_of_windows(np.array([0, 3, 9]), [0, start], 4)


@given(
    rows=st.lists(st.lists(st.integers(1, 5), max_size=4), max_size=6),
    spare=st.lists(st.integers(0, 3), min_size=6, max_size=6),
    has_lookback=st.booleans(),
    data=st.data(),
)
def test_what_is_known_of_rows_stays_with_some_of_them(
    rows: list[list[int]], spare: list[int], has_lookback: bool, data: st.DataObject
) -> None:
    lengths = np.array([length for row in rows for length in row], np.int64)
    starts = np.arange(len(lengths)) * 100
    pieces = Pieces(np.cumsum([0, *map(len, rows)]), starts, lengths, starts + lengths + 1)
    if has_lookback:
        pieces = pieces._replace(lookback=np.ones((len(lengths), 3), np.int64))
    widths = np.array([sum(row) + more for row, more in zip(rows, spare, strict=False)], np.int64)
    known = pieces.with_rows(widths)
    begin = data.draw(st.integers(0, len(rows)))
    end = data.draw(st.integers(begin, len(rows)))
    some, some_known = some_rows(pieces, begin, end), some_rows(known, begin, end)
    assert as_lists(some) == as_lists(some_known)
    segments = [[length for length in (*row, more) if length] for row, more in zip(rows, spare, strict=False)]
    assert some_known.row_segments is not None
    assert some_known.row_segments.tolist() == [
        [max(row, default=0) for row in segments[begin:end]],
        [len(row) for row in segments[begin:end]],
    ]
    if has_lookback:  # the tokens before a piece are between it and the one before
        assert some_known.places is None
        return
    assert some_known.places is not None
    assert some_known.places.tolist() == [sum(row[:at]) for row in rows[begin:end] for at in range(len(row))]
    row_begins = np.cumsum([3, *widths[begin:end] + 1])
    assert as_lists(staged(some_known, row_begins)) == as_lists(staged(some, row_begins))
    order = np.array(data.draw(st.permutations(range(len(rows)))), np.int64)
    chosen = chosen_rows(known, order)
    assert chosen.row_segments is None
    assert chosen.places is not None
    assert chosen.places.tolist() == [sum(rows[row][:at]) for row in order for at in range(len(rows[row]))]
