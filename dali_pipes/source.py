"""The block source: the callable that DALI's external source runs. Block number in, token arrays out.

A block is K batches of one rank. For each block the source plans the rows (integers), gets their tokens and runs the
token kernels. Planning and reading are done ahead of time by threads, with reads that release the GIL into buffers
that are kept and reused, so the thread that runs the pipeline, the trainer's, does not touch a file:

    reader threads    plan ─▶ positioned reads ─▶ range check ─┐
    trainer's thread      source(block number) ◀── ready block ┘

Blocks leave here in the file's own width wherever someone behind can widen them: DALI copies what an external source
hands it, and copying two bytes a token costs an eighth of copying two int64.
"""

import os
import threading
import time
from collections import deque
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus import Corpus
from dali_pipes.errors import LoaderClosedError, TokenRangeError
from dali_pipes.operators import permute, rows
from dali_pipes.readers import ReaderThreads
from dali_pipes.schedule import Blocks, Position, Schedule, StepRange
from dali_pipes.stats import BlockTimes

IGNORE_INDEX = -100
"""Label that a loss function leaves out: the default of `torch.nn.functional.cross_entropy`."""

PLAN_ROWS = 1024

Array = Any  # a NumPy array, or a CuPy array where the placement is on a GPU
Int64Array = npt.NDArray[np.int64]


class BlockInfo(NamedTuple):
    """What a source is asked for; DALI's `BatchInfo` has the same fields."""

    iteration: int
    epoch_idx: int


@dataclass
class Plan:
    """Rows of one block: row numbers in the epoch (-1: padding) and the first token of each; int64 (R,)."""

    steps: StepRange
    row_ids: Int64Array
    starts: Int64Array


@dataclass
class Slot:
    """Memory of one block on its way; reused block after block. `arrays` belongs to the placement."""

    arrays: dict[str, Array] = field(default_factory=dict)
    plan: Plan | None = None


class Placement(Protocol):
    """Where a block's tokens come from and go to. Placements change cost, never content."""

    def new_slot(self, max_rows: int) -> Slot:
        """Memory for blocks of up to `max_rows` rows."""

    def prepare(self, slot: Slot, plan: Plan, times: BlockTimes) -> None:
        """Read and check a block; called in a reader thread."""

    def deliver(self, slot: Slot, plan: Plan) -> dict[str, Array]:
        """Arrays of a prepared block, valid until the next call; called in the thread that runs the pipeline."""

    def close(self) -> None:
        """Let go of device memory; idempotent."""


def plan_rows(schedule: Schedule, steps: StepRange) -> Plan:
    """Row numbers and token positions of a range of steps. Cost and memory depend on the number of rows alone."""
    row_ids = schedule.rows(steps)
    order = np.maximum(row_ids, 0) if schedule.pads else row_ids  # a padding row shows the epoch's first row
    key = schedule.key(steps.epoch)
    windows = order if key is None else permute(order, schedule.num_rows, key)
    return Plan(steps, row_ids, schedule.starts(windows))


class PlanCache:
    """Plans of ranges of steps, computed for about `PLAN_ROWS` rows at a time; safe for several threads.

    A permutation costs some 150 small NumPy calls whatever the number of rows, so planning a block of 64 rows by itself
    costs nearly as much as planning 1,024: measured 2 us a row against 0.3.
    """

    def __init__(self, schedule: Schedule, batches_per_run: int) -> None:
        self._schedule = schedule
        self._steps_per_plan = max(1, PLAN_ROWS // (batches_per_run * schedule.batch_size)) * batches_per_run
        self._plans: dict[tuple[int, int, int], Plan] = {}
        self._lock = threading.Lock()

    def plan(self, steps: StepRange) -> Plan:
        """The plan of one block, whose first step is a multiple of batches_per_run."""
        number = steps.first_step // self._steps_per_plan
        first_step = number * self._steps_per_plan
        key = (steps.epoch, steps.base, number)
        with self._lock:
            if key not in self._plans:
                count = min(self._steps_per_plan, self._schedule.steps(steps.base) - first_step)
                while len(self._plans) >= 3:
                    del self._plans[next(iter(self._plans))]
                self._plans[key] = plan_rows(self._schedule, steps._replace(first_step=first_step, num_steps=count))
            whole = self._plans[key]
        begin = (steps.first_step - first_step) * self._schedule.batch_size
        part = slice(begin, begin + steps.num_steps * self._schedule.batch_size)
        return Plan(steps, whole.row_ids[part], whole.starts[part])


def check_range(tokens: npt.NDArray[Any], starts: Int64Array, corpus: Corpus, vocab_size: int | None) -> None:
    """Refuse ids that are negative, at or above `vocab_size`, or too large for int64.

    `tokens` is (R, L); row r holds the corpus from `starts[r]`. Raises `TokenRangeError` naming the first such id.
    """
    limit = vocab_size if vocab_size is not None else 2**63
    info = np.iinfo(tokens.dtype)
    too_large = limit <= info.max and int(tokens.max()) >= limit
    negative = info.min < 0 and int(tokens.min()) < 0
    if not (too_large or negative):
        return
    bad = np.zeros(tokens.shape, dtype=bool)
    if limit <= info.max:
        bad |= tokens >= limit
    if info.min < 0:
        bad |= tokens < 0
    row, column = np.unravel_index(int(np.argmax(bad)), bad.shape)
    position = int(starts[row]) + int(column)
    place = corpus.locate(position)
    expected = f"0 <= id < vocab_size = {vocab_size}" if vocab_size is not None else "0 <= id < 2**63"
    raise TokenRangeError(
        f"{place.file}: token {place.offset} (corpus position {position}) is {int(tokens[row, column])}, expected "
        f"{expected}; check vocab_size (it must count added tokens) and the file's dtype (read as {tokens.dtype})"
    )


def read_checked(
    corpus: Corpus, plan: Plan, tokens: npt.NDArray[Any], vocab_size: int | None, times: BlockTimes
) -> None:
    """Read the rows of a plan into `tokens` (R, L), in the corpus's dtype, and check their range."""
    begin = time.perf_counter()
    corpus.read_rows(plan.starts, tokens)
    check_range(tokens, plan.starts, corpus, vocab_size)
    times.read_s = time.perf_counter() - begin


class StagedPlacement:
    """Tokens from files to host memory, untouched: `tokens` (R, T + 1) in the file's own width ((R, T) unshifted).

    What a loader on the CPU takes: it widens, shifts and labels a block when it hands it out (`block_queue`).
    """

    def __init__(self, corpus: Corpus, seq_len: int, *, label_shift: bool, vocab_size: int | None) -> None:
        self._corpus, self._vocab_size = corpus, vocab_size
        self._width = seq_len + label_shift

    def new_slot(self, max_rows: int) -> Slot:
        return Slot({"tokens": np.empty((max_rows, self._width), self._corpus.dtype)})

    def prepare(self, slot: Slot, plan: Plan, times: BlockTimes) -> None:
        read_checked(self._corpus, plan, slot.arrays["tokens"][: len(plan.starts)], self._vocab_size, times)

    def deliver(self, slot: Slot, plan: Plan) -> dict[str, Array]:
        return {"tokens": slot.arrays["tokens"][: len(plan.starts)]}

    def close(self) -> None:
        pass


class ShiftedPlacement(StagedPlacement):
    """`input_ids` and `labels` (R, T) in host memory, in the file's own width; DALI widens them.

    What a pipeline on the CPU takes that has no loader behind it. Padding rows need a label of -100, so where the
    schedule has them the arrays are int32 or int64.
    """

    def __init__(
        self, corpus: Corpus, seq_len: int, *, label_shift: bool, vocab_size: int | None, padding: bool
    ) -> None:
        super().__init__(corpus, seq_len, label_shift=label_shift, vocab_size=vocab_size)
        self._seq_len, self._label_shift, self._padding = seq_len, label_shift, padding
        signed = np.dtype(np.int32 if np.can_cast(corpus.dtype, np.int32) else np.int64)
        self._dtype = signed if padding else corpus.dtype

    def new_slot(self, max_rows: int) -> Slot:
        slot = super().new_slot(max_rows)
        for name in ("input_ids", "labels"):
            slot.arrays[name] = np.empty((max_rows, self._seq_len), self._dtype)
        return slot

    def prepare(self, slot: Slot, plan: Plan, times: BlockTimes) -> None:
        super().prepare(slot, plan, times)
        begin = time.perf_counter()
        count = len(plan.starts)
        inputs, labels = slot.arrays["input_ids"][:count], slot.arrays["labels"][:count]
        staged_rows(slot.arrays["tokens"][:count], self._label_shift, inputs, labels)
        if self._padding:
            labels[plan.row_ids < 0] = IGNORE_INDEX
        times.kernels_s = time.perf_counter() - begin

    def deliver(self, slot: Slot, plan: Plan) -> dict[str, Array]:
        count = len(plan.starts)
        return {"input_ids": slot.arrays["input_ids"][:count], "labels": slot.arrays["labels"][:count]}


def staged_rows(
    tokens: npt.NDArray[Any], label_shift: bool, inputs: npt.NDArray[Any], labels: npt.NDArray[Any]
) -> None:
    """Fill inputs and labels (R, T) from staged `tokens` (R, T + label_shift), C-contiguous."""
    count, width = tokens.shape
    starts = range(0, count * width, width)
    rows(tokens.reshape(-1), starts, inputs.shape[1], label_shift=label_shift, dtype=inputs.dtype, out=(inputs, labels))


class BlockSource:
    """Blocks by number, for DALI's external source (`batch=True, batch_info=True`) or for a queue without DALI.

    What a call returns depends on the block number alone; reading ahead only makes the answer ready. A call blocks
    while the block it asks for is still being read. Arrays are (1, R, T) ((1, R) for row_ids) and valid until the
    next call. Errors of a reader thread are raised by the call that asks for the failed block, every time it asks.

    With `endless`, blocks run on from epoch to epoch; without, `StopIteration` ends each epoch and DALI's `epoch_idx`
    tells which one is meant.
    """

    def __init__(
        self,
        corpus: Corpus,
        schedule: Schedule,
        placement: Placement,
        *,
        outputs: tuple[str, ...],
        batches_per_run: int,
        num_threads: int,
        endless: bool,
    ) -> None:
        self.corpus, self.schedule, self.placement = corpus, schedule, placement
        self.outputs, self.batches_per_run, self.endless = outputs, batches_per_run, endless
        self._num_threads = num_threads
        self._plans = PlanCache(schedule, batches_per_run)
        self._blocks = Blocks(schedule, batches_per_run, Position(0, 0))
        self._origin = 0
        self._pending: dict[tuple[int | None, int], Future[Slot]] = {}
        self._free: deque[Slot] = deque()
        self._delivered: Slot | None = None
        self._threads: ReaderThreads | None = None
        self._process = os.getpid()
        self._closed = False
        self.delivered = 0
        """Blocks handed out so far, over all epochs and restarts."""
        self._times = BlockTimes()
        self._times_lock = threading.Lock()

    def __call__(self, info: BlockInfo) -> tuple[Array, ...]:
        self._check_usable()
        if self._delivered is not None:  # whoever got the last block has copied it by now
            self._free.append(self._delivered)
            self._delivered = None
        key = self._read_ahead(info)
        if key is None:
            raise StopIteration
        try:
            slot = self._pending[key].result()
        except CancelledError:  # closed from a signal handler or another thread while this call waited
            self._check_usable()
            raise
        self._check_usable()
        del self._pending[key]
        self._delivered = slot
        assert slot.plan is not None
        begin = time.perf_counter()
        arrays = self.placement.deliver(slot, slot.plan)
        arrays["row_ids"] = slot.plan.row_ids
        with self._times_lock:
            self._times.kernels_s += time.perf_counter() - begin
        self.delivered += 1
        return tuple(arrays[name][None] for name in self.outputs)

    def steps(self, info: BlockInfo) -> StepRange | None:
        """Steps of a block, None past the end of its epoch. Reads nothing."""
        return self._blocks.steps(info.iteration - self._origin, None if self.endless else info.epoch_idx)

    def ready(self, info: BlockInfo) -> bool:
        """Whether a call for this block would return at once; starts reading it otherwise. Does not block."""
        self._check_usable()
        key = self._read_ahead(info)
        return key is None or self._pending[key].done()

    def restart(self, position: Position, iteration: int = 0) -> None:
        """Make `iteration` the first block from `position` on. Blocks read ahead for another place are dropped."""
        self._blocks = Blocks(self.schedule, self.batches_per_run, position)
        self._origin = iteration
        for key in list(self._pending):
            self._discard(key)

    def blocks_ready(self) -> int:
        """Blocks that have been read ahead and wait to be asked for."""
        return sum(future.done() for future in list(self._pending.values()))

    def block_times(self) -> BlockTimes:
        """Seconds spent so far, by part."""
        with self._times_lock:
            return BlockTimes(**vars(self._times))

    def close(self) -> None:
        """Stop the reader threads (waiting for reads under way) and free the buffers; idempotent."""
        self._closed = True
        for future in self._pending.values():
            future.cancel()
        if self._threads is not None and os.getpid() == self._process:
            self._threads.stop()
        self._threads = None
        self._pending.clear()
        self._free.clear()
        self._delivered = None
        self.placement.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise LoaderClosedError("this block source is closed; build a new loader")
        if os.getpid() != self._process:
            raise LoaderClosedError(
                f"this loader belongs to process {self._process} and its threads do not exist in the forked process "
                f"{os.getpid()}; build the loader in the process that uses it"
            )

    def _read_ahead(self, info: BlockInfo) -> tuple[int | None, int] | None:
        """See that a block and those behind it are being read; the block's key, or None past the end of the epoch."""
        if self.steps(info) is None:
            return None
        epoch_index = None if self.endless else info.epoch_idx
        block = info.iteration - self._origin
        wanted = range(block, block + self._num_threads + 1)
        for key in [key for key in self._pending if key[0] != epoch_index or key[1] not in wanted]:
            self._discard(key)
        if self._threads is None:
            self._threads = ReaderThreads(self._num_threads)
        for number in wanted:
            steps = self._blocks.steps(number, epoch_index)
            if steps is not None and (epoch_index, number) not in self._pending:
                slot = self._free.popleft() if self._free else None
                self._pending[epoch_index, number] = self._threads.submit(self._prepare, steps, slot)
        return epoch_index, block

    def _discard(self, key: tuple[int | None, int]) -> None:
        future = self._pending.pop(key)
        if not future.cancel():
            future.add_done_callback(self._reclaim)

    def _reclaim(self, future: "Future[Slot]") -> None:
        if future.exception() is None:
            self._free.append(future.result())

    def _prepare(self, steps: StepRange, slot: Slot | None) -> Slot:
        slot = self.placement.new_slot(self.batches_per_run * self.schedule.batch_size) if slot is None else slot
        times = BlockTimes(blocks=1)
        begin = time.perf_counter()
        slot.plan = self._plans.plan(steps)
        times.plan_s = time.perf_counter() - begin
        self.placement.prepare(slot, slot.plan, times)
        with self._times_lock:
            for name, value in vars(times).items():
                setattr(self._times, name, getattr(self._times, name) + value)
        return slot
