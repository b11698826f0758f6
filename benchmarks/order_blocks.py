"""What an order by blocks costs and saves: planning, and chunks that are decoded, compared with the order by rows.

    python benchmarks/order_blocks.py
    python benchmarks/order_blocks.py --only decode --tokens 134217728

Planning: CPU time a row of planning the places of a corpus of 10^12 tokens, of one source and of mixtures of it, in
calls of 64, 1,024 and 8,192 rows; the two orders take turns, and ratios are taken within a round.

Decoding: one epoch of Parquet files with row groups of three sizes, with a cache of a quarter of the corpus, in which a
window of blocks fits. Chunks decoded per chunk of the corpus, and CPU time a million tokens; the two orders take turns.
Each epoch's tokens are added up and compared with those that were written. The last line is one JSON line.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from comparison.report import machine, wide_console
from rich.table import Table

from dali_pipes import TokenLoader
from dali_pipes.rows.block_order import BLOCK_TOKENS
from dali_pipes.rows.item_order import BlockShape
from dali_pipes.rows.windows import WindowRows, split_windows
from dali_pipes.schedule.mixed_rows import MixedRows
from dali_pipes.schedule.mixture import MixtureOrder

SEQ_LEN = 1024
_SIZES = (64, 1024, 8192)
_SOURCES = (1, 5, 100)
_GROUPS = (1 << 16, 1 << 20, 1 << 23)
"""Tokens of a row group: small ones, some of a block, and several blocks."""
_DOCUMENT = 512
_WINDOW_SHARE = 8
"""A window is this part of the corpus, and the cache twice as large: two windows fit."""


def main(
    only: Annotated[str, typer.Option(help="parts, separated by commas: plan, decode")] = "plan,decode",
    tokens: Annotated[int, typer.Option(min=1 << 16, help="tokens of the Parquet files")] = 1 << 25,
    rounds: Annotated[int, typer.Option(min=1, help="samples per case")] = 3,
    data_dir: Annotated[Path | None, typer.Option(help="folder for the files, which are removed at the end")] = None,
) -> None:
    """Measure, print tables and, as the last line, one line of JSON."""
    about, console, entries = machine(), wide_console(), []
    if "plan" in only.split(","):
        entries += plan_entries(rounds)
    if "decode" in only.split(","):
        with tempfile.TemporaryDirectory(dir=data_dir) as folder:
            entries += decode_entries(Path(folder), tokens, rounds)
    console.print(", ".join(f"{key} {value}" for key, value in about.items() if key != "versions"), markup=False)
    for part, columns in (("plan", ("us_a_row",)), ("decode", ("decoded_per_chunk", "cpu_s_per_mtok"))):
        if any(entry["part"] == part for entry in entries):
            console.print(_table([entry for entry in entries if entry["part"] == part], columns))
    print(json.dumps({"benchmark": "order_blocks", "machine": about, "entries": entries}))


def plan_entries(rounds: int) -> list[dict[str, Any]]:
    """CPU time of planning consecutive places."""
    windows = split_windows(10**12, SEQ_LEN)
    entries = []
    for count in _SOURCES:
        plans = {name: _plans(windows, count, blocks) for name, blocks in (("rows", None), ("blocks", BlockShape(512)))}
        for size in _SIZES:
            calls = max(4, 8192 // size)

            def sample(name: str, round_: int, size: int = size, calls: int = calls, plans: Any = plans) -> float:
                first = (round_ + 1) * 10**6
                begin = time.process_time()
                for call in range(calls):
                    plans[name](np.arange(first + call * size, first + (call + 1) * size))
                return (time.process_time() - begin) / (calls * size) * 1e6

            figures = _in_turns(sample, rounds)
            entries.append({"part": "plan", "case": f"{count} sources, {size} rows", "us_a_row": figures})
    return entries


def _plans(windows: Any, count: int, blocks: BlockShape | None) -> Callable[[Any], Any]:
    if count == 1:
        rows = WindowRows(windows, seed=1, blocks=blocks)
        return lambda places: rows.plan(0, places)
    names = [f"source {number}" for number in range(count)]
    sources = [WindowRows(windows, seed=1, name=name, blocks=blocks) for name in names]
    weights = [(0, dict.fromkeys(names, Fraction(1, count)))]
    order = MixtureOrder(names, weights, seed=1)
    bases = np.arange(count + 1) * windows.num_tokens
    mixture = MixedRows(names, sources, bases, order, 10**9, {}, weights)
    return lambda places: mixture.plan(0, places)


def decode_entries(folder: Path, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Chunks decoded, and CPU time, in epochs of Parquet files."""
    entries = []
    ids = np.random.default_rng(0).integers(0, 50_000, tokens - tokens % _DOCUMENT, np.int32)
    for group in _GROUPS:
        path = folder / f"{group}.parquet"
        write_parquet(path, ids, group)
        chunks = -(-len(ids) // group)
        window = max(1, tokens // BLOCK_TOKENS // _WINDOW_SHARE)
        found: dict[str, list[float]] = {"rows": [], "blocks": []}

        def sample(name: str, round_: int, path: Path = path, window: int = window, found: Any = found) -> float:
            orders: dict[str, Any] = {"rows": {}, "blocks": {"order": "blocks", "shuffle_window": window}}
            decoded, cpu_s = run_epoch(path, ids, orders[name], round_, 2 * ids.nbytes // _WINDOW_SHARE)
            found[name].append(decoded)
            return cpu_s / (len(ids) / 1e6)

        cpu = _in_turns(sample, rounds)
        decoded = {name: statistics.median(counts) / chunks for name, counts in found.items()}
        entries.append(
            {
                "part": "decode",
                "case": f"{chunks} row groups of {group} tokens, window of {window} blocks",
                "decoded_per_chunk": decoded | {"ratio": decoded["blocks"] / decoded["rows"]},
                "cpu_s_per_mtok": cpu,
            }
        )
        path.unlink()
    return entries


def write_parquet(path: Path, ids: Any, group: int) -> None:
    """zstd, documents of equal length."""
    import pyarrow as pa
    import pyarrow.parquet

    offsets = np.arange(0, len(ids) + 1, _DOCUMENT, dtype=np.int64)
    lists = pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(ids))
    table = pa.table({"input_ids": lists.cast(pa.list_(pa.int32()))})
    pyarrow.parquet.write_table(table, path, compression="zstd", row_group_size=max(1, group // _DOCUMENT))


def run_epoch(path: Path, ids: Any, order: dict[str, Any], seed: int, cache_bytes: int) -> tuple[int, float]:
    """Chunks decoded and CPU seconds of one epoch. Stops if a token is missing or comes twice."""
    settings: dict[str, Any] = {"batch_size": 16, "seq_len": SEQ_LEN, "drop_last": False, "seed": seed, "quiet": True}
    with TokenLoader(
        corpus=str(path), device="cpu", decoded_cache_bytes=cache_bytes, num_threads=1, **settings, **order
    ) as loader:
        begin, total, rows = time.process_time(), 0, 0
        for batch in loader:
            total += int(batch["input_ids"].sum())
            rows += len(batch["input_ids"])
        cpu_s, cache = time.process_time() - begin, loader.stats().cache
    if total != int(ids[: rows * SEQ_LEN].sum()) or rows != (len(ids) - 1) // SEQ_LEN:
        raise SystemExit(f"{path}: the epoch does not have each token once")
    assert cache is not None, "a decoded format has a cache"
    return cache.misses, cpu_s


def _in_turns(sample: Callable[[str, int], float], rounds: int) -> dict[str, float]:
    """Medians of both orders, and of the ratio within a round."""
    samples = [(sample("rows", round_), sample("blocks", round_)) for round_ in range(rounds)]
    rows, blocks = zip(*samples, strict=True)
    ratios = [after / before for before, after in samples]
    return {"rows": statistics.median(rows), "blocks": statistics.median(blocks), "ratio": statistics.median(ratios)}


def _table(entries: list[dict[str, Any]], columns: tuple[str, ...]) -> Table:
    table = Table("case", *(f"{column}: {name}" for column in columns for name in ("rows", "blocks", "ratio")))
    for entry in entries:
        table.add_row(
            entry["case"], *(f"{entry[column][name]:.3g}" for column in columns for name in ("rows", "blocks", "ratio"))
        )
    return table


if __name__ == "__main__":
    typer.run(main)
