"""The layout of pieces in rows, for the NumPy path of `segments`: copies, repeated values, and labels ahead.

Tables have one entry per piece. Arrays with one entry per position are avoided, except if the pieces of many rows are
scattered over the tokens: the allocator returns memory of that size each time, which costs as much as the work.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Runs of this many tokens on average are copied one by one (0.3 us each); shorter ones are gathered token by token.
_SLICE_TOKENS = 256

# Positions that are filled from a table at a time: 64 KiB, which the allocator keeps.
_CHUNK = 1 << 15


class PieceTables(NamedTuple):
    row_offsets: Any
    starts: Any
    lengths: Any
    ends: Any


class PieceLayout:
    """Where the pieces lie in the rows, with all rows as one line of `size` positions."""

    def __init__(self, pieces: PieceTables, shape: tuple[int, int]) -> None:
        num_rows, seq_len = shape
        self.size, self.seq_len = num_rows * seq_len, seq_len
        self.offsets, self.starts, self.lengths, self.ends = pieces
        rows = np.arange(num_rows)
        row_begins = rows * seq_len
        row_of_piece = rows.repeat(self.offsets[1:] - self.offsets[:-1])
        totals = np.zeros(self.lengths.size + 1, np.int64)
        self.lengths.cumsum(out=totals[1:])
        row_totals = totals[self.offsets]
        used = row_totals[1:] - row_totals[:-1]
        if used.max(initial=0) > seq_len:
            row = int(used.argmax())
            raise ValueError(
                f"segments: the pieces of row {row:,} have {used[row]:,} tokens, expected at most {seq_len:,}"
            )
        self.begins = totals[:-1] + (row_begins - row_totals[:-1])[row_of_piece]
        self.row_of_piece = row_of_piece
        # One place per piece and, after those of a row, one for its padding, which may be empty.
        self._places = np.arange(self.lengths.size) + row_of_piece
        self.counts = np.empty(self.lengths.size + num_rows, np.int64)
        self.counts[self._places] = self.lengths
        self.counts[self.offsets[1:] + rows] = seq_len - used
        padded = (used < seq_len).nonzero()[0]
        edges = (row_begins + used)[padded], (row_begins + seq_len)[padded]
        self._padding = list(map(slice, *(edge.tolist() for edge in edges)))

    def pad(self, line: NDArray[Any], value: int) -> None:
        for part in self._padding:
            line[part] = value

    def number_pieces(self, line: NDArray[np.int64]) -> None:
        """For each position, the number of its piece in the row, from 1; 0 for padding."""
        table = np.zeros(self.counts.size, np.min_scalar_type(self.lengths.size))  # a narrow dtype is fastest
        table[self._places] = np.arange(1, self.lengths.size + 1) - self.offsets[self.row_of_piece]
        for places, part, is_one in self._chunks:
            line[part] = table[places] if is_one else table[places].repeat(self.counts[places])

    def count_positions(self, line: NDArray[np.int64]) -> None:
        """For each position, its place in the piece, from 0; padding is undefined."""
        begins = self.counts.cumsum() - self.counts
        for places, part, is_one in self._chunks:
            if is_one:
                line[part] = np.arange(part.stop - part.start)
                continue
            positions = (begins[places] - part.start).astype(np.uint16).repeat(self.counts[places])
            line[part] = np.subtract(_counting()[: positions.size], positions, out=positions)

    @functools.cached_property
    def _chunks(self) -> list[tuple[slice, slice, bool]]:
        """Places that are filled together, their positions, and whether it is a single long place."""
        ends = self.counts.cumsum()
        chunks, place, begin = [], 0, 0
        while begin < self.size:
            stop = int(ends.searchsorted(begin + _CHUNK, "right"))
            is_one = stop <= place
            stop = max(stop, place + 1)
            end = int(ends[stop - 1])
            chunks.append((slice(place, stop), slice(begin, end), is_one))
            place, begin = stop, end
        return chunks

    @functools.cached_property
    def runs(self) -> list[tuple[int, int, int]] | None:
        """Pieces that are contiguous both in the rows and in the tokens: begin, end, and offset to the tokens.

        None if there are too many to copy one by one.
        """
        shifts = self.starts - self.begins
        edge = np.ones(shifts.size + 1, np.bool_)
        np.not_equal(shifts[1:], shifts[:-1], out=edge[1:-1])
        edges = edge.nonzero()[0]
        first, last = edges[:-1], edges[1:] - 1
        if first.size * _SLICE_TOKENS > self.size:
            return None
        parts = self.begins[first], self.begins[last] + self.lengths[last], shifts[first]
        return list(zip(*(part.tolist() for part in parts), strict=True))

    @functools.cached_property
    def index(self) -> NDArray[np.int64]:
        """For each position, the place of its token; undefined for padding."""
        table = np.zeros(self.counts.size, np.int64)
        table[self._places] = self.starts - self.begins
        index: NDArray[np.int64] = table.repeat(self.counts)
        index += np.arange(self.size)
        return index

    def ends_of_pieces(self, step: int, cross: bool) -> PieceEnds:
        """The last `step` tokens of each piece, whose labels, `step` tokens ahead, are after its end.

        With `cross` the labels are the tokens `step` positions ahead in the row, in the next pieces, if there are any.
        """
        back = 1 if step == 1 else np.arange(1, min(step, self.seq_len) + 1)[:, None]  # 1 for the last token
        last = self.lengths - back
        positions, ahead, ends = self.begins + last, self.starts + last + step, self.ends
        if cross and self.lengths.size:
            pieces = self.begins.searchsorted(positions + step, "right") - 1
            pieces = np.minimum(pieces, self.offsets[1:][self.row_of_piece] - 1)  # at most the last one of the row
            ahead, ends = (self.starts - self.begins)[pieces] + positions + step, self.ends[pieces]
        known = ahead < ends
        if step == 1:
            return PieceEnds(positions[~known], positions[known], ahead[known])
        inside = last >= 0
        known &= inside
        return PieceEnds(positions[inside & ~known], positions[known], ahead[known])

    def labels_behind(self, num_labels: int, cross: bool) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Labels of a piece, among the `num_labels` tokens after it, that are not in its row.

        For each, the position of the piece's last token and the label's place in the tokens. With `cross` the labels of
        a piece are in the next one, so only the last piece of a row has any.
        """
        after = self.starts + self.lengths
        counts = np.minimum(self.ends - after, num_labels)
        if cross:
            counts[np.arange(counts.size) + 1 < self.offsets[1:][self.row_of_piece]] = 0
        places = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        return (self.begins + self.lengths - 1).repeat(counts), after.repeat(counts) + places

    def fill_bounds(self, cu_seqlens: NDArray[np.int32], batch_rows: int) -> None:
        """`cu_seqlens` (K, C + 1), of batches of `batch_rows` rows."""
        for bounds, counts in zip(cu_seqlens, self._of_batches(len(cu_seqlens), batch_rows), strict=True):
            ends = counts[counts > 0].cumsum()
            if ends.size >= bounds.size:
                raise ValueError(
                    f"segments: cu_seqlens has room for {bounds.size - 1:,} segments, expected at least {ends.size:,}"
                )
            bounds[0] = 0
            bounds[1 : ends.size + 1] = ends
            bounds[ends.size + 1 :] = ends[-1] if ends.size else 0

    def count_segments(self, num_segments: NDArray[np.int64], batch_rows: int) -> None:
        """`num_segments` (K,), of batches of `batch_rows` rows."""
        num_segments[:] = [np.count_nonzero(counts) for counts in self._of_batches(num_segments.size, batch_rows)]

    def _of_batches(self, num_batches: int, batch_rows: int) -> list[NDArray[np.int64]]:
        """The counts of each batch, one slice per batch."""
        edges = [min(batch * batch_rows, self.offsets.size - 1) for batch in range(num_batches + 1)]
        places = [int(self.offsets[row]) + row for row in edges]
        return [self.counts[begin:end] for begin, end in itertools.pairwise(places)]


class PieceEnds(NamedTuple):
    """Positions at the ends of pieces."""

    ignored: NDArray[np.int64]
    """Positions without a label."""
    known: NDArray[np.int64]
    """Positions whose label is after the piece."""
    ahead: NDArray[np.int64]
    """Places in the tokens of the labels of `known`."""


class Shown:
    """The part of `values`, which are in the order of the tokens, that is in the rows."""

    def __init__(self, values: NDArray[Any], layout: PieceLayout) -> None:
        self._values, self._layout = values, layout
        # Kept in the narrow dtype: copies from it cost less, and two int64 arrays whose addresses differ by a few bytes
        # within a page, as inputs and labels would, cost five times as much on some processors.
        self._line = values.take(layout.index, mode="clip") if layout.runs is None else None

    def copy(self, line: NDArray[Any], step: int = 0) -> None:
        """Fill `line` with the values `step` tokens ahead; padding and, with a step, ends of pieces are undefined."""
        if self._line is not None:
            line[: max(0, line.size - step)] = self._line[step:]
            return
        values = self._values
        for begin, end, shift in self._layout.runs or ():
            first = begin + shift + step
            found = values[first : end + shift + step]
            line[begin : begin + found.size] = found

    def look_ahead(self, step: int, ends: PieceEnds, ignore: int, line: NDArray[Any]) -> None:
        """Fill `line` with the values `step` tokens ahead, or `ignore` without a label; padding is undefined."""
        self.copy(line, step)
        line[ends.known] = self._values[ends.ahead]
        line[ends.ignored] = ignore


@functools.cache
def _counting() -> NDArray[np.uint16]:
    return np.arange(_CHUNK, dtype=np.uint16)
