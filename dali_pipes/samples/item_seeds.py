"""The random state of an item: seeded from (seed, epoch, row) before `dataset[item]`.

    seed, epoch ─▶ key ─▶ row ─▶ random, numpy.random, torch's default generator, and those the dataset stores

A dataset that augments at random therefore gives the same sample on any rank, in any worker and after any resume. Each
generator gets a different seed, or two generators of one kind would give the same numbers.
"""

import contextlib
import functools
import random
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch

from dali_pipes.operators.permute import splitmix64
from dali_pipes.rows.base import order_key

_DEPTH = 8
"""Steps from the dataset to a part of it: Subset, ConcatDataset, dataset, Compose, list, transform, generator."""
_MOST_ENTRIES = 1_000
"""Entries of a container that are looked at: a list of a million paths holds no generators."""
_MOST_OBJECTS = 50_000
_LEAVES = (str, bytes, int, float, complex, type(None), np.ndarray, np.generic, torch.Tensor, type, types.ModuleType)

_GENERATORS = (torch.Generator, random.Random, np.random.RandomState, np.random.Generator, np.random.BitGenerator)

Seed = Callable[[int], object]


class Generators:
    """The generators that objects may draw from: the global ones, and those stored on them or their parts.

    The search is bounded, and done when the first item is seeded. Parts that have a method `seed_item(seed: int)` are
    told the seed, too.
    """

    def __init__(self, *owners: Any, depth: int = _DEPTH) -> None:
        self._owners, self._depth = owners, depth
        self._seeds: list[Seed] | None = None  # found where they are used: a worker has copies

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_seeds": None}

    def seed(self, key: int) -> None:
        """Seed all of them with what a 64-bit key gives."""
        self.seed_each(splitmix64(np.array([[key]], np.uint64), self._numbers())[0].tolist())

    def keys(self, seed: int, epoch: int, rows: Sequence[int]) -> list[list[int]]:
        """The seeds of all of them for each row, as `seed_each` takes them."""
        epoch_key = np.array(order_key("item", seed, epoch), np.uint64)
        row_keys = splitmix64(epoch_key, np.array(rows, np.int64).view(np.uint64) + np.uint64(1))
        keys: list[list[int]] = splitmix64(row_keys[:, None], self._numbers()).tolist()
        return keys

    def seed_each(self, keys: Sequence[int]) -> None:
        """Seed each with its own number."""
        assert self._seeds is not None
        for seed, key in zip(self._seeds, keys, strict=True):
            seed(key)

    def _numbers(self) -> np.ndarray[Any, np.dtype[np.uint64]]:
        if self._seeds is None:
            self._seeds = [random.seed, _seed_numpy, torch.default_generator.manual_seed]
            parts = {id(part): part for owner in self._owners for part in parts_of(owner, self._depth)}
            self._seeds += [seed for part in parts.values() for seed in _seeds_of(part)]
        return np.arange(1, len(self._seeds) + 1, dtype=np.uint64)


@contextlib.contextmanager
def kept_states() -> Iterator[None]:
    """Afterwards, the global random states are those from before."""
    python, of_torch = random.getstate(), torch.default_generator.get_state()
    of_numpy = np.random.get_state()  # noqa: NPY002 - what datasets draw from
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(of_numpy)  # noqa: NPY002
        torch.default_generator.set_state(of_torch)


def parts_of(owner: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """An object and what it holds, nearest first, each once: attributes, entries of containers, closures; of what
    belongs to a class, generators alone.
    """
    seen, kinds = {id(owner)}, set[type]()
    waiting = deque([(owner, 0)])
    while waiting:
        part, steps = waiting.popleft()
        yield part
        if steps == depth:
            continue
        for child in _children(part, kinds):
            if isinstance(child, _LEAVES) or id(child) in seen:
                continue
            if len(seen) >= _MOST_OBJECTS:
                return
            seen.add(id(child))
            waiting.append((child, steps + 1))


def _children(part: Any, kinds: set[type]) -> Iterator[Any]:
    """What a part holds, and the generators of its classes that are not among `kinds`, which are added."""
    if isinstance(part, dict):
        yield from list(islice(part.values(), _MOST_ENTRIES))
    elif isinstance(part, list | tuple | deque):  # not sets, whose order differs between processes
        yield from list(islice(part, _MOST_ENTRIES))
    elif isinstance(part, functools.partial):
        yield from (part.func, part.args, part.keywords)
    elif isinstance(part, types.MethodType):
        yield part.__self__
    elif isinstance(part, types.FunctionType):
        for cell in part.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that is not filled yet
                yield cell.cell_contents
        yield from part.__defaults__ or ()
    attributes = getattr(part, "__dict__", None)
    if isinstance(attributes, Mapping) and not isinstance(part, types.FunctionType):
        yield from list(attributes.values())
    for kind in type(part).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = vars(kind).get(name)
            if isinstance(member, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # a slot that is not set
                    yield member.__get__(part, kind)
        if kind not in kinds:
            kinds.add(kind)
            yield from [value for value in vars(kind).values() if isinstance(value, _GENERATORS)]


def _seeds_of(part: Any) -> Iterator[Seed]:
    """How a generator is seeded; nothing for other objects without `seed_item`."""
    if isinstance(part, torch.Generator):
        yield part.manual_seed
    elif isinstance(part, random.Random):
        yield part.seed
    elif isinstance(part, np.random.RandomState):
        yield lambda key: part.seed(key & 0xFFFFFFFF)
    elif isinstance(part, np.random.Generator):
        yield functools.partial(_seed_bits, part.bit_generator)
    elif isinstance(part, np.random.BitGenerator):
        yield functools.partial(_seed_bits, part)
    hook = getattr(type(part), "seed_item", None)
    if callable(hook):
        yield lambda key: hook(part, key >> 1)  # 63 bits: torch and NumPy take them as they are


def _seed_bits(generator: np.random.BitGenerator, key: int) -> None:
    generator.state = type(generator)(key).state


def _seed_numpy(key: int) -> None:
    np.random.seed(key & 0xFFFFFFFF)  # noqa: NPY002 - what datasets draw from
