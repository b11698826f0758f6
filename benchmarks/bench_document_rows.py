"""The cost of packed rows with all their outputs, compared with plain windows: whole loaders on the CPU, in turns.

    python benchmarks/bench_document_rows.py                   # 4 x 32,768, documents of log-normal length

All read the same corpus from the page cache and discard the batches. In every round, each loader delivers the same
number of batches, after some untimed ones that were read during the turns of the others. `time` and `CPU` are ratios to
plain windows in the same round; `best` is the ratio of the two rounds with the least CPU, which other work on the
machine disturbs least. CPU time is that of all threads. `plan`, `read` and `build` are the times to plan the rows of a
batch, to read its tokens, and to build its outputs from them, in whatever threads do it. The last line is one JSON
line.
"""

import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from comparison.report import machine, wide_console
from rich.table import Table

from dali_pipes import TokenLoader
from dali_pipes.config import OUTPUT_NAMES

_SIDES: dict[str, dict[str, Any]] = {
    "windows": {"rows": "stream"},
    "packed, inputs and labels": {"rows": "pack"},
    "packed, all outputs": {"rows": "pack", "outputs": OUTPUT_NAMES},
    "packed, all, int32 and bool": {
        "rows": "pack",
        "outputs": OUTPUT_NAMES,
        "index_dtype": "int32",
        "mask_dtype": "bool",
    },
}
_YARDSTICK = "windows"
_END_ID, _SIGMA = 50256, 1.2


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a tiny corpus, only to check that it runs")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="samples per side")] = 9,
    batch_size: Annotated[int, typer.Option(min=1)] = 4,
    seq_len: Annotated[int, typer.Option(min=1)] = 32_768,
    median: Annotated[float, typer.Option(min=1, help="median document length (log-normal, sigma 1.2)")] = 400.0,
) -> None:
    """Measure all sides in turns, print a table; the last line is one JSON line."""
    batch_size, seq_len = (2, 64) if quick else (batch_size, seq_len)
    num_tokens = 20_000 if quick else 100_000_000
    batches = max(1, (4 * num_tokens // 10) // (batch_size * seq_len))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        os.environ["DALI_PIPES_CACHE"] = cache  # of the documents found; gone with the corpus
        path = Path(folder) / "tokens.bin"
        documents = write_documents(path, num_tokens, 10.0 if quick else median)
        shared: dict[str, Any] = {"corpus": str(path), "dtype": "uint16", "batch_size": batch_size, "seq_len": seq_len}
        shared |= {"eos_id": _END_ID, "device": "cpu", "repeat": True, "batches_per_run": 2 if quick else None}
        samples = _measure(shared, batches, 2 if quick else rounds)
    shape = {"batch_size": batch_size, "seq_len": seq_len, "documents": documents, "tokens": num_tokens}
    entries = [shape | entry for entry in _entries(samples, batches, batches * batch_size * seq_len)]
    about = machine()
    console = wide_console()
    console.print(", ".join(f"{key} {value}" for key, value in about.items() if key != "versions"), markup=False)
    table = Table(title=f"{batch_size} x {seq_len}, {documents} documents: median (lowest to highest)")
    for heading in ("loader", "Mtok/s", "CPU ms/Mtok", "plan, read, build µs/batch", "time", "CPU", "best"):
        table.add_column(heading, justify="left" if heading == "loader" else "right", no_wrap=True)
    for entry in entries:
        speed, cpu, time_ratio, cpu_ratio = (
            "{median:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})".format(**entry[key], digits=digits)
            for key, digits in (("mtok_per_s", 0), ("cpu_ms_per_mtok", 2), ("time_ratio", 2), ("cpu_ratio", 2))
        )
        parts = ", ".join(f"{entry[f'{part}_us']['median']:.0f}" for part in ("plan", "read", "build"))
        table.add_row(entry["name"], speed, cpu, parts, time_ratio, cpu_ratio, f"{entry['best_cpu_ratio']:.2f}")
    console.print(table)
    print(json.dumps({"benchmark": "document_rows", "machine": about, "entries": entries}))


def write_documents(path: Path, num_tokens: int, median: float) -> int:
    """Random ids, with an end id after each document of log-normal length; returns the number of documents."""
    generator = np.random.default_rng(0)
    tokens = generator.integers(0, _END_ID, num_tokens, np.uint16)
    ends = np.cumsum(1 + generator.lognormal(np.log(median), _SIGMA, num_tokens // int(median)).astype(np.int64))
    ends = np.append(ends[ends < num_tokens], num_tokens) - 1
    tokens[ends] = _END_ID
    tokens.tofile(path)
    return len(ends)


class Sample(NamedTuple):
    """Seconds of one round of one side."""

    wall_s: float
    cpu_s: float
    plan_s: float
    read_s: float
    build_s: float


def _measure(shared: dict[str, Any], batches: int, rounds: int) -> dict[str, list[Sample]]:
    """The rounds of each side."""
    loaders = {name: TokenLoader(**shared, **settings) for name, settings in _SIDES.items()}
    streams = {name: iter(loader) for name, loader in loaders.items()}
    samples: dict[str, list[Sample]] = {name: [] for name in loaders}
    for number in range(rounds + 1):
        for name, stream in streams.items():
            for _ in range(batches // 5):
                next(stream)
            before = loaders[name].stats().block_times
            cpu, wall = time.process_time(), time.perf_counter()
            for _ in range(batches):
                next(stream)
            taken = time.perf_counter() - wall, time.process_time() - cpu
            if number:  # the first round fills caches and makes the memory that is used again later
                after = loaders[name].stats().block_times
                parts = (getattr(after, part) - getattr(before, part) for part in ("plan_s", "read_s", "kernels_s"))
                samples[name].append(Sample(*taken, *parts))
    for loader in loaders.values():
        loader.close()
    return samples


def _entries(samples: dict[str, list[Sample]], batches: int, tokens: int) -> list[dict[str, Any]]:
    reference = samples[_YARDSTICK]
    return [
        {
            "name": name,
            "mtok_per_s": _spread([tokens / sample.wall_s / 1e6 for sample in own]),
            "cpu_ms_per_mtok": _spread([sample.cpu_s * 1e9 / tokens for sample in own]),
            "plan_us": _spread([sample.plan_s / batches * 1e6 for sample in own]),
            "read_us": _spread([sample.read_s / batches * 1e6 for sample in own]),
            "build_us": _spread([sample.build_s / batches * 1e6 for sample in own]),
            "time_ratio": _spread([mine.wall_s / other.wall_s for mine, other in zip(own, reference, strict=True)]),
            "cpu_ratio": _spread([mine.cpu_s / other.cpu_s for mine, other in zip(own, reference, strict=True)]),
            "best_cpu_ratio": min(mine.cpu_s for mine in own) / min(other.cpu_s for other in reference),
        }
        for name, own in samples.items()
    ]


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


if __name__ == "__main__":
    typer.run(main)
