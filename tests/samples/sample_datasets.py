"""Datasets whose samples say which item they are, and draw from every kind of random generator."""

import os
import random
import signal
import time
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info


class Numbers(Dataset[dict[str, Any]]):
    """{"item": i}"""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, item: int) -> dict[str, Any]:
        assert type(item) is int
        assert 0 <= item < self.length
        return {"item": item}


class Jitter:
    """A transform with generators of its own, one of them behind slots."""

    __slots__ = ("numpy_generator", "state")

    def __init__(self) -> None:
        self.numpy_generator = np.random.default_rng(1)
        self.state = np.random.RandomState(2)

    def __call__(self, values: list[float]) -> list[float]:
        return [*values, float(self.numpy_generator.random()), float(self.state.random_sample())]


class Augmented(Numbers):
    """Samples with numbers drawn from all generators that a dataset may draw from."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.transforms = [Jitter()]
        self.of_torch: list[torch.Generator] = [torch.Generator()]
        self.generators = {"python": random.Random(3)}
        self.hidden = 0

    def seed_item(self, seed: int) -> None:
        self.hidden = seed

    def __getitem__(self, item: int) -> dict[str, Any]:
        draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]  # noqa: NPY002
        draws += [float(torch.rand((), generator=generator)) for generator in self.of_torch]
        draws.append(self.generators["python"].random())
        for transform in self.transforms:
            draws = transform(draws)
        return {"item": item, "draws": torch.tensor([*draws, self.hidden % 1_000_003], dtype=torch.float64)}


class Faulty(Numbers):
    """Items that raise, kill their process or take forever; `once` is a file that makes them do it only once."""

    def __init__(self, length: int, what: dict[int, str], once: str | None = None) -> None:
        super().__init__(length)
        self.what, self.once = what, once

    def __getitem__(self, item: int) -> dict[str, Any]:
        fault = self.what.get(item)
        if fault is not None and self._is_due():
            if fault == "raise":
                raise OSError(5, "no such slice")
            if fault == "raise unpicklable":
                raise Unpicklable("a", "b")
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == "exit":
                os._exit(3)
            if fault == "sleep":
                time.sleep(3_600)
            if fault == "lambda":
                return {"item": lambda: item}
        worker = get_worker_info()
        return {"item": item, "pid": os.getpid(), "worker": -1 if worker is None else worker.id}

    def _is_due(self) -> bool:
        if self.once is None:
            return True
        try:
            os.close(os.open(self.once, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True


class Unpicklable(Exception):
    """One that cannot be made again from its arguments."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(first)


def flat(lists: Iterable[Sequence[Any]]) -> list[Any]:
    return [entry for entries in lists for entry in entries]


def items_of(batches: Sequence[dict[str, Any]]) -> list[list[int]]:
    return [batch["item"].tolist() for batch in batches]
