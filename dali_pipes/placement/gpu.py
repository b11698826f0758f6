"""What the placements on a GPU share: the arrays of a block, how they are filled, and the check of the ids.

    host      reader threads ─▶ pinned staging ─▶ copy in the file's width ─▶ kernels ─▶ DALI
    device    corpus in GPU memory ─▶ kernels ─▶ DALI
    pinned    corpus in page-locked host memory ─▶ kernels ─▶ DALI
    pool      reader threads ─▶ pinned buffers ─▶ copies of whole blocks, two windows of them ─▶ kernels ─▶ DALI

`cuda` says who owns which buffer and what frees it. Kernels check the ids while they read them; what they found is
copied back after them and looked at one block later, so nothing waits for it.
"""

import contextlib
import os
import sys
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.config.outputs import ROW_TABLE, SPAN_TABLE, arrays_of
from dali_pipes.documents import Pieces
from dali_pipes.monitoring.stats import BlockTimes, MemoryHeld
from dali_pipes.operators.shuffled_rows import IGNORE_INDEX
from dali_pipes.placement.base import Slot, fields_of, range_error, refuse_bad_id
from dali_pipes.placement.cuda import Gpu
from dali_pipes.rows.outputs import Outputs
from dali_pipes.rows.source import Source
from dali_pipes.schedule import PADDING, Schedule, StepRange
from dali_pipes.schedule.plans import Plan, plan_steps

Array = Any

_NO_BAD_ID = (0, 2**63 - 1)  # number of bad ids, position of the first
_READBACKS = 8  # blocks delivered and not looked at; a deep queue makes more


class _Readback:
    """What a block's kernel found, on its way to the host."""

    def __init__(self, gpu: Gpu) -> None:
        self.found = gpu.empty_pinned((2,), np.int64)
        self.arrived = gpu.event()
        self.iteration = 0
        self.steps = StepRange(0, 0, 0, 0)
        self.plan: Plan | None = None


class GpuPlacement:
    """The arrays of one block, and the check of the ids in it."""

    plans_rows = True
    keeps_corpus = False
    """Whether what rows read of the corpus has to fit in the GPU's memory."""

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
        self._closed, self._process = False, os.getpid()
        self._arrays: dict[str, Array] = {}
        self._unused: list[_Readback] = []
        self._unread: deque[_Readback] = deque()
        self._slots: list[Slot] = []
        self._table: Array = None
        self._work: Array = None
        self.gpu, self._source, self._schedule = gpu, source, schedule
        self._vocab_size, self._outputs = vocab_size, outputs
        self._seq_len, self._row_tokens = outputs.seq_len, source.rows.row_tokens + source.rows.lookback
        self._from_plan = outputs.from_plan
        self._scratch: dict[str, Array] = {}
        self._tables: list[Array] | None = None
        for name in (*outputs.from_tokens, *self._from_plan):
            rows = outputs.most_rows(max_rows) if name in self._from_plan else max_rows
            self._arrays[name] = gpu.empty(outputs.shape(name, rows), outputs.dtype(name))
        if outputs.in_pieces:  # for a piece at every position, so that a card that is full later on ends no run
            columns = 3 if outputs.goldfish is None else 6
            size = outputs.most_rows(max_rows) + 1 + columns * max_rows * self._seq_len
            self._table = gpu.empty((size,), np.int64)
            self._work = gpu.empty((outputs.work_size(max_rows),), np.int64)
        else:
            self._ignored = gpu.empty_pinned((self._seq_len,), outputs.dtype("labels"))
            self._ignored[:] = IGNORE_INDEX
        for name in outputs.scratch:
            self._scratch[name] = gpu.empty((max_rows, self._seq_len), outputs.index_dtype)
        if outputs.transforms is not None:
            self._tables = [None if table is None else self._on_device(table) for table in outputs.transforms.tables]
        self._bad = gpu.empty((2,), np.int64)
        self._tokens: Array = None
        self._loss_mask: Array = None
        self._learned: Array = None  # for objectives, which labels are learned, at the places of their tokens
        self._no_bad_id = gpu.empty_pinned((2,), np.int64)
        self._no_bad_id[:] = _NO_BAD_ID
        self._unused += [_Readback(gpu) for _ in range(_READBACKS)]
        self.restart()

    def deliver(self, slot: Slot, steps: StepRange, iteration: int) -> dict[str, Any]:
        """Queue a block's work; its arrays, (1, R, T) each, in the order of the stream. Does not block."""
        count = self._schedule.row_count(steps) if slot.plan is None else len(slot.plan.row_ids)
        arrays = {name: array[: self._outputs.shape(name, count)[0]] for name, array in self._arrays.items()}
        if slot.plan is not None and slot.plan.widths is not None:
            runs = slot.plan.runs(self._seq_len)
            for name in self._outputs.from_tokens:  # in one line, since batches have different widths
                arrays[name] = self._arrays[name].reshape(-1)[: self._outputs.size(name, runs)]
        with self.gpu.current():
            self._fill(slot, steps, arrays)
            reading = self._unused.pop() if self._unused else _Readback(self.gpu)
            reading.iteration, reading.steps, reading.plan = iteration, steps, slot.plan
            self.gpu.copy(reading.found, self._bad)
            self.gpu.record(reading.arrived)
            self._unread.append(reading)
            return {name: self.gpu.export(arrays[name][None]) for name in arrays_of(self._outputs.names)}

    def new_slot(self, max_rows: int) -> Slot:
        """Memory for blocks of up to `max_rows` rows."""
        raise NotImplementedError

    def prepare(self, slot: Slot, times: BlockTimes) -> None:
        """Read a block; called in a reader thread."""
        raise NotImplementedError

    def _fill(self, slot: Slot, steps: StepRange, arrays: dict[str, Array]) -> None:
        raise NotImplementedError

    def _slot_of(self, arrays: dict[str, Array], max_rows: int) -> Slot:
        """A slot with these arrays, and pinned memory for the fields of a block that its plan says.

        It is held here until `close`: copies from it may be queued when the block source drops it.
        """
        if self.plans_rows:
            for name in self._from_plan:
                shape = self._outputs.shape(name, self._outputs.most_rows(max_rows))
                arrays[name] = self.gpu.empty_pinned(shape, self._outputs.dtype(name))
        slot = Slot({**arrays, "copied": self.gpu.event()})
        self._slots.append(slot)
        return slot

    def _on_device(self, table: npt.NDArray[np.uint8]) -> Array:
        """A copy of a small table, for good. Blocks."""
        pinned, array = self.gpu.empty_pinned(table.shape, table.dtype), self.gpu.empty(table.shape, table.dtype)
        pinned[:] = table
        with self.gpu.current():
            self.gpu.copy(array, pinned)
        self.gpu.wait_for_all()
        return array

    def _objective(self, arrays: dict[str, Array], first: int, end: int, width: int) -> dict[str, Any]:
        """What `Outputs.fill` needs for the objectives of rows first ... end - 1 of a block."""
        if self._tables is None:
            return {}
        size, shape = (end - first) * width, (end - first, width)
        scratch = {name: array.reshape(-1)[:size].reshape(*shape) for name, array in self._scratch.items()}
        own = {name: arrays[name][first:end] for name in (ROW_TABLE, SPAN_TABLE) if name in arrays}
        return {**own, "scratch": scratch, "tables": self._tables}

    def _stage_from_plan(self, slot: Slot) -> None:
        assert slot.plan is not None
        for name, values in fields_of(slot.plan, self._outputs).items():
            slot.arrays[name][: len(values)] = values

    def _send_from_plan(self, slot: Slot, arrays: dict[str, Array]) -> None:
        for name in self._from_plan:
            self.gpu.copy(arrays[name], slot.arrays[name][: len(arrays[name])])

    def _stage_tables(self, slot: Slot, pieces: Pieces) -> None:
        """Keep the places of a block's pieces for their copy, one column after another: in pinned memory if they fit.

        The pinned memory has room for twice the pieces of the slot's first block. Blocks of more are copied from
        pageable memory, which costs the trainer's thread a copy; more pinned memory would cost everybody.
        """
        slot.num_pieces = len(pieces.starts)
        columns = *pieces[:4], pieces.lookback
        self._stage(slot, "table", np.concatenate([column.reshape(-1) for column in columns if column is not None]))

    def _stage(self, slot: Slot, name: str, table: Array) -> None:
        if f"pinned {name}" not in slot.arrays:
            slot.arrays[f"pinned {name}"] = self.gpu.empty_pinned((2 * len(table) + 1024,), np.int64)
        pinned = slot.arrays[f"pinned {name}"][: len(table)]
        if len(pinned) == len(table):
            pinned[:] = table
            table = pinned
        slot.arrays[name] = table

    def _fill_from_pieces(self, slot: Slot, tokens: Array, loss_mask: Array, arrays: dict[str, Array]) -> None:
        """Send the tables of a block, whose tokens are on the device, and queue its kernels, for each width of rows."""
        assert slot.plan is not None
        sizes = [len(slot.plan.row_ids) + 1, *[slot.num_pieces] * 3]
        if self._outputs.goldfish is not None:
            sizes.append(3 * slot.num_pieces)
        size = sum(sizes)
        self.gpu.copy(self._table[:size], slot.arrays["table"])
        self.gpu.record(slot.arrays["copied"])
        columns, end = [], 0
        for column in sizes:
            columns.append(self._table[end : end + column])
            end += column
        offsets, *tables = columns
        if self._outputs.goldfish is not None:
            whole = Pieces(offsets, *tables[:3])._replace(lookback=tables[3].reshape(slot.num_pieces, 3))
            loss_mask = self._outputs.learned(tokens, whole, loss_mask, self._learned[: len(tokens)])
        runs, row = slot.plan.runs(self._seq_len), 0
        names = self._outputs.from_tokens
        parts = {name: self._outputs.unfolded(name, arrays[name].reshape(-1), runs) for name in names}
        check = {"vocab_size": self._vocab_size, "bad": self._bad, "work": self._work}
        for number, (count, width) in enumerate(runs):
            pieces = Pieces(offsets[row : row + count + 1], *tables[:3])
            out = {name: part[number] for name, part in parts.items()}
            own = self._objective(arrays, row, row + count, width)
            self._outputs.fill(tokens, pieces, out, width=width, loss_mask=loss_mask, **check, **own)
            row += count

    def _fill_from_runs(self, plan: Plan, tokens: Array, starts: Array, arrays: dict[str, Array]) -> None:
        """Queue the kernel of rows that are runs of tokens, at `starts` in `tokens`; None: one after another."""
        ((count, width),) = runs = plan.runs(self._seq_len)
        names = self._outputs.from_tokens
        out = {name: self._outputs.unfolded(name, arrays[name].reshape(-1), runs)[0] for name in names}
        check = {"vocab_size": self._vocab_size, "bad": self._bad}
        own = self._objective(arrays, 0, count, width)
        self._outputs.fill(tokens, None, out, starts=starts, width=width, **check, **own)
        if plan.row_ids[-1] == PADDING:  # a rank gets at most one such row, at the end of an epoch
            self.gpu.copy(arrays["labels"][len(plan.row_ids) - 1], self._ignored)

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
                plan = plan_steps(self._schedule, reading.steps) if reading.plan is None else reading.plan
                self._refuse(plan, int(reading.found[1]))
            reading.plan = None
            self._unused.append(self._unread.popleft())

    def _refuse(self, plan: Plan, found: int) -> None:
        """Raise the error for a block's first bad id, which its kernel found at position `found`."""
        if not self._outputs.in_pieces:
            (_, width), rows = plan.runs(self._seq_len)[0], self._source.rows
            row, column = divmod(found, width + rows.row_tokens - rows.seq_len)
            raise range_error(self._source, self._schedule, plan, row, column, self._vocab_size)
        self._refuse_read(plan)

    def _refuse_read(self, plan: Plan) -> None:
        """The same where that position is not known. What is read once more says which id it was.

        Labels after a piece do not have a position, and rows of each width were counted separately.
        """
        row_begins = plan.row_begins(self._source.rows)
        tokens = np.empty(int(row_begins[-1]), self._source.dtype)
        self._source.read(plan.rows, row_begins, tokens)
        refuse_bad_id(self._source, self._schedule, plan, tokens, self._vocab_size)
        raise AssertionError("a bad id that only the GPU saw")

    def restart(self) -> None:
        """Forget what was found in blocks that will not be taken."""
        # Copies into these pairs may still be queued; only copies after them on the same stream write there again.
        self._unused += self._unread
        self._unread.clear()
        with self.gpu.current():
            self.gpu.copy(self._bad, self._no_bad_id)

    def memory(self) -> MemoryHeld:
        """Bytes held here; DALI's are not in it."""
        return MemoryHeld(self.gpu.pinned_bytes, self.gpu.device_bytes)

    def __del__(self) -> None:
        # CuPy keeps the memory of a stream for that stream, so memory of a loader that was not closed, such as the
        # corpus, would stay unusable. Not in a forked process, where CUDA does not work.
        if os.getpid() == self._process and not sys.is_finalizing():
            self.close()

    def end(self) -> None:
        """Nothing: what `prepare` waits for is a read of one block."""

    def close(self) -> None:
        """Let go of the memory. Waits for the stream, since copies from pinned memory may be queued. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(RuntimeError):  # the context is broken, and nothing is being copied any more
            self.gpu.wait_for_all()
        self._forget_memory()
        with contextlib.suppress(RuntimeError):
            self.gpu.free_unused()
        self._unused.clear()
        self._unread.clear()
        self.gpu.device_bytes = self.gpu.pinned_bytes = 0

    def _forget_memory(self) -> None:
        """Drop what copies and kernels used, after the last of them."""
        self._bad = self._tokens = self._loss_mask = self._learned = self._table = self._work = None
        self._tables = None
        self._scratch.clear()
        self._arrays.clear()
        self._slots.clear()
