"""What each process of a launched group does with the manual's recipes. Writes FOLDER/rank_R.json.

torchrun ... on_rank.py FOLDER CORPUS STOP_AT       the one for DDP, killed in a step
"""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from recipes import Run, recipe, weights

DDP = "ddp"
STOP_AT = 7


ON_CPUS = {
    "lightning.Trainer(": 'lightning.Trainer(devices=2, strategy="ddp", ',
    "model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))": (
        "model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters()), loader)"
    ),
}
"""Changes to the recipes: what Lightning needs without GPUs, and a loader that is handed to Accelerate to prepare."""


def stop_and_start(folder: Path, corpus: str, names: list[str]) -> dict[str, Any]:
    report: dict[str, Any] = {}
    for name in names:
        source = recipe(name)
        for old, new in ON_CPUS.items():
            source = source.replace(old, new)
        place = folder / name
        unbroken, broken = Run(place / "unbroken", corpus), Run(place / "broken", corpus)
        variables = unbroken.start(source)
        broken.start(source, STOP_AT)
        expected, found = weights(variables), weights(broken.start(source))
        report[name] = {
            "unbroken": unbroken.batches,
            "broken": broken.batches,
            "kept": broken.kept[-1],
            "same weights": all(map(torch.equal, expected, found)),
            "weights": [float(values.sum()) for values in expected],
        }
        if name == "lightning":
            report[name]["sums"] = {key: float(sum) for key, sum in variables["trainer"].callback_metrics.items()}
    if not torch.distributed.is_initialized():  # no trainer there that did it
        torch.distributed.init_process_group("gloo")
    validation = Run(folder / "validation", corpus).start(recipe("validation"))
    report["validation"] = validation["validation_loss"](validation["model"])
    return report


def train_and_die(folder: Path, corpus: str, stop_at: int) -> None:
    torch.set_default_dtype(torch.float64)  # so that another order of summation does not show
    run = Run(folder, corpus)

    def die() -> None:
        write(folder, {"batches": run.batches, "losses": run.losses, "kept": run.kept})
        os.kill(os.getpid(), signal.SIGKILL)

    run.start(recipe(DDP), stop_at, die)


def write(folder: Path, report: dict[str, Any]) -> None:
    (folder / f"rank_{os.environ['RANK']}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    train_and_die(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
