"""When a run needs the blocks of a corpus again: a formula, by the inverse permutation of the blocks of a pass.

    pass 3    windows   {2 7 4} {0 5 1} {3 8 6}        a run stands in the second window
    pass 4              {5 3 0} {8 2 6} ...
    next use            now: 0 5 1    later in pass 3: 3 8 6    in pass 4: 2 7 4, of which 7 comes last

What a run publishes (`published`) is enough for every process to compute it for all entries of a cache. An entry may
hold several blocks, or a part of one.
"""

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.block_grid import BlockGrid
from dali_pipes.operators import permute
from dali_pipes.rows.block_order import BlockOrder, kept_by_blocks
from dali_pipes.rows.item_order import ItemOrder

Int64Array = npt.NDArray[np.int64]
Float64Array = npt.NDArray[np.float64]

_KEPT_INVERSES = 8
_MOST_BLOCKS_EACH = 1 << 12
"""Blocks of one entry that are looked at; one that holds more is needed soon anyway."""


@dataclass(frozen=True)
class Standing:
    """Where a run is in its orders of one corpus. place: in items, of which rows hold one or more, or a part.

    keys: of the orders of this pass and the next one; None without a shuffle
    item_tokens: tokens that the whole run delivers until this source has had one item more
    """

    place: int
    keys: tuple[int | None, int | None]
    item_tokens: float


def published(corpus: str, order: ItemOrder, grid: BlockGrid, grid_key: str, now: Standing) -> dict[str, Any]:
    """What a run tells the others of a corpus, by the key of its content. JSON.

    grid_key: stands for the grid, where blocks hold documents: who does not know it cannot compute with it
    """
    assert order.blocks is not None, "only blocks have a next use"
    return {
        "corpus": corpus,
        "items": order.num_items,
        "kept": None if order.kept_key is None else [order.count, order.kept_key],
        "block_items": order.blocks.block_rows,
        "window_blocks": order.blocks.window_blocks,
        "grid": [grid.first, grid.size, grid.count, grid.lookahead, grid.end],
        "grid_key": grid_key,
        "place": now.place,
        "keys": list(now.keys),
        "item_tokens": now.item_tokens,
    }


def needed_next(order: ItemOrder, now: Standing, *, goes_on: bool) -> Int64Array:
    """Blocks of the corpus in the window in which a run stands, then those of the window after it; some may be in both.

    goes_on: the last window of a pass is followed by the first one of the next pass
    """
    assert order.blocks is not None, "only blocks have a next use"
    orders, place = order.blocks, min(now.place, order.count - 1)
    key, next_key = now.keys
    if key is None or next_key is None:  # without a shuffle: as many as two windows have, from the place on
        blocks = place // orders.block_rows + np.arange(min(2 * orders.window_blocks, orders.num_blocks))
        blocks = blocks % orders.num_blocks if goes_on else blocks[blocks < orders.num_blocks]
    else:
        window = orders.window_number(place, key)
        found = [orders.window(window, key).blocks]
        if window + 1 < orders.num_windows:
            found.append(orders.window(window + 1, key).blocks)
        elif goes_on:
            found.append(orders.window(0, next_key).blocks)
        blocks = np.concatenate(found)
    if order.kept_blocks is None:
        return blocks
    items = kept_by_blocks([order.kept_blocks], np.array([len(blocks)]), blocks * orders.block_rows)
    return items // orders.block_rows


class NextUseFormula:
    """The formula, as `eviction.NextUses`. grids: those with bounds that this process knows, by their keys."""

    def __init__(self) -> None:
        self.grids: dict[str, BlockGrid] = {}

    def __call__(self, order: dict[str, Any], begins: Int64Array, ends: Int64Array) -> Float64Array | None:
        """Tokens that the run delivers until it needs ids begins[e] to ends[e] - 1, (E,): infinity if never again."""
        if "place" not in order:
            return None
        grid = self.grids.get(order["grid_key"]) if order["grid_key"] else BlockGrid(*order["grid"])
        if grid is None:
            return None
        firsts = np.clip(grid.blocks_of(begins), 0, grid.count - 1)
        lasts = np.maximum(firsts, np.clip(grid.blocks_of(ends - 1 - grid.lookahead), 0, grid.count - 1))
        counts = np.minimum(lasts - firsts + 1, _MOST_BLOCKS_EACH)
        entries = np.repeat(np.arange(len(begins)), counts)
        blocks = np.arange(len(entries)) - np.repeat(np.cumsum(counts) - counts, counts) + firsts[entries]
        uses = np.full(len(begins), np.inf)
        np.minimum.at(uses, entries, _of_blocks(order, blocks))
        return uses


def _of_blocks(order: dict[str, Any], blocks: Int64Array) -> Float64Array:
    """The same of single blocks of the corpus (P,)."""
    kept, block_items = order["kept"], order["block_items"]
    count = order["items"] if kept is None else kept[0]
    if kept is not None:  # a share: numbers of blocks in the order of those that are kept
        num_whole = order["items"] // block_items
        is_whole = blocks < num_whole
        blocks = blocks.copy()
        if num_whole:
            blocks[is_whole] = _inverse(num_whole, kept[1])[blocks[is_whole]]
    orders = BlockOrder(count, block_items, order["window_blocks"])
    uses = np.full(len(blocks), np.inf)
    is_used = blocks < orders.num_blocks
    blocks, place = blocks[is_used], order["place"]
    now, later = (_windows(orders, blocks, key) for key in order["keys"])
    distance = np.where(now[1] > place, np.maximum(0, now[0] - place), count - place + later[0])
    uses[is_used] = distance * order["item_tokens"]
    return uses


def _windows(orders: BlockOrder, blocks: Int64Array, key: int | None) -> tuple[Int64Array, Int64Array]:
    """The first place, and the one after the last, of rows of blocks in a pass."""
    if key is None:
        return blocks * orders.block_rows, np.minimum((blocks + 1) * orders.block_rows, orders.count)
    return orders.window_places(_inverse(orders.num_blocks, orders.blocks_key(key))[blocks], key)


@functools.lru_cache(_KEPT_INVERSES)
def _inverse(count: int, key: int) -> Int64Array:
    """Where the bijection of [0, count) puts each number: all in one call, as a cache holds thousands of blocks."""
    inverse = np.empty(count, np.int64)
    inverse[permute(np.arange(count), count, key)] = np.arange(count)
    inverse.flags.writeable = False
    return inverse
