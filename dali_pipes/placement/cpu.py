"""The placements on a CPU: where a block's tokens are read to, and in which form they leave.

StagedPlacement       tokens in the file's own width: what a loader takes, which widens them when it hands them out
AssembledPlacement    the fields of the batches: what a bare pipeline takes, where DALI widens narrow ones
"""

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.config.outputs import made_from_plans
from dali_pipes.documents import Pieces, staged
from dali_pipes.monitoring.stats import BlockTimes, MemoryHeld
from dali_pipes.operators.shuffled_rows import IGNORE_INDEX
from dali_pipes.placement.base import Slot, refuse_bad_id
from dali_pipes.rows.outputs import Outputs
from dali_pipes.rows.source import Source
from dali_pipes.schedule import PADDING, Schedule, StepRange
from dali_pipes.schedule.plans import Plan

Array = Any


class StagedPlacement:
    """Tokens from files to host memory, untouched: `tokens` (N,) in the file's own width, row after row.

    A loader on the CPU takes this and assembles the batches itself. The loss mask, if the corpus has one, is
    `loss_mask`, uint8 (N,).
    """

    plans_rows = True

    def __init__(self, source: Source, schedule: Schedule, *, vocab_size: int | None) -> None:
        self._source, self._schedule, self._vocab_size = source, schedule, vocab_size
        self._row_tokens = source.rows.row_tokens

    def new_slot(self, max_rows: int) -> Slot:
        arrays = {"tokens": np.empty(max_rows * self._row_tokens, self._source.dtype)}
        if self._source.has_loss_mask:
            arrays["loss_mask"] = np.empty(max_rows * self._row_tokens, np.uint8)
        return Slot(arrays)

    def prepare(self, slot: Slot, times: BlockTimes) -> None:
        """Read the rows of the slot's plan and check the range of their ids."""
        assert slot.plan is not None
        row_begins = slot.plan.row_begins(self._source.rows)
        tokens, loss_mask = _read_part(slot, int(row_begins[-1]))
        begin = time.perf_counter()
        self._source.read(slot.plan.rows, row_begins, tokens, loss_mask)
        refuse_bad_id(self._source, self._schedule, slot.plan, tokens, self._vocab_size)
        times.read_s = time.perf_counter() - begin

    def deliver(self, slot: Slot, steps: StepRange, iteration: int) -> dict[str, Array]:
        assert slot.plan is not None
        size = int(slot.plan.row_begins(self._source.rows)[-1])
        return {name: array[None, :size] for name, array in slot.arrays.items()}

    def check(self, iteration: int | None = None) -> None:
        pass  # ids were checked when they were read

    def restart(self) -> None:
        pass

    def memory(self) -> MemoryHeld:
        return MemoryHeld()

    def close(self) -> None:
        pass


class AssembledPlacement(StagedPlacement):
    """The fields of the batches in host memory: what a CPU pipeline without a loader takes.

    Without pieces `input_ids` and `labels` are in the file's own width, and DALI widens them. Padding rows need a label
    of -100, so where the schedule has them these arrays are int32 or int64.
    """

    def __init__(self, source: Source, schedule: Schedule, outputs: Outputs, *, vocab_size: int | None) -> None:
        super().__init__(source, schedule, vocab_size=vocab_size)
        self._outputs = outputs
        signed = np.dtype(np.int32 if np.can_cast(source.dtype, np.int32) else np.int64)
        self._narrow = signed if schedule.pads else source.dtype

    def new_slot(self, max_rows: int) -> Slot:
        slot = super().new_slot(max_rows)
        for name in self._outputs.from_tokens:
            dtype = self._outputs.dtype(name) if self._outputs.in_pieces else self._narrow
            slot.arrays[_OUTPUT + name] = np.empty(self._outputs.shape(name, max_rows), dtype)
        return slot

    def prepare(self, slot: Slot, times: BlockTimes) -> None:
        super().prepare(slot, times)
        assert slot.plan is not None
        begin = time.perf_counter()
        plan, row_begins = slot.plan, slot.plan.row_begins(self._source.rows)
        tokens, loss_mask = _read_part(slot, int(row_begins[-1]))
        pieces = None if plan.pieces is None else staged(plan.pieces, row_begins)
        assemble(self._outputs, plan.row_ids, tokens, pieces, self._arrays(slot, plan), loss_mask=loss_mask)
        times.kernels_s = time.perf_counter() - begin

    def deliver(self, slot: Slot, steps: StepRange, iteration: int) -> dict[str, Array]:
        assert slot.plan is not None
        arrays = {name: array[None] for name, array in self._arrays(slot, slot.plan).items()}
        from_plan = made_from_plans(self._outputs.names)
        return arrays | {name: slot.plan.field(name)[None].copy() for name in from_plan}

    def _arrays(self, slot: Slot, plan: Plan) -> dict[str, Array]:
        count = len(plan.row_ids)
        names = self._outputs.from_tokens
        return {name: slot.arrays[_OUTPUT + name][: self._outputs.shape(name, count)[0]] for name in names}


_OUTPUT = "output "
"""What the names of arrays begin with that hold a field of the batches: one of them is called `loss_mask` too."""


def assemble(
    outputs: Outputs,
    row_ids: npt.NDArray[np.int64],
    tokens: npt.NDArray[Any],
    pieces: Pieces | None,
    out: dict[str, Array],
    *,
    loss_mask: npt.NDArray[np.uint8] | None = None,
    width: int | None = None,
) -> None:
    """Fill the arrays of rows from the tokens that were read for them (N,).

    pieces: by their places in `tokens`; None where rows are runs of tokens, which then follow one another
    width:  positions of a row, where all of these rows have fewer than others
    """
    outputs.fill(tokens, pieces, out, width=width, loss_mask=loss_mask)
    if pieces is None and row_ids[-1] == PADDING:  # pieces leave it empty
        out["labels"][row_ids == PADDING] = IGNORE_INDEX


def _read_part(slot: Slot, size: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8] | None]:
    """The tokens that were read into a slot, and their loss mask."""
    return slot.arrays["tokens"][:size], slot.arrays["loss_mask"][:size] if "loss_mask" in slot.arrays else None
