"""kill -9 at any moment: with the steps that no checkpoint had lost, the run is the one that never stopped."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import lives
import numpy as np
import pytest
import torch
from oracle import epoch_batches

from dali_pipes import TokenLoader

T = 8
ROWS = 61
END = 9
Life = dict[str, Any]


def draw_documents() -> list[int]:
    """The tokens of documents of 1 to 31 tokens each."""
    draw, tokens = random.Random(3), []
    for _ in range(60):
        tokens += [draw.randrange(10, 2**16) for _ in range(draw.choice([0, 2, 5, 9, 30]))] + [END]
    return tokens


class Job(NamedTuple):
    settings: dict[str, Any]
    step_rows: int | None = None
    """Rows of a step, over all ranks, in every life; None: another number in each."""


MIXTURE: dict[str, Any] = {
    "mixture": {
        "stream": {"corpus": "stream.bin", "dtype": "uint16", "weight": 0.6},
        "packed": {"corpus": "documents.bin", "dtype": "uint16", "weight": 0.4, "rows": "pack", "window_documents": 13},
    },
    "total_rows": 150,
    "seq_len": T,
    "eos_id": END,
}
STREAM: dict[str, Any] = {"corpus": "stream.bin", "dtype": "uint16", "seq_len": T}
DOCUMENTS: dict[str, Any] = {"corpus": "documents.bin", "dtype": "uint16", "seq_len": 2 * T, "eos_id": END}
SHORT = ("input_ids", "labels", "row_ids")
LONG = (*SHORT, "attention_mask", "position_ids", "cu_seqlens")
JOBS = {
    "stream": Job({**STREAM, "outputs": SHORT, "seed": 5}, step_rows=4),
    "in order": Job({**STREAM, "outputs": SHORT, "shuffle": False, "drop_last": False}),
    "mtp": Job({**DOCUMENTS, "outputs": LONG, "mtp": 2, "drop_last": False, "seed": 1}),
    "pack": Job({**DOCUMENTS, "outputs": LONG, "rows": "pack", "window_documents": 13, "drop_last": False}),
    "mixture": Job({**MIXTURE, "outputs": (*SHORT, "attention_mask", "source_ids"), "drop_last": False}),
    "pad": Job(
        {**DOCUMENTS, "outputs": LONG, "rows": "pad", "length_buckets": (4, 9), "window_documents": 20}, step_rows=8
    ),
}


def live(folder: Path, kills: int, seed: int) -> dict[str, list[Life]]:
    """All jobs, killed `kills` times each; what became of their lives."""
    np.random.default_rng(0).integers(0, 2**16, ROWS * T + 1).astype(np.uint16).tofile(folder / "stream.bin")
    np.array(draw_documents(), np.uint16).tofile(folder / "documents.bin")
    jobs = {
        name: {"settings": job.settings, "step_rows": job.step_rows, "kills": kills, "seed": seed}
        for name, job in JOBS.items()
    }
    (folder / "jobs.json").write_text(json.dumps(jobs))
    environment = {**os.environ, "DALI_PIPES_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, lives.__file__, str(folder)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    errors = "".join(path.read_text() for path in sorted(folder.glob("*/*.err")))
    assert done.returncode == 0, done.stdout + done.stderr + errors
    result: dict[str, list[Life]] = json.loads((folder / "lives.json").read_text())
    for name, of_job in result.items():
        for number, life in enumerate(of_job):
            expected = {0} if number == kills else {-9}
            assert set(life["codes"]) == expected, (name, number, life, errors)
    return result


def unbroken(folder: Path, job: Job, epochs: int) -> list[list[tuple[str, int]]]:
    """By epoch and row: a hash of what the row holds, and the width of it alone."""
    settings = job.settings
    if "mixture" in settings:
        paths = {name: str(folder.parent / source["corpus"]) for name, source in settings["mixture"].items()}
        sources = {name: {**source, "corpus": paths[name]} for name, source in settings["mixture"].items()}
        settings = {**settings, "mixture": sources}
    else:
        settings = {**settings, "corpus": str(folder.parent / settings["corpus"])}
    if settings.get("corpus", "").endswith("stream.bin"):  # no loader is asked
        tokens = np.fromfile(settings["corpus"], np.uint16).astype(np.int64)
        order = {"seq_len": T, "shuffle": settings.get("shuffle", True), "seed": settings.get("seed", 0)}
        rows = [list(epoch_batches(tokens, batch_size=1, epoch=epoch, **order)) for epoch in range(epochs)]
        return [[(lives.digests(as_tensors(row))[0], T) for row in epoch] for epoch in rows]
    settings |= {"batch_size": 1, "device": "cpu", "rank": 0, "world_size": 1, "drop_last": False}
    with TokenLoader(**settings) as loader:  # its rows have an oracle in tests/rows
        return [[(lives.digests(batch)[0], batch["input_ids"].shape[1]) for batch in loader] for _ in range(epochs)]


def as_tensors(row: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(value) for name, value in row.items()}


def check_job(folder: Path, job: Job, of_job: list[Life]) -> None:
    """Every step of every rank in every life against the run that never stopped, and the steps that were kept."""
    epochs = max(life["from"][2] if life["from"] else 0 for life in of_job) + 3
    rows = unbroken(folder, job, epochs)
    drop_last = job.settings.get("drop_last", True)
    kept: list[tuple[int, list[int]]] = []  # by step since the job began: its epoch, and its rows over all ranks
    begun: list[int] = []  # by life: the steps before it
    for number, life in enumerate(of_job):
        world_size = life["settings"]["world_size"]
        size = world_size * life["settings"]["batch_size"]
        begun.append(0 if life["from"] is None else begun[life["from"][0]] + life["from"][1])
        epoch, row = (0, 0) if life["from"] is None else life["from"][2:]
        assert len(kept) >= begun[-1], "a step before the checkpoint is in no log"
        del kept[begun[-1] :]
        logs = [read_log(folder / f"{number}-{rank}.log") for rank in range(world_size)]
        assert max(map(len, logs)) - min(map(len, logs)) <= 1
        for step in range(max(map(len, logs))):
            if len(rows[epoch]) - row < (size if drop_last else 1):
                epoch, row = epoch + 1, 0
            ids = list(range(row, min(row + size, len(rows[epoch]))))
            widest = max(rows[epoch][place][1] for place in ids)
            shares = ids + [-1] * (-len(ids) % world_size)
            for rank, log in enumerate(logs):
                if step < len(log):
                    found_step, found_epoch, found_ids, hashes, width = log[step]
                    assert (found_step, found_epoch, width) == (step + 1, epoch, widest), (number, rank)
                    assert found_ids == shares[rank::world_size], (number, rank, step)
                    for place, found in zip(found_ids, hashes, strict=True):
                        assert place < 0 or found == rows[epoch][place][0], (number, rank, step, place)
            if all(step < len(log) for log in logs):
                kept.append((epoch, ids))
            row += len(ids)
    assert kept[-1][0] >= 1
    if job.step_rows:
        assert {len(ids) for _, ids in kept} == {job.step_rows}
    last = kept[-1][0] + 1
    counts = [len(of_epoch) // job.step_rows * job.step_rows if job.step_rows else len(of_epoch) for of_epoch in rows]
    every = [(epoch, row) for epoch in range(last) for row in range(counts[epoch])]
    assert [(epoch, row) for epoch, ids in kept for row in ids] == every


def read_log(path: Path) -> list[Any]:
    """What a rank wrote before it was killed: a write is whole or was not made."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def check_nothing_left(folder: Path, shared_before: set[str]) -> None:
    """That the processes are gone, `lives.py` has seen."""
    assert [path.name for path in (folder / "cache").glob("**/*.tmp")] == []
    given_up = time.monotonic() + 60  # other programs share the folder, and may be about to tidy up
    while left := unused_shared_memory() - shared_before:
        assert time.monotonic() < given_up, left
        time.sleep(0.2)


def unused_shared_memory() -> set[str]:
    """Names in /dev/shm that no process has mapped."""
    names = os.listdir("/dev/shm")
    maps = ""
    for path in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # of another user, or ended just now
            maps += path.read_text()
    return {name for name in names if name not in maps}


@pytest.mark.parametrize(
    ("kills", "seed"), [(3, 0), *(pytest.param(20, seed, marks=pytest.mark.slow) for seed in (1, 2, 3))]
)
def test_kills(tmp_path: Path, kills: int, seed: int) -> None:
    """Eighteen of them, 1 → 4 → 2 ranks; the slow ones are 120 each, at other moments with other settings."""
    before = set(os.listdir("/dev/shm"))
    of_jobs = live(tmp_path, kills, seed)
    for name, job in JOBS.items():
        check_job(tmp_path / name, job, of_jobs[name])
    check_nothing_left(tmp_path, before)
