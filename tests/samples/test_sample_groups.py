"""Groups with weights: shares of groups, and every item of a group once a pass of it."""

from collections import Counter
from fractions import Fraction
from itertools import islice
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_datasets import Numbers, flat, items_of

from dali_pipes import SampleLoader
from dali_pipes.errors import ConfigError


def run_of(loader: SampleLoader, rows: int) -> list[int]:
    """The first items of a run, over all epochs."""
    batches = (batch["item"].tolist() for batch in loader)
    return list(islice((item for batch in batches for item in batch), rows))


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    weights=st.lists(st.integers(1, 9), min_size=6, max_size=6),
    num_samples=st.integers(64, 500),
    seed=st.integers(0, 3),
)
def test_shares_and_passes(sizes: list[int], weights: list[int], num_samples: int, seed: int) -> None:
    ends = np.cumsum(sizes).tolist()
    groups = {f"g{number}": range(end - size, end) for number, (size, end) in enumerate(zip(sizes, ends, strict=True))}
    given_weights = {name: weights[number] / 10 for number, name in enumerate(groups)}
    loader = SampleLoader(
        Numbers(ends[-1]), 5, groups=groups, weights=given_weights, num_samples=num_samples, seed=seed, repeat=True
    )
    rows = 128 * 3  # whole strata
    items = run_of(loader, rows)
    total = sum(Fraction(str(weight)) for weight in given_weights.values())
    for name, members in groups.items():
        own = [item for item in items if item in members]
        assert abs(len(own) - rows * Fraction(str(given_weights[name])) / total) < 2
        passes, more = divmod(len(own), len(members))
        counts = Counter(own)
        assert {counts[item] for item in members} <= {passes, passes + (more > 0)}


def test_groups_without_weights_are_equally_frequent() -> None:
    labels = ["cat"] * 90 + ["dog"] * 9 + ["eel"]
    loader = SampleLoader(Numbers(100), 8, groups=labels, num_samples=384)
    counts = Counter(labels[item] for batch in items_of(list(loader)) for item in batch)
    assert counts == {"cat": 128, "dog": 128, "eel": 128}
    assert loader.locate(3, 2, 0).group == labels[loader.locate(3, 2, 0).item]


def test_ranges_lists_and_labels_mean_the_same() -> None:
    labels = [0, 1, 0, 1, 0, 1, 1]
    forms: list[Any] = [
        labels,
        {"0": [0, 2, 4], "1": np.array([1, 3, 5, 6])},
        {0: range(0, 5, 2), 1: [1, 3, 5, 6]},
    ]
    weights = {0: 0.25, "1": "0.75"}
    found = [run_of(SampleLoader(Numbers(7), 2, groups=form, weights=weights, repeat=True), 300) for form in forms]
    assert found[0] == found[1] == found[2]


@given(world_size=st.integers(1, 4), batch_size=st.integers(1, 4))
def test_the_same_on_any_number_of_ranks(world_size: int, batch_size: int) -> None:
    settings: dict[str, Any] = {"groups": {"a": range(5), "b": range(5, 50)}, "num_samples": 12 * 6}
    whole = flat(items_of(list(SampleLoader(Numbers(50), 1, **settings))))
    by_rank = [
        flat(items_of(list(SampleLoader(Numbers(50), batch_size, rank=rank, world_size=world_size, **settings))))
        for rank in range(world_size)
    ]
    assert [item for row in zip(*by_rank, strict=True) for item in row] == whole


def test_many_items_in_few_groups_cost_nothing() -> None:
    half = 2**39
    groups = {"a": range(half), "b": range(half, 2 * half)}
    loader = SampleLoader(Numbers(2 * half), 128, groups=groups, weights={"a": 3, "b": 1})
    items = next(iter(loader))["item"].tolist()
    assert sum(item < half for item in items) == 96


@pytest.mark.parametrize(
    ("groups", "weights", "message"),
    [
        ({}, None, "empty"),
        ({"a": []}, None, "'a'"),
        ({"a": range(8)}, None, "0 to 7.*0 to 6"),
        ({"a": [-1]}, None, "-1"),
        ({"a": [0.5]}, None, "'a'"),
        ({"a": [0], "b": [1]}, {"a": 1}, "'b'"),
        ({"a": [0]}, {"a": -1}, "-1"),
        ({"a": [0]}, {"a": "much"}, "much"),
        ({"a": [0]}, {"a": 0}, "all are 0"),
        ({"a": [0]}, [1] * 7, "by group"),
        (["a", "b"], None, "7"),
        ({1: [0], "1": [1]}, None, "same as text"),
    ],
)
def test_groups_that_are_refused(groups: Any, weights: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SampleLoader(Numbers(7), groups=groups, weights=weights)
