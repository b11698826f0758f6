"""torch samplers: their lists, a new one each epoch, the same on every rank and after a resume."""

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sample_datasets import Numbers, flat, items_of
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dali_pipes import SampleLoader
from dali_pipes.errors import ConfigError, StateError


class FromList:
    """A sampler that gives what it was made of, a list for each epoch."""

    def __init__(self, lists: list[list[Any]], length: int | None = None) -> None:
        self.lists, self.epoch = lists, 0
        self.length = length

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.lists[self.epoch]) if self.length is None else self.length

    def __iter__(self) -> Iterator[Any]:
        return iter(self.lists[self.epoch])


def epochs_of(loader: SampleLoader, epochs: int = 3) -> list[list[list[int]]]:
    return [items_of(list(loader)) for _ in range(epochs)]


@pytest.mark.parametrize("kind", [RandomSampler, SubsetRandomSampler])
def test_a_new_list_each_epoch_whatever_the_global_state(kind: Any) -> None:
    made = kind(range(20))
    torch.manual_seed(1)
    first = epochs_of(SampleLoader(Numbers(20), 6, sampler=made))
    torch.manual_seed(2)
    drawn = torch.rand(3)
    torch.manual_seed(2)
    assert epochs_of(SampleLoader(Numbers(20), 6, sampler=kind(range(20)))) == first
    assert torch.equal(torch.rand(3), drawn), "the trainer's random state has changed"
    assert all(sorted(flat(epoch)) == list(range(20)) for epoch in first)
    assert len({str(epoch) for epoch in first}) == 3
    assert epochs_of(SampleLoader(Numbers(20), 6, sampler=made, seed=1)) != first


def test_a_generator_of_the_sampler_is_seeded() -> None:
    found = []
    for begun in (1, 2):
        sampler = RandomSampler(range(20), generator=torch.Generator().manual_seed(begun))
        found.append(epochs_of(SampleLoader(Numbers(20), 6, sampler=sampler)))
    assert found[0] == found[1]


def test_ranks_share_the_list() -> None:
    lists = [[5, 1, 1, 3, 2], [0, 4, 4]]
    loaders = [SampleLoader(Numbers(6), 1, sampler=FromList(lists), rank=rank, world_size=2) for rank in range(2)]
    assert [epochs_of(loader, 2) for loader in loaders] == [
        [[[5], [1], [2]], [[0], [4]]],
        [[[1], [3], [2]], [[4], [4]]],
    ]
    assert SampleLoader(Numbers(6), 1, sampler=SequentialSampler(range(4))).state_dict()["config"] == {
        "seed": 0,
        "sampler": "SequentialSampler",
    }


def test_resume_in_an_epoch_of_another_length() -> None:
    lists = [[5, 1, 1, 3, 2], [0, 4, 4, 1, 2, 3, 5], [1, 2, 3]]
    whole = flat(epochs_of(SampleLoader(Numbers(6), 2, sampler=FromList(lists))))
    loader = SampleLoader(Numbers(6), 2, sampler=FromList(lists))
    iterators = (batch for _ in range(3) for batch in loader)
    for number in range(len(whole)):
        other = SampleLoader(Numbers(6), 2, sampler=FromList(lists))
        other.load_state_dict(loader.state_dict())
        assert next(iter(other))["item"].tolist() == whole[number]
        if number + 1 < len(whole):
            next(iterators)


def test_another_list_is_noticed() -> None:
    state = SampleLoader(Numbers(6), 2, sampler=FromList([[1, 2, 3]])).state_dict()
    SampleLoader(Numbers(6), 2, sampler=FromList([[1, 2, 3]])).load_state_dict(state)
    with pytest.raises(StateError, match="epoch 0"):
        SampleLoader(Numbers(6), 2, sampler=FromList([[1, 3, 2]])).load_state_dict(state)


@pytest.mark.parametrize(
    ("sampler", "message"),
    [
        (DistributedSampler(Numbers(6), num_replicas=2, rank=0), "split twice"),
        (FromList([[1, 6]]), "item 6.*0 to 5"),
        (FromList([[1, -1]]), "item -1"),
        (FromList([["a"]]), "'a'"),
        (FromList([[[1, 2]]]), "expected an index"),
        (FromList([[1, 2, 3]], length=2), "more items than its length, 2"),
        (iter([1, 2, 3]), "__len__"),
        (5, "__len__"),
    ],
)
def test_samplers_that_are_refused(sampler: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SampleLoader(Numbers(6), sampler=sampler)


def test_weighted_without_replacement_is_a_list() -> None:
    random.seed(1)
    sampler = WeightedRandomSampler([1.0] * 6, 6, replacement=False)
    loader = SampleLoader(Numbers(6), 2, sampler=sampler)
    assert sorted(flat(items_of(list(loader)))) == list(range(6))
    assert loader.state_dict()["order"] == "sampler-v1"


def test_a_sampler_decides_the_order_alone() -> None:
    for settings in ({"shuffle": True}, {"weights": [1] * 6}, {"groups": {"a": [1]}}, {"num_samples": 3}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            SampleLoader(Numbers(6), sampler=SequentialSampler(range(6)), **settings)
