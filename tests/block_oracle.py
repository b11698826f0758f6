"""The order by blocks by plain lists: slow, and written apart from the code."""

import hashlib
import json
from fractions import Fraction
from itertools import accumulate

import numpy as np

from dali_pipes.operators import permute
from dali_pipes.rows.block_order import BlockOrder


def key_of(*what: object) -> int:
    text = " ".join(map(str, ("dali_pipes", *what)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def named(name: str | None) -> tuple[str, ...]:
    return () if name is None else (json.dumps(name),)


def derived(key: int, number: int) -> int:
    """Output `number`, from 1, of splitmix64."""
    z = (key + number * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z // 2**30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z // 2**27) * 0x94D049BB133111EB % 2**64
    return z ^ z // 2**31


def shuffled(items: list[int], key: int) -> list[int]:
    """The permutation itself has its own oracle in tests/operators."""
    return [items[number] for number in permute(np.arange(len(items)), len(items), key).tolist()]


def blocks_of(count: int, block_rows: int) -> list[list[int]]:
    return [list(range(count))[first : first + block_rows] for first in range(0, count, block_rows)]


def windows_of(count: int, block_rows: int, window_blocks: int, key: int) -> list[list[list[int]]]:
    """The windows of a pass: lists of blocks, which are lists of rows."""
    blocks = blocks_of(count, block_rows)
    order = [blocks[number] for number in shuffled(list(range(len(blocks))), derived(key, 1))]
    num_windows = -(-len(blocks) // window_blocks)
    sizes = [len(blocks) // num_windows + (window < len(blocks) % num_windows) for window in range(num_windows)]
    return [order[sum(sizes[:window]) : sum(sizes[: window + 1])] for window in range(num_windows)]


def order_of(count: int, block_rows: int, window_blocks: int, key: int) -> list[int]:
    """The rows of a pass, window by window."""
    rows: list[int] = []
    for number, window in enumerate(windows_of(count, block_rows, window_blocks, key)):
        rows += shuffled([row for block in window for row in block], derived(key, number + 2))
    return rows


def kept_of(count: int, block_rows: int, share: Fraction | None, name: str | None) -> list[int]:
    """The rows that a share keeps, block by block."""
    if share is None or share == 1:
        return list(range(count))
    key, whole = key_of("share", *named(name)), blocks_of(count - count % block_rows, block_rows)
    order = [row for number in shuffled(list(range(len(whole))), key) for row in whole[number]] if whole else []
    rest = list(range(len(order), count))
    return (order + (shuffled(rest, key) if rest else []))[: max(1, int(share * count))]


def pass_of(
    count: int,
    block_rows: int,
    window_blocks: int,
    *,
    seed: int,
    pass_number: int,
    name: str | None = None,
    share: Fraction | None = None,
) -> list[int]:
    """The windows of tokens of a pass of a source, by number."""
    kept = kept_of(count, block_rows, share, name)
    order = order_of(len(kept), block_rows, window_blocks, key_of("order", seed, *named(name), pass_number))
    return [kept[row] for row in order]


def blocks_in(order: BlockOrder, window: int, key: int) -> list[int]:
    """The blocks of a window, as the order has them."""
    blocks: list[int] = order.window(window, key).blocks.tolist()
    return blocks


def ends_in(order: BlockOrder, key: int) -> list[int]:
    """The place after the last one of each window, as the order has them."""
    return list(accumulate(order.window(window, key).num_rows for window in range(order.num_windows)))
