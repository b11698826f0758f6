"""Flat rows read from a server of ranges on loopback, with the latency and bandwidth of an object store.

    python benchmarks/remote.py
    python benchmarks/remote.py --latency-ms 50 --bandwidth-mb 100 --seq-len 1024

The server is a Python process that uses a core of this machine itself, so rates are a lower bound and ratios are what
counts. Every round makes new loaders, remote ones and one over the local copy in turn. The last line is one JSON line.
"""

import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from comparison.remote_server import SETTLES_S, BandwidthMb, LatencyMs, Rate, counted, serving
from comparison.report import machine, wide_console
from comparison.spread import Column, spread, spread_table
from comparison.work import make_corpus
from rich.table import Table

from dali_pipes import TokenLoader

IN_FLIGHT = (1, 8, 64)
LOCAL = "local"
_COLUMNS = (
    Column("tokens_per_s", "Mtok/s", 1e-6, "{:.2f}"),
    Column("requests_per_mtok", "requests/Mtok", 1.0, "{:,.0f}"),
    Column("bytes_read_per_used", "bytes read/used", 1.0, "{:.3f}"),
    Column("first_batch_s", "first batch s", 1.0, "{:.3f}"),
    Column("resume_s", "resume at 80% s", 1.0, "{:.3f}"),
    Column("paced_wait_pct", "paced wait %", 1.0, "{:.2f}"),
    Column("cpu_s_per_mtok", "CPU s/Mtok", 1.0, "{:.4f}"),
)


def main(
    latency_ms: LatencyMs = 20.0,
    bandwidth_mb: BandwidthMb = 200.0,
    batch_size: Annotated[int, typer.Option(min=1, help="rows of a batch")] = 8,
    seq_len: Annotated[int, typer.Option(min=1, help="tokens of a row")] = 4096,
    rate: Rate = 1.0,
    seconds: Annotated[float, typer.Option(min=0.05, help="of each measurement of a rate")] = 4.0,
    rounds: Annotated[int, typer.Option(min=1, help="of each loader")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="tokens of the corpus")] = 100_000_000,
    data_dir: Annotated[Path | None, typer.Option(help="folder for the corpus, which is kept")] = None,
    out: Annotated[Path, typer.Option(help="folder for the JSON")] = Path("runs/remote"),
) -> None:
    """Measure, print a table, write a JSON; the last line is one JSON line."""
    console, about = wide_console(), machine()
    corpus = make_corpus((data_dir or Path(tempfile.gettempdir()) / "dali_pipes_benchmark") / "remote", tokens)
    settings: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len, "device": "cpu", "quiet": True, "seed": 1}
    entries: dict[str, list[dict[str, float]]] = {name: [] for name in (LOCAL, *map(str, IN_FLIGHT))}
    with serving(corpus.parent, latency_ms / 1000, bandwidth_mb * 1e6) as url, tempfile.TemporaryDirectory() as cache:
        os.environ["DALI_PIPES_CACHE"] = cache
        for number in range(rounds):
            for name, results in entries.items():
                console.log(f"round {number + 1} of {rounds}: {name}")
                is_local = name == LOCAL
                given = settings if is_local else {**settings, "read_requests": int(name)}
                path = str(corpus) if is_local else f"{url}/{corpus.name}"
                counts: Callable[[], dict[str, int]] = dict if is_local else lambda: counted(url)
                results.append(measure(path, given, counts, seconds, rate))
    report = {
        "benchmark": "remote",
        "machine": about,
        "latency_ms": latency_ms,
        "bandwidth_mb": bandwidth_mb,
        "batch_size": batch_size,
        "seq_len": seq_len,
        "rate_mtok_s": rate,
        "rounds": rounds,
        **summary(entries),
    }
    console.print(_table(report))
    out.mkdir(parents=True, exist_ok=True)
    (out / "remote.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def measure(
    path: str, settings: dict[str, Any], counts: Callable[[], dict[str, int]], seconds: float, rate: float
) -> dict[str, float]:
    """One round of one loader."""
    row_bytes = 2 * (settings["seq_len"] + 1)
    batch_tokens = settings["batch_size"] * settings["seq_len"]
    begin = time.perf_counter()
    with TokenLoader(path, **settings) as loader:
        batches = iter(loader)
        next(batches)
        found = {"first_batch_s": time.perf_counter() - begin}
        steps = len(loader)
        counts()
        begin, cpu, done = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - begin < seconds and next(batches, None) is not None:
            done += 1
        elapsed_s = time.perf_counter() - begin
        found["tokens_per_s"] = done * batch_tokens / elapsed_s
        found["cpu_s_per_mtok"] = (time.process_time() - cpu) / (done * batch_tokens / 1e6)
        state = loader.state_dict()
    answered = counts()  # with the blocks that were read ahead, at most, and not used
    if answered:
        found["requests_per_mtok"] = answered["requests"] / (done * batch_tokens / 1e6)
        found["bytes_read_per_used"] = answered["bytes"] / (done * settings["batch_size"] * row_bytes)
    state["rows"] = int(0.8 * steps) * settings["batch_size"]
    begin = time.perf_counter()
    with TokenLoader(path, **settings) as loader:
        loader.load_state_dict(state)
        batches = iter(loader)
        next(batches)
        found["resume_s"] = time.perf_counter() - begin
    with TokenLoader(path, **settings) as loader:
        found["paced_wait_pct"] = 100 * _paced_wait(loader, batch_tokens / (1e6 * rate), seconds)
    return found


def _paced_wait(loader: TokenLoader, step_s: float, seconds: float) -> float:
    """Share of the time that a consumer of `step_s` a batch waits once the first second is over."""
    batches, begin, wait_s, first_s = iter(loader), time.perf_counter(), 0.0, 0.0
    while (now := time.perf_counter()) - begin < SETTLES_S + seconds:
        if next(batches, None) is None:
            batches = iter(loader)
            continue
        got = time.perf_counter()
        if now - begin >= SETTLES_S:
            wait_s += got - now
            first_s = first_s or now
        time.sleep(step_s)
    return wait_s / (time.perf_counter() - first_s) if first_s else 0.0


def summary(entries: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians, lows and highs of each loader; ratios of medians; noise of the local rate."""
    found: list[dict[str, Any]] = [{"loader": name, **spread(results)} for name, results in entries.items()]
    rate = {entry["loader"]: entry["median"]["tokens_per_s"] for entry in found}
    most = str(IN_FLIGHT[-1])
    ratios = {f"{most} / {name} in flight": rate[most] / rate[name] for name in map(str, IN_FLIGHT[:-1])}
    ratios[f"{most} in flight / {LOCAL}"] = rate[most] / rate[LOCAL]
    local = found[0]
    noise = (local["high"]["tokens_per_s"] - local["low"]["tokens_per_s"]) / rate[LOCAL]
    return {"entries": found, "ratios": ratios, "noise": noise}


def _table(report: dict[str, Any]) -> Table:
    title = (
        f"{report['batch_size']} x {report['seq_len']}, {report['latency_ms']:g} ms, {report['bandwidth_mb']:g} MB/s: "
        f"median (low to high); paced: {report['rate_mtok_s']:g} Mtok/s"
    )
    return spread_table(title, "in flight", _COLUMNS, ((entry["loader"], entry) for entry in report["entries"]))


if __name__ == "__main__":
    typer.run(main)
