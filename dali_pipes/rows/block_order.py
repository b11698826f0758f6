"""An order by blocks: the rows of a few hundred blocks at a time, so that neighbors of the corpus are read together.

    rows of the corpus     0 1 2 3 | 4 5 6 7 | 8 9 10 11 | 12 13          blocks of R = 4 rows, the last one short
    blocks, permuted       3 1 | 0 2                                      windows of W = 2 blocks
    rows, permuted         12 4 7 13 5 6 | 2 9 10 0 11 3 8 1              inside each window; of key 0

Each block is in one window of a pass, and a window's rows are permuted as one, so no more than W blocks have to be at
hand, and those of the next window while they come. All of it is a formula: keyed bijections (`permute`) of the blocks
of the pass and of the rows of each window, whose keys are outputs of splitmix64 seeded with that of the pass.

Windows have equal numbers of blocks, the first ones perhaps one more: if the last one took what is left, its rows could
all come from one block. The short block is in another window in every pass. Places in windows after that are counted as
if it were whole, which makes 8 ... 15 of the places 6 ... 13 above.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.operators import permute
from dali_pipes.operators.permute import permute_each, preimage, splitmix64
from dali_pipes.rows.grouping import divided

Int64Array = npt.NDArray[np.int64]

BLOCK_ORDER_NAME = "blocks-v1"
BLOCK_TOKENS = 1 << 21
"""Tokens of the corpus in a block: 8 MiB of ids of 4 bytes, the widest that are common, whatever the corpus stores. So
neither the format nor the machine decides the order. A change needs another `BLOCK_ORDER_NAME`."""

_KEPT = 4
"""Passes and windows that are remembered: a reader is in one or two of them, and so is each source of a mixture."""

_TABLE_ROWS = 64
"""Rows of a window from which on a list of its blocks, which is kept, takes less time than permuting each slot."""


class Window(NamedTuple):
    """One window of a pass."""

    first_place: int
    """The place of the pass at which it begins."""
    num_rows: int
    key: int
    """Of the bijection of its rows."""
    short_end: int
    """Rows of the window up to the end of its short block; `num_rows` without one."""
    blocks: Int64Array
    """The blocks in it, by slot."""


class _Pass(NamedTuple):
    """What the arithmetic on the places of a pass needs."""

    block_rows: int
    num_blocks: int
    fewest: int
    """Blocks of a window."""
    wider: int
    """How many of the first windows have one more."""
    missing: int
    """Rows that the last block is short of the others."""
    short_window: int
    short_slot: int
    """Window and slot of the last block."""

    def first_slot(self, window: Any) -> Any:
        """Of one window or, as below, of several of this pass or each of another; then all fields are arrays."""
        return window * self.fewest + np.minimum(window, self.wider)

    def first_place(self, window: Any) -> Any:
        """The place at which a window begins."""
        return self.first_slot(window) * self.block_rows - self.missing * (window > self.short_window)

    def window_of(self, slot: Any) -> Any:
        among_wide = slot // (self.fewest + 1)
        return np.where(among_wide < self.wider, among_wide, (slot - self.wider) // self.fewest)

    def as_if_whole(self, place: Any) -> Any:
        """The place if all blocks were whole: those in windows after the short block's move on."""
        return place + self.missing * (place >= self.first_slot(self.short_window + 1) * self.block_rows - self.missing)

    def num_rows(self, window: Any) -> Any:
        rows = (self.fewest + (window < self.wider)) * self.block_rows
        return rows - self.missing * (window == self.short_window)

    def short_end(self, window: Any) -> Any:
        """Rows of a window up to the end of the short block; all without it."""
        end = (self.short_slot + 1 - self.first_slot(window)) * self.block_rows - self.missing
        return np.where(window == self.short_window, end, self.num_rows(window))


class BlockOrder:
    """Orders of `count` >= 1 rows, in blocks of `block_rows`, of which `window_blocks` at most make a window.

    The key of a pass selects its order. Safe for several threads.
    """

    def __init__(self, count: int, block_rows: int, window_blocks: int) -> None:
        assert min(count, block_rows, window_blocks) > 0
        self.count, self.block_rows, self.window_blocks = count, block_rows, window_blocks
        self.num_blocks = -(-count // block_rows)
        self.num_windows = -(-self.num_blocks // window_blocks)
        self.of_pass = functools.lru_cache(_KEPT)(self._new_pass)
        self.window = functools.lru_cache(_KEPT)(self._new_window)

    def numbers(self, places: Int64Array, key: int) -> Int64Array:
        """The rows at places (P,) in the order of a key; places in any order, repeats allowed."""
        of_pass = self.of_pass(key)
        whole = of_pass.as_if_whole(places)
        windows = of_pass.window_of(whole // self.block_rows)
        numbers = np.empty_like(places)
        for number in np.unique(windows).tolist():
            here, window = windows == number, self.window(number, key)
            inside = whole[here] - int(of_pass.first_slot(number)) * self.block_rows
            inside = permute(inside, window.num_rows, window.key)
            inside += of_pass.missing * (inside >= window.short_end)
            slots, rows = np.divmod(inside, self.block_rows)
            numbers[here] = window.blocks[slots] * self.block_rows + rows
        return numbers

    def place_of(self, number: int, key: int) -> int:
        """The place of a row in the order of a key: the inverse of `numbers`."""
        of_pass = self.of_pass(key)
        block, row = divmod(number, self.block_rows)
        slot = preimage(block, self.num_blocks, self.blocks_key(key))
        window_number = int(of_pass.window_of(slot))
        window = self.window(window_number, key)
        inside = (slot - int(of_pass.first_slot(window_number))) * self.block_rows + row
        if inside >= window.short_end:
            inside -= of_pass.missing
        return window.first_place + preimage(inside, window.num_rows, window.key)

    def window_number(self, place: int, key: int) -> int:
        """The window that a place is in."""
        of_pass = self.of_pass(key)
        return int(of_pass.window_of(of_pass.as_if_whole(place) // self.block_rows))

    def blocks_key(self, key: int) -> int:
        """The key of the permutation of the blocks, in the order of a key."""
        return _key(key, 0)

    def window_places(self, slots: Int64Array, key: int) -> tuple[Int64Array, Int64Array]:
        """The first place, and the one after the last, of the windows that hold slots (P,), in the order of a key."""
        of_pass = self.of_pass(key)
        windows = of_pass.window_of(slots)
        begins = of_pass.first_place(windows)
        return begins, begins + of_pass.num_rows(windows)

    def _new_window(self, number: int, key: int) -> Window:
        of_pass = self.of_pass(key)
        first, end = (int(of_pass.first_slot(window)) for window in (number, number + 1))
        blocks = permute(np.arange(first, end), self.num_blocks, self.blocks_key(key))
        blocks.flags.writeable = False
        first_place, rows = int(of_pass.first_place(number)), int(of_pass.num_rows(number))
        return Window(first_place, rows, _key(key, 1 + number), int(of_pass.short_end(number)), blocks)

    def _new_pass(self, key: int) -> _Pass:
        missing = self.num_blocks * self.block_rows - self.count
        of_pass = _Pass(self.block_rows, self.num_blocks, *divmod(self.num_blocks, self.num_windows), missing, 0, 0)
        slot = preimage(self.num_blocks - 1, self.num_blocks, self.blocks_key(key))
        return of_pass._replace(short_window=int(of_pass.window_of(slot)), short_slot=slot)


def numbers_by_blocks(
    orders: Sequence[BlockOrder], keys: Sequence[int], counts: Int64Array, places: Int64Array
) -> Int64Array:
    """The rows at the places of several orders, all in one or two calls of the permutation, however many there are.

    places: (P,), the counts[0] >= 1 places of orders[0] with keys[0], then those of orders[1], and so on.
    """
    of_passes: Any = _Pass(*np.array([order.of_pass(key) for order, key in zip(orders, keys, strict=True)]).T)
    each: Any = _Pass(*np.array(of_passes).repeat(counts, axis=1))
    whole = each.as_if_whole(places)
    windows = each.window_of(whole // each.block_rows)
    order, groups, counts = divided(counts, windows)
    if order is not None:
        whole, windows = whole[order], windows[order]
    windows, of_passes = windows[np.cumsum(counts) - counts], _Pass(*np.array(of_passes)[:, groups])
    keys_of_passes = np.array(keys, np.uint64)[groups]
    first_slots = of_passes.first_slot(windows)
    inside = whole - (first_slots * of_passes.block_rows).repeat(counts)
    row_keys = splitmix64(keys_of_passes, (windows + 2).view(np.uint64))
    inside = permute_each(inside, counts, of_passes.num_rows(windows), row_keys)
    if of_passes.missing.any():
        inside += of_passes.missing.repeat(counts) * (inside >= of_passes.short_end(windows).repeat(counts))
    slots, rows = np.divmod(inside, block_rows := of_passes.block_rows.repeat(counts))
    if len(slots) >= _TABLE_ROWS * len(windows):
        wanted = zip(groups.tolist(), windows.tolist(), strict=True)
        tables = [orders[group].window(window, keys[group]).blocks for group, window in wanted]
        begins = np.cumsum([0, *map(len, tables[:-1])])
        blocks = np.concatenate(tables)[slots + begins.repeat(counts)]
    else:
        slots += first_slots.repeat(counts)
        block_keys = splitmix64(keys_of_passes, np.array(1, np.uint64))
        blocks = permute_each(slots, counts, of_passes.num_blocks, block_keys)
    numbers: Int64Array = blocks * block_rows + rows
    if order is None:
        return numbers
    in_place = np.empty_like(numbers)
    in_place[order] = numbers
    return in_place


class KeptBlocks:
    """A fixed part of `count` rows, in whole blocks: the first rows in an order of the whole blocks, each in its own.

    The rows after the last whole block come last, permuted. A key selects the order of the blocks.
    """

    def __init__(self, count: int, block_rows: int, key: int) -> None:
        self.count, self.block_rows, self.key = count, block_rows, key
        self.num_whole = count // block_rows

    def place_of(self, number: int) -> int:
        """The inverse of `kept_by_blocks`."""
        block, row = divmod(number, self.block_rows)
        if block < self.num_whole:
            return preimage(block, self.num_whole, self.key) * self.block_rows + row
        rest = self.num_whole * self.block_rows
        return preimage(number - rest, self.count - rest, self.key) + rest


def kept_by_blocks(kept: Sequence[KeptBlocks], counts: Int64Array, places: Int64Array) -> Int64Array:
    """The rows at the places of several orders of kept blocks; arguments as of `numbers_by_blocks`."""
    keys = np.array([one.key for one in kept], np.uint64)
    columns = [(one.block_rows, one.num_whole, one.count - one.num_whole * one.block_rows) for one in kept]
    block_rows, num_whole, num_rest = np.array(columns).T
    blocks, rows = np.divmod(places, block_rows.repeat(counts))
    numbers, is_whole = np.empty_like(places), blocks < num_whole.repeat(counts)
    firsts = np.cumsum(counts) - counts
    counts_whole = np.add.reduceat(is_whole, firsts, dtype=np.int64)
    images = permute_each(blocks[is_whole], counts_whole, np.maximum(num_whole, 1), keys)
    numbers[is_whole] = images * block_rows.repeat(counts_whole) + rows[is_whole]
    counts_rest = counts - counts_whole
    if counts_rest.any():
        images = permute_each(rows[~is_whole], counts_rest, np.maximum(num_rest, 1), keys)
        numbers[~is_whole] = images + (num_whole * block_rows).repeat(counts_rest)
    return numbers


def _key(key: int, number: int) -> int:
    """Of the blocks of a pass, 0, or of the rows of its window `number` - 1."""
    return int(splitmix64(np.array(key, np.uint64), np.array(number + 1, np.uint64)))
