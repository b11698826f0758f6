"""The cost of planning for one of up to 16,384 ranks: time and memory of the start, of a block, and of a step.

No file is read: windows come from a nominal corpus of 10^12 tokens, and documents are only lengths. The rank is the
last one, whose rows are the farthest. `start` builds the schedule and plans the first block, as a loader does before
its first batch; `step` is the mean over the blocks of the next plans, and `step CPU` the same as CPU time, which other
programs on the machine change less.

With `--node-ranks 8`, the eight last ranks are processes of this machine that share the plans of windows, as ranks of a
node do: `start` and `step` are those of the slowest, `step CPU` is the mean over the eight, and `planned` the windows
that each of them planned and copied. Memory is that of one process without sharing.
"""

import json
import multiprocessing
import os
import statistics
import time
import tracemalloc
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer
from comparison.report import machine, wide_console
from rich.table import Table

from dali_pipes.config import LoaderConfig
from dali_pipes.engine.build import TARGET_BLOCK_TOKENS, batches_per_run
from dali_pipes.engine.node_plans import NodePlans, plan_shape
from dali_pipes.rows.base import RowSource
from dali_pipes.rows.document_rows import DocumentRows
from dali_pipes.rows.length_buckets import LengthBuckets
from dali_pipes.rows.windows import WindowRows, split_windows
from dali_pipes.schedule import Blocks, Position, Schedule, StepRange
from dali_pipes.schedule.plans import PLAN_ROWS, PlanCache

STREAM_TOKENS = 10**12
BUCKETS = (256, 512, 1024, 2048)
SEQ_LEN = 2048
MODES = ("stream", "pack", "pad", "pad with buckets")
_SEED = 1
_PLANS = 3
_BARRIER_S = 600.0
_barrier: Any = None
"""Where the processes of a node begin together."""


def main(
    world_sizes: Annotated[list[int] | None, typer.Option("--world-size", help="may be repeated")] = None,
    batch_sizes: Annotated[
        list[int] | None, typer.Option("--batch-size", help="can be repeated; default: 1, 8")
    ] = None,
    documents: Annotated[int, typer.Option(help="documents that rows are made of")] = 4_000_000,
    node_ranks: Annotated[int, typer.Option(min=1, help="ranks that plan together, each in a process")] = 1,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Measure, print a table and, as the last line, one line of JSON."""
    offsets = document_offsets(documents)
    entries: list[dict[str, Any]] = []
    for mode in MODES:
        for batch_size in batch_sizes or [1, 8]:
            for world_size in world_sizes or [1, 64, 1024, 16384]:
                case: dict[str, Any] = {"rows": mode, "batch_size": batch_size, "world_size": world_size}
                samples = [_of_node(documents, node_ranks, **case) for _ in range(rounds)]
                figures: dict[str, Any] = {
                    name: _spread([sample[name] for sample in samples]) for name in ("start_s", "step_s", "step_cpu_s")
                }
                figures["peak_bytes"] = peak_bytes(offsets, **case)
                figures |= {name: samples[0][name] for name in ("planned", "copied") if name in samples[0]}
                entries.append(
                    {**case, "node_ranks": node_ranks, "batches_per_run": samples[0]["batches_per_run"], **figures}
                )
    for entry in entries:
        alone = min((other for other in entries if _same(entry, other)), key=lambda other: int(other["world_size"]))
        entry["step_ratio"] = entry["step_s"]["median"] / alone["step_s"]["median"]
    about = machine()
    console = wide_console()
    console.print(", ".join(f"{key} {value}" for key, value in about.items() if key != "versions"), markup=False)
    console.print(_table(entries))
    print(json.dumps({"benchmark": "many_ranks", "machine": about, "documents": documents, "entries": entries}))


def document_offsets(documents: int) -> npt.NDArray[np.int64]:
    """Offsets of documents whose lengths are drawn from a lognormal distribution: median 400 tokens, mean 660."""
    lengths = np.random.default_rng(_SEED).lognormal(6, 1, documents).astype(np.int64) + 1
    return np.concatenate(([0], np.cumsum(lengths)))


def _of_node(documents: int, node_ranks: int, **case: Any) -> dict[str, Any]:
    """The figures of one process, or of several that share their plans."""
    node_ranks = min(node_ranks, case["world_size"])
    if node_ranks == 1 or case["rows"] == "stream":
        return measured(document_offsets(documents), **case)
    context = multiprocessing.get_context("spawn")
    begin, key = context.Barrier(node_ranks), f"{os.getpid()} {time.monotonic_ns()}"
    # Each waits for the others, so every process gets one.
    with ProcessPoolExecutor(node_ranks, context, _share_barrier, (begin,)) as processes:
        futures = [processes.submit(_on_node, documents, number, key, case) for number in range(node_ranks)]
        samples = [future.result() for future in futures]
    slowest = {name: max(sample[name] for sample in samples) for name in ("start_s", "step_s")}
    means = {name: statistics.mean(sample[name] for sample in samples) for name in ("step_cpu_s", "planned", "copied")}
    return {**samples[0], **slowest, **means}


def _share_barrier(barrier: Any) -> None:
    global _barrier
    _barrier = barrier


def _on_node(documents: int, number: int, key: str, case: dict[str, Any]) -> dict[str, Any]:
    offsets = document_offsets(documents)
    _barrier.wait(_BARRIER_S)
    return measured(offsets, **case, number=number, key=key)


def build(
    offsets: npt.NDArray[np.int64], rows: str, batch_size: int, world_size: int, number: int = 0, key: str | None = None
) -> tuple[Schedule, int, NodePlans | None]:
    """The schedule of a rank, batches in a block, and what it shares with others, as a loader has them.

    number, key: as of `measured`
    """
    source: RowSource = WindowRows(split_windows(STREAM_TOKENS, SEQ_LEN), seed=_SEED)
    if rows != "stream":
        source = DocumentRows(
            offsets,
            SEQ_LEN,
            mode="pack" if rows == "pack" else "pad",
            long_documents="split",
            window_documents=65536,
            shuffle=True,
            seed=_SEED,
            buckets=LengthBuckets(np.array(BUCKETS)) if "buckets" in rows else None,
        )
    schedule = Schedule(source, batch_size, rank=world_size - 1 - number, world_size=world_size)
    shared = None
    if key is not None and isinstance(source, DocumentRows):
        shared = NodePlans(key, plan_shape([source], schedule.global_rows))
        source.share(partial(shared.plan, 0))
    config = LoaderConfig(corpus="tokens", batch_size=batch_size, seq_len=SEQ_LEN)
    return schedule, batches_per_run(config, schedule, TARGET_BLOCK_TOKENS), shared


def measured(
    offsets: npt.NDArray[np.int64],
    rows: str,
    batch_size: int,
    world_size: int,
    number: int = 0,
    key: str | None = None,
) -> dict[str, Any]:
    """Seconds of a start, and of each step after the first block.

    number, key: of a rank that shares its plans with others, counted from the last, and of these
    """
    begin = time.perf_counter()
    schedule, per_run, shared = build(offsets, rows, batch_size, world_size, number, key)
    plans, blocks = PlanCache(schedule, per_run), Blocks(schedule, per_run, Position(0, 0))
    plans.plan(_steps(blocks, 0))
    started, started_cpu = time.perf_counter(), time.process_time()
    steps = PLAN_ROWS // batch_size
    if schedule.interleave.most_planned is not None:
        steps = min(steps, schedule.interleave.most_planned // schedule.global_rows)
    done = block = 0
    while done < max(6, _PLANS * steps):
        block += 1
        of_block = _steps(blocks, block)
        plans.plan(of_block)
        done += of_block.num_steps
    figures = {} if shared is None else {"planned": shared.made, "copied": shared.copied}
    return figures | {
        "start_s": started - begin,
        "step_s": (time.perf_counter() - started) / done,
        "step_cpu_s": (time.process_time() - started_cpu) / done,
        "batches_per_run": per_run,
    }


def peak_bytes(offsets: npt.NDArray[np.int64], rows: str, batch_size: int, world_size: int) -> int:
    """The most memory that this takes beside the offsets, as Python and NumPy allocate it."""
    tracemalloc.start()
    measured(offsets, rows, batch_size, world_size)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def _steps(blocks: Blocks, block: int) -> StepRange:
    steps = blocks.steps(block)
    assert steps is not None
    return steps


def _same(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return (a["rows"], a["batch_size"]) == (b["rows"], b["batch_size"])


def _spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "low": min(values), "high": max(values)}


def _table(entries: list[dict[str, Any]]) -> Table:
    table = Table(title="many_ranks: planning for one rank, median (lowest to highest)")
    headings = "rows, batch size, ranks, batches per block, start ms, step µs, step CPU µs, ratio, peak MB"
    for heading in headings.split(", "):
        table.add_column(heading, justify="left" if heading == "rows" else "right", no_wrap=True)
    for entry in entries:
        cells = []
        for name, factor in (("start_s", 1e3), ("step_s", 1e6), ("step_cpu_s", 1e6)):
            median, low, high = (entry[name][part] * factor for part in ("median", "low", "high"))
            cells.append(f"{median:.3g} ({low:.3g} to {high:.3g})")
        numbers = [str(entry[name]) for name in ("batch_size", "world_size", "batches_per_run")]
        table.add_row(entry["rows"], *numbers, *cells, f"{entry['step_ratio']:.3g}", f"{entry['peak_bytes'] / 1e6:.1f}")
    return table


if __name__ == "__main__":
    typer.run(main)
