"""Processes as torchrun starts them: they find their ranks, share the rows, and go on as another number of them."""

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from oracle import epoch_batches
from streams import all_same, row_ids, take, write_counting

from dali_pipes import TokenLoader

T = 8
ROWS = 203

SCRIPT = """
import json, os, sys
from datetime import timedelta
from pathlib import Path
import torch
import torch.distributed as dist
from dali_pipes import TokenLoader

rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
folder, leave_after = Path(sys.argv[1]), int(sys.argv[2])
common = {"seq_len": 8, "device": "cpu", "drop_last": False, "outputs": ["input_ids", "labels", "row_ids"]}
stream = {**common, "corpus": str(folder / "stream"), "dtype": "uint32", "batch_size": 12 // world_size}
pack = {**common, "corpus": str(folder / "documents"), "dtype": "uint16", "eos_id": 9, "rows": "pack"}
pack |= {"window_documents": 7, "batch_size": 3}
report = {}


def steps_of(loader, most=None):
    # A rank with fewer steps than another would make the collective hang.
    steps, total = [], torch.zeros(2, dtype=torch.int64)
    for batch in loader:
        total[0], total[1] = 1, int((batch["labels"] != -100).sum())
        dist.all_reduce(total)
        assert total[0].item() == world_size
        steps.append({name: tensor.tolist() for name, tensor in batch.items()} | {"learned": total[1].item()})
        if len(steps) == most:
            break
    return steps


with TokenLoader(**stream) as loader:  # there is no group yet
    found = [loader.config.rank, loader.config.world_size]
    report["of the launcher"] = [*found, next(iter(loader))["row_ids"].tolist()]
dist.init_process_group("gloo")
checkpoint = folder / "checkpoint.json"
with TokenLoader(**stream) as loader:
    state = json.loads(checkpoint.read_text()) if checkpoint.exists() else None
    if state is not None:
        loader.load_state_dict(state)
    report["stream"] = steps_of(loader, leave_after)
    report["next epoch"] = loader.epoch
    states = [None] * world_size
    dist.all_gather_object(states, loader.state_dict())
    assert all(other == states[0] for other in states)
    if rank == 0:
        checkpoint.write_text(json.dumps(states[0]))
with TokenLoader(**pack) as loader:
    report["pack"] = steps_of(loader)
(folder / f"{world_size}-{rank}.json").write_text(json.dumps(report))
dist.barrier()
dist.destroy_process_group()
"""


def torchrun(folder: Path, processes: int, leave_after: int) -> list[dict[str, Any]]:
    """What each process reported."""
    script = folder / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [*command, str(script), str(folder), str(leave_after)],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{processes}-{rank}.json").read_text()) for rank in range(processes)]


class Start(NamedTuple):
    processes: int
    first_row: int
    steps: int
    """Of 12 rows each, over all ranks."""


CHAINS = [
    pytest.param((Start(2, 0, 17),), id="2"),
    pytest.param((Start(4, 0, 5), Start(2, 60, 12)), id="4 and then 2", marks=pytest.mark.slow),
]
Runs = dict[Start, list[dict[str, Any]]]


@pytest.fixture(scope="module", params=CHAINS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two corpora; and the reports of all processes of a job that is started once, or that goes on as another size."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "stream").mkdir()
    write_counting(folder / "stream", [100, ROWS * T + 1 - 100])
    (folder / "documents").mkdir()
    draw = np.random.default_rng(1)
    tokens: list[int] = []
    for _ in range(61):
        tokens += [*draw.integers(10, 2**16, draw.integers(0, 12)).tolist(), 9]
    np.array(tokens, np.uint16).tofile(folder / "documents" / "tokens.bin")
    reports = [torchrun(folder, start.processes, start.steps) for start in request.param]
    (folder / "runs.json").write_text(json.dumps(list(zip(request.param, reports, strict=True))))
    return folder


@pytest.fixture
def runs(folder: Path) -> Runs:
    return {Start(*start): reports for start, reports in json.loads((folder / "runs.json").read_text())}


def as_batches(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: torch.tensor(value) for name, value in step.items() if name != "learned"} for step in steps]


def test_ranks_from_the_launcher(runs: Runs) -> None:
    for start, reports in runs.items():
        for rank, report in enumerate(reports):
            assert report["of the launcher"] == [rank, start.processes, list(range(rank, 12, start.processes))]


def test_all_processes_together_have_the_epoch(runs: Runs) -> None:
    """Each row once, as the oracle has it, on the rank that the oracle says; every label is learned from once."""
    tokens = np.arange(ROWS * T + 1)
    seen, learned = [], 0
    for start, reports in runs.items():
        for rank, report in enumerate(reports):
            order: dict[str, Any] = {"batch_size": 12 // start.processes, "seq_len": T, "drop_last": False}
            order |= {"rank": rank, "world_size": start.processes, "first_row": start.first_row}
            expected = take(epoch_batches(tokens, **order), start.steps)
            assert len(expected) == start.steps
            assert all_same(as_batches(report["stream"]), expected)
            seen += [row for row in row_ids(as_batches(report["stream"])) if row >= 0]
            assert [step["learned"] for step in report["stream"]] == [step["learned"] for step in reports[0]["stream"]]
        learned += sum(step["learned"] for step in reports[0]["stream"])
    assert sorted(seen) == list(range(ROWS))
    assert learned == ROWS * T
    assert {report["next epoch"] for report in reports} == {1}


def test_packed_rows_are_those_of_one_process(folder: Path, runs: Runs) -> None:
    """Each is with one rank, and holds what it holds where there is one alone."""
    common: dict[str, Any] = {"corpus": str(folder / "documents"), "dtype": "uint16", "eos_id": 9, "rows": "pack"}
    common |= {"window_documents": 7, "batch_size": 5, "seq_len": T, "device": "cpu", "drop_last": False}
    outputs = ("input_ids", "labels", "row_ids")
    with TokenLoader(**common, outputs=outputs, rank=0, world_size=1) as loader:
        alone = sorted(rows_of(loader))
    assert len(alone) > 24
    for reports in runs.values():
        assert len({len(report["pack"]) for report in reports}) == 1
        rows = [row for report in reports for row in rows_of(as_batches(report["pack"])) if row[0] >= 0]
        assert sorted(rows) == alone


def rows_of(batches: Iterable[Any]) -> list[tuple[int, list[int], list[int]]]:
    """Number, ids and labels of each row."""
    names = ("row_ids", "input_ids", "labels")
    return [row for batch in batches for row in zip(*(batch[name].tolist() for name in names), strict=True)]
