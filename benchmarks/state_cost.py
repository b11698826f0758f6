"""The cost of `state_dict()` in a training step, by kind of rows and number of files.

    python benchmarks/state_cost.py
    python benchmarks/state_cost.py --files 1,100 --states 500

A state is saved after each batch, as a careful trainer might do, so CPU caches are as the batch left them. For
comparison, a deep copy of the same state is timed, which is the cost of returning a stored dict. Each state is compared
with its expected content. The last line is one JSON line.
"""

import copy
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from comparison.report import machine, wide_console
from rich.table import Table

from dali_pipes import TokenLoader

LIMIT_US = 50.0
END, SEQ_LEN, BATCH_SIZE = 9, 32, 4
TOKENS = 640_000
ROWS = ("stream", "pack")


def write_corpus(folder: Path, files: int) -> None:
    """Documents of 16 tokens, in files of about equal size."""
    ids = np.full((TOKENS // 16, 16), 1, np.uint16)
    ids[:, -1] = END
    for number, part in enumerate(np.array_split(ids, files)):
        part.tofile(folder / f"shard_{number:05}.bin")


def timed_us(call: Callable[[], Any]) -> tuple[float, Any]:
    """Microseconds of one call, and its result."""
    begin = time.perf_counter_ns()
    result = call()
    return (time.perf_counter_ns() - begin) / 1e3, result


def measure(folder: Path, rows: str, states: int) -> dict[str, Any]:
    """Microseconds of `states` states, each after a batch, and of a deep copy of each."""
    ours, copies = [], []
    settings: dict[str, Any] = {"corpus": str(folder), "dtype": "uint16", "eos_id": END, "rows": rows, "device": "cpu"}
    with TokenLoader(**settings, batch_size=BATCH_SIZE, seq_len=SEQ_LEN, repeat=True) as loader:
        length = len(loader)
        for number, _ in enumerate(loader, start=1):
            taken_us, state = timed_us(loader.state_dict)
            copy_us, kept = timed_us(lambda state=state: copy.deepcopy(state))  # type: ignore[misc]
            ours.append(taken_us)
            copies.append(copy_us)
            if number < length and (state != kept or state["rows"] != number * BATCH_SIZE):
                raise SystemExit(f"{rows}: the state after batch {number} has {state['rows']} rows")
            if number == states:
                break
    return {"state_us": spread(ours), "copy_us": spread(copies), "bytes": len(json.dumps(state))}


def spread(values: list[float]) -> dict[str, float]:
    """Median, the lowest, and what 99 of 100 stay below."""
    return {
        "median": statistics.median(values),
        "low": min(values),
        "p99": float(np.percentile(values, 99)),
    }


def main(
    files: Annotated[str, typer.Option(help="numbers of files, separated by commas")] = "1,10000",
    states: Annotated[int, typer.Option(min=2, help="states per corpus")] = 3_000,
) -> None:
    """Write, take states, print a table; the last line is one JSON line."""
    entries: list[dict[str, Any]] = []
    for count in map(int, files.split(",")):
        with tempfile.TemporaryDirectory() as place:
            os.environ["DALI_PIPES_CACHE"] = f"{place}/cache"
            folder = Path(place) / "corpus"
            folder.mkdir()
            write_corpus(folder, count)
            entries += [{"files": count, "rows": rows, **measure(folder, rows, states)} for rows in ROWS]
    grid = Table(title=f"one state after each of {states:,} batches, microseconds")
    for heading in ("files", "rows", "state_dict() median (low, p99)", "deep copy median (low, p99)", "bytes as JSON"):
        grid.add_column(heading)
    for entry in entries:
        figures = ["{median:.1f} ({low:.1f}, {p99:.1f})".format(**entry[name]) for name in ("state_us", "copy_us")]
        grid.add_row(f"{entry['files']:,}", entry["rows"], *figures, str(entry["bytes"]))
    wide_console().print(grid)
    within = all(entry["state_us"]["median"] <= LIMIT_US for entry in entries)
    report = {"benchmark": "state_cost", "machine": machine(), "states": states, "limit_us": LIMIT_US, "within": within}
    print(json.dumps({**report, "entries": entries}))


if __name__ == "__main__":
    typer.run(main)
