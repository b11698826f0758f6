"""Collates samples into a batch with torch's `default_collate` or the user's function, and explains failures.

field ['image'] has shape (3, 64, 64) in item 5, but (3, 32, 32) in item 9
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from dali_pipes.samples.structure import FieldPath, fields_of, name_of

_ADVICE = "make the samples consistent in the dataset, or pass collate_fn=list"


class Collate:
    """Makes a batch of samples. `problem` explains why it failed."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any] | None, name: str) -> None:
        self._collate_fn, self._name = collate_fn, name

    def __call__(self, samples: list[Any], items: Sequence[int]) -> Any:
        if self._collate_fn is not None:
            return self._collate_fn(samples)
        first = samples[0]
        if isinstance(first, dict) and any(sample.keys() != first.keys() for sample in samples):
            raise ValueError("samples have different entries")  # torch drops those that the first sample lacks
        return default_collate(samples)

    def problem(self, samples: Sequence[Any], items: Sequence[int], error: Exception) -> str:
        """Why samples could not be collated, as the end of a sentence about the batch."""
        if self._collate_fn is not None:
            name = getattr(self._collate_fn, "__qualname__", type(self._collate_fn).__name__)
            return f"cannot be collated: {name} raised {type(error).__name__}: {error}"
        found = _difference(samples, items)
        if found is not None:
            return f"cannot be collated: {found}; {_ADVICE}"
        return f"cannot be collated: {type(error).__name__}: {error}; pass collate_fn"


def _difference(samples: Sequence[Any], items: Sequence[int]) -> str | None:
    """What keeps samples, one an item, from being stacked, if that can be seen."""
    all_fields = [dict(fields_of(sample)) for sample in samples]
    first, first_item = all_fields[0], items[0]
    for fields, item in zip(all_fields, items, strict=True):
        for path in [*first, *fields]:
            if (path in first) != (path in fields):
                with_it, without = (first_item, item) if path in first else (item, first_item)
                return f"{_field(path)} is in item {with_it:,}, but not in item {without:,}"
    for path, value in first.items():
        for fields, item in zip(all_fields, items, strict=True):
            other = fields[path]
            if _kind(other) != _kind(value):
                return f"{_field(path)} is {_kind(value)} in item {first_item:,}, but {_kind(other)} in item {item:,}"
            if isinstance(value, torch.Tensor | np.ndarray) and tuple(other.shape) != tuple(value.shape):
                return (
                    f"{_field(path)} has shape {tuple(value.shape)} in item {first_item:,}, but {tuple(other.shape)} "
                    f"in item {item:,}"
                )
        if isinstance(value, np.ndarray) and value.dtype.kind not in "biufc":
            return f"{_field(path)} has dtype {value.dtype}, which torch does not support"
        if not isinstance(value, torch.Tensor | np.ndarray | str | bytes | int | float | np.generic):
            return f"{_field(path)} is {_kind(value)}, which torch's default_collate does not stack"
    return None


def _field(path: FieldPath) -> str:
    return f"field {name_of(path)}" if path else "the sample"


def _kind(value: Any) -> str:
    """The type of a value, as far as it matters for stacking."""
    return "a number" if isinstance(value, int | float | np.number) else f"a {type(value).__name__}"
