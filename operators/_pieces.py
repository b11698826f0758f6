"""The layout of pieces in rows, for the NumPy path of `segments`: copies, repeated values, and labels ahead.

Tables have one entry per piece. Each output is written once, from values of one or two bytes that stay in the cache;
the padding of rows and the ends of pieces, a few positions, are written again. Arrays with one entry per position are
avoided, except if the pieces of many rows are scattered over the tokens.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Runs of this many tokens on average are copied one by one (0.3 us each); shorter ones are gathered token by token.
_SLICE_TOKENS = 256

# Positions that are filled from a table at a time, and a piece more: two-byte values, if that has up to 16,384 tokens.
_CHUNK = 3 << 14

# Padding of fewer positions a row on average is written position by position, not row by row.
_SLICE_PADDING = 128


class PieceTables(NamedTuple):
    row_offsets: Any
    starts: Any
    lengths: Any
    ends: Any


class PieceLayout:
    """Where the pieces lie in the rows, with all rows as one line of `size` positions."""

    def __init__(self, pieces: PieceTables, shape: tuple[int, int]) -> None:
        self.num_rows, self.seq_len = shape
        self.size = self.num_rows * self.seq_len
        self.offsets, self.starts, self.lengths, self.ends = pieces
        num_pieces = self.lengths.size
        totals = np.zeros(num_pieces + 1, np.int64)
        np.add.accumulate(self.lengths, out=totals[1:])
        row_totals = totals[self.offsets]
        used = row_totals[1:] - row_totals[:-1]
        if np.count_nonzero(used > self.seq_len):  # takes half as long as `any` and `max` do
            row = int(used.argmax())
            raise ValueError(
                f"segments: the pieces of row {row:,} have {used[row]:,} tokens, expected at most {self.seq_len:,}"
            )
        row_begins = np.arange(0, self.size, self.seq_len)
        self._counts = self.offsets[1:] - self.offsets[:-1]
        edges = np.empty(num_pieces + 1, np.int64)
        np.add(totals[:-1], (row_begins - row_totals[:-1]).repeat(self._counts), out=edges[:-1])
        edges[-1] = self.size
        self.begins = edges[:-1]
        # Where each piece begins, and the end of the last, with padding as a part of the piece before or after it.
        self._edges = edges
        if edges[0] and num_pieces:
            self._edges = edges.copy()
            self._edges[0] = 0
        self._is_padded = used < self.seq_len
        padded = self._is_padded.nonzero()[0]
        self._padding_begins = (row_begins + used)[padded]
        self._padding = self._parts(self._padding_begins, row_begins[padded] + self.seq_len)

    @staticmethod
    def _parts(begins: NDArray[np.int64], ends: NDArray[np.int64]) -> list[slice] | list[NDArray[np.int64]]:
        """Indices that hold the positions of all parts, each from begin to end."""
        if not begins.size:
            return []
        sizes = ends - begins
        before = np.add.accumulate(sizes) - sizes
        total = int(before[-1] + sizes[-1])
        if total < _SLICE_PADDING * begins.size:
            return [(begins - before).repeat(sizes) + np.arange(total)]
        return list(map(slice, begins.tolist(), ends.tolist()))

    def pad(self, line: NDArray[Any], value: int) -> None:
        for part in self._padding:
            line[part] = value

    def number_pieces(self, line: NDArray[Any]) -> None:
        """For each position, the number of its piece in the row, from 1; padding is undefined."""
        numbers = np.arange(1, self.lengths.size + 1) - self._of_row(self.offsets)
        table = numbers.astype(_counting(self.lengths.size + 1).dtype)  # a narrow dtype is fastest
        for pieces, part in self._chunks:
            line[part] = table[pieces].repeat(self._spans[pieces])

    def count_positions(self, line: NDArray[Any]) -> None:
        """For each position, its place in the piece, from 0; padding is undefined."""
        for pieces, part in self._chunks:
            positions, begins = _counting(part.stop - part.start), self.begins[pieces] - part.start
            if begins[-1]:  # else it is one piece
                begins = begins.astype(positions.dtype).repeat(self._spans[pieces])
                positions = np.subtract(positions, begins, out=begins)
            line[part] = positions

    def _of_row(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """For each piece, the value of its row."""
        return values[: self.num_rows].repeat(self._counts)

    @functools.cached_property
    def _spans(self) -> NDArray[np.int64]:
        """Positions from the edge of each piece to that of the next."""
        return self._edges[1:] - self._edges[:-1]

    @functools.cached_property
    def _chunks(self) -> list[tuple[slice, slice]]:
        """Pieces that are filled together, with the padding around them, and their positions."""
        count = self.begins.size
        if count and self.size <= _CHUNK:
            return [(slice(0, count), slice(0, self.size))]
        firsts = self._edges[:count].searchsorted(np.arange(_CHUNK, self.size, _CHUNK)).tolist()
        borders = sorted({0, *firsts, count})
        edges = self._edges[borders].tolist()
        return [(slice(*borders[at : at + 2]), slice(*edges[at : at + 2])) for at in range(len(borders) - 1)]

    @functools.cached_property
    def runs(self) -> list[tuple[int, int, int]] | None:
        """Pieces that are contiguous both in the rows and in the tokens: begin, end, and offset to the tokens.

        None if there are too many to copy one by one.
        """
        first, shifts = self._run_starts
        if first.size > max(1, self.size // _SLICE_TOKENS):
            return None
        last = np.empty_like(first)
        last[:-1], last[-1:] = first[1:] - 1, self.begins.size - 1
        parts = self.begins[first], self.begins[last] + self.lengths[last], shifts
        return list(zip(*(part.tolist() for part in parts), strict=True))

    @functools.cached_property
    def _run_starts(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The first piece of each run, and the run's offset from positions to tokens."""
        shifts = self.starts - self.begins
        is_first = np.ones(shifts.size, np.bool_)
        np.not_equal(shifts[1:], shifts[:-1], out=is_first[1:])
        first = is_first.nonzero()[0]
        return first, shifts[first]

    @functools.cached_property
    def even_rows(self) -> tuple[int, int] | None:
        """The token of the first position, and the tokens from there to that of the next row; None if rows differ.

        So it is where rows lie one after another at equal distances; those without pieces may have any tokens.
        """
        shifts = self.starts - self.begins
        rows = (self._counts > 0).nonzero()[0]
        if not rows.size:
            return None
        first, last = int(rows[0]), int(rows[-1])
        step = int(shifts[-1] - shifts[0]) // max(1, last - first)
        begin = int(shifts[0]) - step * first
        if begin < 0 or step + self.seq_len <= 0:
            return None
        even = begin if not step else self._of_row(np.arange(begin, begin + step * self.num_rows, step))
        return None if np.count_nonzero(shifts != even) else (begin, step + self.seq_len)

    def gathered(self, values: NDArray[Any]) -> NDArray[Any]:
        """For each position, the value of its token; undefined for padding."""
        table = self.starts - self._edges[:-1]
        if self.begins.size:
            table[0] = self.starts[0] - self.begins[0]
        line = np.empty(self.size, values.dtype)
        for pieces, part in self._chunks:
            index = table[pieces].repeat(self._spans[pieces])
            index += np.arange(part.start, part.stop)
            values.take(index, mode="clip", out=line[part])
        return line

    def ends_of_pieces(self, step: int, cross: bool) -> PieceEnds:
        """The last `step` tokens of each piece, whose labels, `step` tokens ahead, are after its end.

        With `cross` the labels are the tokens `step` positions ahead in the row, in the next pieces, if there are any.
        """
        back = 1 if step == 1 else np.arange(1, min(step, self.seq_len) + 1)[:, None]  # 1 for the last token
        last = self.lengths - back
        positions, ahead, ends = self.begins + last, self.starts + last + step, self.ends
        if cross and self.lengths.size:
            pieces = self.begins.searchsorted(positions + step, "right") - 1
            pieces = np.minimum(pieces, self._of_row(self.offsets[1:]) - 1)  # at most the last one of the row
            ahead, ends = (self.starts - self.begins)[pieces] + positions + step, self.ends[pieces]
        known = ahead < ends
        if step == 1:
            if not np.count_nonzero(known):
                return PieceEnds(positions, positions[:0], positions[:0])
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
            counts[np.arange(counts.size) + 1 < self._of_row(self.offsets[1:])] = 0
        places = np.arange(counts.sum()) - (counts.cumsum() - counts).repeat(counts)
        return (self.begins + self.lengths - 1).repeat(counts), after.repeat(counts) + places

    def fill_bounds(self, cu_seqlens: NDArray[np.int32], batch_rows: int) -> None:
        """`cu_seqlens` (K, C + 1), of batches of `batch_rows` rows."""
        num_batches, room = cu_seqlens.shape
        most = int(self.segment_counts(batch_rows).max())
        if most >= room:
            raise ValueError(f"segments: cu_seqlens has room for {room - 1:,} segments, expected at least {most:,}")
        cu_seqlens[...] = batch_rows * self.seq_len
        cu_seqlens[-1] = (self.num_rows - (num_batches - 1) * batch_rows) * self.seq_len
        # The place of a bound is the number of segments before it. Batches are one line: each begins anew.
        places, first_piece = self._segments_before[:-1], self.offsets[:-1]
        bounds, paddings = self.begins, self._padding_begins
        if num_batches > 1:
            batches = np.arange(num_batches).repeat(batch_rows)[: self.num_rows]
            places = places + (np.arange(0, num_batches * room, room) - places[::batch_rows])[batches]
            shifts = batches * (batch_rows * self.seq_len)
            bounds, paddings = bounds - self._of_row(shifts), paddings - shifts[self._is_padded]
        line = cu_seqlens.reshape(-1)
        line[np.arange(bounds.size) + self._of_row(places - first_piece)] = bounds
        if paddings.size:
            line[(places + self._counts)[self._is_padded]] = paddings

    @functools.cached_property
    def _segments_before(self) -> NDArray[np.int64]:
        """(R + 1,): pieces and padding before each row."""
        before: NDArray[np.int64] = self.offsets.copy()
        before[1:] += np.add.accumulate(self._is_padded, dtype=np.int64)
        return before

    def segment_counts(self, batch_rows: int) -> NDArray[np.int64]:
        """(K,): segments of each batch of `batch_rows` rows."""
        before = self._segments_before
        firsts = before[:-1:batch_rows]
        counts: NDArray[np.int64] = -firsts
        counts[:-1] += firsts[1:]
        counts[-1] += before[-1]
        return counts


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
        is_gathered = layout.even_rows is None and layout.runs is None
        self._line = layout.gathered(values) if is_gathered else None

    def copy(self, line: NDArray[Any], step: int = 0) -> None:
        """Fill `line` with the values `step` tokens ahead; padding and, with a step, ends of pieces are undefined."""
        if self._line is not None:
            line[: max(0, line.size - step)] = self._line[step:]
            return
        values, layout = self._values, self._layout
        if layout.even_rows is not None:
            first, row_step = layout.even_rows
            first += step
            length, item = layout.seq_len, values.itemsize
            inside = max(0, min(layout.num_rows, (values.size - length - first) // row_step + 1))
            shape, strides = (inside, length), (row_step * item, item)
            if row_step == length:
                line[: inside * length] = values[first : first + inside * length]
            elif inside:
                line[: inside * length].reshape(shape)[...] = np.ndarray(
                    shape, values.dtype, values, first * item, strides
                )
            for row in range(inside, layout.num_rows):  # what is read after the last tokens is not wanted
                found = values[first + row * row_step :][:length]
                line[row * length : row * length + found.size] = found
            return
        for begin, end, shift in layout.runs or ():
            first = begin + shift + step
            found = values[first : end + shift + step]
            line[begin : begin + found.size] = found

    def look_ahead(self, step: int, ends: PieceEnds, ignore: int, line: NDArray[Any]) -> None:
        """Fill `line` with the values `step` tokens ahead, or `ignore` without a label; padding is undefined."""
        self.copy(line, step)
        if ends.known.size:
            line[ends.known] = self._values[ends.ahead]
        line[ends.ignored] = ignore


def _counting(count: int) -> NDArray[Any]:
    """0, 1, ... `count` - 1, in the narrowest dtype."""
    size = max(1 << 16, 1 << (count - 1).bit_length())
    return _counting_to(size)[:count]


@functools.lru_cache(maxsize=4)
def _counting_to(size: int) -> NDArray[Any]:
    return np.arange(size, dtype=np.min_scalar_type(size - 1))
