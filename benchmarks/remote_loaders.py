"""Loaders beside one another over a server on loopback with the latency and bandwidth of an object store.

    python benchmarks/remote_loaders.py
    python benchmarks/remote_loaders.py --only dali_pipes,streaming --rounds 1

Each reads the same rows in its own format, in new processes that have cached nothing: `remote_sources` says how.
The server is a Python process of this machine, so rates are a lower bound and ratios count. The last line is JSON.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from comparison.remote_server import BandwidthMb, LatencyMs, Rate, serving
from comparison.remote_sources import BUCKET, SOURCES
from comparison.report import machine, wide_console
from comparison.spread import Column, spread, spread_table
from comparison.work import Work, make_corpus

_COLUMNS = (
    Column("first_batch_s", "first batch s", 1.0, "{:.2f}"),
    Column("paced_wait_pct", "paced wait %", 1.0, "{:.2f}"),
    Column("resume_s", "resume at 80% s", 1.0, "{:.2f}"),
    Column("resume_exact", "exact", 1.0, "{:.0f}"),
    Column("bytes_read_per_used", "bytes read/used", 1.0, "{:.3f}"),
    Column("requests_per_mtok", "requests/Mtok", 1.0, "{:,.1f}"),
    Column("tokens_per_s", "Mtok/s", 1e-6, "{:.2f}"),
    Column("epoch_share", "of the epoch", 1.0, "{:.2f}"),
)
_CHILD_S = 600


def main(
    latency_ms: LatencyMs = 20.0,
    bandwidth_mb: BandwidthMb = 200.0,
    batch_size: Annotated[int, typer.Option(min=1, help="rows of a batch")] = 8,
    seq_len: Annotated[int, typer.Option(min=1, help="tokens of a row")] = 4096,
    rate: Rate = 1.0,
    seconds: Annotated[float, typer.Option(min=0.05, help="of the paced part, after its first second")] = 4.0,
    most_s: Annotated[float, typer.Option(min=1, help="of an epoch, which is cut then")] = 90.0,
    rounds: Annotated[int, typer.Option(min=1, help="of each loader")] = 3,
    tokens: Annotated[int, typer.Option(min=1, help="tokens of the corpus")] = 50_000_000,
    only: Annotated[str, typer.Option(help=f"some of {','.join(SOURCES)}")] = ",".join(SOURCES),
    data_dir: Annotated[Path | None, typer.Option(help="folder for the corpus, which is kept")] = None,
    out: Annotated[Path, typer.Option(help="folder for the JSON")] = Path("runs/remote_loaders"),
) -> None:
    """Measure, print a table, write a JSON; the last line is one JSON line."""
    console, about = wide_console(), machine()
    folder = (data_dir or Path(tempfile.gettempdir()) / "dali_pipes_benchmark") / "remote"
    work = Work(str(make_corpus(folder, tokens)), tokens, batch_size, seq_len, str(folder))
    chosen = [name for name in only.split(",") if all(map(find_spec, SOURCES[name].packages))]
    failed: dict[str, str] = {name: "a package is missing" for name in only.split(",") if name not in chosen}
    entries: dict[str, list[dict[str, float]]] = {name: [] for name in chosen}
    with tempfile.TemporaryDirectory(dir=folder) as served:
        for name in chosen:
            _serve(*SOURCES[name].prepare(work), Path(served) / BUCKET)
        task = {"work": work.as_dict(), "rate": rate, "seconds": seconds, "most_s": most_s}
        with serving(Path(served), latency_ms / 1000, bandwidth_mb * 1e6) as url:
            for number in range(rounds):
                for name in [one for one in chosen if one not in failed]:
                    console.log(f"round {number + 1} of {rounds}: {name}")
                    try:
                        entries[name].append(_measure({**task, "source": name, "url": url}))
                    except (subprocess.SubprocessError, ValueError) as error:
                        failed[name] = str(error)[-500:]
    report = {
        "benchmark": "remote_loaders",
        "machine": about,
        "latency_ms": latency_ms,
        "bandwidth_mb": bandwidth_mb,
        "batch_size": batch_size,
        "seq_len": seq_len,
        "tokens": tokens,
        "rate_mtok_s": rate,
        "rounds": rounds,
        "failed": failed,
        **summary({name: found for name, found in entries.items() if name not in failed}),
    }
    title = f"{batch_size} x {seq_len}, {latency_ms:g} ms, {bandwidth_mb:g} MB/s: median (low to high); {rate:g} Mtok/s"
    console.print(spread_table(title, "loader", _COLUMNS, ((entry["loader"], entry) for entry in report["entries"])))
    out.mkdir(parents=True, exist_ok=True)
    (out / "remote_loaders.json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report))


def summary(entries: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    """Medians, lows and highs of each loader, and its figures as multiples of those of the first."""
    shared = {name: set.intersection(*map(set, rounds)) for name, rounds in entries.items()}
    found: list[dict[str, Any]] = [
        {"loader": name, **spread([{key: one[key] for key in sorted(shared[name])} for one in rounds])}
        for name, rounds in entries.items()
    ]
    ours = found[0]["median"] if found else {}
    keys = ("first_batch_s", "resume_s", "bytes_read_per_used", "tokens_per_s")
    ratios = {
        f"{entry['loader']} / {found[0]['loader']}": {
            key: entry["median"][key] / ours[key] for key in keys if key in entry["median"] and ours.get(key)
        }
        for entry in found[1:]
    }
    return {"entries": found, "ratios": ratios}


def _serve(source: Path, name: str, bucket: Path) -> None:
    """The file, or the files of the folder, below the bucket; as links, so nothing is copied."""
    for path in [source] if source.is_file() else [path for path in source.rglob("*") if path.is_file()]:
        target = bucket / name if source.is_file() else bucket / name / path.relative_to(source)
        target.parent.mkdir(parents=True, exist_ok=True)
        if not target.exists():
            os.link(path, target)


def _measure(task: dict[str, Any]) -> dict[str, float]:
    """One epoch in a process, and the resume of its state in another, each with an empty cache."""
    folder = Path(tempfile.mkdtemp())
    try:
        found: dict[str, float] = {}
        for is_resume in (False, True):
            cache = folder / "cache"  # of one name: LitData refuses a state of another
            shutil.rmtree(cache, ignore_errors=True)
            cache.mkdir()
            given = {**task, "cache": str(cache), "state": str(folder / "state"), "is_resume": is_resume}
            command = [sys.executable, "-m", "comparison.remote_child", json.dumps(given)]
            place = Path(__file__).resolve().parent
            done = subprocess.run(command, cwd=place, capture_output=True, text=True, timeout=_CHILD_S, check=False)
            if done.returncode:
                raise subprocess.SubprocessError(done.stderr[-500:])
            found |= json.loads(done.stdout.splitlines()[-1])
        return found
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    typer.run(main)
