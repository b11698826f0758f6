"""A Hugging Face Trainer at toy size: a corpus of documents, a model that notes its rows, a run from any checkpoint.

corpus = documents(folder, count=60, longest=11, seed=25)
run = Training(folder, {"corpus": corpus, "rows": "pack", ...})
whole = run.start(max_steps=40, save_steps=1)             # Outcome: rows, weights, trainer
rest = run.start(max_steps=40, checkpoint=run.checkpoint(17))
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from dali_pipes import TokenLoader
from dali_pipes.huggingface import loader_trainer

VOCAB = 512
END = 0
"""Id that ends a document."""


def documents(folder: Path, count: int, shortest: int, longest: int, seed: int) -> str:
    """A file of documents whose tokens count from 1, each with its end behind it; the path."""
    lengths = np.random.default_rng(seed).integers(shortest, longest + 1, count)
    tokens = np.arange(1, 1 + lengths.sum() + count)
    tokens[np.cumsum(lengths + 1) - 1] = END
    assert tokens.max() < VOCAB
    folder.mkdir(exist_ok=True)
    path = folder / "documents.bin"
    tokens.astype(np.uint16).tofile(path)
    return str(path)


class Model(torch.nn.Module):
    """Looks at one token at a time, and drops some, so that random states count; notes the rows it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.Sequential(
            torch.nn.Embedding(VOCAB, 4), torch.nn.Dropout(0.1), torch.nn.Linear(4, VOCAB)
        )
        self.batches: list[list[int]] = []

    def forward(
        self, input_ids: torch.Tensor, shift_labels: torch.Tensor, num_items_in_batch: Any = None, **others: Any
    ) -> dict[str, torch.Tensor]:
        if self.training:
            self.batches.append(input_ids[:, 0].tolist())
        logits, labels = self.layers(input_ids).flatten(0, 1), shift_labels.flatten()
        loss = torch.nn.functional.cross_entropy(logits, labels, reduction="sum")
        return {"loss": loss / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)}


class Outcome(NamedTuple):
    """What a start of a run did."""

    batches: list[list[int]]
    """First tokens of the rows of each batch."""
    weights: list[torch.Tensor]
    trainer: Any


class Training:
    """A run in a folder of its own."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.folder = folder
        self.settings = {"eos_id": END, "device": "cpu", "quiet": True, "batch_size": 2, "seq_len": 16, **settings}

    def epochs(self, count: int) -> list[list[list[int]]]:
        """First tokens of the rows of each batch, epoch by epoch."""
        with TokenLoader(**self.settings) as loader:
            return [[batch["input_ids"][:, 0].tolist() for batch in loader] for _ in range(count)]

    def trainer(self, loader: TokenLoader, callbacks: Any = None, **arguments: Any) -> Any:
        from transformers import Trainer, TrainingArguments

        common: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "logging_steps": 1000}
        common |= {"save_strategy": "no", "learning_rate": 0.05}
        if "save_steps" in arguments:
            common["save_strategy"] = "steps"
        training_arguments = TrainingArguments(str(self.folder / "run"), **{**common, **arguments})
        return loader_trainer(Trainer)(Model(), training_arguments, train_dataset=loader, callbacks=callbacks)

    def start(self, checkpoint: str | None = None, changes: Any = None, **arguments: Any) -> Outcome:
        """Train, from a checkpoint if one is given. `changes`: settings of the loader."""
        with TokenLoader(**{**self.settings, **(changes or {})}) as loader:
            trainer = self.trainer(loader, **arguments)
            trainer.train(resume_from_checkpoint=checkpoint)
        return outcome(trainer)

    def checkpoint(self, step: int) -> str:
        return str(self.folder / f"run/checkpoint-{step}")

    def checkpoints(self) -> list[int]:
        """Optimizer steps behind which one was saved."""
        return sorted(int(path.name.split("-")[1]) for path in self.folder.glob("run/checkpoint-*"))


def outcome(trainer: Any) -> Outcome:
    return Outcome(trainer.model.batches, [value.detach().clone() for value in trainer.model.parameters()], trainer)
