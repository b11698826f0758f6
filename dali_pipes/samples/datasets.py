"""Checks of a dataset, and its fingerprint, which tells a resumed run whether the dataset is the same."""

import hashlib
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, IterableDataset, Subset

from dali_pipes.config.validators import shown
from dali_pipes.errors import ConfigError


def num_items(dataset: Any) -> int:
    """The length of a map-style dataset. Raises `ConfigError` for anything else, and for an empty one."""
    name = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{name} is an IterableDataset, which cannot be resumed; pass a map-style dataset, with __getitem__ and "
            "__len__"
        )
    if isinstance(dataset, str | bytes | dict) or not (
        hasattr(type(dataset), "__getitem__") and hasattr(type(dataset), "__len__")
    ):
        raise ConfigError(f"dataset = {shown(dataset)}: expected a map-style dataset, with __getitem__ and __len__")
    length = len(dataset)
    if not length:
        raise ConfigError(f"dataset: {name} is empty; expected at least one item")
    return length


def fingerprint_of(dataset: Any) -> str | None:
    """The `_fingerprint` of a dataset, such as a Hugging Face dataset, also inside `Subset` and `ConcatDataset`."""
    own = getattr(dataset, "_fingerprint", None)
    if isinstance(own, str):
        return own
    if isinstance(dataset, Subset):
        inner = fingerprint_of(dataset.dataset)
        return None if inner is None else _hash(inner, np.asarray(dataset.indices, np.int64).tobytes().hex())
    if isinstance(dataset, ConcatDataset):
        parts = [fingerprint_of(part) for part in dataset.datasets]
        return None if None in parts else _hash(*map(str, parts))
    return None


def _hash(*parts: str) -> str:
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]
