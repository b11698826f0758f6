"""Batches are torch's, and what cannot be stacked is named by field, shapes and items."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Subset

from dali_pipes import SampleLoader
from dali_pipes.errors import SampleError


class Scan(NamedTuple):
    image: Any
    label: int


KINDS: dict[str, list[Any]] = {
    "tuple": [(np.full((2, 3), number, np.float32), number) for number in range(4)],
    "dict": [{"image": torch.full((2,), number), "name": f"scan {number}"} for number in range(4)],
    "namedtuple": [Scan(np.full(3, number), number) for number in range(4)],
    "nested": [{"a": [number, (float(number), number > 1)], "b": {"c": b"bytes"}} for number in range(4)],
    "bool": [number > 1 for number in range(4)],
    "str": [f"scan {number}" for number in range(4)],
    "uint16": [np.full((2, 2), 60_000 + number, np.uint16) for number in range(4)],
    "float16": [np.full((2, 2), number / 2, np.float16) for number in range(4)],
    "float": [number / 2 for number in range(4)],
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[name], other[name]) for name in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("samples", KINDS.values(), ids=KINDS)
def test_batches_are_those_of_torch(samples: list[Any]) -> None:
    found, expected = list(SampleLoader(samples, 3)), list(DataLoader(samples, 3))  # type: ignore[arg-type]
    assert same(found, expected)
    assert [len(batch) for batch in SampleLoader(samples, 3, collate_fn=list)] == [3, 1]


def test_workers_send_all_kinds() -> None:
    samples = [{name: kind[number] for name, kind in KINDS.items()} for number in range(4)]
    with SampleLoader(samples, 3, num_workers=1) as loader:
        assert same(list(loader), list(DataLoader(samples, 3)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([np.zeros((3, 64)), np.zeros((3, 32))], ["the sample", "(3, 64) in item 0", "(3, 32) in item 1"]),
        ([{"image": torch.zeros(2)}, {"image": torch.zeros(3)}], ["field image", "(2,)", "(3,)"]),
        ([Scan(torch.zeros(2), 1), Scan(torch.zeros(1), 1)], ["field image", "(2,)", "(1,)"]),
        ([(1, [2, 3]), (1, [2])], ["[1][1]", "item 0", "not in item 1"]),
        ([{"a": 1}, {"a": 1, "mask": 2}], ["field mask", "item 1", "not in item 0"]),
        ([{"a": 1}, {"a": None}], ["field a", "NoneType in item 1"]),
        ([{"a": None}, {"a": None}], ["field a", "NoneType"]),
        ([np.array(["a"]), np.array(["b"])], ["dtype <U1"]),
    ],
)
def test_samples_that_do_not_fit(samples: list[Any], words: Sequence[str]) -> None:
    with pytest.raises(SampleError) as caught:
        list(SampleLoader(samples, 2))
    message = str(caught.value)
    for word in [*words, "items 0, 1 of list", "epoch 0, rows 0 to 1", "collate_fn=list"]:
        assert word in message
    assert caught.value.__cause__ is not None


def test_errors_of_a_collate_function() -> None:
    def fails(samples: list[Any]) -> Any:
        raise KeyError("image")

    with pytest.raises(SampleError, match="fails raised KeyError: 'image'") as caught:
        list(SampleLoader([1, 2], 2, collate_fn=fails))
    assert isinstance(caught.value.__cause__, KeyError)


class Crops:
    """What a dataset needs, and nothing else; structurally also Hugging Face's."""

    _fingerprint = "5e1f"

    def __len__(self) -> int:
        return 5

    def __getitem__(self, item: int) -> dict[str, Any]:
        if item == 3:
            raise ValueError("empty crop")
        return {"item": item}


@pytest.mark.parametrize(
    ("dataset", "name"),
    [
        (Crops(), "item 3 of Crops"),
        (Subset(Crops(), [0, 3]), "item 1 of Subset of Crops"),  # type: ignore[arg-type]
        (ConcatDataset([[{"item": 1}], Crops()]), "item 4 of ConcatDataset of list and Crops"),  # type: ignore[list-item]
    ],
)
def test_datasets_and_their_names(dataset: Any, name: str) -> None:
    with pytest.raises(SampleError, match=f"{name} .* raised ValueError: empty crop"):
        list(SampleLoader(dataset, 1))
    assert SampleLoader(dataset, 1).state_dict()["dataset"]["length"] == len(dataset)
