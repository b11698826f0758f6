"""Windows: how a stream of tokens is cut into rows.

A window of T = `seq_len` reads T + 1 tokens, since the label of the last input is the token after it. With T = 4 and
stride 4, a stream of 12 tokens has two windows; the tokens after the last window are in no row:

    tokens    0 1 2 3 4 5 6 7 8 9 10 11
    window 0  0 1 2 3|4
    window 1          4 5 6 7|8                 (8 is a label only; 9, 10 and 11 are unused)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.block_grid import BlockGrid
from dali_pipes.documents import Pieces, pieces_of_windows
from dali_pipes.errors import ConfigError
from dali_pipes.rows.base import KeyedRange, Parts, Reads, Rows, kept, key_names, order_key
from dali_pipes.rows.item_order import BlockShape, ItemOrder

if TYPE_CHECKING:
    from dali_pipes.rows.packing import LeftOut
    from dali_pipes.rows.token_batches import TokenBatches
    from dali_pipes.rows.window_counts import WindowMark

Int64Array = npt.NDArray[np.int64]

_MOST_OVERLAPPING_ROWS = 16
"""Rows that share a token, where windows overlap, up to which an error names the steps of all."""


@dataclass(frozen=True)
class Windows:
    """`count` windows of T = `seq_len` tokens (plus one for the last label); the first starts at token `first`."""

    first: int
    count: int
    seq_len: int
    stride: int
    num_tokens: int
    """Tokens of the split that the windows are cut from."""

    @property
    def span(self) -> int:
        """Tokens from `first` to the last one that a window reads."""
        return (self.count - 1) * self.stride + self.seq_len + 1

    @property
    def unused_tokens(self) -> int:
        """Tokens of the split that no window reads, neither as an input nor as a label."""
        gap = max(0, self.stride - self.seq_len - 1) * (self.count - 1)
        return self.num_tokens - self.span + gap


def split_windows(
    num_tokens: int,
    seq_len: int,
    stride: int | None = None,
    split: Literal["train", "validation"] = "train",
    validation_fraction: float = 0.0,
) -> Windows:
    """Windows of one split. The last `floor(num_tokens * validation_fraction)` tokens are the validation split.

    The split depends on the corpus and the fraction alone, never on seed, rank or batch size; no window crosses it.
    Raises `ConfigError` when the split is shorter than one window.
    """
    stride = seq_len if stride is None else stride
    held_out = int(num_tokens * validation_fraction)
    first, available = (num_tokens - held_out, held_out) if split == "validation" else (0, num_tokens - held_out)
    if available < seq_len + 1:
        raise ConfigError(
            f"the {split} split has {available:,} tokens (corpus: {num_tokens:,} tokens, validation_fraction = "
            f"{validation_fraction}), but a row of seq_len = {seq_len} reads {seq_len + 1:,}; use a longer corpus, "
            "a shorter seq_len or another validation_fraction"
        )
    return Windows(first, (available - 1 - seq_len) // stride + 1, seq_len, stride, available)


@dataclass(frozen=True)
class WindowCuts:
    """How windows are cut into pieces: where documents end (nowhere, without `offsets`).

    A row reads `lookahead` tokens more than it shows, for its last labels, but none from `limit` on.
    """

    offsets: Int64Array | None
    lookahead: int
    limit: int
    mask_boundaries: bool
    """Whether labels end with their document; else they go on as the stream does."""
    lookback: int | None = None
    """Tokens before a row that are read with it, if they are of the document that it begins in: what `goldfish` hashes.
    0: none, but other sources have some. None: none."""
    first: int = 0
    """First token of the split, from which on they are."""

    def pieces(self, starts: Int64Array, is_real: npt.NDArray[np.bool_], seq_len: int) -> Pieces:
        """Pieces of the windows that begin at `starts`; rows that are not real have none."""
        if self.offsets is None:
            lengths = np.full(int(is_real.sum()), seq_len)
            cut = Pieces(np.arange(len(lengths) + 1), starts[is_real], lengths, np.full(len(lengths), self.limit))
        else:
            cut = pieces_of_windows(self.offsets, starts[is_real], seq_len)
        counts = np.zeros(len(starts), np.int64)
        counts[is_real] = np.diff(cut.row_offsets)
        row_ends = np.minimum(np.repeat(starts, counts) + seq_len + self.lookahead, self.limit)
        inside = np.minimum(row_ends, cut.document_ends)
        ends = inside if self.mask_boundaries else row_ends
        pieces = Pieces(np.concatenate(([0], np.cumsum(counts))), cut.starts, cut.lengths, ends)
        return pieces if self.lookback is None else pieces._replace(lookback=self._lookback(pieces, inside))

    def _lookback(self, pieces: Pieces, inside: Int64Array) -> Int64Array:
        """Of each piece: tokens before it, and its labels' tokens, those in its document and all."""
        lookback = np.zeros((len(pieces.starts), 3), np.int64)
        is_last = np.zeros(len(pieces.starts), np.bool_)
        is_last[pieces.row_offsets[1:][np.diff(pieces.row_offsets) > 0] - 1] = True
        # Tokens of later pieces in the row are those pieces' own.
        lookback[:, 2] = np.where(is_last, pieces.document_ends - pieces.starts, pieces.lengths)
        if self.lookback:
            assert self.offsets is not None, "documents say which tokens come before"
            begins = self.offsets[np.searchsorted(self.offsets, pieces.starts, side="right") - 1]
            lookback[:, 0] = np.minimum(pieces.starts - np.maximum(begins, self.first), self.lookback)
            lookback[:, 1] = np.minimum(inside - pieces.starts, lookback[:, 2])
        return lookback


class WindowRows:
    """Rows that are windows of the stream: a `RowSource` of closed formulas, which plans nothing ahead.

        place  ─▶  `ItemOrder`: order of the pass, kept windows  ─▶  window number  ─▶  first token

    label_shift: whether a row reads one token more than it shows, for its last label; `cuts` say it for pieces.
    name: makes the orders of this source its own; None: those of a corpus without a name.
    share: keeps floor(share * windows) windows, at least one, which depend on the name alone. Without a shuffle they
    come in a fixed order, the same in every pass, but not in that of the corpus, which is not a closed formula.
    blocks: makes orders, and a share, of blocks of windows; None: of single windows.
    random_offset: the windows of each pass begin at an offset in [0, stride), drawn from (seed, name, pass); there are
    as many as fit at the largest offset.
    """

    is_uniform = True
    most_planned: int | None = None
    rearranges = False
    token_batches: "TokenBatches | None" = None

    def __init__(
        self,
        windows: Windows,
        *,
        shuffle: bool = True,
        seed: int = 0,
        label_shift: bool = True,
        cuts: WindowCuts | None = None,
        name: str | None = None,
        share: Fraction | None = None,
        random_offset: bool = False,
        blocks: BlockShape | None = None,
    ) -> None:
        self._seed, self._cuts, self._names, self._random_offset = seed, cuts, key_names(name), random_offset
        self._shuffle, self.in_pieces = shuffle, cuts is not None
        self.seq_len, self.stride = windows.seq_len, windows.stride
        self.num_tokens, self.first_token = windows.num_tokens, windows.first
        self.row_tokens = windows.seq_len + (label_shift if cuts is None else cuts.lookahead)
        self.lookback = 0 if cuts is None else cuts.lookback or 0
        self.span, num_windows = windows.span, windows.count
        if random_offset:
            num_windows = _windows_at_any_offset(windows)
            self.span = (num_windows - 1) * windows.stride + windows.seq_len + windows.stride
        if cuts is not None:
            self.span = min(self.span + cuts.lookahead - 1, cuts.limit - windows.first)
        num_kept = kept(share, num_windows)
        kept_key = None if num_kept is None else order_key("share", *self._names)
        self._num_rows = num_windows if num_kept is None else num_kept
        block_rows, window_blocks = (
            (None, 1) if blocks is None else (blocks.items(1, windows.stride), blocks.window_blocks)
        )
        self.order = ItemOrder(num_windows, self._num_rows, kept_key, block_rows, window_blocks)
        self.order_name = self.order.name(shuffle)

    def key(self, pass_number: int) -> int | None:
        """The 64-bit key of a pass's order, drawn from (seed, name, pass); None for the order of the corpus."""
        if not self._shuffle:
            return None
        return order_key("order", self._seed, *self._names, pass_number)

    def block_grid(self) -> BlockGrid | None:
        """Where blocks are in the corpus; None without an order by blocks. Those of all passes with `random_offset`."""
        if self.order.blocks is None:
            return None
        items, more = self.order.blocks.block_rows, self.stride - 1 if self._random_offset else 0
        count, lookahead = -(-self.order.num_items // items), max(0, self.row_tokens - self.stride)
        end = self.first_token + self.span
        # A block begins with what its first row reads before it: else it would need the whole block before, too.
        first, both = self.first_token - self.lookback, self.lookback + lookahead + more
        return BlockGrid(first, items * self.stride, count, both, end)

    def item_at(self, pass_number: int, place: int) -> int:
        return place

    def first_of(self, pass_number: int) -> int:
        """The token that window 0 of a pass begins at."""
        if not self._random_offset:
            return self.first_token
        # A stride below 2**24 makes the offsets' chances differ by less than one part in 2**40.
        return self.first_token + order_key("offset", self._seed, *self._names, pass_number) % self.stride

    def count(self, pass_number: int, at_least: int | None = None) -> int:
        return self._num_rows

    def count_by_now(self, pass_number: int) -> tuple[int, bool]:
        return self._num_rows, True

    def is_counted(self, pass_number: int) -> bool:
        return True

    def estimate(self, pass_number: int) -> int:
        return self._num_rows

    def left_out(self) -> "LeftOut | None":
        return None

    def plan(self, pass_number: int, places: Int64Array, parts: Parts | None = None) -> Rows:
        """A padding row shows the first row of the pass, without pieces if rows are cut into those."""
        numbers = self.order.numbers(np.maximum(places, 0), self.key(pass_number))
        starts, seq_len = numbers * self.stride + self.first_of(pass_number), self.seq_len
        if parts is not None:
            starts, seq_len = starts + parts.numbers * parts.seq_len, parts.seq_len
        return Rows(starts, None if self._cuts is None else self._cuts.pieces(starts, places >= 0, seq_len))

    def plan_next(self, pass_number: int, place: int) -> None:
        pass

    def formula(self, pass_number: int) -> KeyedRange | None:
        return KeyedRange(self.order, self.key(pass_number), self.first_of(pass_number), self.stride)

    def widths(self, pass_number: int, first: int, end: int, step_rows: int) -> Int64Array | None:
        return None

    def places_of(self, pass_number: int, position: int) -> list[int] | None:
        """Tokens on the border of two windows are read for both, and more often where windows overlap."""
        if self.row_tokens > _MOST_OVERLAPPING_ROWS * self.stride:
            return None
        offset, key = position - self.first_of(pass_number), self.key(pass_number)
        lowest, highest = -((self.row_tokens - 1 - offset) // self.stride), offset // self.stride
        numbers = range(max(0, lowest), min(highest, self.order.num_items - 1) + 1)
        places = (self.order.place_of(number, key) for number in numbers)
        return [place for place in places if place is not None]

    def reads(self, rows: Rows, begins: Int64Array, sizes: Int64Array) -> Reads:
        starts, lengths = rows.starts, sizes
        if self._cuts is not None and rows.pieces is not None:
            has_pieces = np.diff(rows.pieces.row_offsets) > 0
            if rows.pieces.lookback is not None:  # only a row's first piece begins within a document
                starts = starts.copy()
                starts[has_pieces] -= rows.pieces.tokens_before[rows.pieces.row_offsets[:-1][has_pieces]]
            lengths = np.minimum(lengths, self._cuts.limit - starts)
            lengths[~has_pieces] = 0
        return Reads(starts, lengths, begins)

    def mark(self, pass_number: int, place: int) -> "WindowMark | None":
        return None

    def seek(self, pass_number: int, place: int, mark: "WindowMark") -> bool:
        return False

    def at(self, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
        passes, places = np.divmod(counts, self._num_rows)
        return passes, places

    def mark_count(self, count: int) -> tuple[int, ...]:
        return ()

    def seek_count(self, count: int, mark: Sequence[int]) -> bool:
        return count >= 0 and len(mark) == 0

    def rows_of_pass(self) -> int:
        return self._num_rows

    def mean_tokens(self) -> Fraction:
        return Fraction(self.seq_len)


def _windows_at_any_offset(windows: Windows) -> int:
    """Windows that fit wherever in the first `stride` tokens the first one begins."""
    count = (windows.num_tokens - windows.seq_len) // windows.stride
    if count < 1:
        raise ConfigError(
            f"random_offset = True starts the rows of an epoch up to {windows.stride - 1:,} tokens into the split, and "
            f"a row reads {windows.seq_len + 1:,}, but the split has {windows.num_tokens:,} tokens; use at least "
            f"{windows.seq_len + windows.stride:,} tokens, a shorter seq_len or stride, or random_offset = False"
        )
    return count
