"""Samples to a batch: torch's `default_collate`, or the user's function; and what is wrong where that fails.

field ['image'] has shape (3, 64, 64) in item 5, but (3, 32, 32) in item 9
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

_ADVICE = "make them alike in the dataset, or pass collate_fn=list"


class Collate:
    """Makes a batch of samples. `problem` says why it could not."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None, name: str) -> None:
        self._collate_fn, self._name = collate_fn, name

    def __call__(self, samples: list[Any], items: Sequence[int]) -> Any:
        return default_collate(samples) if self._collate_fn is None else self._collate_fn(samples)

    def problem(self, samples: Sequence[Any], items: Sequence[int], error: Exception) -> str:
        """Why samples could not be collated, as the end of a sentence about the batch."""
        if self._collate_fn is not None:
            name = getattr(self._collate_fn, "__qualname__", type(self._collate_fn).__name__)
            return f"cannot be collated: {name} raised {type(error).__name__}: {error}"
        for found in _differences(samples, items, "samples"):
            return f"cannot be collated: {found}; {_ADVICE}"
        return f"cannot be collated: {type(error).__name__}: {error}; pass collate_fn"


def _differences(values: Sequence[Any], items: Sequence[int], path: str) -> Iterator[str]:
    """What keeps values, one an item, from being stacked."""
    where = "the samples" if path == "samples" else f"field {path.removeprefix('samples')}"
    first = values[0]
    for value, item in zip(values, items, strict=True):
        if _kind(value) != _kind(first):
            yield f"{where} is {_kind(first)} in item {items[0]:,}, but {_kind(value)} in item {item:,}"
            return
    if isinstance(first, torch.Tensor | np.ndarray):
        for value, item in zip(values, items, strict=True):
            if tuple(value.shape) != tuple(first.shape):
                yield (
                    f"{where} has shape {tuple(first.shape)} in item {items[0]:,}, but {tuple(value.shape)} in item "
                    f"{item:,}"
                )
                return
        if isinstance(first, np.ndarray) and first.dtype.kind not in "biufc":
            yield f"{where} has dtype {first.dtype}, which torch cannot hold,"
    elif isinstance(first, Mapping):
        for value, item in zip(values, items, strict=True):
            for name in [*first, *value]:
                if (name in first) != (name in value):
                    with_it, without = (items[0], item) if name in first else (item, items[0])
                    yield f"{where} has an entry {name!r} in item {with_it:,}, but not in item {without:,}"
                    return
        for name in first:
            yield from _differences([value[name] for value in values], items, f"{path}[{name!r}]")
    elif isinstance(first, Sequence) and not isinstance(first, str | bytes):
        for value, item in zip(values, items, strict=True):
            if len(value) != len(first):
                yield f"{where} has {len(first):,} entries in item {items[0]:,}, but {len(value):,} in item {item:,}"
                return
        names = getattr(first, "_fields", range(len(first)))
        for number, name in enumerate(names):
            inner = f"{path}.{name}" if isinstance(name, str) else f"{path}[{name}]"
            yield from _differences([value[number] for value in values], items, inner)
    elif not isinstance(first, str | bytes | int | float | np.generic):
        yield f"{where} is a {type(first).__name__}, which torch's default_collate does not stack,"


def _kind(value: Any) -> str:
    """The type of a value, as far as it matters for stacking."""
    return "a number" if isinstance(value, int | float | np.number) else f"a {type(value).__name__}"
