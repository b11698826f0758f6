"""What `next()` costs the trainer: with warm and with cold CPU caches, and where it goes to the next block.

    python benchmarks/next_cost.py
    python benchmarks/next_cost.py --batches 500 --evict-mb 256
    python benchmarks/next_cost.py --device cuda --placement host

Between two calls the benchmark writes to memory of twice the last-level cache, and runs through a large body of other
code: see `next_calls`. The last line is one JSON line.
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from comparison.report import machine, wide_console
from next_calls import AIMS, BATCH_SIZE, SEQ_LEN, Evictor, measure
from rich.table import Table


def spread(values: list[float]) -> dict[str, float]:
    """Median and what 99 of 100 stay below."""
    return {"median": float(np.median(values)), "p99": float(np.percentile(values, 99)), "calls": len(values)}


def main(
    batches: Annotated[int, typer.Option(min=10, help="calls of each kind")] = 200,
    per_block: Annotated[int, typer.Option(min=2, help="batches in a block")] = 256,
    evict_mb: Annotated[int, typer.Option(min=1, help="megabytes written between two calls")] = 64,
    device: Annotated[str, typer.Option(help="of the loader")] = "cpu",
    placement: Annotated[str, typer.Option(help="of the loader")] = "auto",
) -> None:
    """Measure, print a table; the last line is one JSON line."""
    evict = Evictor(evict_mb)
    with tempfile.TemporaryDirectory() as place:
        os.environ["DALI_PIPES_CACHE"] = f"{place}/cache"
        corpus = Path(place) / "tokens.bin"
        np.random.default_rng(0).integers(0, 50_000, 20_000_000, np.uint16).tofile(corpus)
        taken = measure(str(corpus), per_block, batches, evict, device=device, placement=placement)
    measured = {name: spread(values) for name, values in taken.items()}
    grid = Table(
        title=f"microseconds of next(), batches of {BATCH_SIZE} x {SEQ_LEN} on {device}, {per_block} in a block"
    )
    for heading in ("call", "median", "p99", "aim"):
        grid.add_column(heading)
    for name, figures in measured.items():
        aim = f"<= {AIMS[name]:,.0f}" if name in AIMS else ""
        grid.add_row(name, f"{figures['median']:.1f}", f"{figures['p99']:.1f}", aim)
    wide_console().print(grid)
    missed = [name for name, aim in AIMS.items() if measured[name]["median"] > aim]
    of = {"device": device, "placement": placement, "per_block": per_block}
    report = {"benchmark": "next_cost", "machine": machine(), **of, "microseconds": measured, "missed": missed}
    print(json.dumps(report))


if __name__ == "__main__":
    typer.run(main)
