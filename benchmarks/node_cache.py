"""What the cache of the node saves: bytes from a store for one rank and for eight, hits by two rules of eviction, and
waits where a window begins.

    python benchmarks/node_cache.py
    python benchmarks/node_cache.py --only hits --rounds 10
    python benchmarks/node_cache.py --only waits --pace-rounds 5 --lead-s 60

Bytes: an epoch by blocks of a flat corpus over the server of `remote.py`, with and without a cache, by one rank and by
the ranks of a node, one process each: what the server sent, divided by the bytes of the rows.

Hits: epochs by blocks of a local corpus with room for half of it, evicted by next use and by least recent use in turn.
The part of a warm epoch, one after the first, that did not have to be fetched. Every epoch's tokens are added up and
compared with those that were written.

Waits: a consumer at a fixed pace starts with an empty cache over the same server, some time before the end of a window,
and goes on into the next one; with blocks that are fetched ahead, and with those that are fetched once a batch needs
them, in turn. The last line is one JSON line.
"""

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from comparison.remote_server import BandwidthMb, LatencyMs, Rate, counted, serving
from comparison.report import machine, wide_console
from comparison.spread import Column, spread, spread_table
from rich.table import Table

from dali_pipes import TokenLoader
from dali_pipes.corpus.block_reads import BlockReads
from dali_pipes.engine import node_caching
from dali_pipes.rows import make
from dali_pipes.rows.block_order import BLOCK_TOKENS
from dali_pipes.rows.next_use import NextUseFormula

RANKS = 8
_SEQ_LEN, _BATCH = 1024, 8
_STORE_BLOCK, _LOCAL_BLOCK = 1 << 19, 1 << 14
"""Tokens of a block: fewer than 2 million, so that a small corpus has many."""
_WINDOW = 8
_EPOCHS = 3
_LITTLE_AHEAD = {"batches_per_run": 4, "num_threads": 1, "prefetch_queue_depth": 1}
"""What is read ahead of the end of an epoch is not used, and counts in so small a corpus."""

_PACE_BATCH, _PACE_SEQ_LEN = 16, 4096
_STARTED_S = 3.0
"""After which a run has started: what it waits from then on, it waits for a window."""
_FETCH_AHEAD = BlockReads.fetch_ahead
_COLUMNS = (
    Column("first_batch_s", "first batch s", 1.0, "{:.2f}"),
    Column("longest_at_start_s", "longest next() of the start, s", 1.0, "{:.2f}"),
    Column("longest_later_s", "longest next() later, s", 1.0, "{:.2f}"),
    Column("wait_pct", "wait %", 1.0, "{:.2f}"),
    Column("read_twice_pct", "read twice, % of the corpus", 1.0, "{:.2f}"),
)


class LeastRecentlyUsed(NextUseFormula):
    """The other rule: nothing is known of the next use."""

    def __call__(self, order: dict[str, Any], begins: Any, ends: Any) -> None:
        return None


def main(
    only: Annotated[str, typer.Option(help="parts, separated by commas: bytes, hits, waits")] = "bytes,hits,waits",
    tokens: Annotated[int, typer.Option(min=1 << 16, help="tokens of the corpus of the store")] = 1 << 24,
    blocks: Annotated[int, typer.Option(min=16, help="blocks of the local corpus")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="of each rule of eviction, with another seed each")] = 5,
    latency_ms: LatencyMs = 20.0,
    bandwidth_mb: BandwidthMb = 200.0,
    rate: Rate = 1.0,
    pace_rounds: Annotated[int, typer.Option(min=1, help="of each way to fetch, with a consumer at that pace")] = 2,
    pace_window: Annotated[int, typer.Option(min=2, help="blocks of its windows, of which there are two")] = 512,
    pace_block: Annotated[int, typer.Option(min=_PACE_SEQ_LEN, help="tokens of its blocks")] = 1 << 20,
    lead_s: Annotated[float, typer.Option(min=1, help="seconds that it starts before the second window")] = 20.0,
) -> None:
    """Measure, print tables and, as the last line, one line of JSON."""
    about, console, report = machine(), wide_console(), {}
    with tempfile.TemporaryDirectory() as folder:
        if "bytes" in only.split(","):
            report["bytes"] = bytes_entries(Path(folder), tokens, latency_ms / 1000, bandwidth_mb * 1e6)
            console.print(_table("bytes", report["bytes"]))
        if "hits" in only.split(","):
            report["hits"] = hits_entries(Path(folder), blocks, rounds)
            console.print(_table("hits", report["hits"]))
        if "waits" in only.split(","):
            pace = Pace(rate * 1e6, pace_window, pace_block, lead_s, latency_ms / 1000, bandwidth_mb * 1e6)
            report["waits"] = waits_entries(Path(folder), pace, pace_rounds)
            entries = ((entry["case"], entry) for entry in report["waits"])
            console.print(spread_table("waits at a pace: median (low to high)", "blocks", _COLUMNS, entries))
    print(json.dumps({"benchmark": "node_cache", "machine": about, **report}))


def _cases() -> list[tuple[str, int, int]]:
    """Of an epoch: a name, ranks, and nodes with a cache."""
    return [
        ("1 rank, without a cache", 1, 0),
        ("1 rank, with a cache", 1, 1),
        (f"{RANKS} ranks, without a cache", RANKS, 0),
        (f"{RANKS} ranks, with a cache", RANKS, 1),
        (f"{RANKS} ranks on 2 nodes, with a cache on each", RANKS, 2),
    ]


def bytes_entries(folder: Path, tokens: int, latency_s: float, bandwidth: float) -> list[dict[str, Any]]:
    """What a store sends in an epoch, for each case."""
    (folder / "store").mkdir()
    step = RANKS * _BATCH * _SEQ_LEN
    ids = write(folder / "store" / "tokens.bin", tokens // step * step + 1)  # whole steps, and the last label
    rows = len(ids) // _SEQ_LEN
    entries = []
    with serving(folder / "store", latency_s, bandwidth) as url:
        for case, ranks, nodes in _cases():
            settings = _settings(_SEQ_LEN) | {"shuffle_window": _WINDOW, **_LITTLE_AHEAD}
            caches = [str(folder / f"cache {case} {node}") for node in range(nodes)]
            if caches:
                settings["cache_bytes"] = 3 * tokens  # room for all of it
            counted(url)
            begin = time.perf_counter()
            sums = _ranks(f"{url}/tokens.bin", settings, ranks, caches)
            elapsed_s, sent = time.perf_counter() - begin, counted(url)
            check_sum(sum(sums), ids[:-1])
            used = rows * 2 * (_SEQ_LEN + 1)
            entries.append(
                {
                    "case": case,
                    "bytes_read_per_used": sent["bytes"] / used,
                    "requests": sent["requests"],
                    "seconds": elapsed_s,
                }
            )
    return entries


def _ranks(url: str, settings: dict[str, Any], ranks: int, caches: list[str]) -> list[int]:
    """An epoch by ranks, a process each, of as many nodes as there are caches; the sum of the ids of each rank."""
    context = multiprocessing.get_context("fork")
    queue: Any = context.SimpleQueue()
    processes = []
    for rank in range(ranks):
        own = settings | ({"cache_dir": caches[rank * len(caches) // ranks]} if caches else {})
        processes.append(context.Process(target=_rank, args=(url, own, rank, ranks, queue)))
    for process in processes:
        process.start()
    sums = [queue.get() for _ in processes]
    for process in processes:
        process.join()
    return sums


def _rank(url: str, settings: dict[str, Any], rank: int, ranks: int, queue: Any) -> None:
    make.__dict__["BLOCK_TOKENS"] = _STORE_BLOCK
    try:
        with TokenLoader(url, rank=rank, world_size=ranks, **settings) as loader:
            queue.put(epoch_sum(loader))
    except BaseException:
        queue.put(-1)
        raise


def hits_entries(folder: Path, blocks: int, rounds: int) -> list[dict[str, Any]]:
    """The part of a warm epoch that did not have to be fetched, by each rule, with room for half of the corpus."""
    path = folder / "local.bin"
    ids = write(path, blocks * _LOCAL_BLOCK + 1)
    rules: dict[str, Callable[[], NextUseFormula]] = {"next use": NextUseFormula, "LRU": LeastRecentlyUsed}
    found: dict[str, list[float]] = {name: [] for name in rules}
    for round_ in range(rounds):
        for name, rule in rules.items():
            node_caching.__dict__["NextUseFormula"] = rule
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                settings = _settings(_SEQ_LEN // 2) | {
                    "shuffle_window": _WINDOW,
                    "cache_dir": cache,
                    "cache_bytes": ids.nbytes // 2,
                    **_LITTLE_AHEAD,
                    "batches_per_run": 1,
                    "seed": round_,
                }
                found[name].append(warm_hits(path, settings, ids))
    node_caching.__dict__["NextUseFormula"] = NextUseFormula
    entries = []
    for name, values in found.items():
        median = statistics.median(values)
        entries.append({"case": name, "hits": median, "low": min(values), "high": max(values)})
    return entries


def warm_hits(path: Path, settings: dict[str, Any], ids: Any) -> float:
    """Of three epochs after the first one."""
    make.__dict__["BLOCK_TOKENS"] = _LOCAL_BLOCK
    try:
        with TokenLoader(str(path), **settings) as loader:
            check_sum(epoch_sum(loader), ids[:-1])
            first = loader.stats().cache
            for _ in range(_EPOCHS):
                check_sum(epoch_sum(loader), ids[:-1])
            last = loader.stats().cache
    finally:
        make.__dict__["BLOCK_TOKENS"] = BLOCK_TOKENS
    assert first is not None
    assert last is not None
    return 1.0 - (last.fetched_bytes - first.fetched_bytes) / float(_EPOCHS * ids.nbytes)


class Pace(NamedTuple):
    """A consumer, and its corpus of two windows."""

    tokens_per_s: float
    window: int
    """Blocks."""
    block: int
    """Tokens."""
    lead_s: float
    """Before the second window."""
    latency_s: float
    bandwidth: float


def waits_entries(folder: Path, pace: Pace, rounds: int) -> list[dict[str, Any]]:
    """What a consumer waits for, by how blocks are fetched; see `_COLUMNS`."""
    (folder / "paced").mkdir()
    write(folder / "paced" / "tokens.bin", 2 * pace.window * pace.block + 1)
    found: dict[str, list[dict[str, float]]] = {"ahead": [], "once a batch needs them": []}
    with serving(folder / "paced", pace.latency_s, pace.bandwidth) as url:
        for _ in range(rounds):
            for case, results in found.items():
                results.append(_paced(f"{url}/tokens.bin", pace, folder, ahead=case == "ahead"))
    return [{"case": case, **spread(results)} for case, results in found.items()]


def _paced(url: str, pace: Pace, folder: Path, *, ahead: bool) -> dict[str, float]:
    """From before the second window until as long after its beginning."""
    settings = _settings(_PACE_SEQ_LEN) | {"batch_size": _PACE_BATCH, "shuffle_window": pace.window}
    step_tokens = _PACE_BATCH * _PACE_SEQ_LEN
    lead = round(pace.lead_s * pace.tokens_per_s / step_tokens)
    make.__dict__["BLOCK_TOKENS"] = pace.block
    if not ahead:
        BlockReads.fetch_ahead = _fetch_nothing  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory(dir=folder) as cache, TokenLoader(url, **settings, cache_dir=cache) as loader:
            state = loader.state_dict()
            state["rows"] = (len(loader) // 2 - lead) * _PACE_BATCH
            loader.load_state_dict(state)
            begin, waits = time.perf_counter(), list[tuple[float, float]]()
            batches = iter(loader)
            for _ in range(2 * lead):
                asked = time.perf_counter()
                next(batches)
                got = time.perf_counter()
                waits.append((asked - begin, got - asked))
                time.sleep(step_tokens / pace.tokens_per_s)
            elapsed_s, stats = time.perf_counter() - begin, loader.stats().cache
    finally:
        make.__dict__["BLOCK_TOKENS"] = BLOCK_TOKENS
        BlockReads.fetch_ahead = _FETCH_AHEAD  # type: ignore[method-assign]
    assert stats is not None
    return {
        "first_batch_s": waits[0][1],
        "longest_at_start_s": max((wait for at, wait in waits[1:] if at < waits[0][1] + _STARTED_S), default=0.0),
        "longest_later_s": max((wait for at, wait in waits if at >= waits[0][1] + _STARTED_S), default=0.0),
        "wait_pct": 100 * sum(wait for _, wait in waits[1:]) / (elapsed_s - waits[0][1]),
        "read_twice_pct": 100 * (stats.fetched_bytes - stats.num_bytes) / stats.all_bytes,
    }


def _fetch_nothing(self: BlockReads, blocks: Any, owner: object) -> None:
    """The other way: blocks come once a batch needs them."""


def write(path: Path, tokens: int) -> Any:
    """Random ids."""
    ids = np.random.default_rng(0).integers(0, 50_000, tokens, np.uint16)
    ids.tofile(path)
    return ids


def epoch_sum(loader: TokenLoader) -> int:
    """The sum of all inputs of an epoch."""
    return sum(int(batch["input_ids"].sum()) for batch in loader)


def check_sum(found: int, ids: Any) -> None:
    """Raise SystemExit unless an epoch had each token once."""
    expected = int(ids.sum(dtype=np.int64))
    if found != expected:
        raise SystemExit(
            f"the ids of an epoch add up to {found:,}, expected {expected:,}: it did not have each token once"
        )


def _settings(seq_len: int) -> dict[str, Any]:
    return {"batch_size": _BATCH, "seq_len": seq_len, "device": "cpu", "quiet": True, "order": "blocks", "seed": 1}


def _table(part: str, entries: list[dict[str, Any]]) -> Table:
    if part == "bytes":
        table = Table("case", "bytes read per used", "requests", "s", title="an epoch over the store")
        for entry in entries:
            figures = f"{entry['bytes_read_per_used']:.4f}", f"{entry['requests']:,}", f"{entry['seconds']:.1f}"
            table.add_row(entry["case"], *figures)
        return table
    table = Table("eviction", "hits in warm epochs", title="room for half of the corpus: median (low to high)")
    for entry in entries:
        table.add_row(entry["case"], f"{entry['hits']:.1%} ({entry['low']:.1%} to {entry['high']:.1%})")
    return table


if __name__ == "__main__":
    typer.run(main)
