"""A loader is handed on as it is. What takes a DataLoader apart instead is right, or ends in a sentence."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import CountingCorpus

from dali_pipes import TokenLoader

ITERATE = "iterate over it directly"
INDEXED = "cannot be indexed"


@pytest.fixture
def loader(corpus: CountingCorpus) -> Iterator[TokenLoader]:
    with TokenLoader(corpus=corpus.pattern, batch_size=3, seq_len=8, device="cpu", quiet=True) as loader:
        yield loader


def rows(batches: Any) -> list[list[int]]:
    return [batch["input_ids"][:, 0].tolist() for batch in batches]


def own_rows(loader: TokenLoader) -> list[list[int]]:
    with TokenLoader(loader.config) as fresh:
        return rows(fresh)


def accelerate_calls() -> dict[str, Callable[[Any, TokenLoader], Any]]:
    accelerate: Any = pytest.importorskip("accelerate")

    return {
        "skip_first_batches": lambda accelerator, loader: accelerate.skip_first_batches(loader, 3),
        "its method": lambda accelerator, loader: accelerator.skip_first_batches(loader, 3),
        "prepare_data_loader": lambda accelerator, loader: accelerate.data_loader.prepare_data_loader(loader),
        "that method": lambda accelerator, loader: accelerator.prepare_data_loader(loader),
    }


@pytest.mark.needs("accelerate")
@pytest.mark.parametrize("call", ["skip_first_batches", "its method", "prepare_data_loader", "that method"])
def test_accelerate_says_what_to_do(loader: TokenLoader, call: str) -> None:
    accelerate: Any = pytest.importorskip("accelerate")
    with pytest.raises(TypeError, match=rf"{ITERATE}.*load_state_dict.*skip_steps"):
        accelerate_calls()[call](accelerate.Accelerator(cpu=True), loader)
    assert rows(loader) == own_rows(loader), "it is as it was"


@pytest.mark.needs("accelerate")
def test_what_accelerate_is_told_is_what_it_wants(loader: TokenLoader) -> None:
    """Go on behind batch 3: by a state, and by steps that are left out."""
    accelerate: Any = pytest.importorskip("accelerate")
    expected = own_rows(loader)[3:]
    prepared = accelerate.Accelerator(cpu=True).prepare(loader)
    assert prepared is loader
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    with TokenLoader(loader.config) as resumed:
        resumed.load_state_dict(loader.state_dict())
        assert rows(resumed) == expected
    with TokenLoader(loader.config, skip_steps=[(0, 3)]) as shorter:
        assert rows(shorter) == expected


def test_others_ask_whether_there_is_a_data_set(loader: TokenLoader) -> None:
    """Lightning and Trainer do, of whatever they are given; who takes it for granted is told."""
    for name in ("dataset", "sampler", "batch_sampler", "collate_fn", "batch_size", "drop_last"):
        assert not hasattr(loader, name)
        assert getattr(loader, name, None) is None
    with pytest.raises(AttributeError, match=ITERATE):
        loader.dataset  # noqa: B018


WRAPPED: dict[str, Callable[[Any], Any]] = {
    "samples": lambda loader: torch.utils.data.DataLoader(loader),
    "batches": lambda loader: torch.utils.data.DataLoader(loader, batch_size=None),
    "shuffled": lambda loader: torch.utils.data.DataLoader(loader, batch_size=2, shuffle=True),
    "a worker": lambda loader: torch.utils.data.DataLoader(loader, num_workers=1),
    "a share": lambda loader: torch.utils.data.DataLoader(
        loader, sampler=torch.utils.data.DistributedSampler(loader, 2, 0)
    ),
    "a subset": lambda loader: torch.utils.data.DataLoader(torch.utils.data.Subset(loader, [0, 1])),
    "joined": lambda loader: torch.utils.data.DataLoader(torch.utils.data.ConcatDataset([loader, loader])),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
def test_a_data_loader_around_it(loader: TokenLoader, wrapped: str) -> None:
    with pytest.raises(TypeError, match=INDEXED):
        next(iter(WRAPPED[wrapped](loader)))


@pytest.mark.needs("torchdata")
def test_torchdata(loader: TokenLoader) -> None:
    from torchdata.nodes import IterableWrapper, Loader
    from torchdata.stateful_dataloader import StatefulDataLoader

    expected = own_rows(loader)
    assert rows(Loader(IterableWrapper(loader))) == expected
    with pytest.raises(TypeError, match=INDEXED):
        next(iter(StatefulDataLoader(loader, batch_size=None)))


@pytest.mark.needs("lightning")
def test_fabric(loader: TokenLoader) -> None:
    """Its own sentence; a loop over the loader itself needs no `setup_dataloaders`."""
    fabric: Any = pytest.importorskip("lightning.fabric")
    with pytest.raises(TypeError, match="Only PyTorch DataLoader are currently supported"):
        fabric.Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader)


@pytest.mark.needs("transformers", "accelerate")
def test_trainer_without_loader_trainer(loader: TokenLoader, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to=[], disable_tqdm=True)
    several: list[dict[str, Any]] = [{"train_dataset": loader}, {"eval_dataset": loader}]
    for data in several:
        trainer = Trainer(torch.nn.Linear(1, 1), arguments, **data)
        with pytest.raises(TypeError, match=rf"{INDEXED}.*loader_trainer"):
            (trainer.train if "train_dataset" in data else trainer.evaluate)()
