"""The placement on a CPU: reader threads read a block's tokens and assemble the fields of its batches.

    reader threads    positioned reads ─▶ check of the ids ─▶ widen, shift, label ─▶ arrays that are the trainer's

So the thread that takes a block finds it complete.
"""

import time
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.config.outputs import OUTPUTS, ROW_TABLE, SPAN_TABLE, Axes, arrays_of
from dali_pipes.documents import Pieces, some_rows, staged
from dali_pipes.monitoring.stats import BlockTimes, MemoryHeld
from dali_pipes.operators.rows import widen_rows
from dali_pipes.operators.shuffled_rows import IGNORE_INDEX
from dali_pipes.placement.base import Slot, fields_of, refuse_bad_id
from dali_pipes.placement.buffers import Buffers, Layout, layout_of
from dali_pipes.placement.scratch import Scratch
from dali_pipes.rows.outputs import Outputs
from dali_pipes.rows.source import Source
from dali_pipes.schedule import PADDING, Schedule, StepRange
from dali_pipes.schedule.plans import Plan

Array = npt.NDArray[Any]

_PART_TOKENS = 1 << 18
"""Tokens assembled at a time: their ids, and what is made of them, stay in the core's own cache. Each part costs about
0.1 ms where rows are made from pieces: with half as many it took 15% longer."""


class CpuPlacement:
    """The fields of the batches in host memory.

    narrow: leave `input_ids` and `labels` in the file's own width where rows are runs of tokens, for DALI to widen: it
            copies what an external source hands it, and copying two bytes a token costs an eighth of copying two int64.
            Padding rows need a label of -100, so where the schedule has them these are int32 or int64.
    """

    plans_rows = True

    def __init__(
        self, source: Source, schedule: Schedule, outputs: Outputs, *, vocab_size: int | None, narrow: bool
    ) -> None:
        self._source, self._schedule, self._outputs, self._vocab_size = source, schedule, outputs, vocab_size
        self._is_plain = not outputs.in_pieces and outputs.transforms is None and not source.has_loss_mask
        self._dtypes = {name: outputs.dtype(name) for name in (*outputs.from_tokens, *outputs.from_plan)}
        if narrow and not outputs.in_pieces and outputs.transforms is None:
            signed = np.dtype(np.int32 if np.can_cast(source.dtype, np.int32) else np.int64)
            self._dtypes |= dict.fromkeys(outputs.from_tokens, signed if schedule.pads else source.dtype)
        self._buffers = Buffers()
        self._tokens, self._loss_masks = Scratch(source.dtype), Scratch(np.dtype(np.uint8))
        self._from_plan = outputs.from_plan
        self._layout = lru_cache(16)(partial(_layout, outputs, self._dtypes))

    def new_slot(self, max_rows: int) -> Slot:
        return Slot()

    def prepare(self, slot: Slot, times: BlockTimes) -> None:
        """Read the rows of the slot's plan, check the range of their ids, and assemble the fields."""
        assert slot.plan is not None
        plan, begin = slot.plan, time.perf_counter()
        is_plain = self._is_plain and plan.widths is None
        gathered = self._source.gathered(plan.rows) if is_plain else None
        if gathered is not None:
            refuse_bad_id(self._source, self._schedule, plan, gathered.reshape(-1), self._vocab_size)
            read = time.perf_counter()
            slot.fields = self._widened(plan, gathered)
        else:
            slot.fields, read = self._read(plan, is_plain)
        times.read_s, times.kernels_s = read - begin, time.perf_counter() - read

    def _read(self, plan: Plan, is_plain: bool) -> tuple[dict[str, Array], float]:
        """The fields of a block, and when its tokens had been read into memory that this thread has for a while."""
        row_begins = plan.row_begins(self._source.rows)
        size = int(row_begins[-1])
        memory = self._tokens.borrow(size)
        mask_memory = self._loss_masks.borrow(size) if self._source.has_loss_mask else None
        tokens, loss_mask = memory[:size], None if mask_memory is None else mask_memory[:size]
        try:
            self._source.read(plan.rows, row_begins, tokens, loss_mask)
            refuse_bad_id(self._source, self._schedule, plan, tokens, self._vocab_size)
            read = time.perf_counter()
            if is_plain:
                return self._widened(plan, tokens.reshape(len(plan.row_ids), -1)), read
            return self._assembled(plan, row_begins, tokens, loss_mask), read
        finally:
            self._tokens.give_back(memory)
            if mask_memory is not None:
                self._loss_masks.give_back(mask_memory)

    def deliver(self, slot: Slot, steps: StepRange, iteration: int) -> dict[str, Array]:
        return {name: slot.fields[name][None] for name in arrays_of(self._outputs.names)}

    def check(self, iteration: int | None = None) -> None:
        pass  # ids were checked when they were read

    def restart(self) -> None:
        pass

    def memory(self) -> MemoryHeld:
        return MemoryHeld()

    def end(self) -> None:
        pass

    def close(self) -> None:
        pass

    def _widened(self, plan: Plan, rows: Array) -> dict[str, Array]:
        """All fields of a block of rows (R, row_tokens), each a run of tokens: what `_assembled` makes, in fewer steps.

        Copying a block leaves little of the interpreter in the caches, so that each step costs microseconds.
        """
        lines = self._buffers.take(self._layout(((len(rows), self._outputs.seq_len),), False))
        inputs, labels = lines["input_ids"], lines["labels"]
        at_once = max(1, _PART_TOKENS // self._outputs.seq_len)
        for first in range(0, len(rows), at_once):
            part = slice(first, first + at_once)
            widen_rows(rows[part], inputs[part], labels[part], self._outputs.label_shift)
        if plan.row_ids[-1] == PADDING:
            labels[plan.row_ids == PADDING] = IGNORE_INDEX
        for name in self._from_plan:
            lines[name][:] = plan.field(name)
        return lines

    def _assembled(
        self, plan: Plan, row_begins: npt.NDArray[np.int64], tokens: Array, loss_mask: Array | None
    ) -> dict[str, Array]:
        """All fields of a block. Those of positions are in one line where batches have different widths."""
        outputs, runs = self._outputs, plan.runs(self._outputs.seq_len)
        lines = self._buffers.take(self._layout(tuple(runs), plan.widths is not None))
        if plan.widths is None:
            parts = {name: [lines[name]] for name in outputs.from_tokens}
        else:
            parts = {name: outputs.unfolded(name, lines[name], runs) for name in outputs.from_tokens}
        pieces = None if plan.pieces is None else staged(plan.pieces, row_begins)
        loss_mask = outputs.learned(tokens, pieces, loss_mask)
        row = 0
        for name, values in fields_of(plan, outputs).items():
            lines[name][:] = values
        for number, (count, width) in enumerate(runs):
            rows = count if outputs.batch_size is None else outputs.batch_size
            at_once = rows * max(1, _PART_TOKENS // (rows * width))
            for first in range(0, count, at_once):
                end = min(first + at_once, count)
                out = {name: part[number][_lines(name, first, end, outputs)] for name, part in parts.items()}
                own = slice(row + first, row + end)
                tables = {name: lines[name][own] for name in (ROW_TABLE, SPAN_TABLE) if name in lines}
                self._fill(plan, own.start, own.stop, row_begins, tokens, pieces, out, width, loss_mask, tables)
            row += count
        return lines

    def _fill(
        self,
        plan: Plan,
        first: int,
        end: int,
        row_begins: npt.NDArray[np.int64],
        tokens: Array,
        pieces: Pieces | None,
        out: dict[str, Array],
        width: int,
        loss_mask: Array | None,
        tables: Mapping[str, Array],
    ) -> None:
        how: dict[str, Any] = {"width": width, **tables}
        if pieces is not None:
            self._outputs.fill(tokens, some_rows(pieces, first, end), out, loss_mask=loss_mask, **how)
            return
        self._outputs.fill(tokens[row_begins[first] : row_begins[end]], None, out, **how)
        row_ids = plan.row_ids[first:end]
        if row_ids[-1] == PADDING:  # pieces leave such a row empty
            out["labels"][row_ids == PADDING] = IGNORE_INDEX


def _layout(
    outputs: Outputs, dtypes: Mapping[str, np.dtype[Any]], runs: tuple[tuple[int, int], ...], is_flat: bool
) -> Layout:
    """The fields of a block of rows: how many of which width follow one another. is_flat: in one line each."""
    if is_flat:
        rows = sum(count for count, _ in runs)
        flat: dict[str, tuple[int, ...]] = {name: (outputs.size(name, runs),) for name in dtypes}
        flat |= {name: outputs.shape(name, rows) for name in outputs.from_plan}
        return layout_of({name: (flat[name], dtype) for name, dtype in dtypes.items()})
    ((count, width),) = runs
    return layout_of({name: (outputs.shape(name, count, width), dtype) for name, dtype in dtypes.items()})


def _lines(name: str, first: int, end: int, outputs: Outputs) -> slice:
    """Where rows first ... end - 1, which are whole batches but for the last, are in the first axis of a field."""
    if OUTPUTS[name].axes is Axes.SEGMENT_BOUNDS:
        if outputs.batch_size is None:
            return slice(None)
        return slice(first // outputs.batch_size, -(-end // outputs.batch_size))
    return slice(first, end)
