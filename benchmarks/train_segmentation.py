"""Train a small 3D U-Net on a synthetic volume, fed by `SampleLoader`: `python benchmarks/train_segmentation.py`.

The noisy volume contains bright bubbles of two sizes; large bubbles (class 2) are rare. With `groups`, crops with large
bubbles are sampled as often as all other crops together. The dataset augments crops at random. The run writes
`loss.png` and `prediction.png`, which shows unseen crops with truth and prediction. The last line of the output is one
JSON line.
"""

import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

# Torch's threads spin while they wait for each other, which takes a core from the one that is waited for. Read when
# torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import numpy.typing as npt
import torch
import typer
from comparison.report import machine, wide_console
from matplotlib.figure import Figure
from rich.table import Table
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

from dali_pipes import SampleLoader
from dali_pipes.samples.contact_sheet import write_contact_sheet

CLASSES = ("background", "small bubble", "large bubble")
SMOOTHING_STEPS = 10


def make_volume(shape: tuple[int, int, int], seed: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Intensities and classes, both (D, H, W). All bubbles have bright shells: their size tells them apart."""
    rng = np.random.default_rng(seed)
    grid = np.meshgrid(*(np.arange(side, dtype=np.float32) for side in shape), indexing="ij")
    raw, truth = np.zeros(shape, np.float32), np.zeros(shape, np.int64)
    voxels = np.prod(shape)
    for kind, count, radii in ((1, voxels // 1_500, (2.5, 4.0)), (2, voxels // 40_000, (7.0, 9.0))):
        for _ in range(max(2, int(count))):
            radius = rng.uniform(*radii)
            center = [rng.uniform(0, side) for side in shape]
            distance = np.sqrt(sum((axis - middle) ** 2 for axis, middle in zip(grid, center, strict=True)))
            inside = distance < radius
            if (truth[inside] > 0).mean() > 0.1:
                continue
            truth[inside] = kind
            raw[inside] = np.where(distance[inside] > radius - 1.5, 1.0, 0.4)
    return raw + rng.normal(0, 0.25, shape).astype(np.float32), truth


class Crops(Dataset[dict[str, torch.Tensor]]):
    """Cubes of a volume, flipped and brightened at random if `augments`: raw (1, S, S, S), truth (S, S, S)."""

    def __init__(
        self, raw: npt.NDArray[np.float32], truth: npt.NDArray[np.int64], side: int, stride: int, *, augments: bool
    ) -> None:
        self.raw, self.truth, self.side, self.augments = raw, truth, side, augments
        corners = [range(0, length - side + 1, stride) for length in raw.shape]
        self.corners = np.stack(np.meshgrid(*corners, indexing="ij"), axis=-1).reshape(-1, 3)

    def __len__(self) -> int:
        return len(self.corners)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        cube = tuple(slice(corner, corner + self.side) for corner in self.corners[item].tolist())
        raw, truth = self.raw[cube], self.truth[cube]
        if self.augments:  # the loader seeds these generators for each item
            axes = [axis for axis in range(3) if np.random.random() < 0.5]  # noqa: NPY002
            raw = np.flip(raw, tuple(axes)) * np.float32(np.random.uniform(0.8, 1.2))  # noqa: NPY002
            truth = np.flip(truth, tuple(axes))
        return {"raw": torch.from_numpy(raw[None].copy()), "truth": torch.from_numpy(truth.copy())}

    def groups(self) -> dict[str, npt.NDArray[np.int64]]:
        """Items with a large bubble in their middle half, and all others."""
        quarter = self.side // 4
        middles = [
            self.truth[tuple(slice(corner + quarter, corner + self.side - quarter) for corner in place)]
            for place in self.corners.tolist()
        ]
        is_rare = np.array([(middle == 2).any() for middle in middles])
        return {"large": np.flatnonzero(is_rare), "other": np.flatnonzero(~is_rare)}


class UNet(nn.Module):
    """A 3D U-Net of three levels. (B, 1, S, S, S), with S a multiple of 4, to logits (B, classes, S, S, S)."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.down = nn.ModuleList([_block(1, width), _block(width, 2 * width), _block(2 * width, 4 * width)])
        self.up = nn.ModuleList([_block(6 * width, 2 * width), _block(3 * width, width)])
        self.head = nn.Conv3d(width, classes, 1)

    def forward(self, raw: torch.Tensor) -> torch.Tensor:
        """Logits of each voxel."""
        skipped = [self.down[0](raw)]
        for block in self.down[1:]:
            skipped.append(block(functional.max_pool3d(skipped[-1], 2)))
        out = skipped.pop()
        for block in self.up:
            out = block(torch.cat([functional.interpolate(out, scale_factor=2.0), skipped.pop()], dim=1))
        logits: torch.Tensor = self.head(out)
        return logits


def _block(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(inputs, outputs, 3, padding=1),
        nn.InstanceNorm3d(outputs, affine=True),
        nn.LeakyReLU(),
        nn.Conv3d(outputs, outputs, 3, padding=1),
        nn.InstanceNorm3d(outputs, affine=True),
        nn.LeakyReLU(),
    )


def segmentation_loss(logits: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Cross-entropy plus one minus the mean soft Dice coefficient of the classes, which counts rare classes in full."""
    likely = logits.softmax(dim=1)
    true = functional.one_hot(truth, len(CLASSES)).movedim(-1, 1)
    places = (0, 2, 3, 4)
    dice = (2 * (likely * true).sum(places) + 1) / (likely.sum(places) + true.sum(places) + 1)
    return functional.cross_entropy(logits, truth) + 1 - dice.mean()


def overlap(predicted: torch.Tensor, truth: torch.Tensor) -> list[float]:
    """Intersection over union of each class; 1 for a class that is nowhere."""
    found = []
    for kind in range(len(CLASSES)):
        both, either = (predicted == kind) & (truth == kind), (predicted == kind) | (truth == kind)
        found.append(float(both.sum() / either.sum()) if either.any() else 1.0)
    return found


def main(
    steps: Annotated[int, typer.Option(min=2, help="optimizer steps")] = 120,
    side: Annotated[int, typer.Option(min=8, help="voxels of a crop along each axis, a multiple of 4")] = 24,
    batch_size: Annotated[int, typer.Option(min=1, help="crops per step")] = 4,
    width: Annotated[int, typer.Option(min=1, help="channels at the first level")] = 8,
    size: Annotated[int, typer.Option(min=16, help="voxels of the volume along each axis")] = 72,
    workers: Annotated[int, typer.Option(min=0, help="worker processes")] = 0,
    seed: Annotated[int, typer.Option(help="seed of the volume, the order and the model")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    out: Annotated[Path, typer.Option(help="folder for the pictures")] = Path("runs/segmentation"),
) -> None:
    """Train, measure the overlap on unseen crops, and draw them; the last line is one JSON line."""
    about, console = machine(), wide_console()
    torch.manual_seed(seed)
    seen = make_volume((size, size, size), seed)
    unseen = make_volume((side, 2 * side, 2 * side), seed + 1)
    crops = Crops(*seen, side, 4, augments=True)
    model = UNet(width, len(CLASSES)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    losses: list[float] = []
    begin = time.perf_counter()
    settings: dict[str, Any] = {"batch_size": batch_size, "groups": crops.groups(), "num_workers": workers}
    with SampleLoader(crops, **settings, seed=seed, repeat=True, device=device) as loader:
        for _, batch in zip(range(steps), loader, strict=False):
            loss = segmentation_loss(model(batch["raw"]), batch["truth"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            losses.append(loss.item())
            if len(losses) % 25 == 0:
                console.print(f"step {len(losses):,}: loss {np.mean(losses[-SMOOTHING_STEPS:]):.3f}", highlight=False)
        waited = loader.stats().data_wait_s
    train_s = time.perf_counter() - begin
    with SampleLoader(Crops(*unseen, side, side, augments=False), batch_size=4, device=device) as validation:
        (batch,) = validation
    model.eval()
    with torch.inference_mode():
        predicted = model(batch["raw"]).argmax(dim=1)
    scores = overlap(predicted, batch["truth"])
    out.mkdir(parents=True, exist_ok=True)
    sheet = {"raw": batch["raw"], "truth": batch["truth"], "prediction": predicted}
    write_contact_sheet(
        sheet, [f"crop {number}" for number in range(4)], out / "prediction.png", f"after {steps:,} steps"
    )
    save_losses(losses, out / "loss.png")
    table = Table("class", "intersection over union", title=f"{steps:,} steps in {train_s:.0f} s; pictures in {out}")
    for name, score in zip(CLASSES, scores, strict=True):
        table.add_row(name, f"{score:.2f}")
    console.print(table)
    figures = {"overlap": dict(zip(CLASSES, scores, strict=True)), "train_s": train_s, "data_wait_s": waited}
    means = {"first_loss": float(np.mean(losses[:SMOOTHING_STEPS])), "loss": float(np.mean(losses[-SMOOTHING_STEPS:]))}
    print(json.dumps({"benchmark": "train_segmentation", "machine": about, "steps": steps, **means, **figures}))


def save_losses(losses: list[float], path: Path) -> None:
    """A chart of the loss of each step."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(losses) + 1), losses)
    axes.set(xlabel="step", ylabel="cross-entropy + 1 - Dice", yscale="log")
    figure.savefig(path)


if __name__ == "__main__":
    typer.run(main)
