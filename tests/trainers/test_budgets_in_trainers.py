"""Trainers that go on from checkpoints with copied documents, balanced rows, and batches by tokens."""

import gc
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recipes import Run, expected_batches, recipe
from tiny import END, Training, documents

from dali_pipes import TokenLoader


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """So little is computed that threads only wait for each other; and Trainer collects garbage at each start."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.freeze()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """24 documents, some of them copied or dropped, in balanced rows."""
    corpus = documents(tmp_path / "data", count=24, shortest=2, longest=13, seed=1)
    np.save(tmp_path / "keep.npy", np.array([1, 0, 2] * 8))
    keep = {"keep": str(tmp_path / "keep.npy"), "balance": "cost", "balance_cost": [2, 1], "window_documents": 9}
    return {"corpus": corpus, "rows": "pad", "eos_id": END, **keep}


@pytest.mark.slow
@pytest.mark.needs("transformers", "accelerate")
def test_trainer_goes_on_with_balanced_rows_and_copies(settings: dict[str, Any], tmp_path: Path) -> None:
    run = Training(tmp_path, settings)
    epochs = run.epochs(2)
    with_all = Training(tmp_path, {**settings, "keep": None}).epochs(1)
    assert len(epochs[0]) == len(epochs[1]) == len(with_all[0]), "as many copies as dropped documents"
    assert sorted(itertools.chain(*epochs[0])) != sorted(itertools.chain(*with_all[0]))
    steps = sum(map(len, epochs))
    whole = run.start(num_train_epochs=2, save_steps=7)
    assert whole.batches == [*itertools.chain(*epochs)]
    assert whole.trainer.state.global_step == steps
    for step in (7, 14):
        rest = run.start(run.checkpoint(step), num_train_epochs=2)
        assert rest.batches == whole.batches[step:]
        assert all(map(torch.equal, rest.weights, whole.weights))


@pytest.mark.slow
@pytest.mark.needs("lightning")
@pytest.mark.parametrize("by_tokens", [False, True], ids=["balance", "batch_tokens"])
def test_lightning_goes_on(settings: dict[str, Any], tmp_path: Path, by_tokens: bool) -> None:
    source = recipe("lightning")
    given = {name: value for name, value in settings.items() if name not in ("corpus", "balance", "balance_cost")}
    if by_tokens:
        given["batch_tokens"] = 24
        source = source.replace("max_epochs=2", "max_epochs=2, reload_dataloaders_every_n_epochs=1")
        source = source.replace('"batch_size": 3, ', "")
    else:
        given |= {"balance": "cost", "balance_cost": [2, 1]}
    source = source.replace('"validation_fraction": 0.3', f'"validation_fraction": 0.3, **{given!r}')
    whole, broken = (Run(tmp_path / name, settings["corpus"]) for name in ("whole", "broken"))
    loader = whole.start(source)["loader"]
    assert whole.batches == expected_batches(loader, 2)
    broken.start(source, 5)
    broken.start(source)
    assert broken.kept == [4]
    assert broken.batches == whole.batches
    with TokenLoader(loader.config) as fresh:
        assert len(fresh) > 5, "the stop was in the first epoch"
