"""What loaders cost a trainer that uses all cores: matrix products as long as a step, with and without a loader.

    python benchmarks/beside_training.py
    python benchmarks/beside_training.py --batch-size 16 --seq-len 4096 --step-ms 50 --rounds 20

A step is one call of `next()` and products of two float32 matrices on all cores, which leave nothing of the loader in
the CPU's caches. All alternatives are open in one process and are timed in turns, in another random order each round,
so that a slow moment of the machine affects all of them. The table has medians over all steps of a round, and the
quartiles of that over the rounds: how long a step takes, how much longer than one without a loader, and the calls of
`next()`. Rates and CPU times are in `compare.py`; here, threads of the products that spin while they wait would hide
the latter. The last line is one JSON line.
"""

import json
import os
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from comparison.alternatives import ALTERNATIVES
from comparison.report import machine, wide_console
from comparison.work import Work
from rich.table import Table

NAMES = ("dali_pipes", "dali_pipes_mapped", "numpy", "torch_gather_0", "torch_batches_0", "torch_dataloader_0")
ALONE = "no loader"
_SIDE = 768
FIGURES = {
    "step_ms": "step, ms",
    "longer_ms": "longer by, ms",
    "next_p50_us": "next() p50, µs",
    "next_p99_us": "next() p99, µs",
}


class Training:
    """Products that take about `step_ms` on all cores."""

    def __init__(self, step_ms: float) -> None:
        self._left, self._right = torch.rand(_SIDE, _SIDE), torch.rand(_SIDE, _SIDE)
        self._products = 1
        for _ in range(3):  # the first ones are slower
            begin = time.perf_counter()
            for _ in range(10):
                self._left @ self._right
            self._products = max(1, round(step_ms / 100 / (time.perf_counter() - begin)))

    def __call__(self) -> None:
        for _ in range(self._products):
            self._left @ self._right


def measured(batches: Iterator[Any], train: Training, steps: int) -> dict[str, float]:
    """Medians over some steps, after two that are not counted."""
    for _ in range(2):
        next(batches)
        train()
    waits, begin = [], time.perf_counter()
    for _ in range(steps):
        asked = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - asked)
        train()
        del batch
    step_s = (time.perf_counter() - begin) / steps
    waits_us = np.array(waits) * 1e6
    p50, p99 = (float(np.percentile(waits_us, share)) for share in (50, 99))
    return {"step_ms": step_s * 1e3, "next_p50_us": p50, "next_p99_us": p99}


def main(
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    seq_len: Annotated[int, typer.Option(min=1)] = 1024,
    step_ms: Annotated[float, typer.Option(min=0.1, help="of the products")] = 15.0,
    steps: Annotated[int, typer.Option(min=2, help="of each alternative in a round")] = 40,
    rounds: Annotated[int, typer.Option(min=1)] = 12,
    tokens: Annotated[int, typer.Option(min=1000)] = 100_000_000,
    only: Annotated[str, typer.Option(help="alternatives of compare.py, separated by commas")] = ",".join(NAMES),
) -> None:
    """Measure, print a table; the last line is one JSON line."""
    with tempfile.TemporaryDirectory() as place:
        os.environ["DALI_PIPES_CACHE"] = f"{place}/cache"
        corpus = Path(place) / "tokens.bin"
        np.random.default_rng(0).integers(0, 50_000, tokens, np.uint16).tofile(corpus)
        work = Work(str(corpus), tokens, batch_size, seq_len, place)
        streams: dict[str, Iterator[Any]] = {ALONE: iter(lambda: None, 0)}
        streams |= {name: ALTERNATIVES[name].load().open(work) for name in only.split(",")}
        train, found = Training(step_ms), defaultdict[str, list[dict[str, float]]](list)
        for number in range(rounds + 1):
            of_round = {name: measured(streams[name], train, steps) for name in random.sample([*streams], len(streams))}
            alone = of_round[ALONE]
            for name, figures in of_round.items():
                figures["longer_ms"] = figures["step_ms"] - alone["step_ms"]
                if number:  # the first round warms everything up
                    found[name].append(figures)
        for name, stream in streams.items():
            if name != ALONE:
                stream.close()  # type: ignore[attr-defined]
    quartiles = {
        name: {
            figure: [float(q) for q in np.percentile([one[figure] for one in of], (25, 50, 75))] for figure in FIGURES
        }
        for name, of in ((name, found[name]) for name in streams)
    }
    grid = Table(
        title=f"{batch_size} x {seq_len}, steps of about {step_ms:g} ms: median (quartiles over {rounds} rounds)"
    )
    for heading in ("", *FIGURES.values()):
        grid.add_column(heading)
    for name, of_name in quartiles.items():
        grid.add_row(name, *(f"{mid:.3g} ({low:.3g} to {high:.3g})" for low, mid, high in of_name.values()))
    wide_console().print(grid)
    how = {"batch_size": batch_size, "seq_len": seq_len, "step_ms": step_ms, "steps": steps, "rounds": rounds}
    print(json.dumps({"benchmark": "beside_training", "machine": machine(), **how, "quartiles": quartiles}))


if __name__ == "__main__":
    typer.run(main)
