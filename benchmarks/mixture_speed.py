"""What a mixture costs: rate and CPU time against one source of the same size, start and resume of many sources.

    python benchmarks/mixture_speed.py
    python benchmarks/mixture_speed.py --only start --rounds 3

Rates: the same random tokens in one file, and cut into 5 and into 100 files, as one source and as a mixture with a
source for each file; the files are in the page cache. Mixtures are compared with one source of the same files: where
the page cache has put a file changes the time to read it by up to a third. One process opens all loaders and times them
in turn, in short slices. Start and resume: sparse files that
together read as 10^13 tokens; one source of one of them, one source of all, and a mixture with a source for each. Every
start is a new process, without the imports. Ratios are taken within a round. See `benchmarks/README.md`. The last line
is one JSON line.
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from comparison.child import Order, run_children
from comparison.report import machine, wide_console
from comparison.work import make_corpus, warm
from rich.table import Table
from start_resume import sparse_corpus

SIZES = [(8, 1024), (64, 2048)]
MIXED = (5, 100)
_TIMEOUT_S = 300.0
_EPOCHS = 10_000
"""Passes that the mixture's total allows, so that a timed run does not end."""
_RATE = ("tokens_per_s", "main_thread_cpu_s_per_batch", "cpu_s_per_mtok", "next_p50_s", "next_p99_s")
_START = ("first_batch_s", "first_batch_cpu_s", "resume_s", "resume_cpu_s")


def main(
    only: Annotated[str, typer.Option(help="parts, separated by commas: rate, start")] = "rate,start",
    rounds: Annotated[int, typer.Option(min=1, help="starts per case")] = 5,
    slices: Annotated[int, typer.Option(min=1, help="timed parts per case")] = 25,
    tokens: Annotated[int, typer.Option(min=1, help="random tokens whose rate is measured")] = 100_000_000,
    mixed: Annotated[str, typer.Option(help="numbers of sources whose rate is measured")] = ",".join(map(str, MIXED)),
    sources: Annotated[int, typer.Option(min=2, help="sources whose start is measured")] = 1000,
    total_tokens: Annotated[str, typer.Option(help="tokens of all of them together")] = "1e13",
    seconds: Annotated[float, typer.Option(help="length of a timed part")] = 0.4,
    data_dir: Annotated[Path | None, typer.Option(help="folder for files, which are removed at the end")] = None,
) -> None:
    """Measure, print tables and, as the last line, one line of JSON. Exit code 1 if a check failed."""
    about, console = machine(), wide_console()
    entries: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=data_dir) as folder:
        if "rate" in only.split(","):
            console.log("rates")
            entries += _rates(Path(folder), tokens, [1, *map(int, mixed.split(","))], slices, seconds)
        if "start" in only.split(","):
            console.log("starts")
            entries += _starts(Path(folder), sources, int(float(total_tokens)), rounds)
    outcomes = [(entry, outcome) for entry in entries for outcome in entry["rounds"]]
    failed = [f"{_label(entry)}: {outcome['failed']}" for entry, outcome in outcomes if "failed" in outcome]
    if not failed:
        for entry in entries:
            _summarise(entry, next(other for other in entries if _is_base(entry, other)))
        console.print(", ".join(f"{key} {value}" for key, value in about.items() if key != "versions"), markup=False)
        for part, names in (("rate", _RATE[:3]), ("start", _START)):
            if any(entry["part"] == part for entry in entries):
                console.print(_table([entry for entry in entries if entry["part"] == part], part, names))
    for text in failed:
        console.print(f"FAILED {text}", markup=False)
    print(json.dumps({"benchmark": "mixture_speed", "machine": about, "entries": entries, "failed": failed}))
    if failed:
        raise typer.Exit(1)


def _rates(folder: Path, tokens: int, counts: list[int], slices: int, seconds: float) -> list[dict[str, Any]]:
    """Of one file, and of the same tokens in as many files as there are sources."""
    whole = make_corpus(folder, tokens)
    cases: dict[tuple[int, int], list[list[str]]] = {}  # by sources and files
    for count in counts:
        paths = [str(path) for path in _cut(whole, folder / f"files_{count}", count)]
        cases |= {(1, count): [paths], (count, count): [[path] for path in paths]}
    entries: list[dict[str, Any]] = []
    for batch_size, seq_len in SIZES:
        shape = {"batch_size": batch_size, "seq_len": seq_len}
        task = {
            "cases": [*cases.values()],
            "total_tokens": _EPOCHS * tokens,
            "rounds": slices,
            "seconds": seconds,
            **shape,
        }
        (outcome,) = run_children([Order("comparison.mixture", task)], _TIMEOUT_S)
        of_cases = outcome.get("cases", [[outcome]] * len(cases))
        for (count, files), found in zip(cases, of_cases, strict=True):
            entry = {"part": "rate", "sources": _named(count, files), "files": files, **shape}
            entries.append({**entry, "beside": 1 if count == 1 else files, "rounds": found})
    return entries


def _starts(folder: Path, count: int, total_tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Of as many sparse files as sources, all of the same size. Each round begins with another case."""
    each = total_tokens // count
    files = []
    for number in range(count):
        place = folder / f"sparse_{number:04d}"
        place.mkdir()
        files.append([str(path) for path in sparse_corpus(place, each)])
    together = [[path for of_source in files for path in of_source]]
    shape = dict(zip(("batch_size", "seq_len"), SIZES[0], strict=True))
    cases = {_named(1, 1): files[:1], _named(1, count): together, _named(count, count): files}
    about = {"part": "start", "files": 1, "beside": 1}
    entries: list[dict[str, Any]] = [{**about, "sources": name, **shape, "rounds": []} for name in cases]
    for number in range(rounds):
        first = number * len(entries) // rounds
        for entry in entries[first:] + entries[:first]:
            task = {"sources": cases[entry["sources"]], "total_tokens": each * count, **shape}
            entry["rounds"] += run_children([Order("comparison.mixture", task)], _TIMEOUT_S)
    return entries


def _cut(whole: Path, folder: Path, count: int) -> list[Path]:
    """The tokens of a file in `count` files, in the page cache."""
    folder.mkdir()
    paths = []
    for number, part in enumerate(np.array_split(np.memmap(whole, np.uint16, "r"), count)):
        paths.append(folder / f"part_{number:03d}.bin")
        part.tofile(paths[-1])
    warm(folder)
    return paths


def _named(sources: int, files: int) -> str:
    return f"{sources:,}" if sources > 1 else f"1, of {files:,} file{'s' if files > 1 else ''}"


def _is_base(entry: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether `other` is the one source that an entry is compared with."""
    same = all(entry[key] == other[key] for key in ("part", "batch_size", "seq_len"))
    return same and other["files"] == entry["beside"]


def _summarise(entry: dict[str, Any], one: dict[str, Any]) -> None:
    """Median, lowest and highest of every figure, and of its ratio to that of the source `one` in the same round."""
    names = _RATE if entry["part"] == "rate" else _START
    for name in names:
        values = [found[name] for found in entry["rounds"]]
        ratios = [value / found[name] for value, found in zip(values, one["rounds"], strict=True)]
        entry[name], entry[f"{name}_ratio"] = _spread(values), _spread(ratios)
    entry["noise"] = (entry[names[0]]["high"] - entry[names[0]]["low"]) / entry[names[0]]["median"]


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


_UNITS = {
    "tokens_per_s": ("Mtok/s", 1e-6),
    "main_thread_cpu_s_per_batch": ("main thread, µs a batch", 1e6),
    "cpu_s_per_mtok": ("CPU ms a Mtok", 1e3),
    "first_batch_s": ("first batch, ms", 1e3),
    "first_batch_cpu_s": ("CPU ms", 1e3),
    "resume_s": ("resume at 80%, ms", 1e3),
    "resume_cpu_s": ("CPU ms", 1e3),
}


def _label(entry: dict[str, Any]) -> str:
    return f"{entry['part']}, {entry['batch_size']} x {entry['seq_len']}, {entry['sources']} sources"


def _table(entries: list[dict[str, Any]], part: str, names: tuple[str, ...]) -> Table:
    base = "one source of the same files, its own to one file" if part == "rate" else "the first row"
    table = Table(title=f"{part}: median (low to high); ratios to {base}, within a round")
    table.add_column("batch")
    table.add_column("sources")
    for name in names:
        table.add_column(_UNITS[name][0], justify="right")
        table.add_column("ratio", justify="right")
    table.add_column("noise", justify="right")
    for entry in entries:
        cells = []
        for name in names:
            figures = {part: value * _UNITS[name][1] for part, value in entry[name].items()}
            cells.append("{median:.4g} ({low:.4g} to {high:.4g})".format(**figures))
            cells.append("{median:.2f} ({low:.2f} to {high:.2f})".format(**entry[f"{name}_ratio"]))
        noise = f"{100 * entry['noise']:.0f}%"
        table.add_row(f"{entry['batch_size']} x {entry['seq_len']}", entry["sources"], *cells, noise)
    return table


if __name__ == "__main__":
    typer.run(main)
