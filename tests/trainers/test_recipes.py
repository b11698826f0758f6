"""The manual's recipes in one process: stopped at any batch and started again, they train as if never stopped."""

from pathlib import Path
from typing import Any

import pytest
import torch
from counting import CountingCorpus
from recipes import Run, expected_batches, recipe, weights

RECIPES = {
    "huggingface": ["transformers", "accelerate"],
    "accelerate": ["accelerate"],
    "lightning": ["lightning"],
    "checkpoint": [],
}
KEPT = {
    "huggingface": {17: 14},  # saved every two optimizer steps of 4, 4 and 2 batches
    "accelerate": {12: 8, 19: 16},  # every 4 batches
    "lightning": {12: 10},  # every 2 of 10 an epoch
    "checkpoint": {17: 16},  # every 2 of 14
}
"""By recipe: batches to stop in, and those that the last checkpoint before that had."""


class Unbroken:
    """A run from beginning to end."""

    def __init__(self, name: str, folder: Path, corpus: CountingCorpus) -> None:
        self.name, self.source = name, recipe(name)
        run = Run(folder, corpus.pattern)
        self.variables = run.start(self.source)
        self.batches, self.weights = run.batches, weights(self.variables)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.needs(*packages), id=name) for name, packages in RECIPES.items()],
)
def unbroken(
    request: pytest.FixtureRequest, corpus: CountingCorpus, tmp_path_factory: pytest.TempPathFactory
) -> Unbroken:
    return Unbroken(request.param, tmp_path_factory.mktemp("unbroken"), corpus)


def same_after_a_stop(unbroken: Unbroken, stop_at: int, folder: Path, corpus: CountingCorpus) -> int:
    """Stop and start again; the same rows and, bit for bit, weights: accumulated gradients count too.

    Returns the batches that the checkpoint had.
    """
    run = Run(folder, corpus.pattern)
    run.start(unbroken.source, stop_at)
    variables: dict[str, Any] = run.start(unbroken.source)
    assert run.batches == unbroken.batches
    assert all(map(torch.equal, weights(variables), unbroken.weights))
    return run.kept[-1] if run.kept else 0


def test_two_epochs_are_trained_on(unbroken: Unbroken) -> None:
    """`len()` right: every batch of both epochs once, in our order; none split, joined, skipped or lost to prefetch."""
    loader = unbroken.variables["loader"]
    assert len(unbroken.batches) == 2 * len(loader)
    assert unbroken.batches == expected_batches(loader, 2)


def test_a_run_that_was_stopped_goes_on(unbroken: Unbroken, tmp_path: Path, corpus: CountingCorpus) -> None:
    for stop_at, kept in KEPT[unbroken.name].items():
        assert same_after_a_stop(unbroken, stop_at, tmp_path / str(stop_at), corpus) == kept


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", range(1, 21))
def test_a_run_that_was_stopped_anywhere_goes_on(
    unbroken: Unbroken, stop_at: int, tmp_path: Path, corpus: CountingCorpus
) -> None:
    assert same_after_a_stop(unbroken, stop_at, tmp_path, corpus) < stop_at
