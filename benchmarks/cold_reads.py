"""Data wait of a consumer of a fixed pace when the corpus is not in the page cache, and when it is.

    python benchmarks/cold_reads.py
    python benchmarks/cold_reads.py --rate 20 --seq-len 4096 --consumer sleep

`TokenLoader` is compared with a torch `DataLoader` of two workers over an `np.memmap`; both deliver the same rows in
random order. Cold and warm rounds of both alternate, each in a new process. All figures but those of the start are from
after the first second. "Data wait" is all time inside `next()`, and "for blocks" is the part of it in which the next
block was not ready, as `TokenLoader` counts it. The last line is one JSON line.
"""

import json
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from comparison.child import Order, run_children
from comparison.cold import CONSUMERS, LOADERS
from comparison.report import machine, wide_console
from comparison.spread import Column, spread, spread_table
from comparison.work import Work, make_corpus
from rich.table import Table

OURS, THEIRS = LOADERS
CACHES = ("warm", "cold")
_TIMEOUT_S = 300.0
_CONSUMERS_HELP = f"how it spends its time: {' or '.join(CONSUMERS)} (a core, or none)"
_COLUMNS = (
    Column("tokens_per_s", "Mtok/s", 1e-6, "{:.2f}"),
    Column("data_wait_pct", "data wait %", 1.0, "{:.2f}"),
    Column("blocks_wait_pct", "for blocks %", 1.0, "{:.3f}"),
    Column("next_p99_s", "next() p99 µs", 1e6, "{:,.0f}"),
    Column("next_most_s", "longest ms", 1e3, "{:,.0f}"),
    Column("first_batch_s", "first batch ms", 1e3, "{:,.0f}"),
    Column("start_wait_s", "first second ms", 1e3, "{:,.0f}"),
    Column("cpu_s", "CPU s", 1.0, "{:.2f}"),
)


def main(
    rate: Annotated[float, typer.Option(min=0.001, help="pace of the consumer in million tokens per second")] = 5.0,
    batch_size: Annotated[int, typer.Option(min=1, help="rows of a batch")] = 8,
    seq_len: Annotated[int, typer.Option(min=1, help="tokens of a row")] = 1024,
    consumer: Annotated[str, typer.Option(help=_CONSUMERS_HELP)] = "burn",
    seconds: Annotated[float, typer.Option(min=0.01, help="of the consumer's own work in a round")] = 4.0,
    first_s: Annotated[
        float, typer.Option(min=0, help="seconds of the start, which are not in the other figures")
    ] = 1.0,
    rounds: Annotated[int, typer.Option(min=1, help="of each loader, warm and cold")] = 5,
    threads: Annotated[int | None, typer.Option(min=1, help="num_threads of TokenLoader; default: its own")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="tokens of the corpus")] = 400_000_000,
    data_dir: Annotated[
        Path | None, typer.Option(help="folder on a disk for the corpus, which is kept; default: temporary")
    ] = None,
    out: Annotated[Path, typer.Option(help="folder for the JSON")] = Path("runs/cold_reads"),
) -> None:
    """Measure, print a table, write a JSON; the last line is one JSON line. Exit code 1 if a check failed."""
    if consumer not in CONSUMERS:
        raise typer.BadParameter(f"unknown consumer {consumer!r}; choose {' or '.join(CONSUMERS)}")
    console, about = wide_console(), machine()
    folder = data_dir or Path(tempfile.gettempdir()) / "dali_pipes_benchmark"
    work = Work(str(make_corpus(folder, tokens)), tokens, batch_size, seq_len, str(folder), threads=threads)
    pace = {"step_s": work.batch_tokens / (1e6 * rate), "seconds": seconds, "first_s": first_s, "consumer": consumer}
    entries: list[dict[str, Any]] = [
        {"loader": name, "cache": cache, "rounds": []} for name in LOADERS for cache in CACHES
    ]
    for number in range(rounds):
        for entry in entries:
            console.log(f"round {number + 1} of {rounds}: {entry['loader']}, {entry['cache']}")
            task = {"name": entry["loader"], "work": work.as_dict(), "is_cold": entry["cache"] == "cold", **pace}
            entry["rounds"] += run_children([Order("comparison.cold", task)], _TIMEOUT_S)
    report = {
        "benchmark": "cold_reads",
        "machine": about,
        "tokens": tokens,
        "batch_size": batch_size,
        "seq_len": seq_len,
        "rate_mtok_s": rate,
        "threads": threads,
        **pace,
        **summary(entries),
    }
    console.print(_table(report))
    for text in report["failed"]:
        console.print(f"FAILED {text}", markup=False)
    out.mkdir(parents=True, exist_ok=True)
    (out / "cold_reads.json").write_text(json.dumps(report, indent=1) + "\n")
    for entry in report["entries"]:
        del entry["rounds"]
    print(json.dumps(report))
    if report["failed"]:
        raise typer.Exit(1)


def summary(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians, lows and highs of each entry; what failed; ratios of medians; noise of the warm rate of each loader."""
    failed, of = [], {}
    for entry in entries:
        label = f"{entry['loader']}, {entry['cache']}"
        failed += [f"{label}: {result['failed']}" for result in entry["rounds"] if "failed" in result]
        good = [result for result in entry["rounds"] if "failed" not in result]
        entry |= spread(good) if good else {}
        of[entry["loader"], entry["cache"]] = entry

    def ratio(key: str, one: tuple[str, str], other: tuple[str, str]) -> float | None:
        values = [of[name].get("median", {}).get(key) for name in (one, other)]
        return None if None in values or not values[1] else values[0] / values[1]

    ratios = {
        f"{name} cold / warm {key}": ratio(key, (name, "cold"), (name, "warm"))
        for name in LOADERS
        for key in ("tokens_per_s", "next_p99_s")
    }
    ratios |= {
        f"{OURS} / {THEIRS} {key}, {cache}": ratio(key, (OURS, cache), (THEIRS, cache))
        for cache in CACHES
        for key in ("data_wait_s", "next_p99_s", "cpu_s")
    }
    noise = {}
    for name in LOADERS:
        entry = of[name, "warm"]
        if "median" in entry:
            low, high, middle = (entry[part]["tokens_per_s"] for part in ("low", "high", "median"))
            noise[name] = (high - low) / middle
    return {"entries": entries, "ratios": ratios, "noise": noise, "failed": failed}


def _table(report: dict[str, Any]) -> Table:
    title = (
        f"a consumer of {report['rate_mtok_s']:g} Mtok/s, {report['batch_size']} x {report['seq_len']}: "
        "median (low to high)"
    )
    return spread_table(
        title,
        "loader, page cache",
        _COLUMNS,
        ((f"{entry['loader']}, {entry['cache']}", entry) for entry in report["entries"]),
    )


if __name__ == "__main__":
    typer.run(main)
