"""The manual's recipes in several processes, on gloo: each rank gets its own rows, and a killed run goes on."""

import json
import socket
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import CountingCorpus
from launch import PATHS, torchrun
from on_rank import DDP
from recipes import SEQ_LEN, Run, recipe

from dali_pipes import TokenLoader

ON_RANK = Path(__file__).with_name("on_rank.py")
BATCH_SIZE = 3
TRAINERS = {"huggingface": "transformers", "accelerate": "accelerate", "lightning": "lightning"}
HELD_OUT = {"huggingface": 0.3, "accelerate": 0.0, "lightning": 0.3}
"""Share of the corpus that a recipe does not train on."""


SCRIPT = """
import contextlib, os, sys
from pathlib import Path
import torch._dynamo  # as optimizers do when they are first made
sys.path[:0] = {paths}
from on_rank import stop_and_start, write
{imports}

rank, world_size, port, folder, corpus, *names = sys.argv[1:]
os.environ |= dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world_size, LOCAL_WORLD_SIZE=world_size)
os.environ |= dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, CUDA_VISIBLE_DEVICES="")
with contextlib.redirect_stdout(sys.stderr):
    write(Path(folder), stop_and_start(Path(folder), corpus, names))
print("null")
"""
"""What torchrun starts, in processes that are forked after the imports."""


def reports(folder: Path, ranks: int) -> list[Any]:
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def ranks(
    corpus: CountingCorpus, tmp_path_factory: pytest.TempPathFactory, run_ranks: Callable[..., list[Any]]
) -> list[Any]:
    """What two ranks report. One start for all trainers, since their imports take seconds."""
    folder = tmp_path_factory.mktemp("ranks")
    there = [name for name, package in TRAINERS.items() if find_spec(package)]
    imports = "\n".join(f"import {TRAINERS[name]}" for name in there)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    source = SCRIPT.format(paths=PATHS, imports=imports)
    run_ranks(source, 2, port, folder, corpus.pattern, *there, forked=True)
    return reports(folder, 2)


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.needs(package)) for name, package in TRAINERS.items()])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_each_rank_trains_on_its_own_rows(ranks: list[Any], name: str, corpus: CountingCorpus) -> None:
    """Ours, exactly: nothing sharded twice, joined, repeated to even the ranks out, or left out."""
    own: dict[str, Any] = {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "device": "cpu"}
    own["validation_fraction"] = HELD_OUT[name]
    for rank, report in enumerate(ranks):
        with TokenLoader(corpus=corpus.pattern, **own, rank=rank, world_size=2) as loader:
            expected = [batch["input_ids"][:, 0].tolist() for _ in range(2) for batch in loader]
        assert report[name]["unbroken"] == expected


def test_a_run_that_was_stopped_on_two_ranks_goes_on(ranks: list[Any], name: str) -> None:
    for report in ranks:
        assert 0 < report[name]["kept"] < 7
        assert report[name]["broken"] == report[name]["unbroken"]
        assert report[name]["same weights"]
        assert report[name]["weights"] == ranks[0][name]["weights"]


def test_validation_is_that_of_one_process(ranks: list[Any], corpus: CountingCorpus, tmp_path: Path) -> None:
    variables = Run(tmp_path, corpus.pattern).start(recipe("validation"))
    alone = variables["validation_loss"](variables["model"])
    for report in ranks:
        assert report["validation"] == pytest.approx(alone, rel=1e-6)


@pytest.mark.needs("lightning")
def test_the_sums_of_lightning_are_over_all_ranks(ranks: list[Any]) -> None:
    """13 validation rows, each counted once; the last step has one of them, and padding for the other rank."""
    for report in ranks:
        assert report["lightning"]["sums"] == ranks[0]["lightning"]["sums"]
        assert report["lightning"]["sums"]["labels"] == 13 * SEQ_LEN


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as the only one of a group, with sums so exact that their order does not show."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "starts",
    [
        pytest.param([(2, 11)], id="2-1"),
        pytest.param([(1, 4), (3, 5), (6, 4), (2, 4)], id="1-3-6-2-1", marks=pytest.mark.slow),
    ],
)
@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_a_killed_ddp_run_goes_on_with_another_number_of_processes(
    starts: list[tuple[int, int]], corpus: CountingCorpus, tmp_path: Path
) -> None:
    """All ranks die of SIGKILL in the middle of a step. Rows and losses are those of one process that never died."""
    whole = Run(tmp_path / "whole", corpus.pattern)
    whole.start(recipe(DDP))
    assert len(whole.batches) == 14
    folder = tmp_path / "killed"
    last = Run(folder, corpus.pattern)
    rows: list[list[int]] = []
    losses: list[float] = []
    for processes, stop_at in starts:
        ended = torchrun(processes, ON_RANK, folder, corpus.pattern, stop_at, folder=folder)
        assert "SIGKILL" in ended.stderr, ended.stderr
        ranks = reports(folder, processes)
        kept = ranks[0]["kept"][-1] if rows else 0
        rows[kept:] = [
            [row for rank_rows in zip(*step, strict=True) for row in rank_rows]
            for step in zip(*(rank["batches"] for rank in ranks), strict=True)
        ]
        steps = zip(*(rank["losses"] for rank in ranks), strict=True)
        losses[kept:] = [sum(step) for step in steps]
    last.start(recipe(DDP))  # in one process, to the end
    assert 0 < last.kept[0] < len(rows)
    assert rows[: last.kept[0]] + last.batches == whole.batches
    assert losses[: last.kept[0]] + last.losses == pytest.approx(whole.losses, rel=1e-9)
