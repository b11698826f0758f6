"""A loader in a checkpoint of torch.distributed, as a `Stateful`, goes on exactly; files are in test_state.py."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from streams import take
from torch.distributed.checkpoint.state_dict_loader import load as load_checkpoint
from torch.distributed.checkpoint.state_dict_saver import save

from dali_pipes import TokenLoader
from dali_pipes.errors import StateError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
END = 9
MODES: list[dict[str, Any]] = [
    {"rows": "stream"},
    {"rows": "pack"},
    {"rows": "pad", "length_buckets": [4, 8]},
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """120 documents of 1 to 12 tokens; tokens before an end tell where they are."""
    path = tmp_path_factory.mktemp("states") / "tokens.bin"
    ids = [token for n in range(120) for token in [*range(100 * n + 10, 100 * n + 10 + n * 7 % 12), END]]
    np.array(ids, np.uint16).tofile(path)
    return str(path)


SETTINGS: dict[str, Any] = {
    "dtype": "uint16",
    "eos_id": END,
    "seq_len": 12,
    "window_documents": 25,
    "device": "cpu",
    "outputs": ["input_ids", "labels", "row_ids"],
}


def load(corpus: str, **how: Any) -> TokenLoader:
    return TokenLoader(corpus=corpus, **{**SETTINGS, "batch_size": 3, **how})


def plain(batches: Any) -> list[dict[str, Any]]:
    return [{name: value.tolist() for name, value in batch.items()} for batch in batches]


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode["rows"])
def test_a_distributed_checkpoint_of_one_process(corpus: str, tmp_path: Path, mode: dict[str, Any]) -> None:
    """The loader is a `Stateful`: no call of `state_dict` in the user's code; the loader behind it goes on from there.

    A state that is loaded replaces one in mid-epoch.
    """
    with load(corpus, **mode) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        save({"loader": loader}, checkpoint_id=tmp_path / "checkpoint")
        expected = plain(batches)
    with load(corpus, **mode) as loader:
        take(loader, 2)
        load_checkpoint({"loader": loader}, checkpoint_id=tmp_path / "checkpoint")
        assert loader.step == 5
        assert plain(loader) == expected
    with load(corpus, **mode, seed=1) as loader, pytest.raises(Exception, match="seed: saved 0, now 1") as caught:
        load_checkpoint({"loader": loader}, checkpoint_id=tmp_path / "checkpoint")
    assert isinstance(caught.value, StateError)


SCRIPT = """
import itertools, json, sys
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from dali_pipes import TokenLoader

rank, world_size, corpus, folder, settings = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:]
dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
rows = {}
for mode in json.loads(settings)["modes"]:
    name = mode["rows"]
    with TokenLoader(corpus=corpus, **json.loads(settings)["common"], **mode, batch_size=2) as loader:
        batches = iter(loader)
        rows[name] = [next(batches)["row_ids"].tolist() for _ in range(4)]
        dcp.save({"loader": loader}, checkpoint_id=f"{folder}/{name}")
        rows[name] += [batch["row_ids"].tolist() for batch in batches]
        loader.state_dict()
        dcp.load({"loader": loader}, checkpoint_id=f"{folder}/{name}")
        assert rows[name][4:] == [batch["row_ids"].tolist() for batch in loader]
print(json.dumps(rows))
dist.destroy_process_group()
"""


def test_a_distributed_checkpoint_of_two_processes_goes_on_in_one(
    corpus: str, tmp_path: Path, run_ranks: Callable[..., list[Any]]
) -> None:
    """And in the two, with the same batches."""
    settings = json.dumps({"common": SETTINGS, "modes": MODES})
    ranks = run_ranks(SCRIPT, 2, corpus, tmp_path, settings, forked=True)
    for mode in MODES:
        seen = [row for rank in ranks for step in rank[mode["rows"]][:4] for row in step]
        assert sorted(seen) == list(range(16))
        with load(corpus, **mode, drop_last=False) as loader:
            whole = {
                row: ids
                for batch in plain(loader)
                for row, ids in zip(batch["row_ids"], batch["input_ids"], strict=True)
            }
        with load(corpus, **mode, drop_last=False) as loader:
            load_checkpoint({"loader": loader}, checkpoint_id=tmp_path / mode["rows"])
            rest = plain(loader)
        assert [row for batch in rest for row in batch["row_ids"]] == list(range(16, len(whole)))
        if "length_buckets" not in mode:  # with them, a row is as wide as its batch
            assert all(
                whole[row] == ids
                for batch in rest
                for row, ids in zip(batch["row_ids"], batch["input_ids"], strict=True)
            )
