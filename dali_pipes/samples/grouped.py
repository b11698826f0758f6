"""Groups of items with weights: the order of a mixture gives the group of each row, and its count within the group.

    row of the run     0     1     2     3     4 ...
    group, count      cat 0 dog 0 cat 1 cat 2 dog 1      `MixtureOrder`
    item               17    61    4     9     70        each pass of a group in its own keyed order

If groups are ranges, memory and time depend on the number of groups, not of items. Each epoch continues every group
where the previous epoch stopped.
"""

import hashlib
import json
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.config.validators import shown
from dali_pipes.errors import ConfigError
from dali_pipes.operators.permute import ORDER_NAME, permute_each
from dali_pipes.rows.base import key_names, order_key
from dali_pipes.schedule.mixture import MIXTURE_ORDER_NAME, MixtureOrder

Int64Array = npt.NDArray[np.int64]
Items = range | Int64Array


class GroupedItems:
    """Groups by weight; within a group, every item once a pass."""

    is_uniform = True
    name = f"{MIXTURE_ORDER_NAME}, {ORDER_NAME}"

    def __init__(
        self, groups: Mapping[str, Items], weights: Mapping[str, Fraction], num_rows: int | None, seed: int
    ) -> None:
        self._names, self._items = list(groups), list(groups.values())
        self._sizes = np.array([len(items) for items in self._items], np.int64)
        self._num_rows = int(self._sizes.sum()) if num_rows is None else num_rows
        self._mixture = MixtureOrder(self._names, [(0, weights)], seed=seed)
        self._key = lru_cache(4 * len(groups))(
            lambda group, number: order_key("group", *key_names(self._names[group]), seed, number)
        )
        about = hashlib.sha256()
        for name, items in groups.items():
            where = [items.start, items.stop, items.step] if isinstance(items, range) else None
            about.update(json.dumps([name, str(weights[name]), where, len(items)]).encode())
            if not isinstance(items, range):
                about.update(items.data)
        self.settings: dict[str, Any] = {"num_samples": self._num_rows, "groups": about.hexdigest()[:16]}

    def count(self, epoch: int, at_least: int | None = None) -> int:
        return self._num_rows

    def items(self, epoch: int, rows: Int64Array) -> Int64Array:
        groups, counts = self._mixture.rows(rows + epoch * self._num_rows)
        passes, places = np.divmod(counts, self._sizes[groups])
        order = np.lexsort((passes, groups))
        begins = np.flatnonzero(np.diff(groups[order], prepend=-1) | np.diff(passes[order], prepend=-1))
        sizes = np.diff(begins, append=len(order))
        firsts = order[begins]
        keys = np.array(
            [self._key(*each) for each in zip(groups[firsts].tolist(), passes[firsts].tolist(), strict=True)], np.uint64
        )
        inside = permute_each(places[order], sizes, self._sizes[groups[firsts]], keys)
        found = np.empty(len(rows), np.int64)
        for first, size in zip(begins.tolist(), sizes.tolist(), strict=True):
            part = slice(first, first + size)
            items = self._items[groups[order[first]]]
            of_part = items.start + items.step * inside[part] if isinstance(items, range) else items[inside[part]]
            found[order[part]] = of_part
        return found

    def group(self, epoch: int, row: int) -> str | None:
        sources, _ = self._mixture.rows(np.array([row + epoch * self._num_rows]))
        return self._names[int(sources[0])]

    def digest(self, epoch: int) -> str | None:
        return None


def read_groups(groups: Any, num_items: int) -> dict[str, Items]:
    """Items by group, from a dict of ranges or lists of items, or from one label an item. Raises `ConfigError`."""
    if not isinstance(groups, Mapping):
        return _by_label(groups, num_items)
    if not groups:
        raise ConfigError("groups is an empty dict; expected items for each group name")
    read: dict[str, Items] = {}
    for name, given in groups.items():
        items = given if isinstance(given, range) else _indices(name, given)
        if not len(items):
            raise ConfigError(f"groups: group {name!r} is empty; remove it")
        lowest, highest = min(items[0], items[-1]) if isinstance(items, range) else items.min(), _highest(items)
        if lowest < 0 or highest >= num_items:
            raise ConfigError(
                f"groups: group {name!r} has items {lowest:,} to {highest:,}, expected 0 to {num_items - 1:,}"
            )
        read[str(name)] = items
    if len(read) < len(groups):
        raise ConfigError(f"groups: two names in {shown(list(groups))} are the same as text; rename one")
    return read


def read_group_weights(weights: Any, names: list[str]) -> dict[str, Fraction]:
    """A weight for each group; equal ones for None. Raises `ConfigError` for other names and values."""
    if weights is None:
        return dict.fromkeys(names, Fraction(1))
    if not isinstance(weights, Mapping):
        raise ConfigError(
            f"weights = {shown(weights)}: with groups, expected a dict with a weight by group, for {shown(names)}"
        )
    given = {str(name): weight for name, weight in weights.items()}
    if set(given) != set(names):
        raise ConfigError(
            f"weights: found weights for the groups {shown(sorted(given))}, expected {shown(sorted(names))}"
        )
    read = {}
    for name in names:
        try:
            read[name] = Fraction(str(given[name]))
        except ValueError as error:
            raise ConfigError(f"weights: group {name!r} has weight {given[name]!r}, expected a number") from error
        if read[name] < 0:
            raise ConfigError(f"weights: group {name!r} has weight {given[name]!r}, expected 0 or more")
    if not any(read.values()):
        raise ConfigError("weights: all are 0; give at least one group a weight above 0")
    return read


def _by_label(labels: Any, num_items: int) -> dict[str, Items]:
    given = np.asarray(labels)
    if given.ndim != 1 or len(given) != num_items:
        raise ConfigError(
            f"groups = {shown(labels)}: expected a dict of items by group, or {num_items:,} labels, one per item"
        )
    values, numbers = np.unique(given, return_inverse=True)
    order = np.argsort(numbers, kind="stable")
    ends = np.cumsum(np.bincount(numbers, minlength=len(values)))
    return {str(value): order[first:end] for value, first, end in zip(values, [0, *ends[:-1]], ends, strict=True)}


def _indices(name: object, given: Any) -> Int64Array:
    items = np.asarray(given)
    if items.ndim != 1 or (items.dtype.kind not in "iu" and len(items)):
        raise ConfigError(f"groups: group {name!r} is {shown(given)}, expected a range or a list of items")
    return np.ascontiguousarray(items, np.int64)


def _highest(items: Items) -> int:
    return max(items[0], items[-1]) if isinstance(items, range) else int(items.max())
