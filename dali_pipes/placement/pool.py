"""The placement "pool": two windows of an order by blocks in GPU memory, which stream there one after the other.

    window 4    kernels ─▶ DALI             where rows are a formula: `shuffled_rows`, (slot, row) of each row
    window 5    sequential reads ─▶ copies  `pool_windows`

The order is the row source's, as everywhere; so are the batches.
"""

import os
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from dali_pipes.monitoring.stats import BlockTimes
from dali_pipes.operators import shuffled_rows
from dali_pipes.placement.base import Slot
from dali_pipes.placement.cuda import Gpu
from dali_pipes.placement.gpu import GpuPlacement
from dali_pipes.placement.pool_order import PoolOrder, Span
from dali_pipes.placement.pool_windows import PoolWindows
from dali_pipes.rows.outputs import Outputs
from dali_pipes.rows.source import Source
from dali_pipes.schedule import Schedule, StepRange
from dali_pipes.schedule.plans import Plan

Array = Any


class PoolPlacement(GpuPlacement):
    """Windows of blocks in GPU memory. Rows that are not cut into pieces cost the host one launch a window."""

    _windows: PoolWindows | None = None
    _starts: Array = None

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
        self.plans_rows = outputs.in_pieces or bool({*self._from_plan} - {"row_ids"})
        self._order = PoolOrder(schedule, source)
        if self.plans_rows and not outputs.in_pieces:
            self._starts = gpu.empty((max_rows,), np.int64)
        self._windows = PoolWindows(source, gpu, self._order)

    @property
    def _pool(self) -> PoolWindows:
        assert self._windows is not None, "a placement that is closed"
        return self._windows

    def new_slot(self, max_rows: int) -> Slot:
        self.gpu.adopt_thread()
        arrays: dict[str, Array] = {}
        if not self._outputs.in_pieces and self.plans_rows:
            arrays["starts"] = self.gpu.empty_pinned((max_rows,), np.int64)
        if not self._outputs.in_pieces and self._schedule.pads:
            arrays["padding"] = self.gpu.empty_pinned((self._row_tokens,), self._source.dtype)
        return self._slot_of(arrays, max_rows)

    def prepare(self, slot: Slot, times: BlockTimes) -> None:
        """Wait for the block's windows, which are loaded by other threads; called in a reader thread."""
        steps, plan = slot.steps, slot.plan
        assert steps is not None
        self.gpu.adopt_thread()
        begin = time.perf_counter()
        spans = slot.arrays["spans"] = self._order.spans(steps)
        self._pool.wait([span.window for span in spans])
        self.gpu.wait(slot.arrays["copied"])
        is_padded = (spans[-1].end if spans else 0) < self._schedule.row_count(steps)
        if is_padded and not self._outputs.in_pieces:
            row = self._schedule.interleave.plan(steps.epoch, np.zeros(1, np.int64))
            self._source.read_span(int(row.starts[0]), slot.arrays["padding"])
        times.read_s = time.perf_counter() - begin
        if plan is None:
            return
        moved = self._order.moved(plan, spans)
        if plan.pieces is None:
            starts = slot.arrays["starts"][: len(plan.starts)]
            np.add(plan.starts, moved, out=starts)
            if is_padded:  # with one such row, the last one
                starts[-1] = self._order.padding_start
        else:
            moved = moved.repeat(np.diff(plan.pieces.row_offsets))
            starts, ends = plan.pieces.starts + moved, plan.pieces.document_ends + moved
            self._stage_tables(slot, plan.pieces._replace(starts=starts, document_ends=ends))
        self._stage_from_plan(slot)

    def restart(self) -> None:
        super().restart()
        if self._windows is not None:
            self._windows.restart()

    def end(self) -> None:
        """Give up the windows on their way."""
        if self._windows is not None:
            self._windows.stop()

    def close(self) -> None:
        if self._windows is not None and os.getpid() == self._process:  # in a fork, its threads do not exist
            self._windows.close()
        super().close()

    def _forget_memory(self) -> None:
        super()._forget_memory()
        self._starts = None
        if self._windows is not None:
            self._windows.forget_memory()

    def _fill(self, slot: Slot, steps: StepRange, arrays: dict[str, Array]) -> None:
        spans: list[Span] = slot.arrays["spans"]
        windows = [span.window for span in spans]
        self._pool.enter(windows)
        if self._outputs.in_pieces:
            self._send_from_plan(slot, arrays)
            self._fill_from_pieces(slot, self._pool.tokens, self._pool.loss_mask, arrays)
        else:
            if (spans[-1].end if spans else 0) < self._schedule.row_count(steps):
                self.gpu.copy(self._padding, slot.arrays["padding"])
            if slot.plan is None:
                self._fill_by_formula(steps, spans, arrays)
            else:
                self._fill_by_starts(slot, slot.plan, arrays)
            self.gpu.record(slot.arrays["copied"])
        if windows:
            self._pool.leave(windows)

    @property
    def _padding(self) -> Array:
        begin = self._order.padding_start
        return self._pool.tokens[begin : begin + self._row_tokens]

    def _fill_by_starts(self, slot: Slot, plan: Plan, arrays: dict[str, Array]) -> None:
        """With what the plan says: where each row is, and what objectives do to it."""
        self._send_from_plan(slot, arrays)
        starts = self._starts[: len(plan.starts)]
        self.gpu.copy(starts, slot.arrays["starts"][: len(plan.starts)])
        self._fill_from_runs(plan, self._pool.tokens, starts, arrays)

    def _fill_by_formula(self, steps: StepRange, spans: Sequence[Span], arrays: dict[str, Array]) -> None:
        stride, schedule = self._order.formula(steps.epoch).stride, self._schedule
        first = schedule.first_row(steps)
        inputs, labels = arrays["input_ids"], arrays["labels"]
        row_ids = arrays.get("row_ids")
        common: dict[str, Any] = {"seq_len": self._seq_len, "label_shift": self._outputs.label_shift}
        common |= {"vocab_size": self._vocab_size, "bad": self._bad}
        end = 0
        for window, rows, begin, end in spans:
            shuffled_rows(
                self._pool.tokens,
                first + begin * schedule.world_size,
                end - begin,
                row_step=schedule.world_size,
                begin=rows.first_place,
                num_rows=rows.num_rows,
                key=rows.key,
                origin=self._order.half(window) * self._order.half_tokens,
                stride=stride,
                slots=self._order.slots(rows),
                out=(inputs[begin:end], labels[begin:end]),
                row_ids=None if row_ids is None else row_ids[begin:end],
                **common,
            )
        if end < len(inputs):  # a rank gets at most one such row, at the end of an epoch
            shuffled_rows(
                self._padding,
                1,
                1,
                row_step=1,
                num_rows=1,
                key=None,
                origin=0,
                stride=1,
                out=(inputs[end:], labels[end:]),
                row_ids=None if row_ids is None else row_ids[end:],
                **common,
            )

    def _refuse(self, plan: Plan, found: int) -> None:
        """Each launch counts its positions from 0."""
        self._refuse_read(plan)
