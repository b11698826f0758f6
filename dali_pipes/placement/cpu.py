"""The placements on a CPU: where a block's tokens are read to, and in which form they leave.

StagedPlacement     tokens in the file's own width: what a loader takes, which widens them itself (`block_queue`)
ShiftedPlacement    inputs and labels in the file's own width: what a bare pipeline takes, where DALI widens them
"""

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus import Corpus
from dali_pipes.monitoring.stats import BlockTimes, MemoryHeld
from dali_pipes.operators import rows
from dali_pipes.operators.shuffled_rows import IGNORE_INDEX
from dali_pipes.placement.base import Slot, range_error
from dali_pipes.rows.outputs import RowOutputs
from dali_pipes.schedule import Schedule, StepRange
from dali_pipes.schedule.plans import Layout, Plan, staged

Array = Any


def find_bad_id(tokens: npt.NDArray[Any], vocab_size: int | None) -> int | None:
    """Place of the first id in `tokens` (N,) that is negative or at or above `vocab_size`."""
    limit = vocab_size if vocab_size is not None else 2**63
    info = np.iinfo(tokens.dtype)
    too_large = limit <= info.max and int(tokens.max()) >= limit
    negative = info.min < 0 and int(tokens.min()) < 0
    if not (too_large or negative):
        return None
    bad = np.zeros(tokens.shape, dtype=bool)
    if limit <= info.max:
        bad |= tokens >= limit
    if info.min < 0:
        bad |= tokens < 0
    return int(np.argmax(bad))


class StagedPlacement:
    """Tokens from files to host memory, untouched: `tokens` (R, T + 1) in the file's own width ((R, T) unshifted).

    What a loader on the CPU takes: it widens, shifts and labels a block when it hands it out (`block_queue`). Rows made
    of pieces take as many tokens as their layout says, in one line (N,); their loss mask, if there
    is one, is `learn`, uint8 (N,).
    """

    plans_rows = True

    def __init__(
        self,
        corpus: Corpus,
        schedule: Schedule,
        *,
        label_shift: bool,
        vocab_size: int | None,
        layout: Layout = None,
    ) -> None:
        self._corpus, self._schedule, self._vocab_size = corpus, schedule, vocab_size
        self._layout = layout
        self._width = schedule.windows.seq_len + label_shift if layout is None else layout.width

    def new_slot(self, max_rows: int) -> Slot:
        arrays = {"tokens": np.empty(max_rows * self._width, self._corpus.dtype)}
        if self._corpus.loss_mask is not None:
            arrays["learn"] = np.empty(max_rows * self._width, np.uint8)
        return Slot(arrays)

    def prepare(self, slot: Slot, times: BlockTimes) -> None:
        """Read the rows of the slot's plan and check the range of their ids."""
        assert slot.plan is not None
        places = slot.plan.places(self._width)
        tokens, learn = _staged(slot, int(places[-1]))
        begin = time.perf_counter()
        read_rows(self._corpus, slot.plan, self._layout, tokens, learn)
        bad = find_bad_id(tokens, self._vocab_size)
        times.read_s = time.perf_counter() - begin
        if bad is not None:
            row = int(np.searchsorted(places, bad, side="right")) - 1
            where = row, bad - int(places[row])
            raise range_error(self._corpus, self._schedule, slot.plan, *where, self._vocab_size, width=self._width)

    def deliver(self, slot: Slot, steps: StepRange, iteration: int) -> dict[str, Array]:
        assert slot.plan is not None
        size = int(slot.plan.places(self._width)[-1])
        shape = (1, -1, self._width) if self._layout is None else (1, -1)
        return {name: array[:size].reshape(shape) for name, array in slot.arrays.items()}

    def check(self, iteration: int | None = None) -> None:
        pass  # ids were checked when they were read

    def restart(self) -> None:
        pass

    def memory(self) -> MemoryHeld:
        return MemoryHeld()

    def close(self) -> None:
        pass


class ShiftedPlacement(StagedPlacement):
    """`input_ids` and `labels` (R, T) in host memory, in the file's own width; DALI widens them.

    What a pipeline on the CPU takes that has no loader behind it. Padding rows need a label of -100, so where the
    schedule has them the arrays are int32 or int64. Rows made of pieces are delivered whole, as `outputs` says.
    """

    def __init__(
        self,
        corpus: Corpus,
        schedule: Schedule,
        *,
        label_shift: bool,
        vocab_size: int | None,
        layout: Layout = None,
        row_outputs: RowOutputs | None = None,
    ) -> None:
        super().__init__(corpus, schedule, label_shift=label_shift, vocab_size=vocab_size, layout=layout)
        self._seq_len, self._label_shift = schedule.windows.seq_len, label_shift
        self._row_outputs = row_outputs
        signed = np.dtype(np.int32 if np.can_cast(corpus.dtype, np.int32) else np.int64)
        self._dtype = signed if schedule.pads else corpus.dtype

    def new_slot(self, max_rows: int) -> Slot:
        slot = super().new_slot(max_rows)
        if self._row_outputs is None:
            for name in ("input_ids", "labels"):
                slot.arrays[name] = np.empty((max_rows, self._seq_len), self._dtype)
        else:
            for name in self._row_outputs.outputs:
                slot.arrays[name] = np.empty(self._row_outputs.shape(name, max_rows), self._row_outputs.dtype(name))
        return slot

    def prepare(self, slot: Slot, times: BlockTimes) -> None:
        super().prepare(slot, times)
        assert slot.plan is not None
        begin = time.perf_counter()
        places = slot.plan.places(self._width)
        tokens, learn = _staged(slot, int(places[-1]))
        if self._row_outputs is None:
            count = len(slot.plan.row_ids)
            inputs, labels = slot.arrays["input_ids"][:count], slot.arrays["labels"][:count]
            staged_rows(tokens.reshape(count, self._width), self._label_shift, inputs, labels)
            if self._schedule.pads:
                labels[slot.plan.row_ids < 0] = IGNORE_INDEX
        else:
            assert slot.plan.pieces is not None
            count = len(slot.plan.row_ids)
            sizes = {"cu_seqlens": -(-count // self._schedule.batch_size)}
            arrays = {name: slot.arrays[name][: sizes.get(name, count)] for name in self._row_outputs.outputs}
            self._row_outputs.build(tokens, staged(slot.plan.pieces, places), arrays, learn=learn)
        times.kernels_s = time.perf_counter() - begin

    def deliver(self, slot: Slot, steps: StepRange, iteration: int) -> dict[str, Array]:
        assert slot.plan is not None
        count = self._schedule.row_count(steps)
        arrays = {n: array[None, :count] for n, array in slot.arrays.items() if n not in ("tokens", "learn")}
        if "cu_seqlens" in arrays:
            arrays["cu_seqlens"] = arrays["cu_seqlens"][:, : steps.num_steps]
        return {**arrays, "row_ids": slot.plan.row_ids[None].copy()}


def read_rows(
    corpus: Corpus, plan: Plan, layout: Layout, tokens: npt.NDArray[Any], learn: npt.NDArray[np.uint8] | None = None
) -> None:
    """Read the rows of a plan into `tokens` (N,), and their loss mask, where the corpus has one, into `learn` (N,).

    Places that no token of the corpus belongs in become 0.
    """
    if layout is None:
        corpus.read_rows(plan.starts, tokens.reshape(len(plan.starts), -1))
        return
    starts, lengths, targets = layout.reads(plan)
    starts = np.maximum(starts, 0)
    begins, ends = np.append(0, targets + lengths), np.append(targets, tokens.size)  # of the gaps; targets rise
    gaps = list(map(slice, begins[begins < ends].tolist(), ends[begins < ends].tolist()))
    for reader, array in ((corpus, tokens), (corpus.loss_mask, learn)):
        if reader is not None and array is not None:
            line = array.reshape(-1)
            for gap in gaps:
                line[gap] = 0
            reader.read_pieces(starts, lengths, targets, line)


def _staged(slot: Slot, size: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint8] | None]:
    """The tokens that were read into a slot, and their loss mask."""
    return slot.arrays["tokens"][:size], slot.arrays["learn"][:size] if "learn" in slot.arrays else None


def staged_rows(
    tokens: npt.NDArray[Any], label_shift: bool, inputs: npt.NDArray[Any], labels: npt.NDArray[Any]
) -> None:
    """Fill inputs and labels (R, T) from staged `tokens` (R, T + label_shift), C-contiguous."""
    count, width = tokens.shape
    starts = range(0, count * width, width)
    rows(tokens.reshape(-1), starts, inputs.shape[1], label_shift=label_shift, dtype=inputs.dtype, out=(inputs, labels))
