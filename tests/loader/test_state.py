"""States that do not fit are refused with every difference; see test_resume.py for resumes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load as load_distributed
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

from dali_pipes import TokenLoader
from dali_pipes.errors import StateError


def load(corpus: Any, **overrides: Any) -> TokenLoader:
    defaults = {"corpus": corpus.pattern, "dtype": corpus.dtype, "batch_size": 2, "seq_len": 4, "device": "cpu"}
    return TokenLoader(**{**defaults, **overrides})


def test_a_state_written_out(counting: Callable[..., Any]) -> None:
    corpus = counting(60, 41, dtype="uint16")
    with load(corpus, seed=3) as loader:
        iterator = iter(loader)
        next(iterator), next(iterator), next(iterator)
        state = loader.state_dict()
        fingerprint, digests = loader.corpus.fingerprint, " ".join(loader.corpus.file_digests)
    assert state == {
        "version": 1,
        "order": "philox24-v1",
        "config": {
            "seq_len": 4,
            "stride": 4,
            "shuffle": True,
            "seed": 3,
            "split": "train",
            "validation_fraction": 0.0,
            "label_shift": True,
        },
        "corpus": {
            "fingerprint": fingerprint,
            "format": "flat",
            "dtype": "uint16",
            "tokens": 101,
            "files": 2,
            "digests": digests,
        },
        "epoch": 0,
        "rows": 6,
        "step_rows": 2,
    }
    assert json.loads(json.dumps(state)) == state


def through_json(path: Path, state: dict[str, Any], fresh: dict[str, Any]) -> Any:
    path.write_text(json.dumps(state))
    return json.loads(path.read_text())


def through_torch(path: Path, state: dict[str, Any], fresh: dict[str, Any]) -> Any:
    torch.save(state, path)
    return torch.load(path, weights_only=True)


def through_distributed(path: Path, state: dict[str, Any], fresh: dict[str, Any]) -> Any:
    """Fills a state that is there already, entry by entry."""
    save_distributed({"loader": state}, checkpoint_id=path, no_dist=True)
    found = {"loader": fresh}
    load_distributed(found, checkpoint_id=path, no_dist=True)
    return found["loader"]


@pytest.mark.parametrize("rows", ["stream", "pack"])
@pytest.mark.parametrize("through", [through_json, through_torch, through_distributed])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_comes_back_from_a_file(
    counting: Callable[..., Any], tmp_path: Path, through: Callable[..., Any], rows: str
) -> None:
    corpus = counting(101, vocab_size=7)
    settings: dict[str, Any] = {"rows": rows, "eos_id": 6, "window_documents": 3, "outputs": ("input_ids", "row_ids")}
    with load(corpus, **settings) as loader, load(corpus, **settings) as other:
        iterator = iter(loader)
        next(iterator), next(iterator)
        state = through(tmp_path / "state", loader.state_dict(), other.state_dict())
        assert state == loader.state_dict()
        other.load_state_dict(state)
        assert torch.equal(next(iter(other))["row_ids"], torch.tensor([4, 5]))


def test_every_difference_is_listed(counting: Callable[..., Any]) -> None:
    corpus = counting(101)
    with load(corpus, seed=1) as loader:
        state = loader.state_dict()
    with load(corpus, seed=2, stride=3, label_shift=False) as other, pytest.raises(StateError) as error:
        other.load_state_dict(state)
    for line in ("seed: saved 1, now 2", "stride: saved 4, now 3", "label_shift: saved True, now False"):
        assert line in str(error.value)
    with load(corpus, seed=1, shuffle=False) as other, pytest.raises(StateError, match="order: saved 'philox24-v1'"):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2"),
        ({"epoch": -1}, "epoch -1"),
        ({"rows": 26}, "rows at most 25"),
        ({"rows": 1.5}, r"rows 1\.5"),
        ({"rows": True}, "rows True"),
        ({"config": {}}, "seed: saved 'nothing', now 0"),
        ({"corpus": {}}, "corpus tokens: saved"),
        ({"corpus": None}, "corpus"),
        ({"config": "x"}, "config"),
    ],
)
def test_a_damaged_state_is_refused(counting: Callable[..., Any], change: dict[str, Any], message: str) -> None:
    with load(counting(101)) as loader:
        state = {**loader.state_dict(), **change}
        with pytest.raises(StateError, match=message):
            loader.load_state_dict(state)
        assert loader.epoch == 0


@pytest.mark.parametrize("state", [None, {}, [], "x", {"model": 1}])
def test_what_is_not_a_state_is_refused(counting: Callable[..., Any], state: Any) -> None:
    with load(counting(101)) as loader, pytest.raises(StateError, match="not a loader state"):
        loader.load_state_dict(state)


def test_a_whole_checkpoint_names_the_entry_to_pass(counting: Callable[..., Any]) -> None:
    with load(counting(101)) as loader, pytest.raises(StateError, match="'data'"):
        loader.load_state_dict({"model": {"w": 1}, "data": loader.state_dict()})


def test_an_incomplete_state_names_what_is_missing(counting: Callable[..., Any]) -> None:
    with load(counting(101)) as loader:
        state = loader.state_dict()
        del state["rows"], state["corpus"]
        with pytest.raises(StateError, match="corpus, rows missing"):
            loader.load_state_dict(state)
