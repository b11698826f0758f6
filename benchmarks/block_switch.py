"""CPU time of the trainer's thread where the next block begins: its batches made by a thread, or by the trainer's own.

    python benchmarks/block_switch.py
    python benchmarks/block_switch.py --per-block 64 --rounds 5

For a machine without a GPU: the loader runs its GPU branch over the tests' stand-in for CuPy and DALI, whose kernels
and copies do nothing here. What is left is the Python code of the loader and of the stand-in, not that of CUDA. On a
card, `gpu_check.py` times the same calls. CPU caches are filled with other data and code before each call. The last
line is one JSON line.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer
from comparison.report import machine, wide_console
from next_calls import BATCH_SIZE, SEQ_LEN, Evictor
from rich.table import Table

from dali_pipes import TokenLoader
from dali_pipes.engine import batches_ahead
from dali_pipes.runtime.threads import ReaderThreads

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import gpu_stand_in

PLACEMENTS = ("host", "device", "pinned")
WAYS = ("by a thread", "by the trainer's thread")
_READY_S = 0.03  # until the next block has been taken
_SMALL_BYTES = 16
_FIRST = 2  # switches before the queue is full


@contextmanager
def idle_device() -> Iterator[None]:
    """The stand-in with nothing to do: kernels do not run, and only what the loader looks at on the host is copied."""

    def empty(self: Any, gpu: Any, size: int, **_: Any) -> None:
        self.raw = np.empty(max(size, 1) + 63, np.uint8)
        self.offset = -self.raw.ctypes.data % 64
        self.address, self.size = self.raw.ctypes.data + self.offset, size

    def copy(
        self: Any, target: int, source: int, size: int, handle: int, real: Any = gpu_stand_in.StandInGpu.copy
    ) -> None:
        if size <= _SMALL_BYTES:
            real(self, target, source, size, handle)

    def no_kernel(*_: Any) -> Any:
        return lambda *_: None

    with (
        patch.object(gpu_stand_in.Memory, "__init__", empty),
        patch.object(gpu_stand_in.StandInGpu, "is_known", lambda self, address: True),
        patch.object(gpu_stand_in.StandInGpu, "copy", copy),
        patch.object(gpu_stand_in, "_built_kernel", no_kernel),
        gpu_stand_in.installed("early"),
    ):
        yield


def no_thread(*_: Any) -> Any:
    """What Python raises where the system does not start more threads."""
    raise RuntimeError("can't start new thread")


def switches(corpus: Path, placement: str, per_block: int, count: int, evict: Evictor) -> list[float]:
    """Microseconds of CPU of the trainer's thread in each call of `next()` that begins a block."""
    shape: dict[str, Any] = {"batch_size": BATCH_SIZE, "seq_len": SEQ_LEN, "batches_per_run": per_block}
    found = []
    with (
        idle_device(),
        TokenLoader(
            corpus, **shape, dtype="uint16", device="cuda", placement=placement, quiet=True, repeat=True
        ) as loader,
    ):
        batches = iter(loader)
        for _ in range(_FIRST + count):
            time.sleep(_READY_S)
            evict()
            begin = time.thread_time()
            batch = next(batches)
            found.append(1e6 * (time.thread_time() - begin))
            del batch
            for _ in range(per_block - 1):
                next(batches)
    return found[_FIRST:]


def main(
    per_block: Annotated[int, typer.Option(min=2, help="batches in a block")] = 256,
    count: Annotated[int, typer.Option(min=1, help="switches in a round")] = 20,
    rounds: Annotated[int, typer.Option(min=1, help="of each way, in turns")] = 3,
    evict_mb: Annotated[int, typer.Option(min=1, help="megabytes written before each call")] = 16,
) -> None:
    """Measure, print a table; the last line is one JSON line."""
    evict = Evictor(evict_mb)
    taken: dict[tuple[str, str], list[float]] = {(placement, way): [] for placement in PLACEMENTS for way in WAYS}
    with tempfile.TemporaryDirectory() as place:
        corpus = Path(place) / "tokens.bin"
        blocks = _FIRST + count + 8  # more than are taken and read ahead
        ids = np.random.default_rng(0).integers(0, 50_000, blocks * per_block * BATCH_SIZE * SEQ_LEN + 1, np.uint16)
        ids.tofile(corpus)
        for _round in range(rounds):
            for (placement, way), found in taken.items():
                made_by = ReaderThreads if way == WAYS[0] else no_thread
                with patch.object(batches_ahead, "ReaderThreads", made_by):
                    found += switches(corpus, placement, per_block, count, evict)
    grid = Table(title=f"CPU of the trainer's thread at a block switch, {per_block} batches in a block: microseconds")
    for heading in ("placement", *(f"batches made {way}: median (10 to 90 of 100)" for way in WAYS), "ratio"):
        grid.add_column(heading)
    report: dict[str, Any] = {}
    for placement in PLACEMENTS:
        spread = {way: np.percentile(taken[placement, way], (50, 10, 90)).tolist() for way in WAYS}
        report[placement] = spread | {"ratio": spread[WAYS[0]][0] / spread[WAYS[1]][0]}
        cells = ("{:,.0f} ({:,.0f} to {:,.0f})".format(*spread[way]) for way in WAYS)
        grid.add_row(placement, *cells, f"{report[placement]['ratio']:.2f}")
    wide_console().print(grid)
    print(json.dumps({"benchmark": "block_switch", "machine": machine(), "per_block": per_block, "us": report}))


if __name__ == "__main__":
    typer.run(main)
