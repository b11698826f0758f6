"""How documents cut windows of the token stream into pieces.

offsets         0         3     5     5           9            document 2 is empty
tokens          0  1  2 | 3  4  |     | 5  6  7  8
windows of 4    [         )                                    from 0:  pieces 0+3, 3+1
                   [           )                               from 1:  pieces 1+2, 3+2
                           [          )                        from 4:  pieces 4+1, 5+3
document ends   3 5     3 5     5 9
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.operators._pieces import places_in_rows

Int64Array = npt.NDArray[np.int64]


class Pieces(NamedTuple):
    """The pieces of R windows, in the order of the windows and of the tokens in them. Every piece has a token."""

    row_offsets: Int64Array
    """(R + 1,): window r has pieces row_offsets[r] to row_offsets[r + 1] - 1."""
    starts: Int64Array
    """(P,): position of each piece's first token in the corpus."""
    lengths: Int64Array
    """(P,): tokens in each piece."""
    document_ends: Int64Array
    """(P,): position after the last token of the piece's document, wherever the window ends."""
    lookback: Int64Array | None = None
    """(P, 3): tokens before each piece that are read with it, and how far its labels go: as `goldfish` takes it."""
    places: Int64Array | None = None
    """(P,): where in its window each piece begins, if each follows the one before; None: not known."""
    row_segments: Int64Array | None = None
    """(2, R): length of the longest segment of each row, and the number of its segments. Padding counts as a segment.
    None: not known."""

    def with_rows(self, widths: Int64Array | int) -> "Pieces":
        """The same pieces with `places` and `row_segments`, computed once for all blocks of a plan.

        widths: (R,), positions of each row, or of all of them
        """
        begins, ends = self.row_offsets[:-1], self.row_offsets[1:]
        counts, padding = ends - begins, widths - self.row_lengths
        longest = np.zeros_like(counts)
        has_pieces = counts > 0
        if len(self.lengths):
            longest[has_pieces] = np.maximum.reduceat(self.lengths, begins[has_pieces])
        row_segments = np.stack((np.maximum(longest, padding), counts + (padding > 0)))
        places = None if self.lookback is not None else places_in_rows(self.row_offsets, self.lengths)
        return self._replace(places=places, row_segments=row_segments)

    def chosen(self, row_offsets: Int64Array, at: slice | Int64Array) -> "Pieces":
        """All pieces of some of the windows, which may be in any order."""
        lookback = None if self.lookback is None else self.lookback[at]
        places = None if self.places is None else self.places[at]
        return Pieces(row_offsets, self.starts[at], self.lengths[at], self.document_ends[at], lookback, places)

    @property
    def row_lengths(self) -> Int64Array:
        """(R,): tokens in each window."""
        ends = np.zeros(len(self.lengths) + 1, np.int64)
        np.add.accumulate(self.lengths, out=ends[1:])
        lengths: Int64Array = np.diff(ends[self.row_offsets])
        return lengths

    @property
    def tokens_before(self) -> Int64Array:
        """(P,): tokens before each piece that are read with it."""
        return np.zeros_like(self.lengths) if self.lookback is None else self.lookback[:, 0]


def pieces_of_windows(offsets: Int64Array, starts: npt.ArrayLike, length: int) -> Pieces:
    """Cut the windows [start, start + length) of the token stream where documents end.

    offsets: (D + 1,) int64, as in `Documents`, empty documents included
    starts:  (R,) integers, in any order; windows lie inside the corpus and may overlap
    length:  tokens in a window, the same for all

    Two binary searches a window and work in proportion to the documents that the windows meet, empty ones too.
    """
    begins: Int64Array = np.asarray(starts, np.int64)
    ends = begins + length
    assert offsets.dtype == np.int64, f"offsets of {offsets.dtype} would be copied as a whole by every search"
    assert length >= 0
    assert not begins.size or (begins.min() >= 0 and ends.max() <= offsets[-1]), "a window outside the corpus"
    # Documents that a window meets: from the last that begins at or before its first token to the last that begins
    # before its end. In rising order a search goes where the one before has been: 2.1 instead of 3.0 ms for 1024
    # windows in 10^8 documents.
    order = np.argsort(begins)
    first, last = np.empty_like(begins), np.empty_like(begins)
    first[order] = np.searchsorted(offsets, begins[order], side="right") - 1
    last[order] = np.searchsorted(offsets, ends[order], side="left") - 1
    counts = np.maximum(last + 1 - first, 0)
    before = np.cumsum(counts) - counts
    windows = np.repeat(np.arange(len(begins)), counts)
    documents = np.arange(len(windows)) + (first - before)[windows]
    document_ends = offsets[documents + 1]
    piece_starts = np.maximum(offsets[documents], begins[windows])
    lengths = np.minimum(document_ends, ends[windows]) - piece_starts
    has_tokens = lengths > 0
    row_offsets = np.zeros(len(begins) + 1, np.int64)
    np.cumsum(np.bincount(windows[has_tokens], minlength=len(begins)), out=row_offsets[1:])
    return Pieces(row_offsets, piece_starts[has_tokens], lengths[has_tokens], document_ends[has_tokens])


def some_rows(pieces: Pieces, begin: int, end: int) -> Pieces:
    """The pieces of rows begin ... end - 1."""
    first, last = int(pieces.row_offsets[begin]), int(pieces.row_offsets[end])
    some = pieces.chosen(pieces.row_offsets[begin : end + 1] - first, slice(first, last))
    return some if pieces.row_segments is None else some._replace(row_segments=pieces.row_segments[:, begin:end])


def chosen_rows(pieces: Pieces, rows: Int64Array) -> Pieces:
    """The pieces of some rows, in the order of `rows`: (R,) row numbers."""
    return pieces.chosen(*numbers_of(pieces.row_offsets, rows))


def numbers_of(row_offsets: npt.NDArray[np.integer], rows: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Which pieces some rows have, in the order of `rows`: where those of each begin, (R + 1,), and their numbers.

    row_offsets: as of `Pieces`
    """
    firsts = row_offsets[rows]
    counts = row_offsets[rows + 1] - firsts
    offsets = np.concatenate(([0], np.cumsum(counts)))
    return offsets, np.repeat(firsts - offsets[:-1], counts) + np.arange(offsets[-1])


def staged(pieces: Pieces, row_begins: Int64Array) -> Pieces:
    """The same pieces by their places in a buffer that rows were read into, row r from `row_begins[r]` on.

    row_begins: (R,) or longer
    """
    offsets, lengths = pieces.row_offsets, pieces.lengths
    if pieces.places is not None:
        begins: Int64Array = pieces.places + row_begins[: len(offsets) - 1].repeat(offsets[1:] - offsets[:-1])
        return pieces._replace(starts=begins, document_ends=begins + (pieces.document_ends - pieces.starts))
    ends = (lengths if pieces.lookback is None else lengths + pieces.tokens_before).cumsum()
    firsts = np.concatenate(([0], ends))[offsets[:-1]]
    shifts = (row_begins[: len(firsts)] - firsts).repeat(offsets[1:] - offsets[:-1])
    starts: Int64Array = ends - lengths + shifts
    return pieces._replace(starts=starts, document_ends=starts + (pieces.document_ends - pieces.starts))
