"""Times alternatives of a token kernel in turns, and prints the results with their noise.

In every round each alternative runs once; ratios are taken within a round, so that a temporary slowdown of the machine
affects both sides. Shared by `bench_permute.py` and `bench_rows.py`.
"""

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from comparison.report import machine, wide_console
from rich.table import Table

_SAMPLE_S = 2e-3


def modules() -> list[Any]:
    """NumPy, and CuPy where it is installed and there is a CUDA device."""
    try:
        import cupy
    except ImportError:
        return [np]
    return [np, cupy] if cupy.cuda.is_available() else [np]


def measure(
    module: Any, alternatives: dict[str, Callable[[], object]], baseline: str, rounds: int
) -> list[dict[str, Any]]:
    """Seconds a call, and the ratio of the baseline's time to it (above 1: faster); median, lowest and highest.

    Calls are repeated to at least 2 ms a sample. On a device the sample ends when the device has done all of them.
    """
    calls = {name: _calls(module, run) for name, run in alternatives.items()}
    samples: dict[str, list[float]] = {name: [] for name in alternatives}
    for _ in range(rounds):
        for name, run in alternatives.items():
            samples[name].append(_seconds(module, run, calls[name]) / calls[name])
    ratios = {
        name: [reference / own for reference, own in zip(samples[baseline], samples[name], strict=True)]
        for name in alternatives
    }
    return [
        {
            "device": module.__name__,
            "name": name,
            "baseline": baseline,
            "seconds": _spread(samples[name]),
            "ratio": _spread(ratios[name]),
        }
        for name in alternatives
    ]


def report(benchmark: str, entries: list[dict[str, Any]]) -> None:
    """Print the machine, a table, and one line of JSON, the last. Entries are those of `measure` with a `case` each."""
    about = machine()
    for module in modules()[1:]:
        about["gpu"] = module.cuda.runtime.getDeviceProperties(module.cuda.Device().id)["name"].decode()
    console = wide_console()
    console.print(", ".join(f"{key} {value}" for key, value in about.items() if key != "versions"), markup=False)
    table = Table(title=f"{benchmark}: median (lowest to highest)")
    for heading in ("case", "on", "alternative", "µs", "ratio (above 1: faster)", "than"):
        table.add_column(heading, justify="right" if heading[0] in "µr" else "left", no_wrap=True)
    for entry in entries:
        time_us = [f"{entry['seconds'][part] * 1e6:.1f}" for part in ("median", "low", "high")]
        ratio = [f"{entry['ratio'][part]:.3g}" for part in ("median", "low", "high")]
        cells = [f"{middle} ({low} to {high})" for middle, low, high in (time_us, ratio)]
        table.add_row(entry["case"], entry["device"], entry["name"], *cells, entry["baseline"])
    console.print(table)
    print(json.dumps({"benchmark": benchmark, "machine": about, "entries": entries}))


def _calls(module: Any, run: Callable[[], object]) -> int:
    run()  # the first call compiles kernels and touches new memory
    return max(1, int(_SAMPLE_S / max(_seconds(module, run, 1), 1e-7)))


def _seconds(module: Any, run: Callable[[], object], calls: int) -> float:
    _wait(module)
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    _wait(module)
    return time.perf_counter() - begin


def _wait(module: Any) -> None:
    if module is not np:
        module.cuda.get_current_stream().synchronize()


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}
