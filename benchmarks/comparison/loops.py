"""Loops without a loader: the NumPy yardsticks, nanoGPT's random windows, and a strided gather."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from comparison.alternatives import Pair
from comparison.work import Work


def epoch_orders(work: Work) -> Iterator[tuple[int, "np.ndarray[Any, np.dtype[np.int64]]"]]:
    """Epoch number and its order of windows, without end. The order is an array of the size of the epoch."""
    epoch = 0
    while True:
        yield epoch, np.random.default_rng((work.seed, epoch)).permutation(work.windows)
        epoch += 1


class Loop:
    """What the loops share: nothing to prepare, no state."""

    def prepare(self, work: Work) -> None:
        del work

    def state_after(self, work: Work, batches: int) -> Any:
        del work, batches


class RowCopies(Loop):
    """The yardstick: for each row two widening assignments into buffers that every batch overwrites."""

    def __init__(self, plain: bool) -> None:
        self._plain = plain

    def open(self, work: Work, state: Any = None) -> Iterator[Pair]:
        del state
        corpus = work.view() if self._plain else work.mapped()
        batch_size, seq_len = work.batch_size, work.seq_len
        inputs = np.empty((batch_size, seq_len), np.int64)
        labels = np.empty((batch_size, seq_len), np.int64)
        pair = torch.from_numpy(inputs), torch.from_numpy(labels)
        for _, order in epoch_orders(work):
            for first in range(0, work.epoch_batches * batch_size, batch_size):
                for row, window in enumerate(order[first : first + batch_size].tolist()):
                    start = window * seq_len
                    inputs[row] = corpus[start : start + seq_len]
                    labels[row] = corpus[start + 1 : start + seq_len + 1]
                yield pair


class Gather(Loop):
    """One strided gather a batch, then two widening copies: into buffers that are kept, or into fresh tensors."""

    def __init__(self, keep_buffers: bool) -> None:
        self._keep_buffers = keep_buffers

    def open(self, work: Work, state: Any = None) -> Iterator[Pair]:
        del state
        windows = work.window_view()
        batch_size, shape = work.batch_size, (work.batch_size, work.seq_len)
        inputs, labels = np.empty(shape, np.int64), np.empty(shape, np.int64)
        pair = torch.from_numpy(inputs), torch.from_numpy(labels)
        for _, order in epoch_orders(work):
            for first in range(0, work.epoch_batches * batch_size, batch_size):
                rows = windows[order[first : first + batch_size]]
                if self._keep_buffers:
                    inputs[:] = rows[:, :-1]
                    labels[:] = rows[:, 1:]
                    yield pair
                else:
                    yield widened(rows)


class RandomWindows(Loop):
    """Rows start anywhere, drawn with replacement; the file is mapped again for every batch, as nanoGPT does."""

    positions: "np.ndarray[Any, np.dtype[np.int64]]"
    """First token of each row of the last batch, for the check."""

    def open(self, work: Work, state: Any = None) -> Iterator[Pair]:
        del state
        generator = torch.Generator().manual_seed(work.seed)
        length = work.seq_len
        while True:
            corpus = work.mapped()
            starts = torch.randint(len(corpus) - length, (work.batch_size,), generator=generator)
            inputs = [torch.from_numpy(corpus[start : start + length].astype(np.int64)) for start in starts]
            labels = [torch.from_numpy(corpus[start + 1 : start + 1 + length].astype(np.int64)) for start in starts]
            self.positions = starts.numpy()
            yield torch.stack(inputs), torch.stack(labels)


def widened(rows: "np.ndarray[Any, np.dtype[Any]]") -> Pair:
    """Rows of T + 1 tokens as fresh int64 inputs and labels, each contiguous."""
    return torch.from_numpy(rows[:, :-1].astype(np.int64)), torch.from_numpy(rows[:, 1:].astype(np.int64))
