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

    def __init__(
        self,
        pieces: PieceTables,
        shape: tuple[int, int],
        *,
        places: NDArray[np.int64] | None = None,
        even_rows: tuple[int, int] | None = None,
    ) -> None:
        """places: as `places_in_rows` returns them. even_rows: as the property. None: found from the tables.

        Tables with `places` are trusted; others are checked.
        """
        self.num_rows, self.seq_len = shape
        self.size = self.num_rows * self.seq_len
        self.offsets, self.starts, self.lengths, self.ends = pieces
        borders = _borders(*shape)
        row_begins, row_ends = borders[:-1], borders[1:]
        self._counts = self.offsets[1:] - self.offsets[:-1]
        are_known = places is not None
        if places is None:
            places = places_in_rows(self.offsets, self.lengths)
        # Where each piece begins, and the end of the last, with padding as a part of the piece before or after it.
        self._edges = np.empty(self.lengths.size + 1, np.int64)
        self.begins = np.add(places, row_begins.repeat(self._counts), out=self._edges[:-1])
        self._edges[-1] = self.size
        if self.begins.size and self.begins[0]:
            self.begins = self.begins.copy()
            self._edges[0] = 0
        behind = np.zeros(self._edges.size, np.int64)
        self._behind = np.add(self.begins, self.lengths, out=behind[1:])
        # The last piece before the end of a row without pieces is in a row before it, if there is one.
        used = np.maximum(behind[self.offsets[1:]], row_begins)
        if not are_known and np.count_nonzero(used > row_ends):
            row = int((used > row_ends).argmax())
            raise ValueError(
                f"segments: the pieces of row {row:,} have {used[row] - row_begins[row]:,} tokens, expected at most "
                f"{self.seq_len:,}"
            )
        self._is_padded = used < row_ends
        self._padding_begins = used[self._is_padded]
        self._padding = self._parts(self._padding_begins, row_ends[self._is_padded])
        if even_rows is not None:
            self.even_rows = even_rows

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
        table = numbers.astype(_narrow(self.seq_len))
        for pieces, part in self._chunks:
            line[part] = table[pieces].repeat(self._spans[pieces])

    def count_positions(self, line: NDArray[Any]) -> None:
        """For each position, its place in the piece, from 0; padding is undefined."""
        dtype = _narrow(self.seq_len)
        # Modulo what the dtype has room for, as the differences are, which have room.
        begins, chunks = self.begins.astype(dtype), self._chunks
        firsts = np.array([part.start for _, part in chunks]).astype(dtype)
        for (pieces, part), first in zip(chunks, firsts, strict=True):
            positions = (begins[pieces] - first).repeat(self._spans[pieces])
            line[part] = np.subtract(_counting(part.stop - part.start, dtype), positions, out=positions)

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
        parts = self.begins[first], self._behind[last], shifts
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
        positions, ends = self._behind - back, self.ends
        ahead = self.starts + self.lengths + (step - back)
        if cross and self.lengths.size:
            pieces = self.begins.searchsorted(positions + step, "right") - 1
            pieces = np.minimum(pieces, self._of_row(self.offsets[1:]) - 1)  # at most the last one of the row
            ahead, ends = (self.starts - self.begins)[pieces] + positions + step, self.ends[pieces]
        known = ahead < ends
        if step == 1:
            if not np.count_nonzero(known):
                return PieceEnds(positions, positions[:0], positions[:0])
            return PieceEnds(positions[~known], positions[known], ahead[known])
        inside = self.lengths >= back
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
        counts = self.segment_counts(batch_rows)
        most = max(counts.tolist())
        if most >= room:
            raise ValueError(f"segments: cu_seqlens has room for {room - 1:,} segments, expected at least {most:,}")
        batch_size = batch_rows * self.seq_len
        cu_seqlens.fill(batch_size)
        if num_batches * batch_rows > self.num_rows:
            cu_seqlens[-1] = self.size - (num_batches - 1) * batch_size
        bounds = self.begins
        if self._padding_begins.size:
            bounds = np.concatenate((bounds, self._padding_begins))
            bounds.sort()
        places = np.arange(bounds.size)
        if num_batches > 1:  # each begins anew
            places += (np.arange(0, num_batches * room, room) - counts.cumsum() + counts).repeat(counts)
            bounds = bounds % batch_size
        cu_seqlens.reshape(-1)[places] = bounds

    def segment_counts(self, batch_rows: int) -> NDArray[np.int64]:
        """(K,): segments of each batch of `batch_rows` rows."""
        of_rows = self._counts + self._is_padded
        counts: NDArray[np.int64] = np.add.reduceat(of_rows, np.arange(0, self.num_rows, batch_rows))
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
                found = values[first : first + line.size]
                line[: found.size] = found
                return
            if inside:
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


def places_in_rows(row_offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """(P,): where in its row each piece begins, which is after the one before it."""
    ends = np.zeros(lengths.size + 1, np.int64)
    np.add.accumulate(lengths, out=ends[1:])
    places: NDArray[np.int64] = ends[:-1] - ends[row_offsets[:-1]].repeat(row_offsets[1:] - row_offsets[:-1])
    return places


@functools.lru_cache(maxsize=16)
def _borders(num_rows: int, seq_len: int) -> NDArray[np.int64]:
    """(R + 1,): where each row begins, with all rows as one line, and the end."""
    borders = np.arange(0, (num_rows + 1) * seq_len, seq_len)
    borders.flags.writeable = False
    return borders


def _narrow(largest: int) -> np.dtype[Any]:
    """Of numbers up to `largest`: to repeat two bytes takes a third as long as eight."""
    return np.dtype(np.uint16 if largest < 1 << 16 else np.uint32)


def _counting(count: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """0, 1, ... `count` - 1, modulo what `dtype` has room for."""
    return _counting_to(max(1 << 16, 1 << (count - 1).bit_length()), dtype)[:count]


@functools.lru_cache(maxsize=4)
def _counting_to(size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.arange(size).astype(dtype)
