"""What `next()` costs the trainer: with warm and with cold CPU caches, and where it goes to the next block.

    python benchmarks/next_cost.py
    python benchmarks/next_cost.py --batches 500 --evict-mb 256

A training step leaves nothing of the loader in the CPU's caches. So between two calls the benchmark writes to memory of
twice the last-level cache, and runs through a large body of other code, and for comparison it takes ready dicts from a
list in the same way: no loader can cost less. Calls that go to the next block are reported apart; the next block is
ready by then, as it is for a trainer. The last line is one JSON line.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from comparison.report import machine, wide_console
from rich.table import Table

from dali_pipes import TokenLoader

BATCH_SIZE, SEQ_LEN = 8, 128
AIMS = {"warm": 3.0, "cold": 12.0, "next block": 1_000.0}
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


def measure(corpus: Path, per_block: int, count: int, evict: Callable[[], None]) -> dict[str, list[float]]:
    """The calls within blocks with warm and with cold caches, those to the next block, and those of a list."""
    loader = TokenLoader(
        corpus, dtype="uint16", batch_size=BATCH_SIZE, seq_len=SEQ_LEN, batches_per_run=per_block, device="cpu",
        quiet=True, repeat=True,
    )  # fmt: skip
    within: dict[str, list[float]] = {"warm": [], "cold": [], "next block": []}
    with loader:
        batches = iter(loader)
        timed(batches, per_block, nothing)
        for number in range(max(24, 2 * count // per_block + 2)):
            time.sleep(0.05)  # the next block is being read
            evict()
            within["next block"] += timed(batches, 1, nothing)
            name, between = ("warm", nothing) if number % 2 else ("cold", evict)
            wanted = min(per_block - 1, max(0, count - len(within[name])))
            within[name] += timed(batches, wanted, between)
            timed(batches, per_block - 1 - wanted, nothing)
    floor = iter([ready_dicts() for _ in range(2 * count)])
    within["list, warm"], within["list, cold"] = timed(floor, count, nothing), timed(floor, count, evict)
    return within


def spread(values: list[float]) -> dict[str, float]:
    """Median and what 99 of 100 stay below."""
    return {"median": float(np.median(values)), "p99": float(np.percentile(values, 99)), "calls": len(values)}


def main(
    batches: Annotated[int, typer.Option(min=10, help="calls of each kind")] = 200,
    per_block: Annotated[int, typer.Option(min=2, help="batches in a block")] = 256,
    evict_mb: Annotated[int, typer.Option(min=1, help="megabytes written between two calls")] = 64,
) -> None:
    """Measure, print a table; the last line is one JSON line."""
    evict = Evictor(evict_mb)
    with tempfile.TemporaryDirectory() as place:
        os.environ["DALI_PIPES_CACHE"] = f"{place}/cache"
        corpus = Path(place) / "tokens.bin"
        np.random.default_rng(0).integers(0, 50_000, 20_000_000, np.uint16).tofile(corpus)
        measured = {name: spread(values) for name, values in measure(corpus, per_block, batches, evict).items()}
    grid = Table(title=f"microseconds of next(), batches of {BATCH_SIZE} x {SEQ_LEN}, {per_block} in a block")
    for heading in ("call", "median", "p99", "aim"):
        grid.add_column(heading)
    for name, figures in measured.items():
        aim = f"<= {AIMS[name]:,.0f}" if name in AIMS else ""
        grid.add_row(name, f"{figures['median']:.1f}", f"{figures['p99']:.1f}", aim)
    wide_console().print(grid)
    missed = [name for name, aim in AIMS.items() if measured[name]["median"] > aim]
    print(json.dumps({"benchmark": "next_cost", "machine": machine(), "microseconds": measured, "missed": missed}))


if __name__ == "__main__":
    typer.run(main)
