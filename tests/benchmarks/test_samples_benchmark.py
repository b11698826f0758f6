"""The benchmark of samples runs at small size; its children check the batches that they time."""

import json
from pathlib import Path
from typing import Any

import pytest
import samples
import torch
from comparison import sample_sets
from comparison.check import CheckError
from comparison.samples import rates, run, start

from dali_pipes import SampleLoader


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("benchmark") / "data"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_sets, "FILES", 8)
        patch.setattr(sample_sets, "VOLUME_SIZE", 72)
        sample_sets.make_data(folder)
    return str(folder)


def test_datasets_hold_what_they_say(data: str) -> None:
    pytest.importorskip("zarr")
    shapes = {"jpeg": (224, 224, 3), "volume": (64, 64, 64), "arrays": (256,)}
    for kind, dataset in sample_sets.DATASETS.items():
        made: Any = dataset(Path(data), 20)
        assert len(made) == 20
        sample, item = made[19]
        assert sample.shape == shapes[kind]
        assert item == 19
        assert sample.dtype == (torch.float32 if kind == "arrays" else torch.uint8)
    assert not torch.equal(sample_sets.Jpegs(Path(data), 8)[1][0], sample_sets.Jpegs(Path(data), 8)[2][0])


@pytest.mark.parametrize(("kind", "names"), [("arrays", ["torch_0", "ours_0"]), ("jpeg", ["torch_0", "ours_graph"])])
def test_rates_of_loaders_in_turn(data: str, kind: str, names: list[str]) -> None:
    if "ours_graph" in names:
        pytest.importorskip("nvidia.dali")
    found = rates(names, kind, data, 128, 2, 0.02)
    assert list(found) == names
    for slices in found.values():
        assert len(slices) == 2
        assert all(figures["items_per_s"] > 0 for figures in slices)
        assert all(figures["cpu_s_per_item"] >= 0 for figures in slices)


@pytest.mark.parametrize("name", ["torch_0", "ours_0"])
def test_a_start_and_a_resume(data: str, name: str) -> None:
    figures = start(name, "arrays", data, 640)
    assert set(figures) == {"first_batch_s", "first_batch_cpu_s", "resume_s", "resume_cpu_s"}
    assert figures["resume_s"] > 0


def test_wrong_items_fail(data: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = SampleLoader.locate

    def moved(self: SampleLoader, step: int, row: int, epoch: int | None = None) -> Any:
        return where(self, step + 1, row, epoch)

    monkeypatch.setattr(SampleLoader, "locate", moved)
    with pytest.raises(CheckError, match=r"locate"):
        rates(["ours_0"], "arrays", data, 256, 1, 0.01)
    assert "failed" in run({"name": "ours_0", "kind": "arrays", "folder": data, "items": 640})


@pytest.mark.slow
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("nvidia.dali")

    def without_zarr(folder: Path) -> str:
        sample_sets.make_data(folder)
        return "zarr: none"

    monkeypatch.setattr(samples, "make_data", without_zarr)
    samples.main(kinds="jpeg,volume", slices=2, seconds=0.1, rounds=1, items=256, data_dir=tmp_path)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["failed"] == []
    assert [entry["skipped"] for entry in report["entries"] if "skipped" in entry] == ["zarr: none"]
    found = [(entry["part"], entry["loader"]) for entry in report["entries"] if "skipped" not in entry]
    assert found == [(part, name) for part in ("rate", "start") for name in samples.KINDS["jpeg"]]
    assert {aim["met"] for aim in report["aims"]} <= {True, False}
    assert len(report["aims"]) == 2 + 2 * 3
    assert list(tmp_path.iterdir()) == []
