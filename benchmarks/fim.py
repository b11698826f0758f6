"""The cost of fill in the middle: packed rows with and without it, and Megatron-LM's rule on finished rows, in turns.

    python benchmarks/fim.py                        # 8 x 2,048, documents of log-normal length, half of them rearranged
    python benchmarks/fim.py --median 2000

All read the same corpus from the page cache and discard the batches, on the CPU. In every round, each side delivers the
same number of batches, after some untimed ones. `Megatron's rule` is that of `GPTFIMDataset` on ids: it takes the rows
of the loader without fill in the middle, rearranges each of their documents with NumPy, and cuts off what no longer
fits; only the character-level part of it, which decodes and encodes every document, is left out. Ratios are to packed
rows without it, within a round. The last line is one JSON line.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from bench_document_rows import write_documents
from comparison.report import machine, wide_console
from comparison.spread import Column, spread, spread_table

from dali_pipes import TokenLoader

_END_ID, _PREFIX, _MIDDLE, _SUFFIX = 50256, 50257, 50258, 50259
_TOKENS = {"prefix": _PREFIX, "middle": _MIDDLE, "suffix": _SUFFIX}
_SIDES = {"without": 0.0, "fim": 0.5, "fim, all documents": 1.0}
_MEGATRON = "Megatron's rule, NumPy"
_COLUMNS = (
    Column("tokens_per_s", "Mtok/s", 1e-6, "{:.0f}"),
    Column("cpu_s_per_mtok", "CPU ms/Mtok", 1e3, "{:.2f}"),
    Column("time_ratio", "time", 1, "{:.2f}"),
    Column("cpu_ratio", "CPU", 1, "{:.2f}"),
)


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a tiny corpus, only to check that it runs")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="samples per side")] = 7,
    batch_size: Annotated[int, typer.Option(min=1)] = 8,
    seq_len: Annotated[int, typer.Option(min=8)] = 2048,
    median: Annotated[float, typer.Option(min=1, help="median document length (log-normal, sigma 1.2)")] = 400.0,
) -> None:
    """Measure all sides in turns, print a table; the last line is one JSON line."""
    batch_size, seq_len = (2, 64) if quick else (batch_size, seq_len)
    num_tokens, batches = (20_000, 4) if quick else (50_000_000, max(1, 6_000_000 // (batch_size * seq_len)))
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        os.environ["DALI_PIPES_CACHE"] = cache  # of the documents found; gone with the corpus
        path = Path(folder) / "tokens.bin"
        documents = write_documents(path, num_tokens, 10.0 if quick else median)
        shared: dict[str, Any] = {"corpus": str(path), "dtype": "uint16", "batch_size": batch_size, "seq_len": seq_len}
        shared |= {"rows": "pack", "eos_id": _END_ID, "device": "cpu", "repeat": True, "quiet": True}
        rounds_of = _measure(shared, batches, 2 if quick else rounds, batch_size * seq_len)
    entries = [(name, spread(of_side)) for name, of_side in rounds_of.items()]
    about, console = machine(), wide_console()
    console.print(", ".join(f"{key} {value}" for key, value in about.items() if key != "versions"), markup=False)
    title = f"{batch_size} x {seq_len}, {documents:,} documents: median (lowest to highest)"
    console.print(spread_table(title, "rows", _COLUMNS, entries))
    shape = {"batch_size": batch_size, "seq_len": seq_len, "documents": documents, "tokens": num_tokens}
    listed = [{"name": name, **shape, **figures} for name, figures in entries]
    print(json.dumps({"benchmark": "fim", "machine": about, "entries": listed}))


def by_megatrons_rule(batches: Iterator[dict[str, Any]], rate: float, spm: float) -> Iterator[dict[str, torch.Tensor]]:
    """Batches whose documents are rearranged row by row; what no longer fits in a row is cut off."""
    draws = np.random.RandomState(0)
    for batch in batches:
        rows = [_rearranged(row, draws, rate, spm) for row in batch["input_ids"].numpy()]
        ids = torch.from_numpy(np.stack(rows))
        labels = torch.full_like(ids, -100)
        labels[:, :-1] = ids[:, 1:]
        yield {"input_ids": ids, "labels": labels}


def _rearranged(row: Any, draws: np.random.RandomState, rate: float, spm: float) -> Any:
    ends = np.flatnonzero(row == _END_ID)
    parts, begin = [], 0
    for end in [*ends.tolist(), len(row)]:
        if end > begin:
            parts.append(_permuted(row[begin:end], draws, rate, spm))
        parts.append(row[end : end + 1])
        begin = end + 1
    return np.concatenate(parts)[: len(row)]


def _permuted(ids: Any, draws: np.random.RandomState, rate: float, spm: float) -> Any:
    if not draws.binomial(1, rate):
        return ids
    low, high = sorted(draws.randint(0, len(ids) + 1, 2).tolist())
    prefix, middle, suffix = ids[:low], ids[low:high], ids[high:]
    if draws.binomial(1, spm):
        return np.concatenate([[_PREFIX, _SUFFIX], suffix, [_MIDDLE], prefix, middle])
    return np.concatenate([[_PREFIX], prefix, [_SUFFIX], suffix, [_MIDDLE], middle])


def _measure(shared: dict[str, Any], batches: int, rounds: int, batch_tokens: int) -> dict[str, list[dict[str, float]]]:
    """The rounds of each side."""
    loaders = {
        name: TokenLoader(**shared, objective=[{"kind": "fim", "rate": rate, "tokens": _TOKENS}] if rate else [])
        for name, rate in _SIDES.items()
    }
    plain = TokenLoader(**shared)
    streams: dict[str, Iterator[Any]] = {name: iter(loader) for name, loader in loaders.items()}
    streams[_MEGATRON] = by_megatrons_rule(iter(plain), 0.5, 0.5)
    for name, stream in streams.items():
        _check(name, next(stream)["input_ids"])
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in streams}
    for number in range(rounds + 1):
        taken = {name: _timed(stream, batches) for name, stream in streams.items()}
        tokens = batches * batch_tokens
        for name, (wall, cpu) in taken.items():
            if number:  # the first round fills caches and makes the memory that is used again later
                ratios = {"time_ratio": wall / taken["without"][0], "cpu_ratio": cpu / taken["without"][1]}
                samples[name].append({"tokens_per_s": tokens / wall, "cpu_s_per_mtok": cpu / tokens * 1e6, **ratios})
    for loader in (*loaders.values(), plain):
        loader.close()
    return samples


def _timed(stream: Iterator[Any], batches: int) -> tuple[float, float]:
    """Wall time and CPU time of all threads, in seconds, after batches that may have been read before."""
    for _ in range(batches // 5):
        next(stream)
    cpu, wall = time.process_time(), time.perf_counter()
    for _ in range(batches):
        next(stream)
    return time.perf_counter() - wall, time.process_time() - cpu


def _check(name: str, ids: torch.Tensor) -> None:
    """As many sentinels of each kind in rows that nothing was cut off from, and some where there should be."""
    counts = [int((ids == sentinel).sum()) for sentinel in _TOKENS.values()]
    if (name == "without") == any(counts) or (name != _MEGATRON and len(set(counts)) > 1):
        raise SystemExit(f"{name}: a batch has {counts} sentinels")


if __name__ == "__main__":
    typer.run(main)
