"""The placement "device": the corpus stays in GPU memory."""

import os
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.documents import staged
from dali_pipes.monitoring.stats import BlockTimes
from dali_pipes.operators import gather_runs, shuffled_rows
from dali_pipes.placement.base import Slot
from dali_pipes.placement.cuda import Gpu
from dali_pipes.placement.gpu import GpuPlacement
from dali_pipes.rows.outputs import Outputs
from dali_pipes.rows.source import Source
from dali_pipes.runtime.progress import progress_bar
from dali_pipes.runtime.threads import ReaderThreads
from dali_pipes.schedule import Schedule, StepRange
from dali_pipes.schedule.plans import Plan

Array = Any

LOAD_CHUNK_BYTES = 4 << 20
"""Of each of a thread's two buffers. Page-locking is slow, so small ones make the start shorter."""
LOAD_THREADS = 8
"""Threads that read the corpus into pinned memory while it is loaded: one alone copies less than a bus takes."""


class DevicePlacement(GpuPlacement):
    """What rows read of the corpus in GPU memory. Where rows are a formula, a block costs the host one launch."""

    keeps_corpus = True
    _gathered: "_Gathered | None" = None

    def __init__(
        self,
        source: Source,
        schedule: Schedule,
        outputs: Outputs,
        gpu: Gpu,
        *,
        max_rows: int,
        vocab_size: int | None,
    ) -> None:
        super().__init__(source, schedule, outputs, gpu, max_rows=max_rows, vocab_size=vocab_size)
        formula = schedule.interleave.formula(0)
        by_formula = formula is not None and formula.is_one_permutation and not outputs.in_pieces
        self.plans_rows = not by_formula or bool({*self._from_plan} - {"row_ids"})
        if self.plans_rows and not outputs.in_pieces:
            self._starts = gpu.empty((max_rows,), np.int64)
        if source.rows.rearranges:
            self._gathered = _Gathered(gpu, max_rows * self._row_tokens, source)
        self._hold_corpus()
        if outputs.goldfish is not None:
            size = max_rows * self._row_tokens if source.rows.rearranges else 0
            self._learned = gpu.empty((max(source.rows.span, size),), np.uint8)

    def _hold_corpus(self) -> None:
        """Put what rows read of the corpus where kernels can read it, as `_tokens` and `_loss_mask`. Blocks."""
        self._tokens = self.gpu.empty((self._source.rows.span,), self._source.dtype)
        load_tokens(self._source, self._tokens, self.gpu)
        if self._source.has_loss_mask:
            self._loss_mask = self.gpu.empty(self._tokens.shape, np.uint8)
            load_tokens(self._source, self._loss_mask, self.gpu, of_loss_mask=True)
        self.gpu.free_unused()

    def new_slot(self, max_rows: int) -> Slot:
        self.gpu.adopt_thread()
        if not self.plans_rows or self._outputs.in_pieces:
            return self._slot_of({}, max_rows)
        return self._slot_of({"starts": self.gpu.empty_pinned((max_rows,), np.int64)}, max_rows)

    def prepare(self, slot: Slot, times: BlockTimes) -> None:
        """For a formula nothing: the order is computed where the tokens are. Else where rows or pieces lie there."""
        plan, first = slot.plan, self._source.rows.first_token
        if plan is None:
            return
        self.gpu.adopt_thread()
        self.gpu.wait(slot.arrays["copied"])
        if plan.pieces is None:
            slot.arrays["starts"][: len(plan.starts)] = plan.starts - first
        elif plan.rows.fim is not None:
            row_begins = plan.row_begins(self._source.rows)
            reads = self._source.rows.reads(plan.rows, row_begins[:-1], np.diff(row_begins))
            starts = np.where(reads.starts < 0, reads.starts, reads.starts - first)
            self._stage(slot, "runs", np.concatenate([starts, reads.lengths, reads.targets]))
            self._stage_tables(slot, staged(plan.pieces, row_begins))
        else:
            starts, ends = plan.pieces.starts - first, plan.pieces.document_ends - first
            self._stage_tables(slot, plan.pieces._replace(starts=starts, document_ends=ends))
        self._stage_from_plan(slot)

    def _fill(self, slot: Slot, steps: StepRange, arrays: dict[str, Array]) -> None:
        plan, schedule = slot.plan, self._schedule
        if plan is not None:
            self._send_from_plan(slot, arrays)
            if plan.rows.fim is not None:
                self._fill_from_pieces(slot, *self._gather(slot, plan), arrays)
                return
            if plan.pieces is not None:
                self._fill_from_pieces(slot, self._tokens, self._loss_mask, arrays)
                return
            starts = self._starts[: len(plan.starts)]
            self.gpu.copy(starts, slot.arrays["starts"][: len(plan.starts)])
            self.gpu.record(slot.arrays["copied"])
            self._fill_from_runs(plan, self._tokens, starts, arrays)
            return
        formula = schedule.interleave.formula(steps.epoch)
        assert formula is not None, "rows without a formula are planned"
        shuffled_rows(
            self._tokens,
            schedule.first_row(steps),
            len(arrays["input_ids"]),
            row_step=schedule.world_size,
            num_rows=formula.order.count,
            key=formula.key,
            origin=formula.first - self._source.rows.first_token,
            stride=formula.stride,
            seq_len=self._seq_len,
            label_shift=self._outputs.label_shift,
            out=(arrays["input_ids"], arrays["labels"]),
            row_ids=arrays.get("row_ids"),
            vocab_size=self._vocab_size,
            bad=self._bad,
        )

    def _gather(self, slot: Slot, plan: Plan) -> tuple[Array, Array]:
        """Queue what puts the tokens of a block together, and their loss mask, row after row."""
        assert self._gathered is not None
        gathered, size = self._gathered, int(plan.row_begins(self._source.rows)[-1])
        tokens = gathered.tokens[:size]
        loss_mask = None if gathered.loss_mask is None else gathered.loss_mask[:size]
        table = gathered.runs[: len(slot.arrays["runs"])]
        self.gpu.copy(table, slot.arrays["runs"])
        num_runs = len(table) // 3
        starts, lengths, targets = (table[at * num_runs : (at + 1) * num_runs] for at in range(3))
        masks = {"loss_mask": self._loss_mask, "out_mask": loss_mask}
        gather_runs(self._tokens, starts, lengths, targets, tokens, longest=self._row_tokens, **masks)
        return tokens, loss_mask

    def _forget_memory(self) -> None:
        super()._forget_memory()
        self._gathered = None


class _Gathered:
    """Tokens of one block, put together on the device, and the table of the runs that they come from.

    A run may be at every position, so that a card that is full later on ends no run.
    """

    def __init__(self, gpu: Gpu, size: int, source: Source) -> None:
        self.tokens = gpu.empty((size,), source.dtype)
        self.loss_mask = gpu.empty((size,), np.uint8) if source.has_loss_mask else None
        self.runs = gpu.empty((3 * size,), np.int64)


def load_tokens(source: Source, target: Array, gpu: Gpu, *, of_loss_mask: bool = False) -> None:
    """Fill a device array with the tokens that rows read, or their entries in the loss mask. Blocks until it is done.

    Each thread reads chunks into one of two pinned buffers while the copy out of the other runs.
    """
    total, item, first = len(target), target.dtype.itemsize, source.rows.first_token
    chunk = min(total, LOAD_CHUNK_BYTES // item)
    starts = range(0, total, chunk)
    threads = min(LOAD_THREADS, os.cpu_count() or 1, len(starts))
    pinned_before = gpu.pinned_bytes
    buffers: list[npt.NDArray[Any]] = []  # which outlive their copies, whatever ends a thread
    ended = threading.Event()

    def load(thread: int, advance: Callable[[int], None]) -> None:
        gpu.adopt_thread()
        ring = [(gpu.empty_pinned((chunk,), target.dtype), gpu.event()) for _ in range(2)]
        buffers.extend(buffer for buffer, _ in ring)
        for turn, start in enumerate(starts[thread::threads]):
            if ended.is_set():
                return
            buffer, copied = ring[turn % 2]
            gpu.wait(copied)
            part = buffer[: min(chunk, total - start)]
            source.read_span(first + start, part, of_loss_mask=of_loss_mask)
            gpu.copy(target[start : start + part.size], part)
            gpu.record(copied)
            advance(part.nbytes)

    readers = ReaderThreads(threads)
    try:
        with progress_bar(f"corpus to cuda:{gpu.number}", total * item, in_bytes=True) as advance:
            for future in [readers.submit(load, thread, advance) for thread in range(threads)]:
                readers.result(future)
    finally:
        ended.set()
        readers.stop()
        gpu.wait_for_all()
        gpu.pinned_bytes = pinned_before
