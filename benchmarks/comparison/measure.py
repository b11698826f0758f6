"""Measure one alternative once, in a separate child process: see `comparison.child`.

The child imports what the alternative needs and notes its memory, then:

    open ─ first batch ─ warm-up ─ timed batches ─ a few batches for the memory ─ close ─ resume ─ check
    └── first_batch_s ┘            └ rates, CPU ┘                                 └ close_s └ resume_s

The timed loop does nothing with a batch but hold it until the next one has come, as a training step does.
"""

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from comparison.alternatives import ALTERNATIVES, Loader, Pair
from comparison.check import Checker, CheckError, problems_as_results
from comparison.child import serve
from comparison.process import CpuMeter, MemoryWatch
from comparison.work import Limits, Work

_WARMUP_S = 0.2
_WARMUP_BATCHES = 8
_MEMORY_SAMPLES = 12
_MEMORY_S = 0.25


def measure(name: str, work: Work, limits: Limits) -> dict[str, Any]:
    """All figures of one run. Raises `CheckError` where the delivered data is wrong."""
    alternative = ALTERNATIVES[name]
    loader = alternative.load()
    memory = MemoryWatch()
    began = time.perf_counter()
    stream = loader.open(work)
    next(stream)
    figures: dict[str, Any] = {"first_batch_s": time.perf_counter() - began}
    memory.look()
    warm_up(stream)
    rates, last = timed(stream, work.batch_tokens, limits)
    figures |= rates
    positions = getattr(loader, "positions", None)
    _watch_memory(stream, memory)
    figures |= memory.added()
    began = time.perf_counter()
    stream.close()  # type: ignore[attr-defined]
    figures["close_s"] = time.perf_counter() - began
    del stream
    gc.collect()
    resumed = _resume(loader, work, figures)
    checker = Checker(work, anywhere=alternative.random_windows)
    checker.check(*last, positions)
    if resumed is not None:
        checker.restart()
        checker.check(*resumed)
    checker.restart()
    if limits.check_s:
        figures["check"] = _check(loader, work, limits, checker, resumed)
    return figures


def warm_up(stream: Iterator[Pair]) -> int:
    """Take batches until buffers and threads are as they stay; returns how many."""
    began, batches = time.perf_counter(), 0
    while batches < _WARMUP_BATCHES or time.perf_counter() - began < _WARMUP_S:
        next(stream)
        batches += 1
    return batches


def timed(stream: Iterator[Pair], batch_tokens: int, limits: Limits) -> tuple[dict[str, Any], Pair]:
    """Rates, CPU time and latency of the next batches within `limits`, and a copy of the last batch."""
    clock = time.perf_counter_ns
    waits: list[int] = []
    meter, thread_cpu = CpuMeter(), time.thread_time()
    began = clock()
    earliest, latest = began + int(limits.min_s * 1e9), began + int(limits.max_s * 1e9)
    while True:
        asked = clock()
        batch = next(stream)
        got = clock()
        waits.append(got - asked)
        if got >= latest or (len(waits) >= limits.batches and got >= earliest):
            break
    thread_cpu = time.thread_time() - thread_cpu
    cpu = meter.elapsed_s()
    seconds, tokens = (got - began) / 1e9, len(waits) * batch_tokens
    p50, p99 = np.percentile(waits, [50, 99]) / 1e9
    figures = {
        "batches": len(waits),
        "seconds": seconds,
        "tokens_per_s": tokens / seconds,
        "cpu_s_per_mtok": cpu / tokens * 1e6,
        "main_thread_cpu_s_per_batch": thread_cpu / len(waits),
        "next_p50_s": float(p50),
        "next_p99_s": float(p99),
    }
    return figures, (batch[0].clone(), batch[1].clone())


def _watch_memory(stream: Iterator[Pair], memory: MemoryWatch) -> None:
    began = time.perf_counter()
    for _ in range(_MEMORY_SAMPLES):
        batch = next(stream)
        memory.look()
        del batch
        if time.perf_counter() - began > _MEMORY_S:
            return


def _resume(loader: Loader, work: Work, figures: dict[str, Any]) -> Pair | None:
    """Time from a fresh object to the batch at 80 % of the epoch. `resume_s` is None without a state."""
    state = loader.state_after(work, work.resume_batch)
    figures["resume_s"] = None
    if state is None:
        return None
    began = time.perf_counter()
    stream = loader.open(work, state)
    inputs, labels = next(stream)
    figures["resume_s"] = time.perf_counter() - began
    resumed = inputs.clone(), labels.clone()
    _close(stream)
    return resumed


def _check(loader: Loader, work: Work, limits: Limits, checker: Checker, resumed: Pair | None) -> dict[str, Any]:
    """Check a fresh epoch from its first batch on, until its end or until time is up."""
    exact: bool | None = None
    ends = time.perf_counter() + limits.check_s
    stream = loader.open(work)
    while checker.batches < work.epoch_batches and (time.perf_counter() < ends or not checker.batches):
        inputs, labels = next(stream)
        if resumed is not None and checker.batches == work.resume_batch:
            exact = torch.equal(inputs, resumed[0]) and torch.equal(labels, resumed[1])
            if not exact:
                raise CheckError(f"the batch after the resume is not batch {work.resume_batch} of the epoch")
        checker.check(inputs, labels, getattr(loader, "positions", None))
    _close(stream)
    return {
        "batches": checker.batches,
        "rows": checker.rows,
        "whole_epoch": checker.batches == work.epoch_batches,
        "resume_exact": exact,
    }


def _close(stream: Any) -> None:
    stream.close()
    gc.collect()


@problems_as_results
def run(task: dict[str, Any]) -> dict[str, Any]:
    """Carry out a task: measure within `limits`, or prepare the corpus where they are None.

    Problems come back as `skipped` or `failed` with the reason.
    """
    alternative, work = ALTERNATIVES[task["name"]], Work(**task["work"])
    try:
        loader = alternative.load()
    except Exception as error:  # a package may fail to import with anything, e.g. RuntimeError from a mismatched pair
        return {"skipped": f"{type(error).__name__}: {error}"}
    if task["limits"] is None:
        loader.prepare(work)
        return {}
    return measure(alternative.name, work, Limits(**task["limits"]))


def load(task: dict[str, Any]) -> None:
    """Import what the task needs. What goes wrong here goes wrong again in `run`, which says so."""
    with contextlib.suppress(Exception):
        ALTERNATIVES[task["name"]].load()


if __name__ == "__main__":
    serve(load, run)
