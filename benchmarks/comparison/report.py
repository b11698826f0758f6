"""Medians and spread, the table, the goals, the JSON and the charts."""

import datetime
import importlib.metadata
import os
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from comparison.work import Work

Run = dict[str, Any]
OURS, MAPPED, YARDSTICK = "dali_pipes", "dali_pipes_mapped", "numpy"
_GATHERS_FROM_A_MAP = ((32, 1024), (16, 4096))
"""Sizes at which the fastest other loader copies rows from a map in one call, and keeps its memory."""
_TABLE_WIDTH = 160  # characters
ROW_LOADER = "torch_dataloader_0"
_DISTRIBUTIONS = [
    *("dali-pipes", "numpy", "torch", "nvidia-dali-cuda120", "nvidia-dali-cuda130"),
    *("torchdata", "grain", "jax", "mosaicml-streaming", "litdata", "datasets"),
]


@dataclass(frozen=True)
class Figure:
    """One measured quantity: its key in the raw figures, its heading, and the factor to the unit of the heading."""

    key: str
    heading: str
    factor: float
    digits: int


FIGURES = [
    Figure("tokens_per_s", "Mtok/s", 1e-6, 1),
    Figure("cpu_s_per_mtok", "CPU ms\n/Mtok", 1e3, 2),
    Figure("main_thread_cpu_s_per_batch", "main thr.\nµs/batch", 1e6, 0),
    Figure("next_p50_s", "next()\np50 µs", 1e6, 0),
    Figure("next_p99_s", "next()\np99 µs", 1e6, 0),
    Figure("first_batch_s", "first\nbatch ms", 1e3, 0),
    Figure("resume_s", "resume\nms", 1e3, 0),
    Figure("close_s", "close\nms", 1e3, 1),
    Figure("unshared_added_mb", "memory\n+MB", 1, 0),
]


def wide_console() -> Console:
    """A console as wide as the tables need, also where the output goes to a file or a narrow terminal."""
    console = Console()
    return console if console.width >= _TABLE_WIDTH else Console(width=_TABLE_WIDTH)


def summarise(work: Work, results: dict[str, Run]) -> Run:
    """One size: medians, lows and highs of every figure, the yardstick's own noise, and the goals."""
    for result in results.values():
        keys = [key for key in (result["rounds"] or [{}])[0] if key not in ("seconds", "batches", "load_average")]
        for name, pick in (("median", statistics.median), ("low", min), ("high", max)):
            result[name] = {key: _over_rounds(result["rounds"], key, pick) for key in keys}
        if keys and result["median"]["resume_s"] is None:
            to_skip = work.resume_batch * work.batch_tokens
            result["skip_to_resume_s_estimate"] = to_skip / result["median"]["tokens_per_s"]
    run = {
        "batch_size": work.batch_size,
        "seq_len": work.seq_len,
        "epoch_batches": work.epoch_batches,
        "alternatives": results,
        "noise": {name: _noise(results, name) for name in (YARDSTICK, OURS) if _noise(results, name) is not None},
    }
    return run | {"goals": goals(results, (work.batch_size, work.seq_len))}


def _over_rounds(rounds: list[Run], key: str, pick: Any) -> float | None:
    values = [figures[key] for figures in rounds if figures[key] is not None]
    return float(pick(values)) if values else None


def _noise(results: dict[str, Run], name: str) -> float | None:
    """(high - low) / median of the rate over the rounds."""
    result = results.get(name, {})
    if not result.get("median"):
        return None
    low, high, middle = (result[part]["tokens_per_s"] for part in ("low", "high", "median"))
    return float((high - low) / middle)


def goals(results: dict[str, Run], size: tuple[int, int]) -> list[Run]:
    """What the project wants to reach at this size, what was measured, and whether it holds. Medians."""
    medians = {name: result["median"] for name, result in results.items() if result.get("median")}
    if OURS not in medians:
        return []
    ours = medians[OURS]
    found = [
        _goal("first batch, s", ours["first_batch_s"], "<=", 0.015),
        _goal("resume at 80 %, s", ours["resume_s"], "<=", 0.015),
        _goal("close, s", ours["close_s"], "<=", 0.005),
    ]

    def ratio(key: str, other: str, one: str = OURS) -> float:
        return float(medians[one][key] / medians[other][key])

    loaders = {name: median for name, median in medians.items() if results[name]["kind"] == "loader"}
    if loaders:
        smallest = min(median["unshared_added_mb"] for median in loaders.values())
        more = ours["unshared_added_mb"] - smallest
        found.append(_goal("memory added beyond the smallest other loader's, MB", more, "<=", 20))
    if YARDSTICK in medians:
        found.append(_goal(f"CPU s per Mtok against {YARDSTICK}", ratio("cpu_s_per_mtok", YARDSTICK), "<=", 1.5))
    fastest = max(loaders, key=lambda name: loaders[name]["tokens_per_s"], default=None)
    if fastest is not None:
        wanted = 0.9 if size in _GATHERS_FROM_A_MAP else 1.2
        text = f"tokens/s against {fastest} (fastest other loader)"
        found.append(_goal(text, ratio("tokens_per_s", fastest), ">=", wanted))
        if MAPPED in medians:
            found.append(_goal(f"{text}, reads mapped", ratio("tokens_per_s", fastest, MAPPED), ">=", 1.1))
    if YARDSTICK in medians and MAPPED in medians:
        share = ratio("cpu_s_per_mtok", YARDSTICK, MAPPED)
        found.append(_goal(f"CPU s per Mtok against {YARDSTICK}, reads mapped", share, "<=", 1.1))
    if ROW_LOADER in medians:
        share = ratio("main_thread_cpu_s_per_batch", ROW_LOADER)
        found.append(_goal(f"main-thread CPU a batch against {ROW_LOADER}", share, "<=", 1 / 3))
    return found


def _goal(text: str, measured: float, relation: str, limit: float) -> Run:
    met = measured >= limit if relation == ">=" else measured <= limit
    return {"goal": text, "measured": measured, "wanted": f"{relation} {limit:.3g}", "met": met}


def table(run: Run) -> Table:
    """The comparison at one size, fastest first."""
    grid = Table(
        title=f"batch_size {run['batch_size']}, seq_len {run['seq_len']}: medians, rate with lowest to highest"
    )
    grid.add_column("alternative")
    grid.add_column("Mtok/s (low to high)", justify="right")
    grid.add_column(f"ratio to\n{YARDSTICK}", justify="right")
    for figure in FIGURES[1:]:
        grid.add_column(figure.heading, justify="right")
    grid.add_column("checked\nrows", justify="right")
    measured = {name: result for name, result in run["alternatives"].items() if result.get("median")}
    yardstick = measured.get(YARDSTICK, {}).get("median", {}).get("tokens_per_s")
    for name in sorted(measured, key=lambda name: -measured[name]["median"]["tokens_per_s"]):
        result = measured[name]
        middle = result["median"]
        rate, low, high = (result[part]["tokens_per_s"] / 1e6 for part in ("median", "low", "high"))
        cells = [
            f"{rate:.1f} ({low:.1f} to {high:.1f})",
            f"{middle['tokens_per_s'] / yardstick:.2f}" if yardstick else "-",
        ]
        for figure in FIGURES[1:]:
            value = middle[figure.key]
            cells.append("no state" if value is None else f"{value * figure.factor:.{figure.digits}f}")
        grid.add_row(name, *cells, _checked(result.get("check")), style="bold" if name == OURS else None)
    return grid


def _checked(check: Run | None) -> str:
    if not check:
        return "-"
    remarks = ["= epoch"] * check["whole_epoch"] + ["resume exact"] * bool(check["resume_exact"])
    return f"{check['rows']}\n{', '.join(remarks)}" if remarks else str(check["rows"])


def goals_table(run: Run) -> Table:
    grid = Table(title=f"{OURS} at {run['batch_size']} x {run['seq_len']}")
    for heading in ("goal", "measured", "wanted", "met"):
        grid.add_column(heading, justify="left" if heading == "goal" else "right")
    for entry in run["goals"]:
        grid.add_row(entry["goal"], f"{entry['measured']:.3g}", entry["wanted"], "yes" if entry["met"] else "NO")
    return grid


def machine() -> Run:
    """What the figures were measured on and with. The load is that before the run: above 0.3 others were working."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": model,
        "cores": os.cpu_count(),
        "cores_allowed": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load_average_before": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: version for name in _DISTRIBUTIONS if (version := _version(name)) is not None},
    }


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None
