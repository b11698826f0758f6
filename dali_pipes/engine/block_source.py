"""The block source: the callable that DALI's external source runs. Block number in, token arrays out.

A block is K batches of one rank. For each block the source plans the rows (integers), gets their tokens and runs the
token kernels. Planning and reading are done ahead of time by threads, with reads that release the GIL into buffers
that are kept and reused, so the thread that runs the pipeline, the trainer's, does not touch a file:

    reader threads    plan ─▶ positioned reads ─▶ range check ─▶ on the CPU: token kernels, batches ─┐
    trainer's thread      source(block number) ◀───────────────────────────────────── ready block ◀──┘
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.engine.profiling import Ranges
from dali_pipes.engine.read_ahead import Autotune
from dali_pipes.errors import LoaderClosedError
from dali_pipes.monitoring.stats import BlockTimes
from dali_pipes.placement.base import Placement, Slot
from dali_pipes.rows.outputs import Outputs
from dali_pipes.rows.source import Source
from dali_pipes.runtime.threads import ReaderThreads
from dali_pipes.schedule import Blocks, Position, Schedule, StepRange
from dali_pipes.schedule.plans import Plan, PlanCache

Array = Any  # a NumPy array, or a CuPy array where the placement is on a GPU
Int64Array = npt.NDArray[np.int64]

_forks = 0
"""How many forks lie between the process that imported this and this one; cheaper to look at than its number is."""


def _count_fork() -> None:
    global _forks
    _forks += 1


os.register_at_fork(after_in_child=_count_fork)


class BlockInfo(NamedTuple):
    """A request for a block; DALI's `BatchInfo` has the same fields."""

    iteration: int
    epoch_idx: int


class Batches(NamedTuple):
    """The batches of a block."""

    arrays: dict[str, Any]
    """By field: the rows of the batches one after another; fields of segment bounds have a line for each batch. Empty
    where the arrays are elsewhere."""
    sizes: list[int]
    """Rows of each batch."""
    values: list[dict[str, int]]
    """Of each batch, the fields that are numbers on the host."""
    widths: list[int]
    """Positions in a row, of each batch."""
    is_flat: bool
    """Whether arrays of positions are in one line, because the batches may have different widths."""


class Block(NamedTuple):
    """What is known of a block apart from its arrays."""

    batches: Batches
    cut: list[Any] | None
    """The batches as a loader hands them out, where a reader thread has made them."""


class BlockSource:
    """Blocks by number, for DALI's external source (`batch=True, batch_info=True`) or for a queue without DALI.

    What a call returns depends on the block number alone; reading ahead only makes the answer ready. A call blocks
    while the block it asks for is still being read. Arrays are (1, R, T) ((1, R) for row_ids) and valid until the
    next call. Errors of a reader thread are raised by the call that asks for the failed block; the next one reads it
    again.

    endless:     blocks run on from epoch to epoch; else `StopIteration` ends each epoch, and DALI's `epoch_idx` tells
                 which one is meant
    max_rows:    rows of `seq_len` positions that a block has room for
    autotune:    how many threads read, and how many blocks ahead; asked at every block
    keeps_blocks: whether what is known of each block that was handed out waits for `take_block`
    arrays:      which arrays of a block to hand out, in order
    cut:         makes the batches of a block from its arrays, in a reader thread, which are then in `Block.cut`;
                 None: they are handed out as arrays alone
    note:        is told, by the thread that plans them, which steps come next
    """

    def __init__(
        self,
        rows: Source,
        schedule: Schedule,
        placement: Placement,
        outputs: Outputs,
        *,
        arrays: tuple[str, ...],
        batches_per_run: int,
        max_rows: int,
        autotune: Autotune,
        endless: bool,
        keeps_blocks: bool = False,
        cut: Callable[[Batches], list[Any]] | None = None,
        note: Callable[[StepRange], None] | None = None,
        ranges: Ranges,
    ) -> None:
        self.rows, self.schedule, self.placement = rows, schedule, placement
        self.arrays, self.batches_per_run, self.endless = arrays, batches_per_run, endless
        self._outputs, self._max_rows = outputs, max_rows
        self._keeps_blocks, self._cut, self._note = keeps_blocks, cut, note
        self._taken: dict[int, Block] = {}
        self._known_batches: dict[tuple[int, int], Batches] = {}
        self.autotune, self._ranges = autotune, ranges
        self._read_ahead_now = autotune.now
        self.forget_plans()
        self._count_from(Position(0, 0))
        self._origin = 0
        self._pending: dict[tuple[int | None, int], Future[tuple[Slot, Block]]] = {}
        self._free: deque[Slot] = deque()
        self._delivered: Slot | None = None
        self._delivered_at: float | None = None  # None: what follows is the first block after a start, or an error
        self._threads: ReaderThreads | None = None
        self._process, self._forks = os.getpid(), _forks
        self._closed = False
        self.delivered = 0
        """Blocks handed out so far, over all epochs and restarts."""
        self._times: dict[int, BlockTimes] = {}  # of each thread, so that none has to wait for another to add to them

    def __call__(self, info: BlockInfo) -> tuple[Array, ...]:
        self.check_usable()
        self.placement.check()
        # By now the last block has been copied. An interrupt between the lines loses a slot; the other way
        # round it would put one there twice, and two blocks into the same memory.
        last, self._delivered = self._delivered, None
        last_at, self._delivered_at = self._delivered_at, None
        if last is not None:
            last.fields = {}
            self._free.append(last)
        key = self._read_ahead(info)
        if key is None:
            self.placement.check(info.iteration)  # there may be no further call
            raise StopIteration
        asked = time.perf_counter()
        try:
            assert self._threads is not None, "blocks to read exist only with threads"
            slot, block = self._threads.result(self._pending[key])
            self.check_usable()
            del self._pending[key]
        except Exception:
            self._pending.pop(key, None)  # it holds the error, whose traceback now holds the frames of this call
            self.check_usable()  # closed from another thread meanwhile: no other error tells that
            raise
        self._delivered = slot
        steps = self.steps(info)
        assert steps is not None
        begin = time.perf_counter()
        with self._ranges.around("deliver"):
            arrays = self.placement.deliver(slot, steps, info.iteration) if self.arrays else {}
        times = self._own_times()
        times.wait_s += begin - asked
        times.kernels_s += time.perf_counter() - begin
        self.delivered += 1
        if self._keeps_blocks:
            self._taken[info.iteration] = block
        if last_at is not None:
            self.autotune.add(begin - asked, asked - last_at, slot.cpu_share)
        self._delivered_at = time.perf_counter()
        return tuple(arrays[name] for name in self.arrays)

    def take_block(self, info: BlockInfo) -> Block:
        """What is known of a block that was handed out, once. Does not block."""
        return self._taken.pop(info.iteration)

    def check(self, info: BlockInfo) -> None:
        """Raise `TokenRangeError` if a block that was handed out holds a bad id that only a GPU has seen.

        The CPU knows before it hands a block out. On a GPU this waits for the block's kernel, which has usually run by
        the time anyone takes the block; a call for a later block raises too once the answer is known.
        """
        self.placement.check(info.iteration)

    def steps(self, info: BlockInfo) -> StepRange | None:
        """Steps of a block, None past the end of its epoch. Reads nothing."""
        return self._steps_of(info.iteration - self._origin, None if self.endless else info.epoch_idx)

    def ready(self, info: BlockInfo) -> bool:
        """Whether a call for this block would return immediately; starts reading it otherwise. Does not block."""
        self.check_usable()
        key = self._read_ahead(info)
        return key is None or self._pending[key].done()

    def restart(self, position: Position, iteration: int = 0) -> None:
        """Make `iteration` the first block from `position` on. Blocks read ahead for another place are dropped."""
        self._count_from(position)
        self._origin = iteration
        self._taken.clear()
        self._delivered_at = None
        self.autotune.restart()
        self.placement.restart()
        threads = self._threads
        if threads is not None and not threads.are_alive:
            threads.stop()
            self._threads = None
        for key in list(self._pending):
            self._discard(key)

    def forget_plans(self) -> None:
        """Plan rows anew from now on, because their order has changed. Blocks on their way keep their plans."""
        self._planned = PlanCache(self.schedule, self.batches_per_run, **self._plans_needed())

    def blocks_ready(self) -> int:
        """Blocks that have been read ahead and wait to be asked for."""
        return sum(future.done() for future in list(self._pending.values()))

    def block_times(self) -> BlockTimes:
        """Seconds spent so far, by part. Does not block."""
        total = BlockTimes()
        for times in list(self._times.values()):
            total.add(times)
        return total

    def end(self) -> None:
        """Read nothing more, and hand nothing out, from now on; does not wait for the reads under way. Idempotent."""
        self._closed = True  # before the threads are checked: a call that starts them checks this afterwards
        self.rows.end_retries()
        self.placement.end()
        for future in list(self._pending.values()):
            future.cancel()
        threads = self._threads
        if threads is not None and not self.is_forked:
            threads.stop(0)

    def close(self) -> None:
        """Stop the reader threads (waiting for reads under way) and free the buffers; idempotent."""
        self.end()
        threads = self._threads
        if threads is not None and not self.is_forked:
            threads.stop()
        self._threads = None
        self._pending.clear()
        self._taken.clear()
        self._free.clear()
        self._delivered = None
        self.placement.close()

    @property
    def is_forked(self) -> bool:
        """Whether this is a copy, in a forked process, of a source whose threads are in another one."""
        return _forks != self._forks

    def check_usable(self) -> None:
        """Raise `LoaderClosedError` where the source is closed, or belongs to the process this one was forked from."""
        if self._closed:
            raise LoaderClosedError("this block source is closed; build a new loader")
        if _forks != self._forks:
            raise LoaderClosedError(
                f"this loader was built in process {self._process}, and its threads do not exist in process "
                f"{os.getpid()}, "
                "which was forked from it; build the loader in the process that uses it"
            )

    def _read_ahead(self, info: BlockInfo) -> tuple[int | None, int] | None:
        """See that a block and the next ones are being read; the block's key, or None past the end of the epoch."""
        if self.steps(info) is None:
            return None
        epoch_index = None if self.endless else info.epoch_idx
        block = info.iteration - self._origin
        may_be_kept = range(block, block + self.autotune.most_blocks)  # those read ahead before it became less, too
        for key in [key for key in self._pending if key[0] != epoch_index or key[1] not in may_be_kept]:
            self._discard(key)
        threads = self._threads
        if threads is None:
            threads = self._threads = ReaderThreads(self.autotune.now.num_threads)
            if self._closed:  # meanwhile, by someone who has not seen these
                threads.stop()
        if self._read_ahead_now != self.autotune.now:
            self._adapt(threads)
        for number in range(block, block + self.autotune.blocks):
            steps = self._steps_of(number, epoch_index)
            if steps is not None and (epoch_index, number) not in self._pending:
                slot = self._free.popleft() if self._free else None
                self._pending[epoch_index, number] = threads.submit(self._prepare, steps, slot)
        return epoch_index, block

    def _adapt(self, threads: ReaderThreads) -> None:
        self._planned.keep_for(**self._plans_needed())
        # A limit on threads ends no run: the autotune finds that nothing was gained, and goes back.
        with contextlib.suppress(RuntimeError, MemoryError):
            threads.resize(self.autotune.now.num_threads)
        self._read_ahead_now = self.autotune.now

    def _plans_needed(self) -> dict[str, int]:
        return {"num_threads": self.autotune.blocks - 1, "queue_depth": self.autotune.now.prefetch_queue_depth}

    def _count_from(self, position: Position) -> None:
        # Several calls ask for the steps of each block.
        self._steps_of = lru_cache(128)(Blocks(self.schedule, self.batches_per_run, position).steps)

    def _discard(self, key: tuple[int | None, int]) -> None:
        future = self._pending.pop(key)
        if not future.cancel():
            future.add_done_callback(self._reclaim)

    def _reclaim(self, future: "Future[tuple[Slot, Block]]") -> None:
        if future.exception() is None:
            slot, _ = future.result()
            slot.fields = {}
            self._free.append(slot)

    def _prepare(self, steps: StepRange, slot: Slot | None) -> tuple[Slot, Block]:
        began, began_cpu = time.perf_counter(), time.thread_time()
        slot = self.placement.new_slot(self._max_rows) if slot is None else slot
        slot.steps = steps
        times = BlockTimes(blocks=1)
        if self._note is not None:
            self._note(steps)
        if self.placement.plans_rows:
            begin = time.perf_counter()
            with self._ranges.around("plan"):
                slot.plan = self._planned.plan(steps)
            times.plan_s = time.perf_counter() - begin
        with self._ranges.around("read"):
            self.placement.prepare(slot, times)
        batches, cut = self._batches(steps, slot.plan), None
        if self._cut is not None:
            begin = time.perf_counter()
            with self._ranges.around("batches"):
                cut = self._cut(Batches(slot.fields, *batches[1:]))
            slot.fields = {}
            times.kernels_s += time.perf_counter() - begin
        if slot.plan is not None:
            with self._ranges.around("plan"):
                self._planned.plan_next(slot.plan)
        self._own_times().add(times)
        slot.cpu_share = (time.thread_time() - began_cpu) / (time.perf_counter() - began)
        return slot, Block(batches, cut)

    def _batches(self, steps: StepRange, plan: Plan | None) -> Batches:
        if plan is None or plan.widths is not None or plan.pieces is not None:
            return self._new_batches(steps, plan)
        key = steps.num_steps, len(plan.row_ids)  # which say all where rows are runs of tokens
        if key not in self._known_batches:
            self._known_batches[key] = self._new_batches(steps, plan)
        return self._known_batches[key]

    def _new_batches(self, steps: StepRange, plan: Plan | None) -> Batches:
        schedule, seq_len = self.schedule, self._outputs.seq_len
        if plan is not None and plan.sizes is not None:
            sizes = plan.sizes.tolist()
        else:
            sizes = [schedule.batch_size] * (steps.num_steps - 1)
            sizes.append(schedule.step_rows(steps.base, steps.first_step + steps.num_steps - 1, steps.epoch))
        if plan is None or plan.widths is None:
            widths, is_flat = [seq_len] * len(sizes), False
        else:
            widths, is_flat = plan.widths[np.cumsum(sizes) - 1].tolist(), True
        values = self._outputs.host_values(None if plan is None else plan.pieces, sizes, widths)
        return Batches({}, sizes, values, widths, is_flat)

    def _own_times(self) -> BlockTimes:
        """Those of the calling thread."""
        thread = threading.get_ident()
        if thread not in self._times:
            self._times[thread] = BlockTimes()
        return self._times[thread]
