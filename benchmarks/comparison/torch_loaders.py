"""torch's DataLoader over rows and over whole batches, and torchdata's StatefulDataLoader."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from comparison.alternatives import Pair
from comparison.loops import Loop, widened
from comparison.work import Work

PREFETCH = 4


class RowDataset:
    """Map-style over an `np.memmap`: item `i` is window `i` as an int64 pair. The default collate stacks them."""

    def __init__(self, work: Work) -> None:
        self._corpus = work.mapped()
        self._windows = work.windows
        self._seq_len = work.seq_len

    def __len__(self) -> int:
        return self._windows

    def __getitem__(self, index: int) -> Pair:
        start = index * self._seq_len
        row = torch.from_numpy(self._corpus[start : start + self._seq_len + 1].astype(np.int64))
        return row[:-1], row[1:]


class BatchDataset(RowDataset):
    """Also answers `__getitems__`, with a whole batch: two fresh tensors that rows are copied into."""

    def __getitems__(self, indices: list[int]) -> Pair:
        shape = (len(indices), self._seq_len)
        inputs, labels = torch.empty(shape, dtype=torch.int64), torch.empty(shape, dtype=torch.int64)
        input_rows, label_rows = inputs.numpy(), labels.numpy()
        for row, index in enumerate(indices):
            start = index * self._seq_len
            input_rows[row] = self._corpus[start : start + self._seq_len]
            label_rows[row] = self._corpus[start + 1 : start + self._seq_len + 1]
        return inputs, labels


class GatherDataset(RowDataset):
    """Answers `__getitems__` with one strided gather of uint16 rows, widened into fresh tensors.

    The strongest dataset we could write for a DataLoader; it also avoids what `np.memmap` adds to every slice.
    """

    def __init__(self, work: Work) -> None:
        super().__init__(work)
        self._rows = work.window_view()

    def __getitems__(self, indices: list[int]) -> Pair:
        return widened(self._rows[indices])


class LengthOnly:
    """Stands in for the dataset while a state is made: as many items, all empty."""

    def __init__(self, work: Work) -> None:
        self._windows = work.windows
        self._item = torch.empty(0)

    def __len__(self) -> int:
        return self._windows

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._item


def loader_settings(work: Work, workers: int) -> dict[str, Any]:
    """Keywords that all the DataLoaders here share: shuffled, whole batches, workers that persist."""
    settings: dict[str, Any] = {
        "batch_size": work.batch_size,
        "shuffle": True,
        "drop_last": True,
        "num_workers": workers,
        "generator": torch.Generator().manual_seed(work.seed),
    }
    return settings | ({"persistent_workers": True, "prefetch_factor": PREFETCH} if workers else {})


class RowDataLoader(Loop):
    def __init__(self, workers: int) -> None:
        self._workers = workers

    def open(self, work: Work, state: Any = None) -> Iterator[Pair]:
        del state
        loader: DataLoader[Any] = DataLoader(RowDataset(work), **loader_settings(work, self._workers))  # type: ignore[arg-type]
        while True:
            yield from loader


class BatchDataLoader(Loop):
    def __init__(self, workers: int, gather: bool = False) -> None:
        self._workers = workers
        self._gather = gather

    def open(self, work: Work, state: Any = None) -> Iterator[Pair]:
        del state
        dataset = GatherDataset(work) if self._gather else BatchDataset(work)
        settings = loader_settings(work, self._workers) | {"collate_fn": unchanged}
        loader: DataLoader[Any] = DataLoader(dataset, **settings)  # type: ignore[arg-type]
        while True:
            yield from loader


class StatefulRowDataLoader(Loop):
    """StatefulDataLoader over the same rows. Its state replays the sampler's order up to the position."""

    def open(self, work: Work, state: Any = None) -> Iterator[Pair]:
        loader = self._loader(RowDataset(work), work)
        if state is not None:
            loader.load_state_dict(state)
        while True:
            yield from loader

    def state_after(self, work: Work, batches: int) -> Any:
        loader = self._loader(LengthOnly(work), work)
        stream = iter(loader)
        for _ in range(batches):
            next(stream)
        return loader.state_dict()

    def _loader(self, dataset: Any, work: Work) -> Any:
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(dataset, **loader_settings(work, 0))


def unchanged(batch: Pair) -> Pair:
    return batch
