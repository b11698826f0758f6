"""The segmentation demo learns, at a tiny size, and draws what it says."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import train_segmentation
from matplotlib.image import imread

from dali_pipes import SampleLoader


@pytest.mark.slow
def test_it_learns_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_segmentation.main(
        steps=40, side=12, batch_size=2, width=4, size=28, workers=0, seed=0, device="cpu", out=tmp_path / "run"
    )
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["steps"] == 40
    assert report["loss"] < 0.8 * report["first_loss"]
    assert set(report["overlap"]) == set(train_segmentation.CLASSES)
    assert all(0 <= score <= 1 for score in report["overlap"].values())
    for name in ("loss.png", "prediction.png"):
        assert imread(tmp_path / "run" / name).std() > 0


def test_crops_and_their_groups() -> None:
    raw, truth = train_segmentation.make_volume((28, 28, 28), 0)
    assert set(np.unique(truth)) == {0, 1, 2}
    assert raw[truth > 0].mean() > raw[truth == 0].mean() + 0.3
    crops = train_segmentation.Crops(raw, truth, 12, 4, augments=True)
    groups = crops.groups()
    assert sorted([*groups["large"], *groups["other"]]) == list(range(len(crops)))
    for item in groups["large"]:
        assert (crops[int(item)]["truth"] == 2).any()
    batches = []
    for workers in (0, 1):
        settings = {"batch_size": 4, "groups": groups, "seed": 1, "device": "cpu", "num_workers": workers}
        with SampleLoader(crops, **settings) as loader:  # type: ignore[arg-type]
            batches.append(next(iter(loader)))
    assert torch.equal(batches[0]["raw"], batches[1]["raw"])
    assert not torch.equal(batches[0]["raw"][0], batches[0]["raw"][0].flip(1))


def test_overlap() -> None:
    truth = torch.tensor([0, 0, 1, 1])
    assert train_segmentation.overlap(torch.tensor([0, 1, 1, 1]), truth) == pytest.approx([1 / 2, 2 / 3, 1])
    perfect = 50 * torch.nn.functional.one_hot(truth[None, :, None, None], 3).movedim(-1, 1).float()
    assert train_segmentation.segmentation_loss(perfect, truth[None, :, None, None]) < 0.01
    assert train_segmentation.segmentation_loss(-perfect, truth[None, :, None, None]) > 1
