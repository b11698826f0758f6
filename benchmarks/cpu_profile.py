"""Where the CPU time of a block goes on a CPU: the loader's parts, and what the copies alone cost by memory in use.

    python benchmarks/cpu_profile.py
    python benchmarks/cpu_profile.py --batch-size 32 --seq-len 1024 --tokens 20000000 --seconds 0.5

The first table is the CPU time of each part in nanoseconds a token: a clock of the thread's CPU time around functions
of the loader, while a consumer takes batches as fast as it can. Such a clock costs below 1 us a call. Parts that are
indented are within the one above. The second table has the copies of a block without a loader, in one thread: rows
gathered from a map, and widened to int64 inputs and labels in one of several blocks in turn. A loader that widens what
it reads ahead needs three or four blocks; this one widens batches when they are asked for, in one or two. The last line
is one JSON line.
"""

import contextlib
import json
import mmap
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal
from unittest import mock

import numpy as np
import typer
from comparison.process import CpuMeter
from comparison.report import machine, wide_console
from rich.table import Table

from dali_pipes import TokenLoader
from dali_pipes.engine import block_source, build
from dali_pipes.operators.rows import widen_rows
from dali_pipes.placement import cpu
from dali_pipes.rows import source
from dali_pipes.schedule import plans

PARTS: dict[str, list[tuple[Any, str]]] = {
    "reader thread": [(block_source.BlockSource, "_prepare")],
    "  plan": [(plans.PlanCache, "plan")],
    "  read or gather": [(source.Source, "read_rows"), (source.Source, "gathered")],
    "trainer's thread": [],
    "  next block": [(block_source.BlockSource, "__call__")],
    "  widen": [(cpu, "widen_rows")],
    "  tensors": [(build, "_cut")],
}
BLOCKS = (1, 2, 3, 4, 6, 8)
BLOCK_TOKENS = cpu._GROUP_TOKENS


class Clock:
    """CPU seconds by part, of the threads that the functions run in."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def around(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.thread_time()
            try:
                return function(*arguments, **options)
            finally:
                self.seconds[part] += time.thread_time() - begin  # threads rarely meet here

        return timed

    @contextlib.contextmanager
    def on_parts(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for part, functions in PARTS.items():
                for owner, name in functions:
                    timed = self.around(part, getattr(owner, name))
                    stack.enter_context(mock.patch.object(owner, name, timed))
            yield


def profile(
    corpus: Path, reads: Literal["calls", "mapped"], shape: tuple[int, int], seconds: float
) -> dict[str, float]:
    """CPU nanoseconds a token: all threads, the trainer's, and parts. One reader thread."""
    clock, tokens = Clock(), shape[0] * shape[1]
    with clock.on_parts(), TokenLoader(
        corpus, dtype="uint16", batch_size=shape[0], seq_len=shape[1], device="cpu", quiet=True, repeat=True,
        reads=reads, num_threads=1, prefetch_queue_depth=2,
    ) as loader:  # fmt: skip
        batches = iter(loader)
        end = time.perf_counter() + seconds / 4
        while time.perf_counter() < end:
            next(batches)
        clock.seconds.clear()
        meter, own, count, end = CpuMeter(), time.thread_time(), 0, time.perf_counter() + seconds
        while time.perf_counter() < end:
            next(batches)
            count += 1
        total = {"all threads": meter.elapsed_s(), "trainer's thread": time.thread_time() - own}
        return {name: value / (count * tokens) * 1e9 for name, value in (total | dict(clock.seconds)).items()}


def copies(corpus: Path, seq_len: int, blocks: int, seconds: float) -> dict[str, float]:
    """CPU nanoseconds a token of the copies alone, with `blocks` blocks in turn."""
    rows = BLOCK_TOKENS // seq_len
    with corpus.open("rb") as file:
        ids = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint16)
    windows = np.lib.stride_tricks.sliding_window_view(ids, seq_len + 1)
    memory = [np.zeros((2, rows, seq_len), np.int64) for _ in range(blocks)]
    dice, spent, count = np.random.default_rng(0), [0.0, 0.0], 0
    end = time.perf_counter() + seconds
    while count < 2 * blocks or time.perf_counter() < end:
        starts, (inputs, labels) = dice.integers(0, len(windows), rows), memory[count % blocks]
        begin = time.thread_time()
        gathered = windows[starts]
        between = time.thread_time()
        widen_rows(gathered, inputs, labels, 1)
        spent[0] += between - begin
        spent[1] += time.thread_time() - between
        count += 1
    gather, widen = (value / (count * rows * seq_len) * 1e9 for value in spent)
    return {"gather": gather, "widen": widen}


def main(
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    seq_len: Annotated[int, typer.Option(min=1)] = 4096,
    tokens: Annotated[int, typer.Option(min=1000)] = 200_000_000,
    seconds: Annotated[float, typer.Option(min=0.01, help="of each measurement")] = 2.0,
) -> None:
    """Measure, print two tables; the last line is one JSON line."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["DALI_PIPES_CACHE"] = f"{place}/cache"
        corpus = Path(place) / "tokens.bin"
        np.random.default_rng(0).integers(0, 50_000, tokens, np.uint16).tofile(corpus)
        shape = batch_size, seq_len
        parts = {reads: profile(corpus, reads, shape, seconds) for reads in ("calls", "mapped")}
        alone = {blocks: copies(corpus, seq_len, blocks, seconds / 4) for blocks in BLOCKS}
    grid = Table(title=f"CPU ns a token, batches of {batch_size} x {seq_len}, one reader thread")
    for heading in ("part", 'reads = "calls"', 'reads = "mapped"'):
        grid.add_column(heading)
    for name in ("all threads", *PARTS):
        grid.add_row(name, *(f"{parts[reads].get(name, 0.0):.3f}" for reads in ("calls", "mapped")))
    wide_console().print(grid)
    grid = Table(title=f"CPU ns a token of the copies alone, in blocks of {BLOCK_TOKENS:,} tokens")
    for heading in ("blocks in turn", "MiB", "gather", "widen"):
        grid.add_column(heading)
    for blocks, figures in alone.items():
        size = blocks * BLOCK_TOKENS * 16 / 2**20
        grid.add_row(str(blocks), f"{size:.0f}", f"{figures['gather']:.3f}", f"{figures['widen']:.3f}")
    wide_console().print(grid)
    results = {"batch_size": batch_size, "seq_len": seq_len, "parts": parts, "copies": alone}
    print(json.dumps({"benchmark": "cpu_profile", "machine": machine(), "ns_per_token": results}))


if __name__ == "__main__":
    typer.run(main)
