"""Contact sheets: what is drawn of fields of every shape, of which samples, without a trace in the run."""

import random
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from dali_pipes import SampleLoader
from dali_pipes.errors import ConfigError, SampleError
from dali_pipes.samples import contact_sheet, sample_loader
from dali_pipes.samples.contact_sheet import write_contact_sheet

Pair = namedtuple("Pair", "left right")
COUNT = 3


def array(*shape: int, dtype: str = "float32") -> Any:
    return np.arange(COUNT * int(np.prod(shape))).reshape(COUNT, *shape).astype(dtype)


def panels(values: Any) -> dict[str, list[Any]]:
    """The first words of the title, and the pictures, of each panel."""
    found = contact_sheet._panels("f", list(values))
    return {panel.title.partition("\n")[0]: list(panel.pictures) for panel in found}


def equal(found: dict[str, list[Any]], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, pictures in expected.items():
        np.testing.assert_array_equal(np.stack(found[name]), pictures)


def test_axes() -> None:
    image, first, last = array(6, 5), array(3, 6, 5), array(6, 5, 4)
    equal(panels(image), {"f": image})
    equal(panels(first), {"f": first.transpose(0, 2, 3, 1)})
    equal(panels(last), {"f": last})
    equal(panels(array(1, 6, 5)), {"f": array(6, 5)})
    equal(panels(array(6, 5, 1)), {"f": array(6, 5)})
    volume = array(8, 6, 5)
    slices = {f"f z = {z}": volume[:, z] for z in (2, 4, 6)}
    equal(panels(volume), slices)
    equal(panels(volume[:, None]), slices)
    equal(panels(volume[..., None]), slices)
    equal(panels(volume[:, :2]), {"f z = 0": volume[:, 0], "f z = 1": volume[:, 1]})
    several = array(6, 8, 5, 7)
    equal(panels(several), {f"f channel {c}, z = 4": several[:, c, 4] for c in range(4)})
    equal(panels(array(8, 5, 7, 3)), {f"f channel {c}, z = 4": array(8, 5, 7, 3)[:, 4, :, :, c] for c in range(3)})
    for other in (
        array(),
        array(4),
        array(2, 2, 2, 2, 2),
        array(0, 5),
        array(2, 2).astype("complex64"),
        array(2, 2).astype("U9"),
    ):
        assert panels(other) == {}


@pytest.mark.parametrize(
    ("batch", "names"),
    [
        ((torch.zeros(4, 5, 5), torch.arange(4)), {"0", "1"}),
        ({"a": {"b": torch.zeros(4, 5, 5)}, "c": ["x", "y", "z", "w"]}, {"a.b", "c"}),
        (Pair(torch.zeros(4, 5, 5), [torch.zeros(4, 2, 2)]), {"left", "right.0"}),
        ([torch.zeros(5, 5), torch.zeros(6, 5), torch.zeros(7, 5)], {""}),
        ([torch.zeros(5, 5, dtype=torch.bfloat16)[None].repeat(3, 1, 1)], {"0"}),
        ([{"a": 1}, {"a": 2}, {"a": 3}], set()),
    ],
)
def test_fields(batch: Any, names: set[str]) -> None:
    found = dict(contact_sheet._fields(batch, COUNT))
    assert set(found) == names
    assert {len(values) for values in found.values()} <= {COUNT}


@pytest.mark.parametrize("shape", [(5, 6), (3, 5, 6), (2, 5, 6)])
def test_types_and_numbers_of_any_range(tmp_path: Path, shape: tuple[int, ...]) -> None:
    values = {dtype: array(*shape, dtype=dtype) for dtype in ("bool", "uint8", "int16", "uint16", "float16", "float64")}
    names = {"$x_{": array(*shape) * 0, "n": ["$a", "b" * 99, "c"]}
    write_contact_sheet(values | names, ["a", "$b_{", "c"], tmp_path / "a.png", "$h_{")
    assert imread(tmp_path / "a.png").shape[2] == 4


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    values = array(3, 5, 6)
    values[0, 0, 0], values[1] = np.inf, np.nan
    (panel,) = contact_sheet._panels("f", list(values))
    assert (panel.low, panel.high) == (6, 269)
    write_contact_sheet([values, values[:, 0], values * np.nan], ["a", "b", "c"], tmp_path / "a.png")


def test_equal_labels_have_equal_colors(tmp_path: Path) -> None:
    """Whatever other labels are in the batch; 0 is black."""
    labels = np.zeros((2, 20, 20), np.int64)
    labels[:, 5:15, 5:15] = 3
    labels[1, :3] = 7
    colors = []
    for row in range(2):
        write_contact_sheet([labels[row : row + 1]], ["a"], tmp_path / "a.png")
        found, counts = np.unique(imread(tmp_path / "a.png").reshape(-1, 4), axis=0, return_counts=True)
        colors.append({tuple(color) for color in found[counts > 1000].tolist() if len(set(color[:3])) > 1})
    assert [len(each) for each in colors] == [1, 2]
    assert colors[0] < colors[1]
    assert not next(contact_sheet._panels("f", [array(4, 8)[0]])).are_labels


def test_what_cannot_be_drawn(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"images or volumes.*: x \(4,\), y \(\)"):
        write_contact_sheet({"x": array(4), "y": [1, 2, 3]}, ["a"] * COUNT, tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"images or volumes.*: the batch \(4,\)"):
        write_contact_sheet(array(4), ["a"] * COUNT, tmp_path / "a.png")
    with pytest.raises(ConfigError, match=r"a\.doc: .*\.png"):
        write_contact_sheet(array(4, 4), ["a"] * COUNT, tmp_path / "a.doc")


class Crops(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, item: int) -> Any:
        if item == 22:
            raise OSError("gone")
        return torch.rand(4, 5) + item, np.random.rand()  # noqa: NPY002


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_preview_is_the_batch_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_workers: int) -> None:
    drawn: list[Any] = []

    def keep(batch: Any, captions: list[str], path: Path, heading: str) -> None:
        drawn.append((batch, captions, heading))
        write_contact_sheet(batch, captions, path, heading)

    monkeypatch.setattr(sample_loader, "write_contact_sheet", keep)
    settings: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": num_workers, "device": "cpu"}
    settings |= {"rank": 1, "world_size": 2, "num_samples": 16, "seed": 5}
    with SampleLoader(torch.utils.data.Subset(Crops(), range(22)), **settings) as loader:
        path = tmp_path / "a.png"
        states = random.getstate(), torch.get_rng_state().tolist()
        before = loader.state_dict()
        for step in (1, 0):
            loader.preview(step, path, rows=3)
        assert loader.state_dict() == before
        assert (random.getstate(), torch.get_rng_state().tolist()) == states
        batches = list(loader)
        for (batch, captions, heading), step in zip(drawn, (1, 0), strict=True):
            assert all(torch.equal(one, other) for one, other in zip(batch, batches[step], strict=True))
            assert f"step {step}, rank 1" in heading
            items = [loader.locate(step, row, 0) for row in range(3)]
            assert captions == [f"item {place.item}, row {place.row}" for place in items]
        assert [place.epoch for place in loader.preview(path=path)] == [1, 1, 1, 1], "the next batch"
        assert imread(path).ndim == 3
        with pytest.raises(ConfigError, match="step 2"):
            loader.preview(2, path)
    with (
        SampleLoader(Crops(), batch_size=23, device="cpu") as loader,
        pytest.raises(SampleError, match=r"item 22.*gone"),
    ):
        loader.preview(0, path)


def test_a_preview_goes_through_the_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fn = pytest.importorskip("nvidia.dali.fn")
    drawn: list[Any] = []
    monkeypatch.setattr(sample_loader, "write_contact_sheet", lambda batch, *_: drawn.append(batch))
    images = list(np.random.default_rng(0).integers(0, 256, (9, 4, 9, 3), np.uint8))

    def augment(image: Any, u: Any) -> Any:
        return fn.crop(fn.reinterpret(image, layout="HWC"), crop=(3, 3), crop_pos_x=u[0])

    settings: dict[str, Any] = {"batch_size": 3, "shuffle": True, "device": "cpu", "num_draws": 1}
    with SampleLoader(images, graph=augment, **settings) as loader:
        run = iter(loader)
        first = next(run)
        loader.preview(1, tmp_path / "a.png")
        second = next(run)
    assert torch.equal(drawn[0], second)
    assert not torch.equal(drawn[0], first)
