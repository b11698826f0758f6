"""The recipes of the manual, run at toy size, and what their models were trained on.

    run = Run(folder, corpus)
    run.start(recipe("accelerate"), stop_at=7)      # the trainer fails in the 7th step
    run.start(recipe("accelerate"))                 # the same script again: goes on from its last checkpoint
    run.batches                                     # of the whole life, without those lost between checkpoint and end

A recipe is run as it is printed, apart from its sizes (`SIZES`). What is recorded is what reaches the model: the first
token of each row that an embedding is given while gradients are on. In a counting corpus that names the row.
"""

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import manual
import torch

from dali_pipes import TokenLoader

SEQ_LEN = 8
SIZES = {
    r"\b1024\b": str(SEQ_LEN),
    r"\b50304\b": "512",
    r"\b64\b": "8",
    r"hidden_size=8, ": "hidden_size=8, num_attention_heads=2, num_key_value_heads=1, ",
    r"intermediate_size=128, num_hidden_layers=2": "intermediate_size=16, num_hidden_layers=1",
    r"batch_size\": 8\b": 'batch_size": 3',
    r"batch_size=8\b": "batch_size=3",
    r"\b24 //": "6 //",
    r"\b400\b": "4",
    r"(?<!-)\b100\b": "2",
    r"\"validation_fraction\": 0.01": '"validation_fraction": 0.3',
    r"Accelerator\(": "Accelerator(cpu=True, ",
    r'TrainingArguments\("run", ': 'TrainingArguments("run", use_cpu=True, report_to=[], logging_steps=1, ',
    r"lightning\.Trainer\(": "lightning.Trainer(logger=False, enable_progress_bar=False, enable_model_summary=False, ",
}
"""What a test changes: sizes, the device, and output that a test has no use for."""


class Stopped(Exception):
    """Raised in the middle of a step, as a failing trainer would."""


def _fail() -> None:
    raise Stopped


def recipe(name: str) -> str:
    """The code of a recipe of the manual, at toy size."""
    source = manual.recipe(name)
    assert '"data/*.bin"' in source
    for pattern, replacement in SIZES.items():
        source = re.sub(pattern, replacement, source)
    return source


class Run:
    """A training run in a folder of its own, over as many starts as it takes."""

    def __init__(self, folder: Path, corpus: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.corpus = folder, corpus
        self.batches: list[list[int]] = []
        """First tokens of the rows of each batch that the surviving model was trained on."""
        self.losses: list[float] = []
        """Loss of each of them, summed over its labels."""
        self.kept: list[int] = []
        """Batches that the checkpoint had which each later start went on from."""

    def start(self, source: str, stop_at: int | None = None, stop: Callable[[], None] = _fail) -> dict[str, Any]:
        """Run a recipe's script from its beginning; its variables, or what there was of them when it was stopped.

        `stop_at` counts the batches of this start from 1; before the step of that batch `stop` is called.
        """
        variables: dict[str, Any] = {"__name__": "__main__"}
        torch.manual_seed(0)
        with contextlib.chdir(self.folder), self._noting_loads(), self._noting_steps(stop_at, stop):
            try:
                exec(compile(source.replace("data/*.bin", self.corpus), "<recipe>", "exec"), variables)
            except Stopped:
                assert stop_at is not None
            else:
                assert stop_at is None, f"the run has no batch {stop_at}"
        return variables

    @contextlib.contextmanager
    def _noting_loads(self) -> Iterator[None]:
        """Forget what was trained on behind the state that is loaded; without one, all of it."""
        load, batches, losses = TokenLoader.load_state_dict, self.batches, self.losses
        self.batches, self.losses = [], []

        def noting(loader: TokenLoader, state: Any) -> None:
            load(loader, state)
            kept = loader.epoch * len(loader) + loader.step
            self.kept.append(kept)
            self.batches, self.losses = batches[:kept], losses[:kept]

        with patch.object(TokenLoader, "load_state_dict", noting):
            yield

    @contextlib.contextmanager
    def _noting_steps(self, stop_at: int | None, stop: Callable[[], None]) -> Iterator[None]:
        embed, cross_entropy = torch.nn.Embedding.forward, torch.nn.functional.cross_entropy
        number = 0

        def noting_rows(embedding: torch.nn.Embedding, ids: torch.Tensor) -> torch.Tensor:
            nonlocal number
            if torch.is_grad_enabled():
                number += 1
                if number == stop_at:
                    stop()
                self.batches.append(ids[:, 0].tolist())
            return embed(embedding, ids)

        def noting_losses(*arguments: Any, **options: Any) -> torch.Tensor:
            loss = cross_entropy(*arguments, **options)
            if torch.is_grad_enabled():
                self.losses.append(loss.item())
            return loss

        with (
            patch.object(torch.nn.Embedding, "forward", noting_rows),
            patch.object(torch.nn.functional, "cross_entropy", noting_losses),
        ):
            yield


def weights(variables: dict[str, Any]) -> list[torch.Tensor]:
    """The parameters of a recipe's model as it ended."""
    model = variables["trainer"].model if "trainer" in variables else variables["model"]
    return [value.detach().clone() for value in model.parameters()]


def expected_batches(loader: TokenLoader, epochs: int, **changes: Any) -> list[list[int]]:
    """First tokens of the rows of the first epochs, from a loader with the same settings."""
    with TokenLoader(loader.config, **changes) as fresh:
        return [batch["input_ids"][:, 0].tolist() for _ in range(epochs) for batch in fresh]
