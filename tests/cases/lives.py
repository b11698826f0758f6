"""Jobs whose processes are killed with SIGKILL, again and again, and go on from their last checkpoint.

    python lives.py FOLDER       jobs in FOLDER/jobs.json; what became of each of their lives in FOLDER/lives.json

A life is one process a rank, forked from this one, which has made the imports but no thread. The ranks keep step: each
writes what its batch held to its own log, waits for the others, and rank 0 then writes the checkpoint of every n-th
step. Meanwhile this process waits for the moment of the kill. The last life of a job is left to end by itself.
"""

import contextlib
import gc
import hashlib
import json
import mmap
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
import gpu_stand_in
import nvidia.dali.fn
import nvidia.dali.pipeline
import nvidia.dali.types  # noqa: F401

from dali_pipes import TokenLoader

CHECKPOINT_EVERY = 2
WRITING, KEEPING = 8, 9
"""Places of flags, behind the ranks' steps: a checkpoint, or a file of the cache folder, is being written."""
SYNC_S = 0.01
"""What the disk takes for a file of the cache."""
MOMENTS = ("keeping", "step", "step", "writing", "building")
DEVICES: dict[str, dict[str, str]] = {
    "cpu": {"device": "cpu"},
    "host": {"device": "cuda", "placement": "host"},
    "device": {"device": "cuda", "placement": "device"},
    "pinned": {"device": "cuda", "placement": "pinned"},
}


class Progress:
    """What the processes of a life tell each other: the step of each rank, and what is being written."""

    def __init__(self) -> None:
        self._numbers = memoryview(mmap.mmap(-1, 8 * (KEEPING + 1))).cast("q")

    def __getitem__(self, place: int) -> int:
        return self._numbers[place]

    def __setitem__(self, place: int, value: int) -> None:
        self._numbers[place] = value

    def wait_for(self, happened: Callable[[], bool]) -> None:
        pause_s = 2e-4
        while not happened():
            time.sleep(pause_s)
            pause_s = min(1.02 * pause_s, 0.05)  # a wait without end uses no CPU time to speak of, and is found by that


def digests(batch: dict[str, Any]) -> list[str]:
    """A hash of what each row holds, its padding left out, which must be padding."""
    width, count = batch["input_ids"].shape[1], len(batch["input_ids"])
    mask = batch.get("attention_mask", torch.ones((count, width), dtype=torch.int64))
    lengths = mask.sum(1).tolist()
    found = []
    for row, length in enumerate(lengths):
        assert (batch["labels"][row, length:] == -100).all()
        parts = [batch[name][row, :length].numpy().tobytes() for name in ("input_ids", "labels")]
        found.append(hashlib.sha256(b"".join(parts)).hexdigest()[:16])
    return found


def write_checkpoint(path: Path, content: dict[str, Any], progress: Progress) -> None:
    """As a trainer does: to another file, then in one step."""
    fresh = path.with_suffix(".fresh")
    progress[WRITING] = 1
    if content["life"] % 2:
        torch.save(content, fresh)
    else:
        text = json.dumps(content)
        with fresh.open("w") as file:
            for begin in range(0, len(text), 200):
                file.write(text[begin : begin + 200])
                file.flush()
    os.replace(fresh, path)
    progress[WRITING] = 0


def read_checkpoint(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    is_json = path.read_bytes()[:1] == b"{"
    content: dict[str, Any] = json.loads(path.read_text()) if is_json else torch.load(path, weights_only=True)
    return content


def reached(progress: Progress, world_size: int, step: int) -> bool:
    """Whether all ranks have logged a step."""
    return all(progress[rank] >= step for rank in range(world_size))


def slow_sync(progress: Progress) -> Callable[[int], None]:
    """`os.fsync`, which the loader calls for files of the cache alone."""

    def sync(descriptor: int, real: Callable[[int], None] = os.fsync) -> None:
        progress[KEEPING] = 1
        time.sleep(SYNC_S)
        real(descriptor)

    return sync


def train(
    folder: Path, number: int, rank: int, life: dict[str, Any], progress: Progress, found: dict[str, Any] | None
) -> None:
    """One rank of one life: until it is killed, or to the start of epoch `life["until"]`."""
    world_size = life["settings"]["world_size"]
    log = os.open(folder / f"{number}-{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.fsync = slow_sync(progress)  # type: ignore[assignment]
    on_device = life["settings"]["device"] != "cpu"
    with contextlib.ExitStack() as stack:
        if on_device:
            stack.enter_context(gpu_stand_in.installed("random", seed=number))
        loader = stack.enter_context(TokenLoader(**life["settings"], rank=rank))
        if found is not None:
            loader.load_state_dict(found["state"])
        step = 0
        while life["until"] is None or loader.epoch < life["until"]:
            epoch = loader.epoch
            for batch in loader:
                step += 1
                line = [step, epoch, batch["row_ids"].tolist(), digests(batch), batch["input_ids"].shape[1]]
                os.write(log, (json.dumps(line) + "\n").encode())
                progress[rank] = step
                progress.wait_for(partial(reached, progress, world_size, step))
                if rank == 0 and step % CHECKPOINT_EVERY == 0:
                    content = {"life": number, "step": step, "state": loader.state_dict()}
                    write_checkpoint(folder / "checkpoint", content, progress)


@contextlib.contextmanager
def ranks(folder: Path, number: int, life: dict[str, Any], progress: Progress) -> Iterator[list[int]]:
    """The processes of a life; those that are still there at the end are killed."""
    found = read_checkpoint(folder / "checkpoint")
    life["from"] = (
        None if found is None else [found["life"], found["step"], found["state"]["epoch"], found["state"]["rows"]]
    )
    running: list[int] = []
    for rank in range(life["settings"]["world_size"]):
        pid = os.fork()
        if pid == 0:
            try:
                os.setpgid(0, running[0] if running else 0)
                os.dup2(os.open(folder / f"{number}-{rank}.err", os.O_WRONLY | os.O_CREAT), 2)
                train(folder, number, rank, life, progress, found)
                os._exit(0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        running.append(pid)
        with contextlib.suppress(OSError):  # both do it: whoever is first
            os.setpgid(pid, running[0])
    yield running
    for pid in running:
        os.kill(pid, signal.SIGKILL)
    life["codes"] = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in running]
    try:
        os.killpg(running[0], 0)
    except ProcessLookupError:
        return
    raise AssertionError(f"life {number} of {folder.name} left a process")


def kill(draw: random.Random, moment: str, running: list[int], life: dict[str, Any], progress: Progress) -> None:
    """Wait for the moment, then kill all ranks at once, or one and the others while they miss it."""
    if moment == "building":
        time.sleep(draw.uniform(0, 0.1))
    elif moment == "keeping":
        progress.wait_for(lambda: progress[KEEPING] == 1 or progress[0] > 0 or ended(running))
    elif moment == "step":
        wanted = draw.randint(1, 9)
        progress.wait_for(lambda: progress[0] >= wanted or ended(running))
        time.sleep(draw.uniform(0, 3e-3))
    else:
        progress.wait_for(lambda: progress[WRITING] == 1 or ended(running))
    life["at"] = [progress[0], progress[WRITING]]
    if draw.random() < 0.5:
        os.kill(draw.choice(running), signal.SIGKILL)
        time.sleep(draw.uniform(0, 0.03))


def ended(running: list[int]) -> bool:
    """Whether one of them has ended by itself, which is an error; it is not waited for yet."""
    options = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return any(os.waitid(os.P_PID, pid, options) is not None for pid in running)


def settings_of(draw: random.Random, job: dict[str, Any], number: int, devices: list[str]) -> dict[str, Any]:
    """What another life may change."""
    world_size = (1, 4, 2)[number % 3]
    batch_size = job["step_rows"] // world_size if job["step_rows"] else draw.choice([1, 2, 3, 5])
    return {
        **job["settings"],
        **DEVICES[draw.choice(devices)],
        "world_size": world_size,
        "batch_size": batch_size,
        "batches_per_run": draw.choice([None, 1, 2, 3, 5]),
        "prefetch_queue_depth": draw.randint(1, 4),
        "num_threads": draw.randint(1, 3),
    }


def build_kernels(jobs: dict[str, Any], devices: list[str]) -> None:
    """Have the stand-in's kernels compiled by a process that nobody kills."""
    pid = os.fork()
    if pid == 0:
        os.environ["DALI_PIPES_CACHE"] += "-of-kernels"
        for job in jobs.values():
            for name in devices:
                settings = {**job["settings"], **DEVICES[name], "batch_size": 1, "rank": 0, "world_size": 1}
                with gpu_stand_in.installed("late"), TokenLoader(**settings) as loader:
                    next(iter(loader))
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def main(folder: Path) -> None:
    jobs = json.loads((folder / "jobs.json").read_text())
    devices = ["cpu"] if gpu_stand_in.why_not() else list(DEVICES)
    gc.collect()
    gc.freeze()
    build_kernels(jobs, [name for name in devices if name != "cpu"])
    lives: dict[str, list[dict[str, Any]]] = {}
    for name, job in jobs.items():
        draw = random.Random(f"{name} {job['seed']}")
        (folder / name).mkdir()
        lives[name] = []
        for number in range(job["kills"] + 1):
            is_last = number == job["kills"]
            life: dict[str, Any] = {"settings": settings_of(draw, job, number, devices), "until": None}
            lives[name].append(life)
            progress = Progress()
            for kept in Path(os.environ["DALI_PIPES_CACHE"]).glob("*.npy"):
                kept.unlink()  # each life makes it again
            if is_last:
                found = read_checkpoint(folder / name / "checkpoint")
                life["until"] = 2 if found is None else max(2, found["state"]["epoch"] + 1)
            with ranks(folder / name, number, life, progress) as running:
                if is_last:
                    for pid in running:
                        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
                else:
                    kill(draw, MOMENTS[number % len(MOMENTS)], running, life, progress)
    (folder / "lives.json").write_text(json.dumps(lives))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
