"""The placements on a GPU: where a block's tokens come from, and what is queued for it on the device's stream.

    host      reader threads ─▶ pinned staging ─▶ copy in the file's width ─▶ kernel `rows` ─▶ DALI
    device    corpus in GPU memory ─▶ kernel `shuffled_rows` ─▶ DALI

`device.py` says who owns which buffer and what frees it. Kernels check the ids while they read them; what they found is
copied back behind them and looked at one block later, so nothing waits for it.
"""

import contextlib
import os
import sys
import time
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus import Corpus
from dali_pipes.device import Gpu
from dali_pipes.operators import rows, shuffled_rows
from dali_pipes.operators.shuffled_rows import IGNORE_INDEX
from dali_pipes.readers import ReaderThreads
from dali_pipes.schedule import PADDING, Schedule, StepRange
from dali_pipes.source import Slot, plan_rows, range_error
from dali_pipes.stats import BlockTimes, MemoryHeld

Array = Any

LOAD_CHUNK_BYTES = 16 << 20
LOAD_THREADS = 8
"""Threads that read the corpus into pinned memory while it is loaded: one alone copies less than a bus takes."""

_NO_BAD_ID = (0, 2**63 - 1)  # number of bad ids, position of the first


class _Readback:
    """What a block's kernel found, on its way to the host."""

    def __init__(self, gpu: Gpu) -> None:
        self.found = gpu.empty_pinned((2,), np.int64)
        self.arrived = gpu.event()
        self.iteration = 0
        self.steps = StepRange(0, 0, 0, 0)


class GpuPlacement:
    """What both placements share: the arrays of one block, and the check of the ids in it."""

    plans_rows = True

    def __init__(
        self,
        corpus: Corpus,
        schedule: Schedule,
        gpu: Gpu,
        *,
        max_rows: int,
        outputs: tuple[str, ...],
        label_shift: bool,
        vocab_size: int | None,
    ) -> None:
        self.gpu, self._corpus, self._schedule = gpu, corpus, schedule
        self._label_shift, self._vocab_size, self._outputs = label_shift, vocab_size, outputs
        self._seq_len = schedule.windows.seq_len
        self._inputs = gpu.empty((max_rows, self._seq_len), np.int64)
        self._labels = gpu.empty((max_rows, self._seq_len), np.int64)
        self._row_ids = gpu.empty((max_rows,), np.int64) if "row_ids" in outputs else None
        self._bad = gpu.empty((2,), np.int64)
        self._tokens: Array = None
        self._no_bad_id = gpu.empty_pinned((2,), np.int64)
        self._no_bad_id[:] = _NO_BAD_ID
        self._unused: list[_Readback] = []
        self._unread: deque[_Readback] = deque()
        self._closed = False
        self.restart()

    def deliver(self, slot: Slot, steps: StepRange, iteration: int) -> dict[str, Any]:
        """Queue a block's work; its arrays, (1, R, T) each, in the order of the stream. Does not block."""
        count = self._schedule.row_count(steps)
        arrays = {"input_ids": self._inputs[:count], "labels": self._labels[:count]}
        if self._row_ids is not None:
            arrays["row_ids"] = self._row_ids[:count]
        with self.gpu.current():
            self._fill(slot, steps, arrays)
        reading = self._unused.pop() if self._unused else _Readback(self.gpu)
        reading.iteration, reading.steps = iteration, steps
        self.gpu.copy(reading.found, self._bad)
        self.gpu.record(reading.arrived)
        self._unread.append(reading)
        return {name: self.gpu.export(arrays[name][None]) for name in self._outputs}

    def _fill(self, slot: Slot, steps: StepRange, arrays: dict[str, Array]) -> None:
        raise NotImplementedError

    def check(self, iteration: int | None = None) -> None:
        """Raise `TokenRangeError` if a block up to `iteration` holds a bad id, which waits for that block's kernel.

        With None: if any block delivered so far is known to, which waits for nothing.
        """
        while self._unread:
            reading = self._unread[0]
            if iteration is None and not self.gpu.passed(reading.arrived):
                return
            if iteration is not None and reading.iteration > iteration:
                return
            self.gpu.wait(reading.arrived)
            if reading.found[0]:
                plan = plan_rows(self._schedule, reading.steps)
                row, column = divmod(int(reading.found[1]), self._seq_len + self._label_shift)
                raise range_error(self._corpus, self._schedule, plan, row, column, self._vocab_size)
            self._unused.append(self._unread.popleft())

    def restart(self) -> None:
        """Forget what was found in blocks that nobody will take."""
        # Copies into these pairs may still be queued; only copies behind them on the same stream write there again.
        self._unused += self._unread
        self._unread.clear()
        self.gpu.copy(self._bad, self._no_bad_id)

    def memory(self) -> MemoryHeld:
        """Bytes held here; DALI's are not in it."""
        return MemoryHeld(self.gpu.pinned_bytes, self.gpu.device_bytes)

    def close(self) -> None:
        """Let go of the memory. Waits for the stream, since copies from pinned memory may be queued. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):  # the context is broken, and nothing is being copied any more
            self.gpu.wait_for_all()
        self._inputs = self._labels = self._row_ids = self._bad = self._tokens = None
        self._unused.clear()
        self._unread.clear()
        self.gpu.device_bytes = self.gpu.pinned_bytes = 0


class HostPlacement(GpuPlacement):
    """Tokens cross to the GPU block by block, in the file's own width, and are widened, labelled and checked there."""

    def __init__(self, corpus: Corpus, schedule: Schedule, gpu: Gpu, *, max_rows: int, **settings: Any) -> None:
        super().__init__(corpus, schedule, gpu, max_rows=max_rows, **settings)
        self._width = self._seq_len + self._label_shift
        self._tokens = gpu.empty((max_rows * self._width,), corpus.dtype)
        self._ignored = gpu.empty_pinned((self._seq_len,), np.int64)
        self._ignored[:] = IGNORE_INDEX

    def new_slot(self, max_rows: int) -> Slot:
        arrays = {"staging": self.gpu.empty_pinned((max_rows, self._width), self._corpus.dtype)}
        if self._row_ids is not None:
            arrays["row_ids"] = self.gpu.empty_pinned((max_rows,), np.int64)
        return Slot({**arrays, "copied": self.gpu.event()})

    def prepare(self, slot: Slot, times: BlockTimes) -> None:
        """Fill the staging buffer; called in a reader thread, which waits for the last copy out of it."""
        assert slot.plan is not None
        self.gpu.wait(slot.arrays["copied"])
        count = len(slot.plan.starts)
        begin = time.perf_counter()
        self._corpus.read_rows(slot.plan.starts, slot.arrays["staging"][:count])
        times.read_s = time.perf_counter() - begin
        if self._row_ids is not None:
            slot.arrays["row_ids"][:count] = slot.plan.row_ids

    def _fill(self, slot: Slot, steps: StepRange, arrays: dict[str, Array]) -> None:
        assert slot.plan is not None
        row_ids, inputs, labels = slot.plan.row_ids, arrays["input_ids"], arrays["labels"]
        count = len(row_ids)
        tokens = self._tokens[: count * self._width]
        self.gpu.copy(tokens, slot.arrays["staging"][:count])
        if self._row_ids is not None:
            self.gpu.copy(arrays["row_ids"], slot.arrays["row_ids"][:count])
        self.gpu.record(slot.arrays["copied"])
        rows(
            tokens,
            range(0, count * self._width, self._width),
            self._seq_len,
            label_shift=self._label_shift,
            out=(inputs, labels),
            vocab_size=self._vocab_size,
            bad=self._bad,
        )
        if row_ids[-1] == PADDING:  # a rank gets at most one such row, at the end of an epoch
            self.gpu.copy(labels[count - 1], self._ignored)


class DevicePlacement(GpuPlacement):
    """The windows' part of the corpus in GPU memory. A block costs the host one launch; order and gather are in it."""

    plans_rows = False

    def __init__(self, corpus: Corpus, schedule: Schedule, gpu: Gpu, **settings: Any) -> None:
        super().__init__(corpus, schedule, gpu, **settings)
        self._tokens = gpu.empty((schedule.windows.span,), corpus.dtype)
        load_tokens(corpus, schedule.windows.first, self._tokens, gpu)
        gpu.free_unused_pinned()

    def new_slot(self, max_rows: int) -> Slot:
        return Slot()

    def prepare(self, slot: Slot, times: BlockTimes) -> None:
        """Nothing: the order is computed where the tokens are."""

    def _fill(self, slot: Slot, steps: StepRange, arrays: dict[str, Array]) -> None:
        schedule = self._schedule
        shuffled_rows(
            self._tokens,
            schedule.first_row(steps),
            len(arrays["input_ids"]),
            row_step=schedule.world_size,
            num_rows=schedule.num_rows,
            key=schedule.key(steps.epoch),
            origin=0,
            stride=schedule.windows.stride,
            seq_len=self._seq_len,
            label_shift=self._label_shift,
            out=(arrays["input_ids"], arrays["labels"]),
            row_ids=arrays.get("row_ids"),
            vocab_size=self._vocab_size,
            bad=self._bad,
        )


def load_tokens(corpus: Corpus, first: int, target: Array, gpu: Gpu) -> None:
    """Fill a device array with the tokens of a corpus from position `first` on. Blocks until they are there.

    Threads read chunks into a ring of pinned buffers while the copies of earlier chunks run.
    """
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    total, item = len(target), corpus.dtype.itemsize
    chunk = min(total, LOAD_CHUNK_BYTES // item)
    starts = range(0, total, chunk)
    threads = min(LOAD_THREADS, os.cpu_count() or 1, len(starts))
    pinned_before = gpu.pinned_bytes
    ring = [(gpu.empty_pinned((1, chunk), corpus.dtype), gpu.event()) for _ in range(threads + 1)]

    def read(number: int) -> npt.NDArray[Any]:
        buffer, copied = ring[number % len(ring)]
        gpu.wait(copied)
        part = buffer[:, : min(chunk, total - starts[number])]
        corpus.read_rows([first + starts[number]], part)
        return part

    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    readers = ReaderThreads(threads)
    try:
        with Progress(
            *columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()
        ) as progress:
            bar = progress.add_task(f"corpus to cuda:{gpu.number}", total=total * item)
            coming = deque(readers.submit(read, number) for number in range(threads))
            for number, start in enumerate(starts):
                part = coming.popleft().result()
                gpu.copy(target[start : start + part.size], part)
                gpu.record(ring[number % len(ring)][1])
                # The buffer it gets held the chunk before this one, whose event has been recorded.
                if number + threads < len(starts):
                    coming.append(readers.submit(read, number + threads))
                progress.update(bar, advance=part.nbytes)
    finally:
        readers.stop()
        gpu.wait_for_all()
        gpu.pinned_bytes = pinned_before
