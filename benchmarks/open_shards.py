"""The time to open a corpus of many small files, the first time and later, by format.

    python benchmarks/open_shards.py
    python benchmarks/open_shards.py --files 2000 --only flat,parquet

Every file has a few documents and is in the page cache. The first opening starts with an empty cache folder and fills
it; later openings use it. Listing the folder and getting the size of every file, which any loader must do, is timed for
comparison. CPU seconds are those of the process; they depend less on other work on the machine. The last line is one
JSON line.
"""

import json
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from comparison.report import machine, wide_console
from rich.table import Table

from dali_pipes import open_corpus

DOCUMENTS, TOKENS = 4, 64
"""Of a file, and of a document."""


def write_flat(folder: Path, files: int) -> None:
    ids = np.ones(DOCUMENTS * TOKENS, np.uint16)
    for number in range(files):
        ids.tofile(folder / f"shard_{number}.bin")


def write_datatrove(folder: Path, files: int) -> None:
    ends = np.arange(TOKENS, DOCUMENTS * TOKENS + 1, TOKENS, dtype=np.uint64)
    for number in range(files):
        (folder / f"{number:05}_unshuffled.ds").write_bytes(bytes(2 * DOCUMENTS * TOKENS))
        ends.tofile(folder / f"{number:05}_unshuffled.ds.index")


def write_mds(folder: Path, files: int) -> None:
    """As MDSWriter does for a column of `ndarray:uint16` without a shape: sizes stand before the ids of each sample."""
    column = {"column_names": ["tokens"], "column_encodings": ["ndarray:uint16"], "column_sizes": [None]}
    config = json.dumps(column).encode()
    sample = struct.pack("<IBB", 2 + 2 * TOKENS, 1 << 2, TOKENS) + bytes(2 * TOKENS)
    first = 4 * (DOCUMENTS + 2) + len(config)
    offsets = [first + number * len(sample) for number in range(DOCUMENTS + 1)]
    shard = struct.pack(f"<I{DOCUMENTS + 1}I", DOCUMENTS, *offsets) + config + sample * DOCUMENTS
    entries = []
    for number in range(files):
        name = f"shard.{number:05}.mds"
        (folder / name).write_bytes(shard)
        raw = {"basename": name, "bytes": len(shard), "hashes": {}}
        common = {"version": 2, "format": "mds", "compression": None, "hashes": [], "size_limit": 1 << 26}
        entries.append({**column, **common, "samples": DOCUMENTS, "raw_data": raw, "zip_data": None})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))


def write_parquet(folder: Path, files: int) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table({"input_ids": [[1] * TOKENS] * DOCUMENTS})
    for number in range(files):
        pyarrow.parquet.write_table(table, folder / f"shard_{number}.parquet")


FORMATS: dict[str, Callable[[Path, int], None]] = {
    "flat": write_flat,
    "datatrove": write_datatrove,
    "mds": write_mds,
    "parquet": write_parquet,
}


def main(
    files: Annotated[int, typer.Option(min=1, help="shard files of a corpus")] = 10_000,
    only: Annotated[str | None, typer.Option(help=f"formats, separated by commas; known: {', '.join(FORMATS)}")] = None,
    rounds: Annotated[int, typer.Option(min=2, help="openings per format; the first without a cache")] = 5,
) -> None:
    """Write, open, print a table; the last line is one JSON line."""
    entries: list[dict[str, Any]] = []
    for name in FORMATS if only is None else only.split(","):
        with tempfile.TemporaryDirectory() as place:
            os.environ["DALI_PIPES_CACHE"] = f"{place}/cache"
            folder = Path(place) / "corpus"
            folder.mkdir()
            FORMATS[name](folder, files)
            listing, opening, cpu = [], [], []
            for _ in range(rounds):
                begin = time.perf_counter()
                for path in sorted(folder.iterdir()):
                    path.stat()
                listing.append(time.perf_counter() - begin)
                begin, cpu_begin = time.perf_counter(), time.process_time()
                with open_corpus(folder) as corpus:
                    opening.append(time.perf_counter() - begin)
                    cpu.append(time.process_time() - cpu_begin)
                    if corpus.num_tokens != files * DOCUMENTS * TOKENS:
                        raise SystemExit(f"{name}: {corpus.num_tokens} tokens were opened")
        later, cpu_later = opening[1:], cpu[1:]
        entries.append(
            {
                "format": name,
                "list_s": statistics.median(listing),
                "first_open_s": opening[0],
                "open_s": {"median": statistics.median(later), "low": min(later), "high": max(later)},
                "first_open_cpu_s": cpu[0],
                "open_cpu_s": {"median": statistics.median(cpu_later), "low": min(cpu_later), "high": max(cpu_later)},
            }
        )
    report: dict[str, Any] = {"benchmark": "open_shards", "machine": machine(), "files": files, "entries": entries}
    grid = Table(title=f"{files:,} files of {DOCUMENTS} documents of {TOKENS} tokens")
    for heading in ("format", "list and stat s", "first opening s", "later openings s, median (low to high)"):
        grid.add_column(heading)
    for heading in ("first CPU s", "later CPU s"):
        grid.add_column(heading)
    for entry in entries:
        opened, worked = (
            "{median:.2f} ({low:.2f} to {high:.2f})".format(**entry[key]) for key in ("open_s", "open_cpu_s")
        )
        first = [f"{entry[key]:.2f}" for key in ("list_s", "first_open_s")]
        grid.add_row(entry["format"], *first, opened, f"{entry['first_open_cpu_s']:.2f}", worked)
    wide_console().print(grid)
    print(json.dumps(report))


if __name__ == "__main__":
    typer.run(main)
