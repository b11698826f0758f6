"""A slow, plain reader that the loader is compared with: one row at a time, Python integers, no blocks, no threads."""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.operators import permute

IntArray = npt.NDArray[np.int64]
MASK = 2**64 - 1


def window_of_row(row: int, num_windows: int, seed: int, epoch: int, shuffle: bool = True) -> int:
    """Window number of one row of an epoch. The permutation itself has its own oracle in tests/operators."""
    if not shuffle:
        return row
    key = int.from_bytes(hashlib.sha256(f"dali_pipes order {seed} {epoch}".encode()).digest()[:8], "little")
    return int(permute(np.array([row], dtype=np.int64), num_windows, key)[0])


def epoch_batches(
    tokens: IntArray,
    *,
    batch_size: int,
    seq_len: int,
    stride: int | None = None,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    drop_last: bool = True,
    rank: int = 0,
    world_size: int = 1,
    label_shift: bool = True,
    first_row: int = 0,
) -> Iterator[dict[str, IntArray]]:
    """Batches of one rank in one epoch, from row `first_row` of the epoch on."""
    stride = seq_len if stride is None else stride
    num_windows = 0
    while num_windows * stride + seq_len + 1 <= len(tokens):
        num_windows += 1
    rows = list(range(first_row, num_windows))
    size = batch_size * world_size
    for begin in range(0, len(rows), size):
        step = rows[begin : begin + size]
        if len(step) < size and drop_last:
            return
        while len(step) % world_size:
            step.append(-1)
        inputs, labels, row_ids = [], [], []
        for row in step[rank::world_size]:
            start = stride * window_of_row(max(row, 0), num_windows, seed, epoch, shuffle)
            inputs.append(tokens[start : start + seq_len])
            shifted = tokens[start + label_shift : start + label_shift + seq_len]
            labels.append(shifted if row >= 0 else np.full_like(shifted, -100))
            row_ids.append(row)
        yield {"input_ids": np.array(inputs), "labels": np.array(labels), "row_ids": np.array(row_ids)}


def same(batch: Any, expected: dict[str, IntArray]) -> bool:
    """Whether every output of a loader's batch equals the oracle's."""
    return all(np.array_equal(tensor.numpy(), expected[name]) for name, tensor in batch.items())
