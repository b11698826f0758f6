"""Weights: each item as often as its share says, the same on any number of ranks."""

import time
from collections import Counter
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sample_datasets import Numbers, flat, items_of
from sample_oracle import by_weight
from torch.utils.data import WeightedRandomSampler

from dali_pipes import SampleLoader
from dali_pipes.errors import ConfigError
from dali_pipes.samples.weighted import WeightedItems, running_sum

decimals = st.integers(0, 500).map(lambda number: number / 100)
weight_lists = st.lists(decimals, min_size=1, max_size=20).filter(any)


def epoch_of(weights: Any, num_rows: int, epoch: int = 0, seed: int = 0) -> list[int]:
    items: list[int] = WeightedItems(weights, len(weights), num_rows, seed).items(epoch, np.arange(num_rows)).tolist()
    return items


@given(weights=weight_lists, num_rows=st.integers(1, 60), seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_order_is_that_of_the_oracle(weights: list[float], num_rows: int, seed: int, epoch: int) -> None:
    exact = [Fraction(str(weight)) for weight in weights]
    places = next(places for places in range(3) if all(weight * 10**places % 1 == 0 for weight in exact))
    assert epoch_of(weights, num_rows, epoch, seed) == by_weight(exact, num_rows, seed, epoch, Fraction(1, 10**places))


@given(
    weights=weight_lists | st.lists(st.floats(0, 1e9, width=32), min_size=1, max_size=20).filter(any),
    num_rows=st.integers(1, 100),
    seed=st.integers(0, 5),
)
def test_items_appear_floor_or_ceiling_of_their_share(weights: list[float], num_rows: int, seed: int) -> None:
    whole = np.diff(running_sum(weights, len(weights)), prepend=0).tolist()
    found = Counter(epoch_of(weights, num_rows, seed=seed))
    for item, weight in enumerate(whole):
        share = Fraction(weight * num_rows, sum(whole))
        assert share - 1 < found[item] < share + 1
        if share.denominator == 1:
            assert found[item] == share


def test_exact_shares_of_decimals() -> None:
    assert Counter(epoch_of([0.1, 0.2, 0.7], 10)) == {0: 1, 1: 2, 2: 7}
    assert Counter(epoch_of(np.array([0.1, 0.2, 0.7], np.float32), 10)) == {0: 1, 1: 2, 2: 7}
    assert Counter(epoch_of([3, 0, 1], 400)) == {0: 300, 2: 100}


@given(st.lists(st.floats(2.0**-30, 1.0), min_size=1, max_size=50))
def test_integer_weights_are_in_proportion(weights: list[float]) -> None:
    whole = np.diff(running_sum(weights, len(weights)), prepend=0)
    assert whole.sum() < 2**62
    assert np.allclose(whole / whole.sum(), np.array(weights) / sum(weights), rtol=2.0**-20, atol=0)


def test_neighbors_are_not_visited_in_turn_and_epochs_differ() -> None:
    first, second = epoch_of([1] * 1_000, 1_000), epoch_of([1] * 1_000, 1_000, epoch=1)
    assert sorted(first) == sorted(second) == list(range(1_000))
    assert first != second
    assert sum(abs(now - before) == 1 for before, now in pairwise(first)) < 20


@given(weights=weight_lists, world_size=st.integers(1, 4), batch_size=st.integers(1, 4))
def test_the_same_on_any_number_of_ranks(weights: list[float], world_size: int, batch_size: int) -> None:
    dataset, num_samples = Numbers(len(weights)), 24 * world_size * batch_size
    loaders = [
        SampleLoader(dataset, batch_size, weights=weights, num_samples=num_samples, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    by_rank = [flat(items_of(list(loader))) for loader in loaders]
    assert [item for row in zip(*by_rank, strict=True) for item in row] == epoch_of(weights, num_samples)


def test_weighted_random_sampler_becomes_weights() -> None:
    sampler = WeightedRandomSampler([0.5, 0.0, 1.5], 40)
    loader = SampleLoader(Numbers(3), 4, sampler=sampler)
    assert flat(items_of(list(loader))) == epoch_of([0.5, 0.0, 1.5], 40)
    assert loader.state_dict()["order"] == "weighted-v1"
    of_tensor = SampleLoader(Numbers(3), 4, weights=torch.tensor([0.5, 0, 1.5]), num_samples=40)
    assert of_tensor.state_dict() == SampleLoader(Numbers(3), 4, sampler=sampler).state_dict()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1, 2], "2 numbers.*3"),
        ([1, -2, 1], "item 1 .* -2"),
        ([1, 2, float("nan")], "item 2 .* nan"),
        ([0, 0, 0], "all are 0"),
        ([[1, 2, 3]], "one number per item"),
        (["a", "b", "c"], "one number per item"),
        ({"a": 1}, "groups"),
        ([2**62, 1, 1], "overflow"),
    ],
)
def test_weights_that_are_refused(weights: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SampleLoader(Numbers(3), weights=weights)


def test_ten_million_items_take_eight_bytes_each() -> None:
    """Time is printed (-s), not judged."""
    weights = np.random.default_rng(0).random(10**7)
    begun = time.perf_counter()
    order = WeightedItems(weights, len(weights), len(weights), 0)
    items = order.items(0, np.arange(4_096))
    print(f"10^7 weights: {time.perf_counter() - begun:.2f} s, {order._ends.nbytes / 1e6:.0f} MB")
    assert order._ends.nbytes == 80_000_000
    assert len(np.unique(items)) > 3_000
    assert weights[items].mean() == pytest.approx(2 / 3, abs=0.02)
