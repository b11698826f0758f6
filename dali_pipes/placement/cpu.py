"""The placement on a CPU: reader threads read a block's tokens, and fields are made where that costs least.

other rows    reader threads    reads ─▶ check of the ids ─▶ fields of whole blocks
plain rows    reader threads    reads ─▶ check of the ids ─▶ rows in the type of the files
              any thread            widen, shift, label ─▶ fields of a few batches
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

_GROUP_TOKENS = 1 << 18
"""Tokens of the batches that are made together from stored rows, if they are more than one. With half as many,
batches of 64K tokens came up to 15% slower, with a quarter 15% to 25%: the steps in Python cost as much as the work."""

_GROUP_BATCHES = 32
"""The most batches that are made together: each takes microseconds, and one call of `next()` waits for all of them."""


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
        self.is_lazy = not narrow and is_plain(source, outputs)
        """Whether a block's rows are kept as they were read, and its fields made by `group`."""
        self._batch_rows = outputs.batch_size or 1
        batches = min(_GROUP_TOKENS // (self._batch_rows * outputs.seq_len), _GROUP_BATCHES)
        self._group_rows = self._batch_rows * max(1, batches)
        self._dtypes = {name: outputs.dtype(name) for name in (*outputs.from_tokens, *outputs.from_plan)}
        if narrow and not outputs.in_pieces and outputs.transforms is None:
            signed = np.dtype(np.int32 if np.can_cast(source.dtype, np.int32) else np.int64)
            self._dtypes |= dict.fromkeys(outputs.from_tokens, signed if schedule.pads else source.dtype)
        self._buffers, self._rows = Buffers(), Buffers()
        self._tokens, self._loss_masks = Scratch(source.dtype), Scratch(np.dtype(np.uint8))
        self._from_plan = outputs.from_plan
        self._layout = lru_cache(16)(partial(_layout, outputs, self._dtypes))

    def new_slot(self, max_rows: int) -> Slot:
        return Slot()

    def prepare(self, slot: Slot, times: BlockTimes) -> None:
        """Read the rows of the slot's plan, check their ids, and assemble the fields unless `group` does."""
        assert slot.plan is not None
        plan, begin = slot.plan, time.perf_counter()
        if self.is_lazy and plan.widths is None:
            slot.stored = self._stored_rows(plan)
            times.read_s = time.perf_counter() - begin
            return
        row_begins = plan.row_begins(self._source.rows)
        size = int(row_begins[-1])
        memory = self._tokens.borrow(size)
        mask_memory = self._loss_masks.borrow(size) if self._source.has_loss_mask else None
        tokens, loss_mask = memory[:size], None if mask_memory is None else mask_memory[:size]
        try:
            self._source.read(plan.rows, row_begins, tokens, loss_mask)
            refuse_bad_id(self._source, self._schedule, plan, tokens, self._vocab_size)
            read = time.perf_counter()
            slot.fields = self._assembled(plan, row_begins, tokens, loss_mask)
        finally:
            self._tokens.give_back(memory)
            if mask_memory is not None:
                self._loss_masks.give_back(mask_memory)
        times.read_s, times.kernels_s = read - begin, time.perf_counter() - read

    def num_groups(self, rows: Array) -> int:
        """How many parts a block of stored rows is made in, each of whole batches."""
        return -(-len(rows) // self._group_rows)

    def group(self, plan: Plan, rows: Array, number: int) -> tuple[slice, dict[str, Array]]:
        """Some batches of a block of stored rows: which ones, and their fields. Safe for several threads.

        A thread that asks for more has usually released the last ones, so their memory is reused while it is still in
        the cache: filling it costs 0.4 ns a token, compared with 0.7 for blocks that are filled ahead in turn.
        """
        outputs, size = self._outputs, self._batch_rows
        first = number * self._group_rows
        own = slice(first, min(first + self._group_rows, len(rows)))
        fields = self._buffers.take(self._layout(((own.stop - first, outputs.seq_len),), False))
        widen_rows(rows[own], fields["input_ids"], fields["labels"], outputs.label_shift)
        if plan.row_ids[-1] == PADDING:
            fields["labels"][plan.row_ids[own] == PADDING] = IGNORE_INDEX
        for name in self._from_plan:
            fields[name][:] = plan.field(name)[own]
        return slice(first // size, -(-own.stop // size)), fields

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

    def _stored_rows(self, plan: Plan) -> Array:
        """The rows of a plan (R, row_tokens) as the files have them, in memory that is free once nobody holds them."""
        length = self._source.rows.row_tokens
        rows = self._source.gathered(plan.starts)
        if rows is None:
            rows = self._rows.take(layout_of({"rows": ((len(plan.row_ids), length), self._source.dtype)}))["rows"]
            self._source.read_rows(plan.starts, rows)
        refuse_bad_id(self._source, self._schedule, plan, rows.reshape(-1), self._vocab_size)
        return rows

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
                out = {name: part[number] for name, part in parts.items()}
                if end - first < count:
                    out = {name: array[_lines(name, first, end, outputs)] for name, array in out.items()}
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
            own = pieces if end - first == len(pieces.row_offsets) - 1 else some_rows(pieces, first, end)
            if own.places is not None:
                begin, following = row_begins[first : first + 2].tolist()
                how["even_rows"] = begin, following - begin
            self._outputs.fill(tokens, own, out, loss_mask=loss_mask, **how)
            return
        self._outputs.fill(tokens[row_begins[first] : row_begins[end]], None, out, **how)
        row_ids = plan.row_ids[first:end]
        if row_ids[-1] == PADDING:  # pieces leave such a row empty
            out["labels"][row_ids == PADDING] = IGNORE_INDEX


def is_plain(source: Source, outputs: Outputs) -> bool:
    """Whether rows are runs of tokens, and inputs and labels are those tokens."""
    in_rows = not outputs.in_pieces and outputs.transforms is None and outputs.batch_size is not None
    return in_rows and not source.has_loss_mask


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
