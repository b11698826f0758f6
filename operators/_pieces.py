"""Where the pieces of rows lie, for NumPy: what `segments` copies, spreads and looks ahead with.

Tables have an entry a piece. Nothing here makes an array with an entry a position, except where the pieces of many rows
lie all over the tokens: the allocator gives such memory back and takes it anew each time, at the price of the work.
"""

from __future__ import annotations

import functools
import itertools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Runs of this many tokens on average are copied one by one (0.3 us each); shorter ones are gathered token by token.
_SLICE_TOKENS = 256

# Positions whose values are repeated from a table at a time: 64 KiB, which the allocator keeps.
_CHUNK = 1 << 15


class PieceTables(NamedTuple):
    row_offsets: Any
    starts: Any
    lengths: Any
    ends: Any


class PieceLayout:
    """Where the pieces lie in the rows, all taken as one line of `size` positions."""

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
            raise ValueError(f"segments: the pieces of row {row} have {used[row]} tokens, expected {seq_len} at most")
        self.begins = totals[:-1] + (row_begins - row_totals[:-1])[row_of_piece]
        self.row_of_piece = row_of_piece
        # A place for each piece and, behind those of its row, one for the padding, which may be none.
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
        """For each position the number of its piece in its row, from 1; 0 for padding."""
        table = np.zeros(self.counts.size, np.min_scalar_type(self.lengths.size))  # a narrow dtype is the quickest
        table[self._places] = np.arange(1, self.lengths.size + 1) - self.offsets[self.row_of_piece]
        for places, part, is_one in self._chunks:
            line[part] = table[places] if is_one else table[places].repeat(self.counts[places])

    def count_positions(self, line: NDArray[np.int64]) -> None:
        """For each position its place in its piece, from 0; padding gets anything."""
        begins = self.counts.cumsum() - self.counts
        for places, part, is_one in self._chunks:
            if is_one:
                line[part] = np.arange(part.stop - part.start)
                continue
            positions = (begins[places] - part.start).astype(np.uint16).repeat(self.counts[places])
            line[part] = np.subtract(_counting()[: positions.size], positions, out=positions)

    @functools.cached_property
    def _chunks(self) -> list[tuple[slice, slice, bool]]:
        """Places that are spread together, their positions, and whether it is one place that is long by itself."""
        ends = self.counts.cumsum()
        chunks, place, begin = [], 0, 0
        while begin < self.size:
            behind = int(ends.searchsorted(begin + _CHUNK, "right"))
            is_one = behind <= place
            behind = max(behind, place + 1)
            end = int(ends[behind - 1])
            chunks.append((slice(place, behind), slice(begin, end), is_one))
            place, begin = behind, end
        return chunks

    @functools.cached_property
    def runs(self) -> list[tuple[int, int, int]] | None:
        """Pieces that lie side by side in the rows and among the tokens: begin, end, and how far off the tokens are.

        None where there are too many of them to go through.
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
        """For each position the place of its token; for padding any number."""
        table = np.zeros(self.counts.size, np.int64)
        table[self._places] = self.starts - self.begins
        index: NDArray[np.int64] = table.repeat(self.counts)
        index += np.arange(self.size)
        return index

    def ends_of_pieces(self, step: int, cross: bool) -> PieceEnds:
        """The last `step` tokens of each piece, whose labels `step` tokens ahead lie behind it.

        With `cross` those are the tokens `step` positions on in the row, of its next pieces, while there are any.
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
        """Tokens that are labels of a piece, one of its `num_labels` next ones, and that its row does not show.

        For each the position of the piece's last token and its own place among the tokens. With `cross` the next piece
        has them, so only the last one of a row has any.
        """
        behind = self.starts + self.lengths
        counts = np.minimum(self.ends - behind, num_labels)
        if cross:
            counts[np.arange(counts.size) + 1 < self.offsets[1:][self.row_of_piece]] = 0
        places = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        return (self.begins + self.lengths - 1).repeat(counts), behind.repeat(counts) + places

    def fill_bounds(self, cu_seqlens: NDArray[np.int32], batch_rows: int) -> None:
        """`cu_seqlens` (K, C + 1), of batches of `batch_rows` rows."""
        for bounds, counts in zip(cu_seqlens, self._of_batches(len(cu_seqlens), batch_rows), strict=True):
            ends = counts[counts > 0].cumsum()
            if ends.size >= bounds.size:
                raise ValueError(
                    f"segments: cu_seqlens has room for {bounds.size - 1} segments, expected {ends.size} or more"
                )
            bounds[0] = 0
            bounds[1 : ends.size + 1] = ends
            bounds[ends.size + 1 :] = ends[-1] if ends.size else 0

    def count_segments(self, num_segments: NDArray[np.int64], batch_rows: int) -> None:
        """`num_segments` (K,), of batches of `batch_rows` rows."""
        num_segments[:] = [np.count_nonzero(counts) for counts in self._of_batches(num_segments.size, batch_rows)]

    def _of_batches(self, num_batches: int, batch_rows: int) -> list[NDArray[np.int64]]:
        """The counts of each batch."""
        edges = [min(batch * batch_rows, self.offsets.size - 1) for batch in range(num_batches + 1)]
        places = [int(self.offsets[row]) + row for row in edges]
        return [self.counts[begin:end] for begin, end in itertools.pairwise(places)]


class PieceEnds(NamedTuple):
    """Positions at the ends of pieces."""

    ignored: NDArray[np.int64]
    """Those without a label."""
    known: NDArray[np.int64]
    """Those whose label lies behind the piece."""
    ahead: NDArray[np.int64]
    """Where among the tokens the labels of `known` are."""


class Shown:
    """What the rows show of `values`, which are in the order of the tokens."""

    def __init__(self, values: NDArray[Any], layout: PieceLayout) -> None:
        self._values, self._layout = values, layout
        # In their own narrow dtype: the copies from here cost less, and two of int64 that lie a few bytes apart in
        # their pages, as inputs and labels would, cost five times as much on some processors.
        self._line = values.take(layout.index, mode="clip") if layout.runs is None else None

    def copy(self, line: NDArray[Any], step: int = 0) -> None:
        """Fill `line` with the values `step` tokens on; padding, and with a step the ends of pieces, get anything."""
        if self._line is not None:
            line[: max(0, line.size - step)] = self._line[step:]
            return
        values = self._values
        for begin, end, shift in self._layout.runs or ():
            first = begin + shift + step
            found = values[first : end + shift + step]
            line[begin : begin + found.size] = found

    def look_ahead(self, step: int, ends: PieceEnds, ignore: int, line: NDArray[Any]) -> None:
        """Fill `line` with the values `step` tokens ahead, `ignore` where there is no label; padding gets anything."""
        self.copy(line, step)
        line[ends.known] = self._values[ends.ahead]
        line[ends.ignored] = ignore


@functools.cache
def _counting() -> NDArray[np.uint16]:
    return np.arange(_CHUNK, dtype=np.uint16)
