"""The random state of an item depends on seed, epoch and row alone."""

import collections
import copy
import functools
import pickle
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from sample_datasets import Augmented, Numbers
from torch.utils.data import ConcatDataset, Dataset, Subset

from dali_pipes import SampleLoader
from dali_pipes.samples.item_seeds import Generators, kept_states, parts_of


def by_row(loader: SampleLoader, epoch: int = 0) -> dict[int, tuple[int, list[float]]]:
    """Item and drawn numbers by row."""
    found = {}
    for step, batch in enumerate(loader):
        for number, draws in enumerate(batch["draws"].tolist()):
            place = loader.locate(step, number, epoch)
            assert place.item == batch["item"][number]
            found[place.row] = (place.item, draws)
    return found


def test_the_same_on_any_rank_and_batch_size_and_new_in_each_epoch() -> None:
    loader = SampleLoader(Augmented(21), 4, True, seed=7)
    whole, second = by_row(loader), by_row(loader, 1)
    parts = [by_row(SampleLoader(Augmented(21), 3, True, seed=7, rank=rank, world_size=2)) for rank in range(2)]
    assert {**parts[0], **parts[1]} == whole
    numbers = [number for _, draws in [*whole.values(), *second.values()] for number in draws]
    assert len(numbers) == 2 * 21 * 8
    assert len(set(numbers)) == len(numbers), "two generators, rows or epochs share their numbers"
    assert by_row(SampleLoader(Augmented(21), 4, True, seed=8)) != whole


def test_without_workers_the_global_states_stay() -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    expected = [random.random(), np.random.rand(), torch.rand(())]  # noqa: NPY002
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(1)
    for _ in SampleLoader(Augmented(5), 2):
        pass
    assert [random.random(), np.random.rand(), torch.rand(())] == expected  # noqa: NPY002


def test_item_seed_false_leaves_everything_alone() -> None:
    class Drawing(Dataset[float]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, item: int) -> float:
            return random.random()

    random.seed(5)
    expected = [random.random() for _ in range(4)]
    random.seed(5)
    loader = SampleLoader(Drawing(), 2, item_seed=False)
    assert torch.cat(list(loader)).tolist() == expected


def test_getitems_is_used_only_if_nothing_is_seeded() -> None:
    class Together(Numbers):
        calls = 0

        def __getitems__(self, items: list[int]) -> list[dict[str, Any]]:
            self.calls += 1
            return [{"item": item} for item in items]

    dataset = Together(6)
    seeded = [batch["item"].tolist() for batch in SampleLoader(dataset, 4)]
    assert dataset.calls == 0
    assert [batch["item"].tolist() for batch in SampleLoader(dataset, 4, item_seed=False)] == seeded
    assert dataset.calls == 2


class Pair(NamedTuple):
    first: Any
    second: Any


class Slotted:
    __slots__ = ("empty", "generator")

    def __init__(self) -> None:
        self.generator = random.Random(1)


class Shared:
    of_all = np.random.default_rng(1)


class Inheriting(Shared):
    more = random.Random(2)


class Holder:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)

    def method(self) -> None: ...


def closing_over(generator: np.random.Generator) -> Any:
    return lambda: generator.random()


def test_generators_are_found_wherever_a_dataset_keeps_them() -> None:
    made: list[Any] = [np.random.default_rng(number) for number in range(8)]
    made += [np.random.RandomState(1), torch.Generator(), random.Random(2), np.random.PCG64(3)]
    slotted = Slotted()
    base = Holder(
        direct=made[0],
        listed=[{"deep": (made[1], None)}],
        deque=collections.deque([made[2]]),
        pair=Pair(made[3], 1),
        closure=closing_over(made[4]),
        partial=functools.partial(print, made[5], end=made[6]),
        bound=Holder(generator=made[7]).method,
        others=made[8:],
        slotted=slotted,
        of_class=[Inheriting(), Inheriting()],
        large=list(range(100_000)),
        array=np.zeros(10),
    )
    vars(base)["loop"] = base
    dataset: Any = ConcatDataset([Subset(base, [0])])  # type: ignore[arg-type]
    found = list(parts_of(dataset))
    assert all(any(part is generator for part in found) for generator in [*made, slotted.generator])
    assert [sum(part is generator for part in found) for generator in (Shared.of_all, Inheriting.more)] == [1, 1]
    assert len(found) < 2_000


class Mixed:
    """A collate function with a generator of its own."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(1)

    def __call__(self, samples: list[dict[str, Any]]) -> list[float]:
        return [float(self.generator.random()), random.random(), *(sample["item"] for sample in samples)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_collate_fn_draws_depends_on_the_rows(num_workers: int) -> None:
    whole = list(SampleLoader(Numbers(13), 3, True, collate_fn=Mixed()))
    assert len({number for batch in whole for number in batch[:2]}) == 2 * len(whole)
    for step in range(3):
        with SampleLoader(Numbers(13), 3, True, collate_fn=Mixed(), num_workers=num_workers) as loader:
            run = iter(loader)
            for _ in range(step):
                next(run)
            state = loader.state_dict()
            loader.load_state_dict(state)
            assert list(loader) == whole[step:]


def test_a_search_is_bounded() -> None:
    chain: Any = random.Random(1)
    for _ in range(50):
        chain = [chain]
    assert len(list(parts_of(chain))) < 20
    wide = [[[number] for number in range(400)] for _ in range(200)]
    assert len(list(parts_of(wide))) <= 50_000


def test_generators_are_found_again_in_a_copy() -> None:
    dataset = Augmented(3)
    generators = Generators(dataset)
    keys = generators.keys(0, 0, [5])[0]
    generators.seed_each(keys)
    expected = dataset[0]["draws"].tolist()
    copied = pickle.loads(pickle.dumps(Holder(dataset=dataset, generators=generators)))
    assert copied.generators.keys(0, 0, [5])[0] == keys
    copied.generators.seed_each(keys)
    assert copied.dataset[0]["draws"].tolist() == expected


def test_states_are_kept_after_an_error() -> None:
    random.seed(3)
    before = copy.deepcopy(random.getstate())
    try:
        with kept_states():
            random.random()
            raise ValueError
    except ValueError:
        pass
    assert random.getstate() == before
