"""A long run of small batches: exact order; constant memory, descriptors, and threads; steady rate.

    make soak
    python benchmarks/soak.py --batches 200000 --rows pack

The batches are divided over the kinds of rows, one loader after another in one process. Each loader is sampled 200
times. Its memory has grown if the least-squares line through the samples of the second half rises by more than
`FLOOR_BYTES` and by more than three standard deviations of the samples around it; smaller changes cannot be
distinguished from memory that malloc keeps. The second half may not have more descriptors or threads than the maximum
of the first.

Row numbers and ids of all delivered batches are hashed and finally compared with the rows of the plan, read from the
file by NumPy.
"""

import gc
import hashlib
import json
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from comparison.report import machine, wide_console
from rich.console import Console
from rich.table import Table

from dali_pipes import TokenLoader
from dali_pipes.schedule import StepRange
from dali_pipes.schedule.plans import plan_steps

SEQ_LEN, BATCH_SIZE, END = 128, 4, 9
BATCHES_PER_RUN = 128
"""Less than by default: a loader keeps sixteen plans, and is to have made them in the first tenth of its batches."""
SAMPLES = 200
FLOOR_BYTES = 2 << 20
FEWEST_BATCHES = 2000
"""A loader that hands out fewer is still warming up when it ends; its memory is not judged."""
_CORPUS_TOKENS = 2_000_000
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MODES: dict[str, dict[str, Any]] = {
    "stream": {},
    "stream, file order": {"shuffle": False, "batches_per_run": 7, "prefetch_queue_depth": 4, "num_threads": 4},
    "mtp": {"eos_id": END, "mtp": 2},
    "pack": {"eos_id": END, "rows": "pack", "window_documents": 1000},
    "pad": {"eos_id": END, "rows": "pad", "length_buckets": (32, 64), "window_documents": 1000},
}


Samples = dict[str, list[float]]
"""Figures of a loader over time, by name."""


def main(
    batches: Annotated[int, typer.Option(min=1, help="in total, over all kinds of rows")] = 200_000,
    rows: Annotated[list[str] | None, typer.Option(help=f"one of {', '.join(MODES)}; can be repeated")] = None,
    trace_python: Annotated[bool, typer.Option(help="also count Python's bytes (tracemalloc), which is slow")] = False,
    out: Annotated[Path, typer.Option(help="folder for JSON and plot")] = Path("runs/soak"),
) -> None:
    """Run, print a table, write a JSON and a plot; the last line is one JSON line. Exit code 1 if a check failed."""
    names = rows or list(MODES)
    unknown = [name for name in names if name not in MODES]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r}: expected {', '.join(MODES)}")
    about, console, begin = machine(), wide_console(), time.perf_counter()
    entries: list[dict[str, Any]] = []
    if trace_python:
        tracemalloc.start()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tokens.bin"
        write_corpus(path)
        for name in names:
            console.log(f"{name}: {batches // len(names)} batches")
            entries.append(soak(path, name, batches // len(names)))
    report = {
        "benchmark": "soak",
        "machine": about,
        "batches": sum(entry["batches"] for entry in entries),
        "seconds": time.perf_counter() - begin,
        "failed": [f"{entry['rows']}: {text}" for entry in entries for text in entry["failed"]],
        "entries": entries,
    }
    console.print(_table(entries))
    for text in report["failed"]:
        console.print(f"FAILED {text}", markup=False)
    out.mkdir(parents=True, exist_ok=True)
    (out / "soak.json").write_text(json.dumps(report) + "\n")
    _save_plot(entries, out / "soak.png", console)
    short = [{key: value for key, value in entry.items() if key != "samples"} for entry in entries]
    print(json.dumps({**report, "entries": short}))
    if report["failed"]:
        raise typer.Exit(1)


def write_corpus(path: Path) -> None:
    """uint16 documents of 1 to 200 tokens, by a fixed seed."""
    draw = np.random.default_rng(0)
    tokens = draw.integers(10, 2**16, _CORPUS_TOKENS).astype(np.uint16)
    ends = np.cumsum(draw.integers(1, 201, _CORPUS_TOKENS // 100))
    tokens[ends[ends < len(tokens)] - 1] = END
    tokens[-1] = END
    tokens.tofile(path)


def soak(path: Path, name: str, batches: int) -> dict[str, Any]:
    """One loader's batches, its samples, and what was found wrong."""
    settings: dict[str, Any] = {"corpus": str(path), "dtype": "uint16", "rank": 0, "world_size": 1, "device": "cpu"}
    settings |= {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "drop_last": False}
    settings |= {"batches_per_run": BATCHES_PER_RUN, **MODES[name]}
    outputs = ("input_ids", "labels", "row_ids") + (("attention_mask",) if "rows" in MODES[name] else ())
    row_hash, token_hash = hashlib.blake2b(), hashlib.blake2b()
    samples: Samples = {}
    every, tokens = max(1, batches // SAMPLES), 0
    with TokenLoader(outputs=outputs, **settings) as loader:
        last, last_tokens = time.perf_counter(), 0
        for number, batch in enumerate(handed_out(loader, batches), start=1):
            row_hash.update(batch["row_ids"].numpy().data)
            ids = batch["input_ids"]
            if "attention_mask" in batch:
                ids = ids[batch["attention_mask"] != 0]
            token_hash.update(ids.numpy().data)
            tokens += ids.numel()
            if number % every == 0:
                now = time.perf_counter()
                for key, value in figures(loader, number, (tokens - last_tokens) / (now - last)).items():
                    samples.setdefault(key, []).append(value)
                last, last_tokens = now, tokens
        position = loader.state_dict()
        expected = expected_hashes(loader, path, position["epoch"], position["rows"])
    gc.collect()
    failed: list[str] = []
    if (row_hash.hexdigest(), token_hash.hexdigest()) != expected:
        failed.append(f"the rows of {batches} batches differ from the plan")
    if batches >= FEWEST_BATCHES:
        failed += grown(samples)
    return {
        "rows": name,
        "batches": batches,
        "epochs": position["epoch"],
        "is_judged": batches >= FEWEST_BATCHES,
        **growth(samples),
        "failed": failed,
        "samples": samples,
    }


def handed_out(loader: TokenLoader, batches: int) -> Iterator[dict[str, Any]]:
    """So many batches, epoch after epoch."""
    left = batches
    while left:
        for batch in loader:
            yield batch
            left -= 1
            if not left:
                return


def figures(loader: TokenLoader, batch: int, tokens_per_s: float) -> dict[str, float]:
    """Of this process and its loader now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found: dict[str, float] = {
        "batch": batch,
        "rss_bytes": pages * _PAGE_BYTES,
        "python_blocks": sys.getallocatedblocks(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "queue_depth": loader.stats().queue_depth,
        "tokens_per_s": round(tokens_per_s),
    }
    if tracemalloc.is_tracing():
        found["python_bytes"] = tracemalloc.get_traced_memory()[0]
    return found


def growth(samples: Samples) -> dict[str, float]:
    """How much memory rises over the second half, by its line of least squares, and what cannot be told from noise."""
    half = len(samples["batch"]) // 2
    batch, rss = (np.array(samples[name][half:]) for name in ("batch", "rss_bytes"))
    if len(batch) < 3:
        return {}
    slope, base = np.polyfit(batch - batch[0], rss, 1)
    deviation = float(np.std(rss - base - slope * (batch - batch[0])))
    span = float(batch[-1] - batch[0])
    noise = max(FLOOR_BYTES, 3 * deviation)
    return {"grown_bytes": float(slope) * span, "noise_bytes": noise, "least_leak_bytes_a_batch": noise / span}


def grown(samples: Samples) -> list[str]:
    """What has grown, in words."""
    half = len(samples["batch"]) // 2
    found, memory = [], growth(samples)
    if memory["grown_bytes"] > memory["noise_bytes"]:
        found.append(
            f"memory grew by {memory['grown_bytes'] / 2**20:.1f} MiB over the second half; "
            f"{memory['noise_bytes'] / 2**20:.1f} MiB would be noise"
        )
    for name in ("descriptors", "threads"):
        first, second = max(samples[name][:half]), max(samples[name][half:])
        if second > first:
            found.append(f"{name}: {second:.0f} in the second half, at most {first:.0f} in the first")
    return found


def expected_hashes(loader: TokenLoader, path: Path, epoch: int, rows: int) -> tuple[str, str]:
    """Of row numbers and of ids, up to `rows` rows of `epoch`: a plan in single steps, its tokens read by NumPy."""
    schedule = loader._schedule
    tokens = np.fromfile(path, np.uint16).astype(np.int64)
    row_hash, token_hash = hashlib.blake2b(), hashlib.blake2b()
    for number in range(epoch + 1):
        steps = schedule.steps(0, number) if number < epoch else -(-rows // schedule.global_rows)
        for first in range(0, steps, 256):
            plan = plan_steps(schedule, StepRange(number, 0, first, min(256, steps - first)))
            row_hash.update(plan.row_ids.data)
            starts, lengths = plan.starts, np.full(len(plan.starts), SEQ_LEN)
            if plan.pieces is not None:
                starts, lengths = plan.pieces.starts, plan.pieces.lengths
            token_hash.update(gathered(tokens, starts, lengths).data)
    return row_hash.hexdigest(), token_hash.hexdigest()


def gathered(
    tokens: npt.NDArray[np.int64], starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """The tokens of pieces, one after another."""
    before = np.cumsum(lengths) - lengths
    found: npt.NDArray[np.int64] = tokens[np.repeat(starts - before, lengths) + np.arange(lengths.sum())]
    return found


def _table(entries: list[dict[str, Any]]) -> Table:
    table = Table(title="soak: memory over the second half, rate as median (lowest to highest)")
    headings = ("rows", "batches", "epochs", "Mtok/s", "RSS MB", "grown MB", "noise MB", "descriptors", "threads")
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "rows" else "right", no_wrap=True)
    for entry in entries:
        samples = entry["samples"]
        rates = np.array(samples["tokens_per_s"]) / 1e6
        ranges = [f"{min(samples[name])} to {max(samples[name])}" for name in ("descriptors", "threads")]
        memory = [f"{entry.get(name, float('nan')) / 1e6:.2f}" for name in ("grown_bytes", "noise_bytes")]
        table.add_row(
            entry["rows"],
            str(entry["batches"]),
            str(entry["epochs"]),
            f"{np.median(rates):.1f} ({rates.min():.1f} to {rates.max():.1f})",
            f"{samples['rss_bytes'][-1] / 1e6:.0f}",
            *memory,
            *ranges,
        )
    return table


def _save_plot(entries: list[dict[str, Any]], path: Path, console: Console) -> None:
    """Memory, rate, queue, descriptors and threads over the batches."""
    try:
        import matplotlib
    except ImportError as error:
        console.print(f"no plot: {error}; pip install matplotlib (extra: demo)", markup=False)
        return
    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    panels = {
        "RSS, MB": ("rss_bytes", 1e-6),
        "million tokens/s": ("tokens_per_s", 1e-6),
        "blocks ready": ("queue_depth", 1),
        "descriptors": ("descriptors", 1),
        "threads": ("threads", 1),
        "Python's blocks, thousands": ("python_blocks", 1e-3),
    }
    figure, axes = pyplot.subplots(len(panels), 1, figsize=(11, 13), sharex=True, layout="constrained")
    for axis, (label, (name, factor)) in zip(axes, panels.items(), strict=True):
        before = 0
        for entry in entries:
            samples = entry["samples"]
            batches = before + np.array(samples["batch"])
            axis.plot(batches, np.array(samples[name]) * factor, label=entry["rows"], linewidth=1)
            before += entry["batches"]
        axis.set(ylabel=label)
        if name == "tokens_per_s":
            axis.set(yscale="log")
        else:
            axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8, ncols=len(entries))
    axes[-1].set(xlabel="batches")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


if __name__ == "__main__":
    typer.run(main)
