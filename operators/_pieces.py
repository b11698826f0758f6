"""Where the pieces of rows lie, for NumPy: what `segments` copies, spreads and looks ahead with."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Runs of this many tokens on average are copied one by one (0.3 us each); shorter ones are gathered token by token.
_SLICE_TOKENS = 256


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
        self.row_of_piece = rows.repeat(self.offsets[1:] - self.offsets[:-1])
        totals = np.zeros(self.lengths.size + 1, np.int64)
        self.lengths.cumsum(out=totals[1:])
        row_totals = totals[self.offsets]
        used = row_totals[1:] - row_totals[:-1]
        if used.max(initial=0) > seq_len:
            row = int(used.argmax())
            raise ValueError(f"segments: the pieces of row {row} have {used[row]} tokens, expected {seq_len} at most")
        self.begins = totals[:-1] + (row_begins - row_totals[:-1])[self.row_of_piece]
        # A place for each piece and, behind those of its row, one for the padding, which may be none.
        self._places = np.arange(self.lengths.size) + self.row_of_piece
        self.counts = np.empty(self.lengths.size + num_rows, np.int64)
        self.counts[self._places] = self.lengths
        self.counts[self.offsets[1:] + rows] = seq_len - used
        padded = (used < seq_len).nonzero()[0]
        edges = (row_begins + used)[padded], (row_begins + seq_len)[padded]
        self._padding = list(map(slice, *(edge.tolist() for edge in edges)))

    def numbers(self) -> NDArray[np.int64]:
        """The number of each piece in its row, from 1."""
        numbers: NDArray[np.int64] = np.arange(1, self.lengths.size + 1) - self.offsets[self.row_of_piece]
        return numbers

    def pad(self, line: NDArray[Any], value: int) -> None:
        for part in self._padding:
            line[part] = value

    def spread(self, values: NDArray[np.int64], largest: int) -> NDArray[Any]:
        """The value of its piece for each position, 0 for padding; in the narrowest dtype, which is the quickest."""
        table = np.zeros(self.counts.size, np.min_scalar_type(largest))
        table[self._places] = values
        return table.repeat(self.counts)

    def gather(self, values: NDArray[Any], line: NDArray[Any]) -> None:
        """What the rows show of `values`, which are in the order of the tokens; padding gets anything."""
        shifts = self.starts - self.begins
        edge = np.ones(shifts.size + 1, np.bool_)  # of runs, whose pieces lie side by side among the tokens, too
        np.not_equal(shifts[1:], shifts[:-1], out=edge[1:-1])
        edges = edge.nonzero()[0]
        first, last = edges[:-1], edges[1:] - 1
        if first.size * _SLICE_TOKENS <= self.size:
            parts = self.begins[first], self.begins[last] + self.lengths[last], shifts[first]
            for begin, end, shift in zip(*(part.tolist() for part in parts), strict=True):
                line[begin:end] = values[begin + shift : end + shift]
        else:
            table = np.zeros(self.counts.size, np.int64)
            table[self._places] = shifts
            index = table.repeat(self.counts)
            index += np.arange(self.size)
            np.copyto(line, values.take(index, mode="clip"), casting="unsafe")

    def look_ahead(
        self, values: NDArray[Any], shown: NDArray[Any], step: int, cross: bool, ignore: int, line: NDArray[Any]
    ) -> Any:
        """The value `step` tokens ahead, `ignore` beyond the end of a piece, at the positions that are returned.

        It is what is shown `step` positions on, except for the last `step` tokens of a piece; with `cross`, of the last
        piece of a row. Padding gets anything.
        """
        line[:-step] = shown[step:]
        pieces = self.offsets[1:][self.offsets[1:] > self.offsets[:-1]] - 1 if cross else slice(None)
        back = np.arange(min(step, self.seq_len))  # 0 for the last token
        starts, lengths, ends = (part[pieces, None] for part in (self.starts, self.lengths, self.ends))
        last = lengths - 1 - back
        inside, positions, ahead = last >= 0, self.begins[pieces, None] + last, starts + last + step
        line[positions[inside]] = values[np.minimum(ahead[inside], values.size - 1)]
        ignored = positions[inside & (ahead >= ends)]
        line[ignored] = ignore
        return ignored

    def fill_bounds(self, cu_seqlens: NDArray[np.int32]) -> None:
        bounds = self.counts.cumsum()[self.counts > 0]
        if bounds.size >= cu_seqlens.size:
            raise ValueError(
                f"segments: cu_seqlens has room for {cu_seqlens.size - 1} segments, expected {bounds.size} or more"
            )
        cu_seqlens[0] = 0
        cu_seqlens[1 : bounds.size + 1] = bounds
        cu_seqlens[bounds.size + 1 :] = self.size
