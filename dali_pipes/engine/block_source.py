"""The block source: the callable that DALI's external source runs. Block number in, token arrays out.

A block is K batches of one rank. For each block the source plans the rows (integers), gets their tokens and runs the
token kernels. Planning and reading are done ahead of time by threads, with reads that release the GIL into buffers
that are kept and reused, so the thread that runs the pipeline, the trainer's, does not touch a file:

    reader threads    plan ─▶ positioned reads ─▶ range check ─▶ on the CPU: token kernels, batches ─┐
    trainer's thread      source(block number) ◀───────────────────────────────────── ready block ◀──┘

Plain rows on the CPU without DALI are only read ahead: their batches are made in `Block.groups`, a few at a time.
"""

import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.engine.profiling import Ranges
from dali_pipes.engine.read_ahead import Autotune
from dali_pipes.errors import LoaderClosedError
from dali_pipes.monitoring.stats import BlockTimes
from dali_pipes.placement.base import Batches, Placement, Slot
from dali_pipes.placement.cpu import CpuPlacement
from dali_pipes.rows.outputs import Outputs
from dali_pipes.rows.source import Source
from dali_pipes.runtime.threads import ReaderThreads, Task
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


class Block(NamedTuple):
    """What is known of a block apart from its arrays."""

    batches: Batches
    groups: Iterable[list[Any]] | None
    """The batches as a loader hands them out, some at a time: made by a reader thread, or when they are asked for. None
    where they are made from arrays."""


class _Made(NamedTuple):
    """A block as a reader thread leaves it."""

    batches: Batches
    groups: Iterable[list[Any]] | None = None
    stored: tuple[Plan, Array] | None = None
    """The plan and its rows as the files have them, from which batches are made when they are asked for."""


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
    cut:         makes batches from arrays, which are then in `Block.groups`; None: they are handed out as arrays alone
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
        self._plans_documents = schedule.interleave.most_planned is not None
        self._keeps_blocks, self._note = keeps_blocks, note
        self._cut = None if cut is None else partial(ranges.run, "batches", cut)
        self._taken: dict[int, _Made] = {}
        self._known_batches: dict[tuple[int, int], Batches] = {}
        self.autotune, self._ranges = autotune, ranges
        self._read_ahead_now = autotune.now
        self.forget_plans()
        self._count_from(Position(0, 0))
        self._origin = 0
        self._pending: dict[tuple[int | None, int], Task[tuple[Slot, _Made]]] = {}
        self._free: deque[Slot] = deque()
        self._delivered: Slot | None = None
        self._delivered_at: float | None = None  # None: what follows is the first block after a start, or an error
        self._threads: ReaderThreads | None = None
        self._process, self._forks = os.getpid(), _forks
        self._closed = False
        self.delivered = 0
        """Blocks handed out so far, over all epochs and restarts."""
        self._is_lazy = cut is not None and isinstance(placement, CpuPlacement) and placement.is_lazy
        self._later: tuple[int | None, range] | None = None  # blocks to begin once batches have been made
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
            if self._closed:
                self.check_usable()
            del self._pending[key]
        except Exception:
            self._pending.pop(key, None)  # it holds the error, whose traceback now holds the frames of this call
            self.check_usable()  # closed from another thread meanwhile: no other error tells that
            raise
        self._delivered = slot
        begin = time.perf_counter()
        if self.arrays:
            steps = self.steps(info)
            assert steps is not None
            arrays = self._ranges.run("deliver", self.placement.deliver, slot, steps, info.iteration)
        else:
            arrays = {}
        times = self._own_times()
        spent_s = time.perf_counter() - begin
        times.wait_s += begin - asked
        times.kernels_s += spent_s
        times.in_trainer_s += spent_s
        self.delivered += 1
        if self._keeps_blocks:
            self._taken[info.iteration] = block
        if block.stored is None:
            self._begin_later()  # there are no batches to make first
        if last_at is not None:
            self.autotune.add(begin - asked, asked - last_at, slot.cpu_share)
        self._delivered_at = time.perf_counter()
        return tuple(arrays[name] for name in self.arrays)

    def take_block(self, info: BlockInfo) -> Block:
        """What is known of a block that was handed out, once. Does not block."""
        batches, groups, stored = self._taken.pop(info.iteration)
        if stored is not None:
            groups = self._groups(batches, *stored)  # not before: it refers to this source, which must not hold it
        return Block(batches, groups)

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
        self._delivered_at = self._later = None
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
        numbers = range(block, block + self.autotune.blocks)
        task = self._pending.get((epoch_index, block))
        self._later = None
        if task is not None and task.done() and self._is_lazy:
            self._later = epoch_index, numbers[1:]
        else:
            self._begin(threads, epoch_index, numbers)
        return epoch_index, block

    def _begin(self, threads: ReaderThreads, epoch_index: int | None, numbers: range) -> None:
        """Let threads make those of these blocks that they have not begun."""
        for number in numbers:
            steps = self._steps_of(number, epoch_index)
            if steps is not None and (epoch_index, number) not in self._pending:
                slot = self._free.popleft() if self._free else None
                self._pending[epoch_index, number] = threads.submit(self._prepare, steps, slot)

    def _begin_later(self) -> None:
        """Begin the blocks after one that was ready, now that its first batches have been made.

        A thread that begins a block holds the interpreter lock for up to a millisecond, if its code is no longer in the
        caches, and the trainer would wait for its batches that long.
        """
        later, self._later = self._later, None
        threads = self._threads
        if later is not None and threads is not None:
            self._begin(threads, *later)

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

    def _reclaim(self, future: Task[tuple[Slot, _Made]]) -> None:
        if future.exception() is None:
            slot, _ = future.result()
            slot.fields = {}
            self._free.append(slot)

    def _prepare(self, steps: StepRange, slot: Slot | None) -> tuple[Slot, _Made]:
        began, began_cpu = time.perf_counter(), time.thread_time()
        slot = self.placement.new_slot(self._max_rows) if slot is None else slot
        slot.steps = steps
        times = BlockTimes(blocks=1)
        if self._note is not None:
            self._note(steps)
        if self.placement.plans_rows:
            begin = time.perf_counter()
            slot.plan = self._ranges.run("plan", self._planned.plan, steps)
            times.plan_s = time.perf_counter() - begin
        self._ranges.run("read", self.placement.prepare, slot, times)
        block = _Made(self._batches(steps, slot.plan))
        if self._cut is not None and slot.stored is not None:
            assert slot.plan is not None
            block = block._replace(stored=(slot.plan, slot.stored))
        elif self._cut is not None:
            begin = time.perf_counter()
            block = block._replace(groups=iter((self._cut(Batches(slot.fields, *block.batches[1:])),)))
            times.kernels_s += time.perf_counter() - begin
        if self._cut is not None:
            slot.fields, slot.stored = {}, None
        if self._plans_documents and slot.plan is not None:
            self._ranges.run("plan", self._planned.plan_next, slot.plan)
        self._own_times().add(times)
        slot.cpu_share = (time.thread_time() - began_cpu) / (time.perf_counter() - began)
        return slot, block

    def _groups(self, batches: Batches, plan: Plan, rows: Array) -> Iterator[list[Any]]:
        """The batches of a block of stored rows, some at a time.

        While some are used, a reader thread may make the next ones. If none has got to it, the thread that asks for
        them does, which is fastest where it asks for one after another: their memory is then still in its cache.
        """
        assert isinstance(self.placement, CpuPlacement)
        count, ahead, threads = self.placement.num_groups(rows), None, self._threads
        self.check_usable()  # it may have been closed in another thread since
        assert threads is not None, "rows were read"
        # Without `finally`: an interrupt that met code there, when the generator is dropped, would be swallowed.
        for number in range(count):
            if ahead is None or ahead.cancel() or self.is_forked:
                made = self._group(batches, plan, rows, number, in_trainer=True)
            else:
                made = threads.result(ahead)
            ahead = None
            if number == 0:
                self._begin_later()
            if number + 1 < count:
                ahead = threads.submit(self._group, batches, plan, rows, number + 1)
            yield made

    def _group(self, batches: Batches, plan: Plan, rows: Array, number: int, *, in_trainer: bool = False) -> list[Any]:
        """Some batches of a block of stored rows, in any thread."""
        assert isinstance(self.placement, CpuPlacement)
        assert self._cut is not None
        begin = time.perf_counter()
        own, fields = self.placement.group(plan, rows, number)
        made = self._cut(Batches(fields, batches.sizes[own], batches.values[own], batches.widths[own], False))
        times, spent_s = self._own_times(), time.perf_counter() - begin
        times.kernels_s += spent_s
        times.in_trainer_s += spent_s * in_trainer
        return made

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
        try:
            return self._times[threading.get_ident()]
        except KeyError:
            return self._times.setdefault(threading.get_ident(), BlockTimes())
