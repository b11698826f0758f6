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

from dali_pipes.corpus import Corpus, TokenMask
from dali_pipes.documents import Pieces
from dali_pipes.monitoring.stats import BlockTimes, MemoryHeld
from dali_pipes.operators import rows, shuffled_rows
from dali_pipes.operators.segments import work_size
from dali_pipes.operators.shuffled_rows import IGNORE_INDEX
from dali_pipes.placement.base import Slot, range_error
from dali_pipes.placement.cpu import find_bad_id, read_rows
from dali_pipes.placement.cuda import Gpu
from dali_pipes.rows.outputs import RowOutputs
from dali_pipes.runtime.progress import progress_bar
from dali_pipes.runtime.threads import ReaderThreads
from dali_pipes.schedule import PADDING, Schedule, StepRange
from dali_pipes.schedule.plans import Layout, Plan, plan_rows, staged, token_span

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
        layout: Layout = None,
        row_outputs: RowOutputs | None = None,
    ) -> None:
        self._closed, self._process = False, os.getpid()
        self._arrays: dict[str, Array] = {}
        self._unused: list[_Readback] = []
        self._unread: deque[_Readback] = deque()
        self._table: Array = None
        self._work: Array = None
        self.gpu, self._corpus, self._schedule = gpu, corpus, schedule
        self._label_shift, self._vocab_size, self._outputs = label_shift, vocab_size, outputs
        self._layout, self._row_outputs = layout, row_outputs
        self._seq_len = schedule.windows.seq_len
        self._width = self._seq_len + label_shift if layout is None else layout.width  # tokens that a row reads
        if row_outputs is None:
            for name in ("input_ids", "labels"):
                self._arrays[name] = gpu.empty((max_rows, self._seq_len), np.int64)
        else:
            for name in row_outputs.outputs:
                self._arrays[name] = gpu.empty(row_outputs.shape(name, max_rows), row_outputs.dtype(name))
        self._row_ids = gpu.empty((max_rows,), np.int64) if "row_ids" in outputs else None
        if row_outputs is not None:  # for a piece at every position, so that a card that is full later on ends no run
            pieces = max_rows * self._seq_len
            self._table = gpu.empty((max_rows + 1 + 3 * pieces,), np.int64)
            self._work = gpu.empty((work_size(pieces, max_rows, row_outputs.batch_size),), np.int64)
        self._bad = gpu.empty((2,), np.int64)
        self._tokens: Array = None
        self._learn: Array = None
        self._no_bad_id = gpu.empty_pinned((2,), np.int64)
        self._no_bad_id[:] = _NO_BAD_ID
        self.restart()

    def deliver(self, slot: Slot, steps: StepRange, iteration: int) -> dict[str, Any]:
        """Queue a block's work; its arrays, (1, R, T) each, in the order of the stream. Does not block."""
        count = self._schedule.row_count(steps)
        arrays = {name: array[:count] for name, array in self._arrays.items() if name != "cu_seqlens"}
        if "cu_seqlens" in self._arrays:
            arrays["cu_seqlens"] = self._arrays["cu_seqlens"][: steps.num_steps]
        if slot.plan is not None and slot.plan.widths is not None:
            assert self._row_outputs is not None
            for name, array in self._arrays.items():  # in one line, since batches have different widths
                arrays[name] = array.reshape(-1)[: self._row_outputs.size(name, slot.plan.runs(self._seq_len))]
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

    def _stage_row_ids(self, slot: Slot) -> None:
        if self._row_ids is not None:
            assert slot.plan is not None
            slot.arrays["row_ids"][: len(slot.plan.row_ids)] = slot.plan.row_ids

    def _send_row_ids(self, slot: Slot, arrays: dict[str, Array]) -> None:
        if self._row_ids is not None:
            self.gpu.copy(arrays["row_ids"], slot.arrays["row_ids"][: len(arrays["row_ids"])])

    def _stage_tables(self, slot: Slot, pieces: Pieces) -> None:
        """Keep the places of a block's pieces in pinned memory, one column behind the other."""
        table = np.concatenate(pieces)
        slot.num_pieces = len(pieces.starts)
        before = slot.arrays.get("table")
        if before is None or len(before) < len(table):
            slot.arrays["table"] = self.gpu.empty_pinned((_roomy(len(table)),), np.int64)
            self.gpu.pinned_bytes -= 0 if before is None else before.nbytes
        slot.arrays["table"][: len(table)] = table

    def _build(self, slot: Slot, tokens: Array, learn: Array, arrays: dict[str, Array]) -> None:
        assert self._row_outputs is not None
        assert slot.plan is not None
        sizes = len(slot.plan.row_ids) + 1, *[slot.num_pieces] * 3
        size = sum(sizes)
        self.gpu.copy(self._table[:size], slot.arrays["table"][:size])
        self.gpu.record(slot.arrays["copied"])
        columns, end = [], 0
        for column in sizes:
            columns.append(self._table[end : end + column])
            end += column
        offsets, *tables = columns
        runs, row = slot.plan.runs(self._seq_len), 0
        names = self._row_outputs.outputs
        parts = {name: self._row_outputs.unfolded(name, arrays[name].reshape(-1), runs) for name in names}
        check = {"vocab_size": self._vocab_size, "bad": self._bad, "work": self._work}
        for number, (count, width) in enumerate(runs):
            pieces = Pieces(offsets[row : row + count + 1], *tables)
            out = {name: part[number] for name, part in parts.items()}
            self._row_outputs.build(tokens, pieces, out, width=width, learn=learn, **check)
            row += count

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
                plan = plan_rows(self._schedule, reading.steps, self._layout)
                place = self._bad_place(plan, int(reading.found[1]))
                raise range_error(self._corpus, self._schedule, plan, *place, self._vocab_size, width=self._width)
            self._unused.append(self._unread.popleft())

    def _bad_place(self, plan: Plan, found: int) -> tuple[int, int]:
        """Row and column of a block's first bad id, which its kernel found at position `found`."""
        if self._layout is None:
            return divmod(found, self._width)
        # Labels behind a piece have no position of their own, and rows of each width were counted by themselves: what
        # was read says which id it was.
        places = plan.places(self._width)
        tokens = np.empty(int(places[-1]), self._corpus.dtype)
        read_rows(self._corpus, plan, self._layout, tokens)
        bad = find_bad_id(tokens, self._vocab_size)
        assert bad is not None, "a bad id that only the GPU saw"
        row = int(np.searchsorted(places, bad, side="right")) - 1
        return row, bad - int(places[row])

    def restart(self) -> None:
        """Forget what was found in blocks that nobody will take."""
        # Copies into these pairs may still be queued; only copies behind them on the same stream write there again.
        self._unused += self._unread
        self._unread.clear()
        self.gpu.copy(self._bad, self._no_bad_id)

    def memory(self) -> MemoryHeld:
        """Bytes held here; DALI's are not in it."""
        return MemoryHeld(self.gpu.pinned_bytes, self.gpu.device_bytes)

    def __del__(self) -> None:
        # CuPy keeps the memory of a stream for that stream, so what a loader leaves that nobody closed, the corpus
        # perhaps, nobody could use. Not in a forked process, where CUDA does not work.
        if os.getpid() == self._process and not sys.is_finalizing():
            self.close()

    def close(self) -> None:
        """Let go of the memory. Waits for the stream, since copies from pinned memory may be queued. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):  # the context is broken, and nothing is being copied any more
            self.gpu.wait_for_all()
        self._row_ids = self._bad = self._tokens = self._learn = self._table = self._work = None
        self._arrays.clear()
        with contextlib.suppress(RuntimeError):
            self.gpu.free_unused()
        self._unused.clear()
        self._unread.clear()
        self.gpu.device_bytes = self.gpu.pinned_bytes = 0


class HostPlacement(GpuPlacement):
    """Tokens cross to the GPU block by block, in the file's own width, and are widened, labelled and checked there."""

    def __init__(self, corpus: Corpus, schedule: Schedule, gpu: Gpu, *, max_rows: int, **settings: Any) -> None:
        super().__init__(corpus, schedule, gpu, max_rows=max_rows, **settings)
        self._tokens = gpu.empty((max_rows * self._width,), corpus.dtype)
        if corpus.loss_mask is not None:
            self._learn = gpu.empty((max_rows * self._width,), np.uint8)
        self._ignored = gpu.empty_pinned((self._seq_len,), np.int64)
        self._ignored[:] = IGNORE_INDEX

    def new_slot(self, max_rows: int) -> Slot:
        self.gpu.adopt_thread()
        arrays = {"staging": self.gpu.empty_pinned((max_rows * self._width,), self._corpus.dtype)}
        if self._learn is not None:
            arrays["learn"] = self.gpu.empty_pinned((max_rows * self._width,), np.uint8)
        if self._row_ids is not None:
            arrays["row_ids"] = self.gpu.empty_pinned((max_rows,), np.int64)
        return Slot({**arrays, "copied": self.gpu.event()})

    def prepare(self, slot: Slot, times: BlockTimes) -> None:
        """Fill the staging buffer; called in a reader thread, which waits for the last copy out of it."""
        assert slot.plan is not None
        self.gpu.adopt_thread()
        self.gpu.wait(slot.arrays["copied"])
        places = slot.plan.places(self._width)
        size = int(places[-1])
        begin = time.perf_counter()
        learn = None if self._learn is None else slot.arrays["learn"][:size]
        read_rows(self._corpus, slot.plan, self._layout, slot.arrays["staging"][:size], learn)
        if self._layout is not None:
            assert slot.plan.pieces is not None
            self._stage_tables(slot, staged(slot.plan.pieces, places))
        times.read_s = time.perf_counter() - begin
        self._stage_row_ids(slot)

    def _fill(self, slot: Slot, steps: StepRange, arrays: dict[str, Array]) -> None:
        assert slot.plan is not None
        row_ids = slot.plan.row_ids
        count, size = len(row_ids), int(slot.plan.places(self._width)[-1])
        tokens = self._tokens[:size]
        self.gpu.copy(tokens, slot.arrays["staging"][:size])
        self._send_row_ids(slot, arrays)
        if self._row_outputs is not None:
            learn = None if self._learn is None else self._learn[:size]
            if learn is not None:
                self.gpu.copy(learn, slot.arrays["learn"][:size])
            self._build(slot, tokens, learn, arrays)
            return
        self.gpu.record(slot.arrays["copied"])
        inputs, labels = arrays["input_ids"], arrays["labels"]
        rows(
            tokens,
            range(0, size, self._width),
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

    def __init__(self, corpus: Corpus, schedule: Schedule, gpu: Gpu, **settings: Any) -> None:
        super().__init__(corpus, schedule, gpu, **settings)
        self.plans_rows = self._layout is not None
        self._tokens = gpu.empty((token_span(schedule, self._layout),), corpus.dtype)
        load_tokens(corpus, schedule.windows.first, self._tokens, gpu)
        if corpus.loss_mask is not None:
            self._learn = gpu.empty(self._tokens.shape, np.uint8)
            load_tokens(corpus.loss_mask, schedule.windows.first, self._learn, gpu)
        gpu.free_unused()

    def new_slot(self, max_rows: int) -> Slot:
        self.gpu.adopt_thread()
        arrays = {"copied": self.gpu.event()}
        if self._layout is not None and self._row_ids is not None:
            arrays["row_ids"] = self.gpu.empty_pinned((max_rows,), np.int64)
        return Slot(arrays)

    def prepare(self, slot: Slot, times: BlockTimes) -> None:
        """With windows nothing: the order is computed where the tokens are. Else the places of the pieces there."""
        if slot.plan is not None and slot.plan.pieces is not None:
            self.gpu.adopt_thread()
            self.gpu.wait(slot.arrays["copied"])
            offsets, starts, lengths, ends = slot.plan.pieces
            first = self._schedule.windows.first
            self._stage_tables(slot, Pieces(offsets, starts - first, lengths, ends - first))
            self._stage_row_ids(slot)

    def _fill(self, slot: Slot, steps: StepRange, arrays: dict[str, Array]) -> None:
        if self._row_outputs is not None:
            self._send_row_ids(slot, arrays)
            self._build(slot, self._tokens, self._learn, arrays)
            return
        schedule = self._schedule
        shuffled_rows(
            self._tokens,
            schedule.first_row(steps),
            len(arrays["input_ids"]),
            row_step=schedule.world_size,
            num_rows=schedule.windows.count,
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


def _roomy(size: int) -> int:
    """Room for more than `size`, so that a block with a few more pieces than those before it allocates nothing."""
    return size + size // 2 + 1024


def load_tokens(corpus: Corpus | TokenMask, first: int, target: Array, gpu: Gpu) -> None:
    """Fill a device array with the tokens of a corpus, or its mask, from position `first` on. Blocks till it is done.

    Threads read chunks into a ring of pinned buffers while the copies of earlier chunks run.
    """
    total, item = len(target), corpus.dtype.itemsize
    chunk = min(total, LOAD_CHUNK_BYTES // item)
    starts = range(0, total, chunk)
    threads = min(LOAD_THREADS, os.cpu_count() or 1, len(starts))
    pinned_before = gpu.pinned_bytes
    ring = [(gpu.empty_pinned((chunk,), corpus.dtype), gpu.event()) for _ in range(threads + 1)]

    def read(number: int) -> npt.NDArray[Any]:
        buffer, copied = ring[number % len(ring)]
        gpu.adopt_thread()
        gpu.wait(copied)
        part = buffer[: min(chunk, total - starts[number])]
        corpus.read_pieces(np.array([first + starts[number]]), np.array([len(part)]), np.zeros(1, np.int64), part)
        return part

    readers = ReaderThreads(threads)
    try:
        with progress_bar(f"corpus to cuda:{gpu.number}", total * item, in_bytes=True) as advance:
            coming = deque(readers.submit(read, number) for number in range(threads))
            for number, start in enumerate(starts):
                part = coming.popleft().result()
                gpu.copy(target[start : start + part.size], part)
                gpu.record(ring[number % len(ring)][1])
                # The buffer it gets held the chunk before this one, whose event has been recorded.
                if number + threads < len(starts):
                    coming.append(readers.submit(read, number + threads))
                advance(part.nbytes)
    finally:
        readers.stop()
        gpu.wait_for_all()
        gpu.pinned_bytes = pinned_before
