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
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.operators import permute
from dali_pipes.operators.permute import preimage, splitmix64

Int64Array = npt.NDArray[np.int64]

BLOCK_ORDER_NAME = "blocks-v1"
BLOCK_TOKENS = 1 << 21
"""Tokens of the corpus in a block: 8 MiB of ids of 4 bytes, the widest that are common, whatever the corpus stores. So
neither the format nor the machine decides the order. A change needs another `BLOCK_ORDER_NAME`."""

_KEPT_WINDOWS = 4
"""Windows whose blocks are remembered: a reader is in one or two of them, and so is each source of a mixture."""


class _Window(NamedTuple):
    """One window of a pass."""

    first_slot: int
    size: int
    """Rows in it."""
    key: int
    short_end: int
    """Rows of the window up to the end of its short block; `size` without one."""
    blocks: Int64Array
    """The blocks in it, by slot."""


class BlockOrder:
    """Orders of `count` >= 1 rows, in blocks of `block_rows`, of which `window_blocks` at most make a window.

    The key of a pass selects its order. Safe for several threads.
    """

    def __init__(self, count: int, block_rows: int, window_blocks: int) -> None:
        assert min(count, block_rows, window_blocks) > 0
        self.count, self.block_rows, self.window_blocks = count, block_rows, window_blocks
        self.num_blocks = -(-count // block_rows)
        self.num_windows = -(-self.num_blocks // window_blocks)
        self._missing = self.num_blocks * block_rows - count
        """Rows that the last block is short of the others."""
        self._fewest, self._wider = divmod(self.num_blocks, self.num_windows)
        """Blocks of a window, and how many of the first windows have one more."""
        self._window = functools.lru_cache(_KEPT_WINDOWS)(self._new_window)
        self._short = functools.lru_cache(_KEPT_WINDOWS)(self._find_short)

    def numbers(self, places: Int64Array, key: int) -> Int64Array:
        """The rows at places (P,) in the order of a key; places in any order, repeats allowed."""
        _, short_window = self._short(key)
        whole = places
        if self._missing:
            whole = places + self._missing * (places >= self._begin(short_window + 1) - self._missing)
        windows = self._windows_of(whole // self.block_rows)
        numbers = np.empty_like(places)
        for number in np.unique(windows).tolist():
            here = windows == number
            numbers[here] = self._in_window(whole[here] - self._begin(number), self._window(key, number))
        return numbers

    def place_of(self, number: int, key: int) -> int:
        """The place of a row in the order of a key: the inverse of `numbers`."""
        block, row = divmod(number, self.block_rows)
        slot = preimage(block, self.num_blocks, _key(key, 0))
        window_number = int(self._windows_of(np.array([slot]))[0])
        window = self._window(key, window_number)
        inside = (slot - window.first_slot) * self.block_rows + row
        if inside >= window.short_end:
            inside -= self._missing
        place = self._begin(window_number) + preimage(inside, window.size, window.key)
        return place - self._missing * (window_number > self._short(key)[1])

    def blocks_key(self, key: int) -> int:
        """The key of the permutation of the blocks, in the order of a key."""
        return _key(key, 0)

    def window_places(self, slots: Int64Array, key: int) -> tuple[Int64Array, Int64Array]:
        """The first place, and the one after the last, of the windows that hold slots (P,), in the order of a key."""
        windows, (_, short_window) = self._windows_of(slots), self._short(key)
        first, end = (self._fewest * one + np.minimum(one, self._wider) for one in (windows, windows + 1))
        begins = first * self.block_rows - self._missing * (windows > short_window)
        return begins, end * self.block_rows - self._missing * (windows >= short_window)

    def _in_window(self, places: Int64Array, window: _Window) -> Int64Array:
        inside = permute(places, window.size, window.key)
        if window.short_end < window.size:
            inside += self._missing * (inside >= window.short_end)
        slots, rows = np.divmod(inside, self.block_rows)
        numbers: Int64Array = window.blocks[slots] * self.block_rows + rows
        return numbers

    def _begin(self, window: int) -> int:
        """Rows before a window, if all blocks were whole."""
        return self._first_slot(window) * self.block_rows

    def _first_slot(self, window: int) -> int:
        return window * self._fewest + min(window, self._wider)

    def _windows_of(self, slots: Int64Array) -> Int64Array:
        wide = self._fewest + 1
        narrow = (slots - self._wider * wide) // self._fewest + self._wider
        windows: Int64Array = np.where(slots < self._wider * wide, slots // wide, narrow)
        return windows

    def _find_short(self, key: int) -> tuple[int, int]:
        """Slot and window of the last block."""
        slot = preimage(self.num_blocks - 1, self.num_blocks, _key(key, 0))
        return slot, int(self._windows_of(np.array([slot]))[0])

    def _new_window(self, key: int, number: int) -> _Window:
        first, end = self._first_slot(number), self._first_slot(number + 1)
        short_slot, short_window = self._short(key)
        size = short_end = (end - first) * self.block_rows
        if number == short_window:
            size -= self._missing
            short_end = (short_slot - first + 1) * self.block_rows - self._missing
        blocks = permute(np.arange(first, end), self.num_blocks, _key(key, 0))
        blocks.flags.writeable = False
        return _Window(first, size, _key(key, 1 + number), short_end, blocks)


class KeptBlocks:
    """A fixed part of `count` rows, in whole blocks: the first rows in an order of the whole blocks, each in its own.

    The rows after the last whole block come last, permuted. A key selects the order of the blocks.
    """

    def __init__(self, count: int, block_rows: int, key: int) -> None:
        self._count, self._block_rows, self._key = count, block_rows, key
        self._num_whole = count // block_rows

    def numbers(self, places: Int64Array) -> Int64Array:
        """The rows at places (P,) of that order."""
        numbers = np.empty_like(places)
        rest = self._num_whole * self._block_rows
        is_whole = places < rest
        if is_whole.any():
            blocks, rows = np.divmod(places[is_whole], self._block_rows)
            numbers[is_whole] = permute(blocks, self._num_whole, self._key) * self._block_rows + rows
        if not is_whole.all():
            numbers[~is_whole] = permute(places[~is_whole] - rest, self._count - rest, self._key) + rest
        return numbers

    def place_of(self, number: int) -> int:
        """The inverse of `numbers`."""
        block, row = divmod(number, self._block_rows)
        if block < self._num_whole:
            return preimage(block, self._num_whole, self._key) * self._block_rows + row
        rest = self._num_whole * self._block_rows
        return preimage(number - rest, self._count - rest, self._key) + rest


def _key(key: int, number: int) -> int:
    """Of the blocks of a pass, 0, or of the rows of its window `number` - 1."""
    return int(splitmix64(np.array(key, np.uint64), np.array(number + 1, np.uint64)))
