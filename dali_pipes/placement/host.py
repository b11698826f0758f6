"""The placement "host" on a GPU: tokens cross the bus block by block."""

import time
from typing import Any

import numpy as np

from dali_pipes.documents import staged
from dali_pipes.monitoring.stats import BlockTimes
from dali_pipes.placement.base import Slot
from dali_pipes.placement.cuda import Gpu
from dali_pipes.placement.gpu import GpuPlacement
from dali_pipes.rows.outputs import Outputs
from dali_pipes.rows.source import Source
from dali_pipes.schedule import Schedule, StepRange

Array = Any


class HostPlacement(GpuPlacement):
    """Tokens cross to the GPU block by block, in the file's own width, and are widened, labeled and checked there."""

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
        self._tokens = gpu.empty((max_rows * self._row_tokens,), source.dtype)
        if source.has_loss_mask:
            self._loss_mask = gpu.empty((max_rows * self._row_tokens,), np.uint8)

    def new_slot(self, max_rows: int) -> Slot:
        self.gpu.adopt_thread()
        arrays = {"staging": self.gpu.empty_pinned((max_rows * self._row_tokens,), self._source.dtype)}
        if self._loss_mask is not None:
            arrays["staged mask"] = self.gpu.empty_pinned((max_rows * self._row_tokens,), np.uint8)
        return self._slot_of(arrays, max_rows)

    def prepare(self, slot: Slot, times: BlockTimes) -> None:
        """Fill the staging buffer; called in a reader thread, which waits for the last copy out of it."""
        assert slot.plan is not None
        self.gpu.adopt_thread()
        self.gpu.wait(slot.arrays["copied"])
        row_begins = slot.plan.row_begins(self._source.rows)
        size = int(row_begins[-1])
        begin = time.perf_counter()
        loss_mask = None if self._loss_mask is None else slot.arrays["staged mask"][:size]
        self._source.read(slot.plan.rows, row_begins, slot.arrays["staging"][:size], loss_mask)
        if slot.plan.pieces is not None:
            self._stage_tables(slot, staged(slot.plan.pieces, row_begins))
        times.read_s = time.perf_counter() - begin
        self._stage_from_plan(slot)

    def _fill(self, slot: Slot, steps: StepRange, arrays: dict[str, Array]) -> None:
        assert slot.plan is not None
        size = int(slot.plan.row_begins(self._source.rows)[-1])
        tokens = self._tokens[:size]
        self.gpu.copy(tokens, slot.arrays["staging"][:size])
        self._send_from_plan(slot, arrays)
        if slot.plan.pieces is not None:
            loss_mask = None if self._loss_mask is None else self._loss_mask[:size]
            if loss_mask is not None:
                self.gpu.copy(loss_mask, slot.arrays["staged mask"][:size])
            self._fill_from_pieces(slot, tokens, loss_mask, arrays)
            return
        self.gpu.record(slot.arrays["copied"])
        self._fill_from_runs(slot.plan, tokens, None, arrays)
