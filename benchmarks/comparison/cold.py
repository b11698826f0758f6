"""Time how long a consumer of a fixed pace waits for data, in a separate child process: see `comparison.child`.

    wait ─ compute ─ wait ─ compute ─ ...       a step is the wait for a batch, then `step_s` of the consumer's work

The first second is apart: it has the start. From then on, a wait is either for a block that is not ready, which the
loader's statistics tell, or what a call of `next()` takes with all data at hand.

Cold: the file's pages are dropped before the start, and all the time by a thread, since a file that is larger than the
memory would not stay in it either. Pages that a process has mapped cannot be dropped, so a map keeps what it touched.
"""

import contextlib
import ctypes
import mmap
import os
import statistics
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from comparison.alternatives import Pair
from comparison.check import Checker, CheckError, problems_as_results
from comparison.child import serve
from comparison.process import CpuMeter
from comparison.torch_loaders import RowDataLoader
from comparison.work import Work, warm
from dali_pipes import TokenLoader

LOADERS = {"dali_pipes": 0, "torch_dataloader_2": 2}
"""Worker processes of each."""
MOST_RESIDENT = 0.05
"""Share of a cold file that may be in the page cache before the start."""
_DROP_EVERY_S = 0.25  # often enough for what is read ahead, and little work for the pages that a map keeps
_BURN_BYTES = bytes(1 << 18)


def drop_pages(descriptor: int) -> None:
    """Drop the pages of an open file from the page cache: those that are on the disk and that no process has mapped."""
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def resident_share(path: Path) -> float:
    """Share of the file's pages that are in the page cache."""
    size = path.stat().st_size
    pages = -(-size // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    library = ctypes.CDLL(None, use_errno=True)
    with path.open("rb") as file, mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as mapped:
        first = np.frombuffer(mapped, np.uint8)
        address = ctypes.c_void_p(first.ctypes.data)
        failed = library.mincore(address, ctypes.c_size_t(size), found)
        del first  # or the map could not be closed
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore: {os.strerror(ctypes.get_errno())}")
    return sum(flags & 1 for flags in bytes(found)) / pages


@contextlib.contextmanager
def kept_cold(path: Path) -> Iterator[Callable[[], float]]:
    """Inside, a thread drops the file's pages again and again; yields what tells its CPU seconds so far.

    Raises CheckError if the file stays in the cache.
    """
    ended, used_s = threading.Event(), 0.0
    with path.open("rb") as file:
        os.fsync(file.fileno())  # pages that are not on the disk yet would stay
        drop_pages(file.fileno())
        share = resident_share(path)
        if share > MOST_RESIDENT:
            raise CheckError(f"{share:.0%} of {path} stays in the page cache: name a folder on a disk with --data-dir")

        def drop() -> None:
            nonlocal used_s
            while not ended.wait(_DROP_EVERY_S):
                drop_pages(file.fileno())
                used_s = time.thread_time()

        thread = threading.Thread(target=drop, daemon=True)
        thread.start()
        try:
            yield lambda: used_s
        finally:
            ended.set()
            thread.join()


def burn(until: float) -> None:
    """Compute until `perf_counter` says so, without the interpreter lock."""
    while time.perf_counter() < until:
        zlib.crc32(_BURN_BYTES)


def rest(until: float) -> None:
    """Sleep until then, as a thread does that waits for a GPU."""
    time.sleep(max(0.0, until - time.perf_counter()))


CONSUMERS: dict[str, Callable[[float], None]] = {"burn": burn, "sleep": rest}


class Consumed(NamedTuple):
    """What a consumer saw, in seconds."""

    first_waits: list[float]
    """Of the steps of the start."""
    waits: list[float]
    """Of each step after that."""
    elapsed_s: float
    cpu_s: float
    blocks_s: float | None
    """Of the waits: for blocks that were not ready; None if the loader does not say."""
    last: Pair


def consume(
    stream: Iterator[Pair],
    step_s: float,
    seconds: float,
    consumer: str,
    *,
    first_s: float = 1.0,
    blocks_s: Callable[[], float | None] = lambda: None,
) -> Consumed:
    """Take batches for `first_s`, and then as many steps as `seconds` have time for.

    blocks_s: the loader's own seconds of waiting for blocks so far
    """
    work = CONSUMERS[consumer]
    batch: Pair | None = None

    def step() -> float:
        nonlocal batch
        asked = time.perf_counter()
        batch = next(stream)
        got = time.perf_counter()
        work(got + step_s)
        return got - asked

    began = time.perf_counter()
    first_waits = [step()]
    while time.perf_counter() < began + first_s:
        first_waits.append(step())
    before, meter, began = blocks_s(), CpuMeter(), time.perf_counter()
    waits = [step() for _ in range(max(1, round(seconds / step_s)))]
    elapsed_s, cpu_s, after = time.perf_counter() - began, meter.elapsed_s(), blocks_s()
    assert batch is not None
    waited_s = None if before is None or after is None else after - before
    return Consumed(first_waits, waits, elapsed_s, cpu_s, waited_s, (batch[0].clone(), batch[1].clone()))


@contextlib.contextmanager
def opened(name: str, work: Work) -> Iterator[tuple[Iterator[Pair], Callable[[], float | None]]]:
    """The batches of a loader, and the seconds that it has waited for blocks, if it says so."""
    if name != "dali_pipes":
        stream = RowDataLoader(LOADERS[name]).open(work)
        yield stream, lambda: None
        return
    settings: dict[str, Any] = {"batch_size": work.batch_size, "seq_len": work.seq_len, "seed": work.seed}
    settings |= {} if work.threads is None else {"num_threads": work.threads}
    with TokenLoader(corpus=work.corpus, device="cpu", quiet=True, repeat=True, **settings) as loader:
        batches = ((batch["input_ids"], batch["labels"]) for batch in loader)
        yield batches, lambda: loader.stats().block_times.wait_s


def measure(
    name: str, work: Work, step_s: float, seconds: float, consumer: str, *, is_cold: bool, first_s: float = 1.0
) -> dict[str, Any]:
    """All figures of one round. Raises `CheckError` for wrong data, and if the file cannot be made cold."""
    path = Path(work.corpus)
    if not is_cold:
        warm(path)
    with contextlib.ExitStack() as stack:
        dropping_s = stack.enter_context(kept_cold(path)) if is_cold else lambda: 0.0
        stream, blocks_s = stack.enter_context(opened(name, work))
        found = consume(stream, step_s, seconds, consumer, first_s=first_s, blocks_s=blocks_s)
        cpu_s = found.cpu_s - dropping_s()
        resident = resident_share(path)
    Checker(work).check(*found.last)
    waits, elapsed_s = found.waits, found.elapsed_s
    percentiles = statistics.quantiles(waits, n=1000, method="inclusive") if len(waits) > 1 else waits * 999
    figures = {
        "steps": len(waits),
        "tokens_per_s": len(waits) * work.batch_tokens / elapsed_s,
        "data_wait_s": sum(waits),
        "data_wait_pct": 100 * sum(waits) / elapsed_s,
        "start_wait_s": sum(found.first_waits),
        "first_batch_s": found.first_waits[0],
        "next_p50_s": percentiles[499],
        "next_p99_s": percentiles[989],
        "next_p999_s": percentiles[998],
        "next_most_s": max(waits),
        # Of the consumer too: what a loader costs is the difference to another one at the same pace.
        "cpu_s": cpu_s,
        "resident_share": resident,
    }
    return figures | ({} if found.blocks_s is None else {"blocks_wait_pct": 100 * found.blocks_s / elapsed_s})


@problems_as_results
def run(task: dict[str, Any]) -> dict[str, Any]:
    """Carry out a task."""
    return measure(**(task | {"work": Work(**task["work"])}))


def load(task: dict[str, Any]) -> None:
    """Nothing: the imports of this module are all there are."""
    del task


if __name__ == "__main__":
    serve(load, run)
