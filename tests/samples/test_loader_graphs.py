"""`SampleLoader` with `graph=`: the same images on any ranks, batches and workers, and after a resume."""

from typing import Any

import numpy as np
import pytest
import torch
from graphs import jpeg

from dali_pipes import SampleLoader
from dali_pipes.errors import LoaderClosedError, SampleError

pytest.importorskip("nvidia.dali", reason="DALI is not installed")


class Jpegs:
    """Encoded images; one that is none, if asked for."""

    def __init__(self, length: int, broken: int | None = None) -> None:
        self.length, self.broken = length, broken

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, item: int) -> dict[str, Any]:
        encoded = b"not an image" if item == self.broken else jpeg(item)
        return {"image": np.frombuffer(encoded, np.uint8), "item": item}


class ReadTogether(Jpegs):
    """The same, as datasets that need no worker processes are."""

    def read_items(self, items: list[int]) -> list[dict[str, Any]]:
        return [self[item] for item in items]


def crop(nodes: Any, u: Any) -> Any:
    from nvidia.dali import fn

    image = fn.decoders.image(nodes["image"], device="cpu")
    return {"image": fn.crop(image, crop=(16, 16), crop_pos_x=u[0], crop_pos_y=u[1]), "item": nodes["item"]}


def images(loader: SampleLoader) -> list[tuple[int, list[int]]]:
    return [
        (int(item), image.flatten().tolist())
        for batch in loader
        for item, image in zip(batch["item"], batch["image"], strict=True)
    ]


@pytest.fixture(scope="module")
def whole() -> list[tuple[int, list[int]]]:
    with SampleLoader(Jpegs(20), 20, True, graph=crop, num_draws=2) as loader:
        return images(loader)


@pytest.mark.parametrize(("dataset", "num_workers"), [(Jpegs(20), 0), (Jpegs(20), 1), (ReadTogether(20), 0)])
def test_the_same_in_any_batches_and_after_a_resume(
    dataset: Any, num_workers: int, whole: list[tuple[int, list[int]]]
) -> None:
    assert len({str(pixels) for _, pixels in whole}) == 20
    with SampleLoader(dataset, 3, True, graph=crop, num_draws=2, num_workers=num_workers) as loader:
        iterator = iter(loader)
        first = images([next(iterator), next(iterator)])  # type: ignore[arg-type]
        state = loader.state_dict()
        loader.load_state_dict(state)  # batches that are in work are dropped
        assert first + images(loader) == whole
    by_rank = []
    for rank in range(2):
        with SampleLoader(dataset, 5, True, graph=crop, num_draws=2, rank=rank, world_size=2) as loader:
            by_rank.append(images(loader))
    assert [image for row in zip(*by_rank, strict=True) for image in row] == whole


def test_tensors_and_closing() -> None:
    loader = SampleLoader(Jpegs(4), 2, graph=crop, num_draws=2)
    iterator = iter(loader)
    batch = next(iterator)
    assert batch["image"].shape == (2, 16, 16, 3)
    assert batch["image"].dtype == torch.uint8
    before = batch["image"].clone()
    loader.close()
    assert torch.equal(batch["image"], before)
    with pytest.raises(LoaderClosedError):
        next(iterator)


@pytest.mark.parametrize("dataset", [Jpegs(12, broken=7), ReadTogether(12, broken=7)])
def test_an_image_that_cannot_be_decoded(dataset: Any) -> None:
    found: list[list[int]] = []
    with SampleLoader(dataset, 3, graph=crop, num_draws=2) as loader:
        with pytest.raises(SampleError, match=r"item 7 of .* \(epoch 0, row 7\)") as caught:
            found += (batch["item"].tolist() for batch in loader)
        assert found == [[0, 1, 2], [3, 4, 5]]
        assert (caught.value.item, caught.value.row) == (7, 7)
        assert loader.state_dict()["rows"] == 6
        dataset.broken = None
        assert [item for item, _ in images(loader)] == list(range(6, 12))


def test_read_ahead_errors_come_at_their_batch() -> None:
    class Failing(ReadTogether):
        def read_items(self, items: list[int]) -> list[dict[str, Any]]:
            if 4 in items:
                raise OSError(5, "no such file")
            return super().read_items(items)

    found: list[list[int]] = []
    with (
        SampleLoader(Failing(8), 2, collate_fn=list) as loader,
        pytest.raises(SampleError, match="items 4, 5") as caught,
    ):
        found += ([sample["item"] for sample in batch] for batch in loader)
    assert found == [[0, 1], [2, 3]]
    assert isinstance(caught.value.__cause__, OSError)
