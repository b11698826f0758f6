"""What a `SampleLoader` hands out, computed the slow way: row by row, with fractions, from the manual's words."""

from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from dali_pipes.operators import permute
from dali_pipes.rows.base import order_key


def rows_of_ranks(num_rows: int, world_size: int, batch_size: int, *, drop_last: bool) -> list[list[list[int]]]:
    """Rows by step and rank."""
    step_rows = world_size * batch_size
    steps: list[list[list[int]]] = []
    for row in range(num_rows):
        if row % step_rows == 0:
            steps.append([[] for _ in range(world_size)])
        steps[-1][row % world_size].append(row)
    if num_rows % step_rows and drop_last:
        steps.pop()
    for step in steps:
        there = sum(map(len, step))
        first = min(min(rows) for rows in step if rows)
        for rank, rows in enumerate(step):
            if not rows:
                rows.append(first + rank % there)
    return steps


def in_passes(num_items: int, num_rows: int, seed: int, epoch: int, *, shuffle: bool) -> list[int]:
    items = []
    for place in range(epoch * num_rows, (epoch + 1) * num_rows):
        number, inside = divmod(place, num_items)
        items.append(permuted(inside, num_items, order_key("samples", seed, number)) if shuffle else inside)
    return items


def by_weight(weights: Sequence[Fraction], num_rows: int, seed: int, epoch: int, unit: Fraction) -> list[int]:
    """Items whose intervals hold the points, `unit` being the weight of which the loader's integers are multiples."""
    total = sum(weights)
    offset = (order_key("weights offset", seed, epoch) % int(total / unit)) * unit
    items = []
    for row in range(num_rows):
        point = (permuted(row, num_rows, order_key("weights", seed, epoch)) * total + offset) / num_rows
        end, item = weights[0], 0
        while end <= point // unit * unit:
            item += 1
            end += weights[item]
        items.append(item)
    return items


def permuted(index: int, size: int, key: int) -> int:
    return int(permute(np.array([index]), size, key)[0])
