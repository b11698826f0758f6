"""Batches as JAX arrays, from `jax_batches` and from Grain: `python benchmarks/jax_input.py --help`.

The same windows of the same corpus, int32, on a mesh of one CPU device. Each run is a separate process, and runs of the
loaders alternate. The last line is one JSON line.
"""

import importlib.util
import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from comparison.child import Order, run_children
from comparison.report import machine, wide_console
from comparison.work import SIZES, Limits, Work, make_corpus, warm
from rich.table import Table

WAYS = ("dali_pipes", "grain", "grain_2_workers")
FIGURES = {  # key: heading, factor
    "tokens_per_s": ("Mtok/s", 1e-6),
    "cpu_s_per_mtok": ("CPU ms per Mtok", 1e3),
    "first_batch_s": ("first batch, ms", 1e3),
    "resume_s": ("resume at 80%, ms", 1e3),
}
_TIMEOUT_S = 300.0


def main(
    tokens: Annotated[int, typer.Option(min=1000, help="Tokens of the corpus.")] = 50_000_000,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each loader.")] = 3,
    seconds: Annotated[float, typer.Option(help="Seconds to time per run.")] = 2.0,
    all_sizes: Annotated[
        bool, typer.Option("--all-sizes", help="Measure four sizes instead of only 8 x 1024.")
    ] = False,
    batch_size: Annotated[int | None, typer.Option(min=1, help="Rows per batch, with --seq-len.")] = None,
    seq_len: Annotated[int | None, typer.Option(min=1, help="Tokens per row.")] = None,
    only: Annotated[
        str | None, typer.Option(help=f"Loaders to measure, separated by commas: {', '.join(WAYS)}.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder for the corpus.", show_default="in the system's temporary folder")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the JSON.")] = Path("runs/jax_input"),
) -> None:
    """Measure, print a table, write a JSON. Exit code 1 if a run failed or delivered wrong data."""
    console = wide_console()
    ways = only.split(",") if only else list(WAYS)
    if unknown := [way for way in ways if way not in WAYS]:
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(WAYS)}")
    for package in ["jax", *(["grain"] if set(ways) - {"dali_pipes"} else [])]:
        if importlib.util.find_spec(package) is None:
            console.print(f"{package} is not installed: pip install -e '.[bench,jax]'")
            raise typer.Exit(1)
    folder = data_dir or Path(tempfile.gettempdir()) / "dali_pipes_jax_input"
    corpus = make_corpus(folder, tokens)
    warm(corpus)
    sizes = [(batch_size, seq_len)] if batch_size and seq_len else SIZES if all_sizes else SIZES[:1]
    entries: list[dict[str, Any]] = []
    for rows, length in sizes:
        work = Work(str(corpus), tokens, rows, length, str(folder))
        limits = Limits(max_s=seconds)
        task = {"work": work.as_dict(), "limits": asdict(limits)}
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
        for number in range(rounds):
            console.log(f"round {number + 1} of {rounds}: {rows} x {length}")
            orders = [Order("comparison.jax_arrays", {"name": way, **task}) for way in ways]
            for way, result in zip(ways, run_children(orders, _TIMEOUT_S), strict=True):
                runs[way].append(result)
        entries.append({"batch_size": rows, "seq_len": length, "runs": runs})
    failed = [
        f"{way}, {entry['batch_size']} x {entry['seq_len']}: {run['failed']}"
        for entry in entries
        for way, runs in entry["runs"].items()
        for run in runs
        if "failed" in run
    ]
    for text in failed:
        console.print(f"FAILED {text}", markup=False)
    if failed:
        raise typer.Exit(1)
    for entry in entries:
        entry["median"] = {way: _over(runs, statistics.median) for way, runs in entry["runs"].items()}
    console.print(_table(entries))
    about = machine()
    out.mkdir(parents=True, exist_ok=True)
    report = {"benchmark": "jax_input", "machine": about, "tokens": tokens, "sizes": entries}
    (out / "jax_input.json").write_text(json.dumps(report, indent=1) + "\n")
    medians = {f"{entry['batch_size']} x {entry['seq_len']}": entry["median"] for entry in entries}
    print(json.dumps({"benchmark": "jax_input", "date": about["date"], "medians": medians}))


def _over(runs: list[dict[str, Any]], pick: Any) -> dict[str, float | None]:
    """One number for each figure; None for one that was not measured."""
    return {key: None if runs[0][key] is None else pick([run[key] for run in runs]) for key in FIGURES}


def _table(entries: list[dict[str, Any]]) -> Table:
    grid = Table("(B, T)", "loader", title="JAX arrays: median (low to high)")
    for heading, _ in FIGURES.values():
        grid.add_column(heading, justify="right", no_wrap=True)
    for entry in entries:
        for way, runs in entry["runs"].items():
            middle, low, high = (_over(runs, pick) for pick in (statistics.median, min, max))
            cells = [
                "-" if middle[key] is None else " ".join(_shown(middle[key], low[key], high[key], factor))
                for key, (_, factor) in FIGURES.items()
            ]
            grid.add_row(f"{entry['batch_size']}, {entry['seq_len']}", way, *cells)
    return grid


def _shown(middle: Any, low: Any, high: Any, factor: float) -> tuple[str, str]:
    return f"{middle * factor:,.1f}", f"({low * factor:,.1f} to {high * factor:,.1f})"


if __name__ == "__main__":
    typer.run(main)
