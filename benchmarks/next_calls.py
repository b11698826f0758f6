"""Times of single calls of `next()`, with warm and with cold CPU caches, and where they go to the next block.

A training step leaves nothing of the loader in the CPU's caches. So between two calls other data is written and other
code is run, and ready dicts are taken from a list in the same way: no loader can cost less. Calls that go to the next
block are apart; the next block is ready by then, as it is for a trainer.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from dali_pipes import TokenLoader

BATCH_SIZE, SEQ_LEN = 8, 128
NEXT_BLOCK = "next block"
AIMS = {"warm": 3.0, "cold": 12.0, NEXT_BLOCK: 1_000.0}
"""Microseconds: medians of calls within a block, and of those that go to the next one."""


def _functions(count: int) -> list[Callable[[int], int]]:
    """Functions that share no code, so that a call of each fetches its own from memory."""
    scope: dict[str, Any] = {}
    for number in range(count):
        exec(f"def f{number}(x):\n    y = x + {number}\n    return y * 3 if y > {number} else y - 1", scope)
    return [scope[f"f{number}"] for number in range(count)]


class Evictor:
    """Puts other data and other code into the caches."""

    def __init__(self, megabytes: int) -> None:
        self._memory = np.zeros(megabytes << 17)
        self._functions = _functions(2_000)

    def __call__(self) -> None:
        self._memory += 1.0
        for number, function in enumerate(self._functions):
            function(number)


def nothing() -> None:
    """Leave the caches as they are."""


def timed(batches: Iterator[Any], count: int, between: Callable[[], None]) -> list[float]:
    """Microseconds of each of `count` calls of `next()`."""
    taken = []
    for _ in range(count):
        between()
        begin = time.perf_counter_ns()
        batch = next(batches)
        taken.append((time.perf_counter_ns() - begin) / 1e3)
        del batch
    return taken


def ready_dicts() -> dict[str, torch.Tensor]:
    """A batch as a loader's, which nobody has to make."""
    return {name: torch.zeros((BATCH_SIZE, SEQ_LEN), dtype=torch.int64) for name in ("input_ids", "labels")}


def measure(
    corpus: str, per_block: int, count: int, evict: Callable[[], None], **settings: Any
) -> dict[str, list[float]]:
    """The calls within blocks with warm and with cold caches, those to the next block, and those of a list.

    settings: of the loader, such as its device
    """
    settings |= {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "batches_per_run": per_block, "dtype": "uint16"}
    loader = TokenLoader(corpus, **settings, quiet=True, repeat=True)
    within: dict[str, list[float]] = {"warm": [], "cold": [], NEXT_BLOCK: []}
    with loader:
        batches = iter(loader)
        timed(batches, per_block, nothing)
        for number in range(max(24, 2 * count // per_block + 2)):
            time.sleep(0.05)  # the next block is being read
            evict()
            within[NEXT_BLOCK] += timed(batches, 1, nothing)
            name, between = ("warm", nothing) if number % 2 else ("cold", evict)
            wanted = min(per_block - 1, max(0, count - len(within[name])))
            within[name] += timed(batches, wanted, between)
            timed(batches, per_block - 1 - wanted, nothing)
    floor = iter([ready_dicts() for _ in range(2 * count)])
    within["list, warm"], within["list, cold"] = timed(floor, count, nothing), timed(floor, count, evict)
    return within
