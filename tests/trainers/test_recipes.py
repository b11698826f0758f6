"""The README's recipes for trainers of one process: killed at any batch and started again, they train as if never killed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import CountingCorpus
from recipes import Run, recipe

from dali_pipes import TokenLoader

RECIPES = [
    pytest.param("Hugging Face Trainer", marks=pytest.mark.needs("transformers", "accelerate")),
    pytest.param("Accelerate", marks=pytest.mark.needs("accelerate")),
    pytest.param("Lightning", marks=pytest.mark.needs("lightning")),
]


def expected_batches(loader: TokenLoader, epochs: int) -> list[list[int]]:
    """First tokens of every row of the first epochs, from a loader with the same settings."""
    with TokenLoader(loader.config) as fresh:
        return [batch["input_ids"][:, 0].tolist() for _ in range(epochs) for batch in fresh]


def weights(variables: dict[str, Any]) -> list[torch.Tensor]:
    model = variables["trainer"].model if "trainer" in variables else variables["model"]
    return [value.detach().clone() for value in model.parameters()]


class Unbroken:
    def __init__(self, heading: str, folder: Path, corpus: CountingCorpus) -> None:
        self.heading = heading
        self.source = recipe(heading)
        self.run = Run(folder, corpus.pattern)
        self.variables = self.run.start(self.source)
        self.weights = weights(self.variables)


@pytest.fixture(scope="module", params=RECIPES)
def unbroken(
    request: pytest.FixtureRequest, corpus: CountingCorpus, tmp_path_factory: pytest.TempPathFactory
) -> Unbroken:
    return Unbroken(request.param, tmp_path_factory.mktemp("unbroken"), corpus)


def test_two_epochs_are_trained_on(unbroken: Unbroken) -> None:
    """`len()` right: every batch of both epochs once, in our order, none split, joined, skipped or prefetched away."""
    loader = unbroken.variables["loader"]
    assert len(unbroken.run.batches) == 2 * len(loader)
    assert unbroken.run.batches == expected_batches(loader, 2)


@pytest.mark.parametrize("stop_at", [1, 7, 10, 12, 19])
def test_a_run_that_was_stopped_goes_on(
    unbroken: Unbroken, stop_at: int, corpus: CountingCorpus, tmp_path: Path
) -> None:
    """The same rows, and the same weights bit for bit: gradients that were accumulated at the end count too."""
    run = Run(tmp_path, corpus.pattern)
    run.start(unbroken.source, stop_at)
    variables = run.start(unbroken.source)
    assert run.batches == unbroken.run.batches
    assert all(map(torch.equal, weights(variables), unbroken.weights))
