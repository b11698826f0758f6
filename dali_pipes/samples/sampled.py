"""The order of a torch sampler: for each epoch, the sampler is seeded and its list of items is read.

The list is computed in the trainer's process, the same on every rank. Its hash is in the state, so a resume detects a
sampler that depends on anything else.
"""

import hashlib
import itertools
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.config.validators import shown
from dali_pipes.errors import ConfigError
from dali_pipes.rows.base import order_key
from dali_pipes.samples.item_seeds import Generators, kept_states

Int64Array = npt.NDArray[np.int64]
SAMPLER_ORDER_NAME = "sampler-v1"
_KEPT = 3
"""Epochs whose lists are kept: the one that is handed out, and the one that is read ahead."""


class SampledItems:
    """A sampler's items. Holds 8 bytes an item, for up to three epochs."""

    is_uniform = False
    name = SAMPLER_ORDER_NAME

    def __init__(self, sampler: Any, num_items: int, seed: int) -> None:
        if not hasattr(sampler, "__iter__") or not hasattr(sampler, "__len__"):
            raise ConfigError(
                f"sampler = {shown(sampler)}: expected an object with __iter__ and __len__, as torch's samplers have"
            )
        self._sampler, self._num_items, self._seed = sampler, num_items, seed
        self._lists: dict[int, Int64Array] = {}
        self._lock = threading.Lock()
        self._generators = Generators(sampler, depth=1)
        self.settings: dict[str, Any] = {"sampler": type(sampler).__name__}

    def count(self, epoch: int, at_least: int | None = None) -> int:
        return len(self._list(epoch))

    def items(self, epoch: int, rows: Int64Array) -> Int64Array:
        return self._list(epoch)[rows]

    def group(self, epoch: int, row: int) -> str | None:
        return None

    def digest(self, epoch: int) -> str | None:
        return hashlib.sha256(self._list(epoch).data).hexdigest()[:16]

    def _list(self, epoch: int) -> Int64Array:
        with self._lock:
            if epoch not in self._lists:
                self._lists[epoch] = self._taken(epoch)
                for old in sorted(self._lists)[:-_KEPT]:
                    del self._lists[old]
            return self._lists[epoch]

    def _taken(self, epoch: int) -> Int64Array:
        """The list of an epoch. The global random states are those from before, afterwards."""
        if hasattr(self._sampler, "set_epoch"):
            self._sampler.set_epoch(epoch)
        with kept_states():
            self._generators.seed(order_key("sampler", self._seed, epoch))
            length = len(self._sampler)
            items = list(itertools.islice(self._sampler, length + 1))
        name = type(self._sampler).__name__
        if len(items) > length:
            raise ConfigError(f"sampler: {name} yields more items than its length, {length:,}; correct its __len__")
        try:
            taken = np.array(items, np.int64) if all(int(item) == item for item in items) else None
        except (TypeError, ValueError):
            taken = None
        if taken is None or taken.ndim != 1:
            raise ConfigError(f"sampler: {name} yields {shown(items[0])}, expected an index of the dataset")
        wrong = (taken < 0) | (taken >= self._num_items)
        if wrong.any():
            raise ConfigError(
                f"sampler: {name} yields item {taken[np.argmax(wrong)]:,}, expected 0 to {self._num_items - 1:,}"
            )
        return taken
