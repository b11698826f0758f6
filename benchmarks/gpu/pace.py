"""Steps of a fixed length on the device, fed by any stream of batches: what the feeding costs shows beside them.

The host is at most `AHEAD` steps ahead of the device, as in training that reads its losses now and then. Without that
limit the host would run into the driver's full launch queue, and the wait there would look like a wait for data.
"""

import collections
import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from comparison.torch_loaders import BatchDataset, loader_settings, unchanged
from comparison.work import Work
from torch.utils.data import DataLoader

from dali_pipes import TokenLoader
from gpu.machine import Machine
from gpu.session import Session

AHEAD = 8
_LONGEST_PRODUCT_S = 1e-3
_HEAD_START_S = 2e-3
Batch = Mapping[str, torch.Tensor]
Feed = Iterator[Batch]


class Pace(NamedTuple):
    """What `paced` measured over its steps."""

    next_s: np.ndarray[Any, np.dtype[np.float64]]
    """Wall time of each `next()`."""
    next_cpu_s: float
    """CPU time of the calling thread within `next()`, for one step."""
    device_s: float
    """Time of the device for one step, from the first step's start to the last one's end."""


class Product:
    """A matrix product on the device, in place of a training step. Of zeros, which keeps the clock steady."""

    def __init__(self, session: Session) -> None:
        dtype = session.pick(torch.bfloat16, torch.float32)
        for size in session.pick((6144, 4096, 2048, 1024), (8,)):  # the largest that this card does in a millisecond
            self._matrix = torch.zeros(size, size, dtype=dtype, device=session.machine.device)
            self._result = torch.empty_like(self._matrix)
            if session.machine.timed(self, calls=3, repeats=3) < _LONGEST_PRODUCT_S:
                break

    def __call__(self) -> None:
        torch.mm(self._matrix, self._matrix, out=self._result)


def paced(machine: Machine, feed: Feed, steps: int, work: Callable[[], None]) -> Pace:
    """Take `steps` batches, queueing `work` after each, and wait for the device."""
    next_s = np.zeros(steps)
    next_cpu_s = 0.0
    queued: collections.deque[Any] = collections.deque()
    start = machine.event()
    machine.busy(_HEAD_START_S)  # until the host is ahead, so that its first steps are not in the device's time
    start.record()
    for step in range(steps):
        if len(queued) == AHEAD:
            queued.popleft().synchronize()
        cpu, asked = time.thread_time(), time.perf_counter()
        next(feed)
        next_s[step] = time.perf_counter() - asked
        next_cpu_s += time.thread_time() - cpu
        work()
        end = machine.event()
        end.record()
        queued.append(end)
    end.synchronize()
    return Pace(next_s, next_cpu_s / steps, start.elapsed_time(end) / 1e3 / steps)


@contextlib.contextmanager
def our_feed(settings: Mapping[str, Any]) -> Iterator[tuple[TokenLoader, Feed]]:
    """A loader and its endless batches."""
    with TokenLoader(**settings, repeat=True) as loader:
        yield loader, iter(loader)


@contextlib.contextmanager
def fixed_feed(settings: Mapping[str, Any]) -> Iterator[Feed]:
    """One batch of our loader, again and again."""
    with TokenLoader(**settings) as loader:
        batch = {name: tensor.clone() for name, tensor in next(iter(loader)).items()}
    yield itertools.repeat(batch)


@contextlib.contextmanager
def torch_feed(session: Session, settings: Mapping[str, Any], tokens: int, workers: int) -> Iterator[Feed]:
    """torch's DataLoader over whole batches of the same file, through pinned memory and asynchronous copies."""
    path = settings["corpus"].replace("*", "shard_0")
    work = Work(path, tokens, settings["batch_size"], settings["seq_len"], str(session.folder))
    machine = session.machine
    # The worker processes start here; nothing in them touches the device.
    options = loader_settings(work, workers) | {"collate_fn": unchanged, "pin_memory": not machine.dry}
    loader: DataLoader[Any] = DataLoader(BatchDataset(work), **options)  # type: ignore[arg-type]

    def feed() -> Generator[Batch, None, None]:
        while True:
            for pair in loader:
                inputs, labels = (tensor.to(machine.device, non_blocking=True) for tensor in pair)
                yield {"input_ids": inputs, "labels": labels}

    batches = feed()
    yield batches
    batches.close()
    loader._iterator = None  # ends the workers now, instead of whenever memory is next collected
