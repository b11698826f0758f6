"""What a training run computes: model, plan and loader settings, from the options, a checkpoint, or a recipe."""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpt import ModelShape
from trainer import Plan

from dali_pipes import LoaderConfig
from dali_pipes.errors import StateError

_DATA = Path(__file__).resolve().parent / "data"
DEMO_MIXTURE = {
    "plays": {"corpus": [str(_DATA / "tinyshakespeare" / name) for name in ("train.bin", "val.bin")], "weight": 0.6},
    "code": {"corpus": str(_DATA / "python_code.bin"), "weight": 0.4},
}
"""About as large each; the end of each is kept for validation."""
GPT2_VOCABULARY = 50257


class Model(StrEnum):
    TINY = "tiny"
    SMALL = "small"
    GPT2_124M = "124m"


@dataclass(frozen=True)
class Recipe:
    """A model's shape, and what the options are where they are not given."""

    layers: int
    heads: int
    width: int
    batch_size: int
    seq_len: int
    steps: int
    learning_rate: float
    beta2: float


RECIPES = {
    # For tests: seconds on anything.
    Model.TINY: Recipe(1, 2, 16, batch_size=2, seq_len=16, steps=20, learning_rate=3e-3, beta2=0.99),
    # On a CPU most of a step is the output over 50,304 ids, whatever the layers do, so tokens are what costs: small
    # batches, and as many steps as two cores do in well under three minutes even while they are busy with other work.
    Model.SMALL: Recipe(4, 4, 128, batch_size=4, seq_len=128, steps=220, learning_rate=2e-3, beta2=0.99),
    # GPT-2's smallest, with the learning rate of GPT-3's model of that size (Brown et al. 2020, table 2.1).
    Model.GPT2_124M: Recipe(12, 12, 768, batch_size=16, seq_len=1024, steps=2000, learning_rate=6e-4, beta2=0.95),
}


@dataclass(frozen=True)
class Job:
    """All that decides what a run computes; saved with its checkpoints."""

    model: Model
    plan: Plan
    loader: LoaderConfig

    def to_dict(self) -> dict[str, Any]:
        """Plain values. Corpus paths are made absolute, so that a resume works from any folder."""
        loader = self.loader.model_dump(mode="json")
        for place in (loader, *(loader["mixture"] or {}).values()):
            if place["corpus"] is not None:
                place["corpus"] = [_absolute(path) for path in place["corpus"]]
        return {"model": str(self.model), "plan": asdict(self.plan), "loader": loader}

    def shape(self) -> ModelShape:
        """The model's shape; the vocabulary is padded to a multiple of 128, which GPUs multiply faster."""
        recipe = RECIPES[self.model]
        vocab_size = math.ceil((self.loader.vocab_size or GPT2_VOCABULARY) / 128) * 128
        return ModelShape(recipe.layers, recipe.heads, recipe.width, vocab_size, self.loader.row_len)


def make_job(
    model: Model | None,
    plan: Mapping[str, Any],
    loader: Mapping[str, Any],
    config_file: Path | None,
    saved: Mapping[str, Any] | None,
) -> Job:
    """The job of the options that were given (None: not given), else of the saved job, else of the model's recipe.

    Raises `ConfigError`; and `StateError` where a saved job cannot go on exactly with what was given.
    """
    model = model or (Model(saved["model"]) if saved else Model.SMALL)
    recipe = RECIPES[model]
    given_plan = {name: value for name, value in plan.items() if value is not None}
    given_loader = {name: value for name, value in loader.items() if value is not None}
    if config_file:
        config = LoaderConfig.from_file(config_file, **given_loader)
    elif saved:
        config = LoaderConfig(**{**saved["loader"], **given_loader})
    else:
        steps = given_plan.get("steps", recipe.steps)
        demo = {"mixture": DEMO_MIXTURE, "total_steps": steps, "validation_fraction": 0.05}
        defaults = {
            **({"validation_fraction": 0.1} if "corpus" in given_loader else demo),
            "vocab_size": GPT2_VOCABULARY,
            "batch_size": recipe.batch_size,
            "seq_len": recipe.seq_len,
            "seed": 1,
        }
        config = LoaderConfig(**{**defaults, **given_loader})
    # The model wants labels that are shifted already; the loss by source, the sources.
    outputs = ("input_ids", "labels", *(() if config.mixture is None else ("source_ids",)))
    config = config.replace(label_shift=True, outputs=outputs)
    default_plan = {
        "steps": recipe.steps,
        "learning_rate": recipe.learning_rate,
        "beta2": recipe.beta2,
        "val_every": 50,
        "val_batches": 50,
    }
    job = Job(model, Plan(**{**(saved["plan"] if saved else default_plan), **given_plan}), config)
    if saved:
        fixed = {
            "model": (saved["model"], str(job.model)),
            "batch_size": (saved["loader"]["batch_size"], config.batch_size),
            "learning_rate": (saved["plan"]["learning_rate"], job.plan.learning_rate),
        }
        differences = [f"{name}: saved {old!r}, now {new!r}" for name, (old, new) in fixed.items() if old != new]
        if differences:
            raise StateError(
                "the run cannot continue exactly:\n  "
                + "\n  ".join(differences)
                + "\nleave these options out, or start a new run"
            )
    return job


def _absolute(path: str) -> str:
    return path if path.startswith("synthetic:") else os.path.abspath(os.path.expanduser(path))
