"""Starts over a server on loopback with the latency of an object store: many objects by several ranks, many sources.

    python benchmarks/remote_starts.py
    python benchmarks/remote_starts.py --objects 10000 --ranks 8

The ranks are processes that start together, as those of a node; then one process starts again. The last line is JSON.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from comparison.remote_server import LatencyMs, counted, serving
from comparison.report import machine, wide_console

_RANK = """
import json, os, sys, time
import obstore
from dali_pipes.corpus import open_corpus

url, count = sys.argv[1:]
sys.stdin.readline()
begin, cpu = time.perf_counter(), time.process_time()
with open_corpus([f"{url}/s_{number}.bin" for number in range(int(count))]) as corpus:
    found = corpus.fingerprint
print(json.dumps([time.perf_counter() - begin, time.process_time() - cpu, found]))
"""


def main(
    latency_ms: LatencyMs = 20.0,
    objects: Annotated[int, typer.Option(min=16, help="of 16 KiB, named in a list")] = 2000,
    ranks: Annotated[int, typer.Option(min=1, help="processes that start together")] = 2,
    sources: Annotated[int, typer.Option(min=2, help="of a mixture, one object each")] = 20,
    out: Annotated[Path, typer.Option(help="folder for the JSON")] = Path("runs/remote_starts"),
) -> None:
    """Measure, print, write a JSON; the last line is one JSON line."""
    console, about = wide_console(), machine()
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        os.environ["DALI_PIPES_CACHE"] = cache
        for number in range(max(objects, sources)):
            np.full(8192, number % 50_000, np.uint16).tofile(Path(folder) / f"s_{number}.bin")
        with serving(Path(folder), latency_ms / 1000, 0) as url:
            starts = {"together": _opened(url, objects, ranks), "again": _opened(url, objects, 1)}
            mixture = {str(most): _mixture_start(url, sources, most) for most in (16, 1, 16)}  # the first is a warm-up
    report: dict[str, Any] = {
        "benchmark": "remote_starts",
        "machine": about,
        "latency_ms": latency_ms,
        "objects": objects,
        "ranks": ranks,
        "starts": starts,
        "sources": sources,
        "mixture_start_s": mixture,
        "mixture_ratio": mixture["1"] / mixture["16"],
    }
    for name, one in starts.items():
        seconds = ", ".join(f"{value:.1f}" for value in one["seconds"])
        console.print(f"{objects:,} objects, {name}: {seconds} s; {one['requests']:,} requests of all")
    console.print(f"{sources} sources: {mixture['16']:.2f} s, one after another {mixture['1']:.2f} s")
    out.mkdir(parents=True, exist_ok=True)
    (out / "remote_starts.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def _opened(url: str, objects: int, ranks: int) -> dict[str, Any]:
    """Seconds and CPU seconds of each rank, and the requests of all together."""
    counted(url)
    command = [sys.executable, "-c", _RANK, url, str(objects)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(ranks)]
    for one in started:
        assert one.stdin is not None
        one.stdin.write("\n")
        one.stdin.flush()
    found = [json.loads(one.communicate()[0]) for one in started]
    assert len({fingerprint for _, _, fingerprint in found}) == 1
    return {
        "seconds": [seconds for seconds, _, _ in found],
        "cpu_seconds": [cpu for _, cpu, _ in found],
        "requests": counted(url)["requests"],
    }


def _mixture_start(url: str, sources: int, most: int) -> float:
    """Seconds until the first batch, with at most `most` sources opened at the same time."""
    from dali_pipes import TokenLoader
    from dali_pipes.engine import mixture

    mixture._MOST_OPENING = most
    mixed: Any = {f"s_{number}": {"corpus": f"{url}/s_{number}.bin", "weight": 1.0} for number in range(sources)}
    settings: dict[str, Any] = {"batch_size": 8, "seq_len": 256, "total_tokens": 10**6, "device": "cpu", "quiet": True}
    begin = time.perf_counter()
    with TokenLoader(mixture=mixed, **settings) as loader:
        next(iter(loader))
        return time.perf_counter() - begin


if __name__ == "__main__":
    typer.run(main)
