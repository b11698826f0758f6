"""Packing against hand-written rows, a plain best-fit decreasing, and what must hold for any lengths."""

import hashlib
from bisect import bisect_left, insort
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.rows import packing
from dali_pipes.rows.packing import LONG_DOCUMENTS, LongDocuments, Packing, narrow, pack, rows_of_documents

Piece = tuple[int, int, int]
"""Document, first token, tokens."""

some_lengths = st.lists(st.integers(0, 40) | st.integers(0, 3), max_size=60)
some_seq_len = st.integers(1, 24)
some_mode = st.sampled_from(LONG_DOCUMENTS)


def packed(lengths: list[int], seq_len: int, long_documents: LongDocuments = "split") -> Packing:
    return pack(np.array(lengths, np.int64), seq_len, long_documents)


def pieces_of(found: packing.DocumentPieces | Packing) -> list[Piece]:
    columns = (found.piece_documents, found.piece_begins, found.piece_lengths)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def rows_of(found: Packing) -> list[list[Piece]]:
    pieces, offsets = pieces_of(found), found.row_offsets.tolist()
    assert offsets[0] == 0
    assert offsets[-1] == len(pieces)
    return [pieces[begin:end] for begin, end in pairwise(offsets)]


def fill(found: Packing, seq_len: int) -> float:
    return float(found.piece_lengths.sum() / (seq_len * (found.row_offsets.size - 1)))


def best_fit_decreasing(lengths: list[int], seq_len: int) -> list[int]:
    """Spaces left in the rows, in rising order, after one piece at a time went where it fits best."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        index = bisect_left(spaces, length)
        space = spaces.pop(index) if index < len(spaces) else seq_len
        insort(spaces, space - length)
    return spaces


def test_hand_written_case_of_the_docstring() -> None:
    found = packed([5, 3, 6, 2, 11, 0], 8)
    assert rows_of(found) == [[(4, 0, 8)], [(2, 0, 6), (3, 0, 2)], [(0, 0, 5), (1, 0, 3)], [(4, 8, 3)]]
    assert found.counts == (0, 0, 1, 0)


@pytest.mark.parametrize(
    ("seq_len", "mode", "rows", "counts"),
    [
        (3, "split", [[(0, 0, 3)], [(2, 0, 3)], [(1, 0, 2), (0, 3, 1)], [(3, 0, 1)]], (0, 0, 1, 0)),
        (3, "truncate", [[(0, 0, 3)], [(2, 0, 3)], [(1, 0, 2), (3, 0, 1)]], (0, 1, 0, 1)),
        (3, "drop", [[(2, 0, 3)], [(1, 0, 2), (3, 0, 1)]], (1, 4, 0, 0)),
        (1, "split", [[(d, b, 1)] for d, tokens in enumerate([4, 2, 3, 1]) for b in range(tokens)], (0, 0, 3, 0)),
        (1, "truncate", [[(0, 0, 1)], [(1, 0, 1)], [(2, 0, 1)], [(3, 0, 1)]], (0, 6, 0, 3)),
        (1, "drop", [[(3, 0, 1)]], (3, 9, 0, 0)),
    ],
)
def test_long_documents_by_hand(
    seq_len: int, mode: LongDocuments, rows: list[list[Piece]], counts: tuple[int, ...]
) -> None:
    found = packed([4, 2, 3, 1], seq_len, mode)
    assert rows_of(found) == rows
    assert found.counts == counts
    alone = rows_of_documents(np.array([4, 2, 3, 1], np.int64), seq_len, mode)
    assert pieces_of(alone) == sorted(piece for row in rows for piece in row)
    assert alone.counts == counts


@pytest.mark.parametrize(
    ("mode", "pieces", "counts"),
    [("split", 157, (0, 0, 1, 0)), ("truncate", 1, (0, 9_936, 0, 1)), ("drop", 0, (1, 10_000, 0, 0))],
)
def test_one_huge_document_among_short_ones(mode: LongDocuments, pieces: int, counts: tuple[int, ...]) -> None:
    """10,000 tokens are 156 rows of 64 and a rest of 16, which shares its row."""
    found = packed([10, 7, 10_000, 12, 5], 64, mode)
    assert found.counts == counts
    mine = [piece for piece in pieces_of(found) if piece[0] == 2]
    assert len(mine) == pieces
    if mode == "split":
        assert mine == [*((2, 64 * number, 64) for number in range(156)), (2, 9_984, 16)]
        assert rows_of(found)[156] == [(2, 9_984, 16), (3, 0, 12), (0, 0, 10), (1, 0, 7), (4, 0, 5)]


def test_ties() -> None:
    """Rows 0 (8 tokens) and 1 (5 + 3) have equal space for the 2: row 1 came to it last. Equal lengths go in order."""
    assert rows_of(packed([8, 5, 3, 2], 10)) == [[(0, 0, 8)], [(1, 0, 5), (2, 0, 3), (3, 0, 2)]]
    assert rows_of(packed([4, 6, 6, 4, 4], 10)) == [[(1, 0, 6), (0, 0, 4)], [(2, 0, 6), (3, 0, 4)], [(4, 0, 4)]]


def test_the_result_is_frozen() -> None:
    """A saved state counts rows: another choice among equal rows would resume with other documents."""
    found = pack(np.arange(5000) * 2654435761 % 65537 % 1103, 800, "split")
    digest = hashlib.sha256(b"".join(array.astype("<i8").tobytes() for array in found[:-1])).hexdigest()
    assert digest[:16] == "2075f4e4c9f9a782"


def test_empty_documents_get_no_piece() -> None:
    lengths = [0, 5, 0, 0, 3, 1, 0]
    assert rows_of(packed(lengths, 4)) == [[(1, 0, 4)], [(4, 0, 3), (1, 4, 1)], [(5, 0, 1)]]
    assert pieces_of(rows_of_documents(np.array(lengths), 4, "split")) == [(1, 0, 4), (1, 4, 1), (4, 0, 3), (5, 0, 1)]


def test_long_and_short_by_turns() -> None:
    """Documents of 100 and 10 tokens by turns, rows of 128."""
    assert rows_of(packed([100, 10] * 4, 128)) == [
        [(0, 0, 100), (1, 0, 10), (3, 0, 10)],
        [(2, 0, 100), (5, 0, 10), (7, 0, 10)],
        [(4, 0, 100)],
        [(6, 0, 100)],
    ]


@pytest.mark.parametrize("mode", LONG_DOCUMENTS)
@pytest.mark.parametrize("lengths", [[], [0], [0, 0, 0]])
def test_nothing_to_pack(lengths: list[int], mode: LongDocuments) -> None:
    found = packed(lengths, 8, mode)
    assert found.row_offsets.tolist() == [0]
    assert pieces_of(found) == []
    assert found.counts == (0, 0, 0, 0)
    assert pieces_of(rows_of_documents(np.array(lengths, np.int64), 8, mode)) == []


def test_all_dropped() -> None:
    assert rows_of(packed([9, 10], 8, "drop")) == []


@pytest.mark.parametrize("mode", LONG_DOCUMENTS)
def test_a_document_as_long_as_a_row_is_no_long_document(mode: LongDocuments) -> None:
    found = packed([8, 1, 8], 8, mode)
    assert rows_of(found) == [[(0, 0, 8)], [(2, 0, 8)], [(1, 0, 1)]]
    assert found.counts == (0, 0, 0, 0)


def test_arrays_are_as_wide_as_their_values() -> None:
    for lengths in ([], [3, 20, 0, 5]):
        for found in (packed(lengths, 8), rows_of_documents(np.array(lengths, np.int64), 8, "split")):
            assert {array.dtype for array in found[:-1]} == {np.dtype(np.int32)}
    longest = 2**31 - 1
    for seq_len, wide in ((longest, []), (longest + 1, ["piece_lengths"]), (2**29, ["piece_begins"])):
        found = packed([longest + 2**29, 5], seq_len, "split" if seq_len < longest else "truncate")
        assert [name for name in Packing._fields[:-1] if getattr(found, name).dtype == np.int64] == wide, seq_len
    values = np.array([0, longest])
    assert narrow(values, longest).tolist() == values.tolist()
    assert narrow(values + 1, longest + 1).tolist() == [1, longest + 1]


def test_documents_past_32_bits() -> None:
    """Begins and counts of one document of 5 * 2**31 tokens in rows of 2**31."""
    found = packed([5 * 2**31 + 2, 7], 2**31)
    assert rows_of(found)[:5] == [[(0, number * 2**31, 2**31)] for number in range(5)]
    assert rows_of(found)[5:] == [[(1, 0, 7), (0, 5 * 2**31, 2)]]
    assert packed([2**31 - 2, 7], 2**31 + 9).piece_lengths.tolist() == [2**31 - 2, 7]
    assert packed([2**40], 8, "truncate").counts.dropped_tokens == 2**40 - 8


@given(some_lengths, some_seq_len, some_mode)
def test_no_token_is_lost_or_invented(lengths: list[int], seq_len: int, mode: LongDocuments) -> None:
    rows = rows_of(packed(lengths, seq_len, mode))
    served = [(d, token) for row in rows for d, begin, tokens in row for token in range(begin, begin + tokens)]
    kept = [
        min(tokens, seq_len) if mode == "truncate" else 0 if mode == "drop" and tokens > seq_len else tokens
        for tokens in lengths
    ]
    assert sorted(served) == [(d, token) for d, tokens in enumerate(kept) for token in range(tokens)]
    long = sum(tokens > seq_len for tokens in lengths)
    assert packed(lengths, seq_len, mode).counts == (
        long if mode == "drop" else 0,
        sum(lengths) - sum(kept),
        long if mode == "split" else 0,
        long if mode == "truncate" else 0,
    )


@given(some_lengths, some_seq_len, some_mode)
def test_rows_and_pieces(lengths: list[int], seq_len: int, mode: LongDocuments) -> None:
    """Rows fit; pieces are whole wherever they can be; a document's pieces come in order and never share a row."""
    rows = rows_of(packed(lengths, seq_len, mode))
    assert all(1 <= sum(tokens for _, _, tokens in row) <= seq_len for row in rows)
    pieces = [piece for row in rows for piece in row]
    for document, tokens in enumerate(lengths):
        mine = [piece for piece in pieces if piece[0] == document]
        assert mine == sorted(mine)
        if tokens <= seq_len:
            assert mine == [(document, 0, tokens)] * (tokens > 0)
        assert all(begin % seq_len == 0 and (size == seq_len or mine[-1][1] == begin) for _, begin, size in mine)
    for row in rows:
        assert len({document for document, _, _ in row}) == len(row)
        assert [tokens for _, _, tokens in row] == sorted((tokens for _, _, tokens in row), reverse=True)
    alone = rows_of_documents(np.array(lengths, np.int64), seq_len, mode)
    assert pieces_of(alone) == sorted(pieces)


@given(some_lengths, some_seq_len, some_mode)
def test_rows_are_those_of_plain_best_fit_decreasing(lengths: list[int], seq_len: int, mode: LongDocuments) -> None:
    found = packed(lengths, seq_len, mode)
    spaces = sorted(seq_len - sum(tokens for _, _, tokens in row) for row in rows_of(found))
    assert spaces == best_fit_decreasing(found.piece_lengths.tolist(), seq_len)


@given(some_lengths, some_seq_len, some_mode, st.data())
def test_the_result_depends_on_the_lengths_alone(
    lengths: list[int], seq_len: int, mode: LongDocuments, data: st.DataObject
) -> None:
    """Also read-only and strided lengths; and their order decides which document goes where, not what the rows hold."""
    strided = np.repeat(np.array(lengths, np.int64), 2)[::2]
    strided.flags.writeable = False
    expected = packed(lengths, seq_len, mode)
    again = pack(strided, seq_len, mode)
    assert rows_of(again) == rows_of(expected)
    assert again.counts == expected.counts
    other = packed(data.draw(st.permutations(lengths)), seq_len, mode)
    assert other.row_offsets.tolist() == expected.row_offsets.tolist()
    assert other.piece_lengths.tolist() == expected.piece_lengths.tolist()
    assert other.counts == expected.counts


@pytest.mark.parametrize("seq_len", [2048, 8192])
def test_log_normal_lengths(seq_len: int) -> None:
    lengths = np.random.default_rng(5).lognormal(np.log(400), 1.2, 20_000).astype(np.int64) + 1
    found = pack(lengths, seq_len, "split")
    spaces = np.sort(seq_len - np.add.reduceat(found.piece_lengths, found.row_offsets[:-1]))
    assert spaces.tolist() == best_fit_decreasing(found.piece_lengths.tolist(), seq_len)
    assert fill(found, seq_len) > 0.99
    assert found.nbytes <= 16 * len(lengths)


def test_every_row_length_packs() -> None:
    """Row lengths around powers of two."""
    lengths = np.random.default_rng(16).normal(4096, 512, 3000).clip(100, 8192).astype(np.int64)
    rows = {}
    for seq_len in (8191, 8192, 8193, 12000, 16384, 16385):
        found = pack(lengths, seq_len, "split")
        rows[seq_len] = found.row_offsets.size - 1
        assert sorted(found.piece_documents.tolist()) == list(range(3000))
        assert not found.piece_begins.any()
        assert fill(found, seq_len) == lengths.sum() / (rows[seq_len] * seq_len)
        assert seq_len < 12000 or fill(found, seq_len) > 0.9
    assert list(rows.values()) == sorted(rows.values(), reverse=True)
    for near, other in ((8191, 8192), (8192, 8193), (16384, 16385)):
        assert abs(rows[near] - rows[other]) <= 0.02 * rows[near]


@pytest.mark.parametrize(("length", "rows", "placements"), [(7, 3425, 2), (1000, 500_000, 1), (2048, 1_000_000, 1)])
def test_the_work_does_not_grow_with_equal_lengths(length: int, rows: int, placements: int) -> None:
    num_rows, made = packing._place([length], [1_000_000], 2048)
    assert (num_rows, len(made)) == (rows, 3 * placements)
    assert packed([length] * 1_000_000, 2048).row_offsets.size == rows + 1


def test_placements_of_two_lengths() -> None:
    """10^6 rows of a piece of 1500 tokens take one of 500 each; the last three of 500 share a new row."""
    assert packing._place([1500, 500], [1_000_000, 1_000_003], 2048) == (
        1_000_001,
        [0, 1_000_000, 1, 0, 1_000_000, 1, 1_000_000, 1, 3],
    )


def test_the_modes_are_listed() -> None:
    assert get_args(LongDocuments) == LONG_DOCUMENTS


@pytest.mark.parametrize(
    ("lengths", "seq_len", "mode", "error", "text"),
    [
        (np.array([1, 2], np.int32), 8, "split", TypeError, "int32"),
        (np.ones((2, 2), np.int64), 8, "split", TypeError, "one axis"),
        (np.array([1, -2, -3]), 8, "split", ValueError, "document 1 has -2 tokens"),
        (np.array([1]), 0, "split", ValueError, "seq_len is 0"),
        (np.array([1]), 8, "cut", ValueError, "'cut', expected one of split, truncate, drop"),
    ],
)
def test_wrong_arguments(lengths: np.ndarray, seq_len: int, mode: LongDocuments, error: type, text: str) -> None:
    for function in (pack, rows_of_documents):
        with pytest.raises(error, match=text):
            function(lengths, seq_len, mode)
