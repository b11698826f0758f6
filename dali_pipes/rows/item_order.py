"""The order of the rows or documents of a source, pass by pass, with or without a share.

    place  ─▶  order of the pass  ─▶  those that are kept, with a share  ─▶  number in the corpus

By rows, both steps are keyed bijections of single items. By blocks, they are of blocks of neighbors (`block_order`).
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.operators import permute
from dali_pipes.operators.permute import ORDER_NAME, preimage
from dali_pipes.rows.block_order import BLOCK_ORDER_NAME, BLOCK_TOKENS, BlockOrder, KeptBlocks

Int64Array = npt.NDArray[np.int64]

SEQUENTIAL = "sequential-v1"
"""The order of the corpus, without a shuffle."""


class BlockShape(NamedTuple):
    """How large blocks and windows are."""

    window_blocks: int
    """Most blocks in a window (W)."""
    tokens: int = BLOCK_TOKENS
    """Tokens of the corpus in a block."""

    def items(self, count: int, num_tokens: int) -> int:
        """Items in a block (R), where `count` items take `num_tokens` tokens of the corpus; at least one."""
        return max(1, self.tokens * count // max(1, num_tokens))


class ItemOrder:
    """The orders of `count` of `num_items` items. Safe for several threads.

    kept_key: selects which items are kept, where those are not all. block_items, window_blocks: of an order by blocks;
    None: by single items.
    """

    def __init__(
        self, num_items: int, count: int, kept_key: int | None, block_items: int | None = None, window_blocks: int = 1
    ) -> None:
        self.num_items, self.count, self.kept_key = num_items, count, kept_key
        self.blocks = None if block_items is None else BlockOrder(count, block_items, window_blocks)
        self._kept_blocks = None
        if block_items is not None and kept_key is not None:
            self._kept_blocks = KeptBlocks(num_items, block_items, kept_key)

    def name(self, shuffle: bool) -> str:
        """For states: another order needs another name."""
        if not shuffle:
            return SEQUENTIAL
        return ORDER_NAME if self.blocks is None else f"{ORDER_NAME}, {BLOCK_ORDER_NAME}"

    def numbers(self, places: Int64Array, key: int | None) -> Int64Array:
        """Items of the corpus at places (P,) of the order of a key; of None, that of those kept, without a shuffle."""
        if key is not None:
            places = permute(places, self.count, key) if self.blocks is None else self.blocks.numbers(places, key)
        if self._kept_blocks is not None:
            return self._kept_blocks.numbers(places)
        return places if self.kept_key is None else permute(places, self.num_items, self.kept_key)

    def place_of(self, number: int, key: int | None) -> int | None:
        """The place of an item, 0 <= number < num_items, in the order of a key; None if it is not kept."""
        if self._kept_blocks is not None:
            number = self._kept_blocks.place_of(number)
        elif self.kept_key is not None:
            number = preimage(number, self.num_items, self.kept_key)
        if number >= self.count:
            return None
        if key is None:
            return number
        return preimage(number, self.count, key) if self.blocks is None else self.blocks.place_of(number, key)
