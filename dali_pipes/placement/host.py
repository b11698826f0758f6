"""The placement "host" on a GPU: tokens cross the bus block by block."""

import time
from collections import deque
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

_BUFFERS = 2
"""One is copied to while kernels read the other."""


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
        self._buffers: deque[_TokenBuffer] = deque()
        super().__init__(source, schedule, outputs, gpu, max_rows=max_rows, vocab_size=vocab_size)
        size = (max_rows * self._row_tokens,)
        self._buffers.extend(_TokenBuffer(gpu, size, source) for _ in range(_BUFFERS))
        if outputs.goldfish is not None:
            self._learned = gpu.empty(size, np.uint8)

    def new_slot(self, max_rows: int) -> Slot:
        self.gpu.adopt_thread()
        arrays = {"staging": self.gpu.empty_pinned((max_rows * self._row_tokens,), self._source.dtype)}
        if self._source.has_loss_mask:
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
        loss_mask = slot.arrays["staged mask"][:size] if self._source.has_loss_mask else None
        self._source.read(slot.plan.rows, row_begins, slot.arrays["staging"][:size], loss_mask)
        if slot.plan.pieces is not None:
            self._stage_tables(slot, staged(slot.plan.pieces, row_begins))
        times.read_s = time.perf_counter() - begin
        self._stage_from_plan(slot)

    def _fill(self, slot: Slot, steps: StepRange, arrays: dict[str, Array]) -> None:
        assert slot.plan is not None
        gpu, size = self.gpu, int(slot.plan.row_begins(self._source.rows)[-1])
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        tokens = buffer.tokens[:size]
        loss_mask = None if buffer.loss_mask is None else buffer.loss_mask[:size]
        gpu.hold_back(gpu.copies, buffer.used)
        gpu.copy(tokens, slot.arrays["staging"][:size], gpu.copies)
        if loss_mask is not None:
            gpu.copy(loss_mask, slot.arrays["staged mask"][:size], gpu.copies)
        gpu.record(buffer.arrived, gpu.copies)
        gpu.hold_back(gpu.stream, buffer.arrived)
        self._send_from_plan(slot, arrays)
        if slot.plan.pieces is not None:
            self._fill_from_pieces(slot, tokens, loss_mask, arrays)
        else:
            gpu.record(slot.arrays["copied"])  # on `stream`, which waits for the other copies: after all of them
            self._fill_from_runs(slot.plan, tokens, None, arrays)
        gpu.record(buffer.used)

    def _forget_memory(self) -> None:
        super()._forget_memory()
        self._buffers.clear()


class _TokenBuffer:
    """Tokens of one block on the device."""

    def __init__(self, gpu: Gpu, size: tuple[int, ...], source: Source) -> None:
        self.tokens = gpu.empty(size, source.dtype)
        self.loss_mask = gpu.empty(size, np.uint8) if source.has_loss_mask else None
        self.arrived, self.used = gpu.event(), gpu.event()
