"""Packing: documents, known by their lengths alone, are laid into rows of T = `seq_len` tokens.

A document longer than T is split, truncated or dropped; every other one stays whole. With T = 8 and "split", the
documents of 5, 3, 6, 2, 11 and 0 tokens make six pieces in four rows (digits: documents, dots: padding):

    row 0   4 4 4 4 4 4 4 4         the first T tokens of document 4
    row 1   2 2 2 2 2 2 3 3
    row 2   0 0 0 0 0 1 1 1
    row 3   4 4 4 . . . . .         its rest

The method is best-fit decreasing: the longest piece first, each into the row with the least sufficient space. It works
on the histogram of lengths, an idea of M. Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021
(arXiv:2107.02027): pieces of equal length go together into groups of neighboring rows with equal space, so 10^6 equal
documents are one placement. The outcome is the same as of placing one piece at a time. Ties:

- of equal lengths the first in document order is placed first (of the same document, the one that begins first);
- of rows with equal space the one that came to it last is filled first; of those that came together, the first row.

All of it is integer arithmetic on `lengths`, so every rank on every machine gets the same rows.
"""

from bisect import bisect_left, insort
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.int32] | npt.NDArray[np.int64]
LongDocuments = Literal["split", "truncate", "drop"]
LONG_DOCUMENTS: tuple[LongDocuments, ...] = ("split", "truncate", "drop")


class PackingCounts(NamedTuple):
    """How documents longer than a row were handled."""

    dropped_documents: int
    dropped_tokens: int
    """Tokens that are not in any row: those of dropped documents, and the ends of truncated ones."""
    split_documents: int
    truncated_documents: int


class LeftOut(NamedTuple):
    """Tokens of long documents that are in no row; the same in every epoch."""

    documents: int
    """Documents that lose some or all of their tokens."""
    tokens: int
    share: float
    """Of all tokens, 0 to 1."""
    is_exact: bool


class DocumentPieces(NamedTuple):
    """P pieces in document order; those of one document follow one another. The row mode "pad": one piece a row.

    Arrays are int32 where that holds their values, else int64: `narrow`.
    """

    piece_documents: IntArray
    """(P,): index of the document in `lengths`."""
    piece_begins: IntArray
    """(P,): first token of the piece, counted from the document's first."""
    piece_lengths: IntArray
    """(P,): tokens, 1 to seq_len."""
    counts: PackingCounts


class Packing(NamedTuple):
    """R rows of P pieces: row r holds the pieces row_offsets[r] to row_offsets[r + 1] - 1, the longest first.

    Rows that one piece fills come first, in document order. Takes 12 bytes a piece and 4 a row, unless values need
    64 bits.
    """

    row_offsets: IntArray
    """(R + 1,): from 0 to P, strictly increasing."""
    piece_documents: IntArray
    piece_begins: IntArray
    piece_lengths: IntArray
    counts: PackingCounts

    @property
    def num_rows(self) -> int:
        """R."""
        return self.row_offsets.size - 1

    def chosen(self, row_offsets: IntArray, at: Int64Array) -> "Packing":
        """Its pieces in another order, in other rows."""
        documents, begins, lengths = (column[at] for column in self[1:4])
        return Packing(row_offsets, documents, begins, lengths, self.counts)

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays."""
        return self.row_offsets.nbytes + sum(piece.nbytes for piece in self[1:4])


def pack(lengths: Int64Array, seq_len: int, long_documents: LongDocuments) -> Packing:
    """Rows of at most `seq_len` tokens that hold the documents of one planning window.

    lengths: int64 (n,), tokens of each document; 0 is allowed and gets no piece. Costs O(P log P) for P pieces.
    """
    return pack_pieces(rows_of_documents(lengths, seq_len, long_documents), seq_len)


def pack_pieces(pieces: DocumentPieces, seq_len: int) -> Packing:
    """The same for pieces of at most `seq_len` tokens, which stay whole."""
    decreasing = _stable_order(seq_len - pieces.piece_lengths, seq_len - 1)
    ordered = pieces.piece_lengths[decreasing]
    begins_run = np.diff(ordered, prepend=0) != 0  # where a new length begins
    runs = np.flatnonzero(begins_run)
    num_rows, placements = _place(ordered[runs].tolist(), np.diff(runs, append=ordered.size).tolist(), seq_len)
    rows = _rows_of_pieces(placements)
    places = decreasing[_stable_order(rows, num_rows)]
    return Packing(
        narrow(_offsets(np.bincount(rows, minlength=num_rows)), rows.size),
        pieces.piece_documents[places],
        pieces.piece_begins[places],
        pieces.piece_lengths[places],
        pieces.counts,
    )


def rows_of_documents(
    lengths: Int64Array, seq_len: int, long_documents: LongDocuments, part_tokens: int | None = None
) -> DocumentPieces:
    """The pieces of all documents, in document order: what `pack` packs, and the rows of `rows = "pad"`.

    lengths: int64 (n,), tokens of each document; 0 is allowed and gets no piece.
    part_tokens: of the parts of a split document, `seq_len` if not given.
    """
    _check(lengths, seq_len, long_documents)
    is_long = lengths > seq_len
    kept, num_long = lengths, int(np.count_nonzero(is_long))
    if long_documents == "truncate":
        kept = np.minimum(lengths, seq_len)
    elif long_documents == "drop":
        kept = np.where(is_long, 0, lengths)
    part = seq_len if part_tokens is None else np.where(kept > seq_len, part_tokens, seq_len)
    offsets = _offsets(-(-kept // part))
    documents = np.repeat(np.arange(lengths.size), np.diff(offsets))
    part = part if isinstance(part, int) else part[documents]
    begins = (np.arange(documents.size) - offsets[documents]) * part
    counts = PackingCounts(
        dropped_documents=num_long if long_documents == "drop" else 0,
        dropped_tokens=int(lengths.sum() - kept.sum()),
        split_documents=num_long if long_documents == "split" else 0,
        truncated_documents=num_long if long_documents == "truncate" else 0,
    )
    piece_lengths = np.minimum(kept[documents] - begins, part)
    return DocumentPieces(
        narrow(documents, lengths.size),
        narrow(begins, int(begins.max(initial=0))),
        narrow(piece_lengths, seq_len),
        counts,
    )


def left_out(lengths: Int64Array, seq_len: int, long_documents: LongDocuments) -> tuple[int, int]:
    """How many documents lose tokens for being longer than a row, and how many tokens these are."""
    if long_documents == "split":
        return 0, 0
    is_long = lengths > seq_len
    num_long = int(np.count_nonzero(is_long))
    return num_long, int((lengths * is_long).sum()) - (seq_len * num_long if long_documents == "truncate" else 0)


def narrow(values: Int64Array, largest: int) -> IntArray:
    """Whole numbers in [0, largest] as int32 if that holds `largest`; else as they are."""
    return values.astype(np.int32) if largest < 2**31 else values


def _check(lengths: Int64Array, seq_len: int, long_documents: str) -> None:
    if lengths.dtype != np.int64 or lengths.ndim != 1:
        raise TypeError(f"lengths are {lengths.dtype} with shape {lengths.shape}, expected int64 with one axis")
    if lengths.size and lengths.min() < 0:
        document = int(np.argmax(lengths < 0))
        raise ValueError(f"document {document} has {lengths[document]} tokens, expected 0 or more")
    if seq_len < 1:
        raise ValueError(f"seq_len is {seq_len}, expected 1 or more")
    if long_documents not in LONG_DOCUMENTS:
        raise ValueError(f"long_documents is {long_documents!r}, expected one of {', '.join(LONG_DOCUMENTS)}")


def _place(lengths: list[int], counts: list[int], seq_len: int) -> tuple[int, list[int]]:
    """Number of rows, and where the pieces lie: counts[i] pieces of lengths[i] tokens, lengths decreasing.

    Three numbers a placement, in order of decreasing length: first_row, rows and per_row. The next rows * per_row
    pieces lie in rows first_row, first_row + 1, ..., per_row in each.
    """
    num_rows, placements = 0, list[int]()
    # Groups of neighboring rows with equal space, first row and number of rows: those of each space on a stack.
    groups: dict[int, list[tuple[int, int]]] = {}
    spaces: list[int] = []  # those that have groups, rising

    def put(space: int, first: int, rows: int) -> None:
        stack = groups.get(space)
        if stack:
            stack.append((first, rows))
        elif space:
            groups[space] = [(first, rows)]
            insort(spaces, space)

    for length, count in zip(lengths, counts, strict=True):
        while count:
            least = bisect_left(spaces, length)
            if least < len(spaces):
                space = spaces[least]
                stack = groups[space]
                first, rows = stack.pop()
                if not stack:
                    del spaces[least]
                per_row = space // length
            else:
                space, per_row = seq_len, seq_len // length
                first, rows = num_rows, -(-count // per_row)
                num_rows += rows
            # A row with a piece more has the least sufficient space as long as another piece fits: it is filled up.
            full = count // per_row
            if full >= rows:
                placements += first, rows, per_row
                put(space - per_row * length, first, rows)
                count -= rows * per_row
                continue
            if full:
                placements += first, full, per_row
                put(space - per_row * length, first, full)
                first, rows, count = first + full, rows - full, count - full * per_row
            if count:
                placements += first, 1, count
                put(space - count * length, first, 1)
                first, rows = first + 1, rows - 1
            if rows:
                put(space, first, rows)
            break
    return num_rows, placements


def _rows_of_pieces(placements: list[int]) -> Int64Array:
    """The row of each piece, in order of decreasing length: int64 (P,)."""
    first_rows, rows, per_row = np.array(placements, np.int64).reshape(-1, 3).T
    ends = np.cumsum(rows)
    numbers = np.arange(ends[-1] if ends.size else 0) + (first_rows - ends + rows).repeat(rows)
    in_rows: Int64Array = numbers.repeat(per_row.repeat(rows))
    return in_rows


def _offsets(counts: Int64Array) -> Int64Array:
    """int64 (n + 1,): 0, then the running sum of `counts` (n,)."""
    offsets = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, out=offsets[1:])
    return offsets


def _stable_order(keys: IntArray, largest: int) -> npt.NDArray[np.intp]:
    """Stable argsort of keys in [0, largest]. NumPy sorts keys of up to 16 bits by radix, 8 times as fast."""
    return np.argsort(keys.astype(np.min_scalar_type(largest)), kind="stable")
