"""Grain: a random-access source, a global shuffle, batches, and its default read-ahead threads."""

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np
import torch

from comparison.alternatives import Pair
from comparison.loops import Loop
from comparison.work import Work


class WindowRows:
    """Random-access source: item `i` is window `i`, uint16 `(T + 1,)`."""

    def __init__(self, work: Work) -> None:
        self._windows = work.window_view()

    def __len__(self) -> int:
        return len(self._windows)

    def __getitem__(self, index: int) -> "np.ndarray[Any, np.dtype[np.uint16]]":
        row: np.ndarray[Any, np.dtype[np.uint16]] = self._windows[index]
        return row


class Grain(Loop):
    def open(self, work: Work, state: Any = None) -> Iterator[Pair]:
        stream = self._iterator(work)
        if state is not None:
            stream.set_state(state)
        for inputs, labels in stream:
            yield torch.from_numpy(inputs), torch.from_numpy(labels)

    def state_after(self, work: Work, batches: int) -> Any:
        """The state of a fresh iterator with its one number moved."""
        state = self._iterator(work).get_state()
        if list(state) != ["next_index"]:
            raise RuntimeError(f"expected Grain's state to be its next index, found {state}")
        return {"next_index": batches}

    def _iterator(self, work: Work) -> Any:
        dataset = grain.MapDataset.source(WindowRows(work)).shuffle(seed=work.seed)
        dataset = dataset.batch(work.batch_size, drop_remainder=True).map(_split).repeat()
        return iter(dataset.to_iter_dataset())


def _split(rows: Any) -> Any:
    return rows[:, :-1].astype(np.int64), rows[:, 1:].astype(np.int64)
