"""`CellMapDataLoader` with datasets like those of cellmap-data: its settings, class weights, another device."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset

from dali_pipes.adapters.cellmap import CellMapDataLoader, class_weights
from dali_pipes.errors import ConfigError


class Crops(Dataset[Any]):
    """Items that draw from a generator of the dataset, as those of cellmap-data do."""

    classes = ("a", "b")

    def __init__(self, length: int, matrix: list[list[int]]) -> None:
        self.length, self.matrix = length, np.array(matrix, bool)
        self.moved: list[str] = []
        self._rng = np.random.default_rng(0)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, item: int) -> dict[str, Any]:
        if not 0 <= item < self.length:
            raise IndexError(item)
        return {"idx": torch.tensor(item), "raw": torch.tensor([self._rng.random()]), "__metadata__": {"item": item}}

    def get_crop_class_matrix(self) -> Any:
        return self.matrix

    def to(self, device: str) -> None:
        self.moved.append(str(device))


class Joined(ConcatDataset[Any]):
    classes = ("a", "b")

    def get_crop_class_matrix(self) -> Any:
        return np.vstack([part.get_crop_class_matrix() for part in self.datasets])  # type: ignore[attr-defined]


def test_settings_and_the_order() -> None:
    crops = Crops(10, [[1, 1]])
    validation = CellMapDataLoader(crops, batch_size=4, is_train=False, iterations_per_epoch=3, device="cpu")
    assert (validation.classes, len(validation)) == (["a", "b"], 3)
    assert [batch["idx"].tolist() for batch in validation] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    loader = CellMapDataLoader(crops, ["a"], 5, iterations_per_epoch=10, device="cpu", drop_last=True)
    (first, second) = loader
    assert sorted(first["idx"].tolist() + second["idx"].tolist()) == list(range(10))
    assert first["__metadata__"] == [{"item": item} for item in first["idx"].tolist()]
    assert (loader.classes, loader.device.type, loader.batch_size) == (["a"], "cpu", 5)
    listed = CellMapDataLoader(crops, batch_size=3, sampler=torch.utils.data.SequentialSampler(crops), device="cpu")
    assert next(iter(listed))["idx"].tolist() == [0, 1, 2]


def test_the_seed_is_that_of_the_generator() -> None:
    orders = []
    for settings in ({"seed": 3}, {"rng": torch.Generator().manual_seed(3)}, {"seed": 4}, {}):
        loader = CellMapDataLoader(Crops(50, [[1, 1]]), batch_size=50, device="cpu", **settings)
        (batch,) = loader
        orders.append((batch["idx"].tolist(), batch["raw"].tolist()))
    assert orders[0] == orders[1]
    assert len({str(order) for order in orders}) == 3


def test_another_device_keeps_the_position() -> None:
    crops = Crops(20, [[1, 1]])
    loader = CellMapDataLoader(crops, batch_size=5, device="cpu")
    expected = [batch["idx"].tolist() for batch in loader]
    again = CellMapDataLoader(crops, batch_size=5, device="cpu")
    iterator = iter(again)
    assert next(iterator)["idx"].tolist() == expected[0]
    assert again.to("cpu") is again
    assert crops.moved == ["cpu"]
    assert [batch["idx"].tolist() for batch in again] == expected[1:]


@given(st.lists(st.lists(st.integers(0, 1), min_size=3, max_size=3), min_size=1, max_size=6))
def test_crops_by_class(matrix: list[list[int]]) -> None:
    """The largest and smallest class are as close as a long greedy run with equal parts brings them."""
    counts = np.zeros(3)
    visits = np.zeros(len(matrix))
    annotated = np.array(matrix, bool)
    active = np.flatnonzero(annotated.any(axis=0))
    joined = Joined([Crops(crop + 1, [row]) for crop, row in enumerate(matrix)])
    if not len(active):
        with pytest.raises(ConfigError, match="none of the crops"):
            class_weights(joined)
        return
    for _ in range(1000 * len(active)):
        chosen = active[np.argmin(counts[active].round(6))]
        part = annotated[:, chosen] / annotated[:, chosen].sum()
        visits += part
        counts += part @ annotated
    found = class_weights(joined)
    weights = np.array(list(found["weights"].values()), float)
    np.testing.assert_allclose(weights / weights.sum(), visits / visits.sum(), atol=0.003)
    ends = np.cumsum(np.arange(1, len(matrix) + 1))
    assert list(found["groups"].values()) == [range(end - crop - 1, end) for crop, end in enumerate(ends.tolist())]


def test_crops_without_items_and_shares_of_one_dataset() -> None:
    joined = Joined([Crops(4, [[1, 0]]), Crops(0, [[0, 1]]), Crops(2, [[0, 1]])])
    assert class_weights(joined)["groups"] == {"crop 0": range(4), "crop 2": range(4, 6)}
    found = class_weights(Crops(7, [[1, 0], [0, 1], [1, 0]]))
    assert list(found["groups"].values()) == [range(3), range(3, 5), range(5, 7)]
    assert found["weights"]["crop 1"] == 2 * found["weights"]["crop 0"] == 2 * found["weights"]["crop 2"]
    with pytest.raises(ConfigError, match=r"list does not have get_crop_class_matrix"):
        CellMapDataLoader([1, 2], weighted_sampler=True)
