"""Batches of loaders as NumPy arrays, what the CPU placement says they must be, and where two differ."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from dali_pipes import TokenLoader

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]

ON_GPU: tuple[dict[str, Any], ...] = (
    {"device": "cuda", "placement": "host"},
    {"device": "cuda", "placement": "device"},
    {"device": "cuda", "placement": "pinned"},
)
ALL_OUTPUTS = ("input_ids", "labels", "row_ids")


def arrays(batch: Mapping[str, torch.Tensor]) -> Arrays:
    """A copy on the host; waits for the device."""
    return {name: torch.as_tensor(value).detach().cpu().numpy().copy() for name, value in batch.items()}


def collect(loader: Iterable[Mapping[str, torch.Tensor]], count: int | None = None) -> list[Arrays]:
    """The next `count` batches, or all of an epoch."""
    return [arrays(batch) for batch in itertools.islice(loader, count)]


def from_cpu(settings: Mapping[str, Any], count: int) -> list[Arrays]:
    """The first `count` batches that `device = "cpu"` delivers with these settings, over as many epochs as needed."""
    with TokenLoader(**{**settings, "device": "cpu", "placement": "auto", "repeat": True}) as loader:
        return collect(loader, count)


def stacked(batches: Sequence[Arrays], name: str) -> torch.Tensor:
    """One output of all batches, (batches, B, T), on the host."""
    return torch.from_numpy(np.stack([batch[name] for batch in batches]))


def difference(got: Sequence[Arrays], expected: Sequence[Arrays]) -> str:
    """Where the first difference is, empty if there is none."""
    for number, (mine, other) in enumerate(zip(got, expected, strict=False)):
        if mine.keys() != other.keys():
            return f"batch {number} has {sorted(mine)}, expected {sorted(other)}"
        for name in mine:
            problem = array_difference(mine[name], other[name])
            if problem:
                return f"batch {number}, {name}: {problem}"
    return "" if len(got) == len(expected) else f"{len(got)} batches, expected {len(expected)}"


def array_difference(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> str:
    """What is different about an array, its dtype and shape included; empty if nothing is."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"{got.dtype} {got.shape}, expected {expected.dtype} {expected.shape}"
    wrong = np.argwhere(got != expected)
    if not len(wrong):
        return ""
    place = tuple(int(index) for index in wrong[0])
    return f"{len(wrong)} of {got.size} values differ, first at {place}: {got[place]}, expected {expected[place]}"
