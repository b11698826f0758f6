"""Rate of the scan for documents, compared with a plain NumPy scan of the whole file, on a file in the page cache.

    python benchmarks/scan_documents.py                        # all cores that the process may use
    taskset -c 0 python benchmarks/scan_documents.py           # one core

In every round both run once; the ratio is taken within a round. The offsets are compared before the timing; the cache
folder is not used. The last line is one JSON line.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from comparison.report import machine, wide_console
from rich.table import Table

from dali_pipes.corpus import Corpus, open_corpus
from dali_pipes.documents.scan import Delimiter, scan_offsets

_MEAN_TOKENS = 400  # of a document
_DTYPES = ("uint16", "uint32")


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a tiny file, only to check that it runs")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="samples per alternative")] = 9,
    megabytes: Annotated[int, typer.Option(min=1, help="size of the file")] = 512,
) -> None:
    """Check both alternatives, measure, print a table; the last line is one JSON line."""
    entries = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in _DTYPES:
            path = Path(folder) / f"{dtype}.bin"
            end_id = _write(path, dtype, 1_000_000 if quick else megabytes * 1_000_000)
            with open_corpus(path, format="flat", dtype=dtype, eos_id=end_id) as corpus:
                entries += _measure(corpus, path, end_id, 3 if quick else rounds)
            path.unlink()
    about = machine() | {"cores_used": len(os.sched_getaffinity(0))}
    console = wide_console()
    console.print(", ".join(f"{key} {value}" for key, value in about.items() if key != "versions"), markup=False)
    table = Table(title="scan for documents: median (lowest to highest)")
    for heading in ("ids", "MB", "documents", "alternative", "GB/s", "ratio to numpy"):
        table.add_column(heading, justify="left" if heading in ("ids", "alternative") else "right", no_wrap=True)
    for entry in entries:
        cells = ("{median:.2f} ({low:.2f} to {high:.2f})".format(**entry[key]) for key in ("gb_per_s", "ratio"))
        counts = (f"{entry['bytes'] / 1e6:.0f}", f"{entry['documents']:,}")
        table.add_row(entry["dtype"], *counts, entry["name"], *cells)
    console.print(table)
    print(json.dumps({"benchmark": "scan_documents", "machine": about, "entries": entries}))


def numpy_scan(path: Path, dtype: str, end_id: int) -> Any:
    """What one would write by hand: positions of the end id."""
    return np.flatnonzero(np.fromfile(path, dtype) == end_id)


def _write(path: Path, dtype: str, size_bytes: int) -> int:
    """Random ids with an end id after each document, of geometric length; returns the end id."""
    generator = np.random.default_rng(0)
    end_id = 50256 if dtype == "uint16" else 128_001
    tokens = generator.integers(0, end_id, size_bytes // np.dtype(dtype).itemsize, dtype)
    tokens[np.cumsum(generator.geometric(1 / _MEAN_TOKENS, len(tokens) // _MEAN_TOKENS * 9 // 10))] = end_id
    tokens.tofile(path)
    return end_id


def _measure(corpus: Corpus, path: Path, end_id: int, rounds: int) -> list[dict[str, Any]]:
    alternatives: dict[str, Callable[[], Any]] = {
        "numpy": lambda: numpy_scan(path, corpus.dtype.name, end_id),
        "dali_pipes": lambda: scan_offsets(corpus, Delimiter("end", end_id)),
    }
    # These calls bring the file into the page cache, too.
    wanted = np.unique([0, *alternatives["numpy"]() + 1, corpus.num_tokens])
    offsets = alternatives["dali_pipes"]()
    if not np.array_equal(offsets, wanted):
        raise SystemExit(f"the scan is wrong for {corpus.dtype.name}: {len(offsets)} offsets, {len(wanted)} expected")
    seconds: dict[str, list[float]] = {name: [] for name in alternatives}
    for _ in range(rounds):
        for name, run in alternatives.items():
            begin = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begin)
    size = corpus.num_tokens * corpus.dtype.itemsize
    return [
        {
            "name": name,
            "dtype": corpus.dtype.name,
            "bytes": size,
            "documents": len(offsets) - 1,
            "gb_per_s": _spread([size / taken / 1e9 for taken in own]),
            "ratio": _spread([plain / taken for plain, taken in zip(seconds["numpy"], own, strict=True)]),
        }
        for name, own in seconds.items()
    ]


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


if __name__ == "__main__":
    typer.run(main)
