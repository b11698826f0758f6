"""Blocks in order, ahead of the trainer: a queue, and what a loader needs around it.

`BlockStream` keeps the queue filled, hands out good blocks before an error that comes after them, and can be moved to
another position. It never waits for a block that is still being read while another one is ready.

On the CPU the queue carries tokens in the file's own width. They are widened, shifted and labeled a few batches at a
time, just before they are handed out, into memory that is reused when it is no longer referenced: fresh pages would
cost more than the work itself.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.config import LoaderConfig
from dali_pipes.config.outputs import OUTPUTS, made_from_plans, on_host
from dali_pipes.documents import Pieces, some_rows, staged
from dali_pipes.engine.block_source import BlockInfo
from dali_pipes.engine.buffers import Buffers
from dali_pipes.engine.build import BuiltSource, Graph
from dali_pipes.engine.dali import DaliQueue, dali_installed, define_pipeline
from dali_pipes.engine.queues import BlockQueue, DirectQueue
from dali_pipes.errors import LoaderClosedError
from dali_pipes.monitoring.stats import MemoryHeld
from dali_pipes.placement.cpu import assemble
from dali_pipes.placement.loans import Loan, loans_of
from dali_pipes.runtime.threads import end_thread_at_exit, to_keep
from dali_pipes.schedule import Position, StepRange
from dali_pipes.schedule.plans import Plan

_EXIT_WAIT_S = 10.0
_USER_WAIT_S = 1.0

BATCHES_TOKENS = 1 << 18
"""Tokens widened at a time on the CPU, 2 MiB an output. Less costs more calls, each at the price of a cold cache."""


class Batches(NamedTuple):
    """Batches of a block, one after another."""

    arrays: dict[str, Any]
    """By field: the rows of the batches one after another; fields of segment bounds have a line for each batch."""
    sizes: list[int]
    """Rows of each batch."""
    values: list[dict[str, int]]
    """Of each batch, the fields that are numbers on the host."""
    widths: list[int]
    """Positions in a row, of each batch."""
    is_flat: bool = False
    """Whether arrays of positions are in one line, because the batches have different widths."""


def open_queue(
    built: BuiltSource, config: LoaderConfig, graph: Graph | None, with_dali: bool
) -> tuple[BlockQueue, str]:
    """A queue over a source and the name of its engine: "dali", or "direct" on a CPU without DALI."""
    if built.device is None and graph is None and not (with_dali and dali_installed()):
        return DirectQueue(built.source), "direct"
    return DaliQueue(define_pipeline(built, config, graph), built.source, built.gpu), "dali"


class BlockStream:
    """The blocks from a position on, through epoch after epoch. For one thread at a time.

    `with_dali` False: on a CPU none is used, as where it is not installed, which saves a few blocks the start of it.
    """

    def __init__(
        self, built: BuiltSource, config: LoaderConfig, graph: Graph | None = None, *, with_dali: bool = True
    ) -> None:
        self._built, self._config, self._graph, self._with_dali = built, config, graph, with_dali
        self._queue: BlockQueue | None = None
        self._next_iteration = 0  # the number by which the source knows the next block to take
        self._error: Exception | None = None
        batch_tokens = config.batch_size * config.row_len
        # Rows that are put together cost more, so their batches are assembled one by one: no `next()` takes long.
        most = 1 if built.outputs.in_pieces else BATCHES_TOKENS // batch_tokens
        self._batches_at_a_time = max(1, min(most, built.source.batches_per_run))
        self._has_numbers = any(map(on_host, built.outputs.names))
        self._buffers = Buffers(self._batches_at_a_time * batch_tokens * max(1, config.mtp))
        self._loans = None if built.device is None else loans_of(built.device)
        self._loan: Loan | None = None
        self._gate = threading.RLock()  # held by the thread inside the queue; at exit it must be free
        self._is_stale = False  # what has been read ahead is of another order
        self.engine = "not started"
        self.kernels_s = 0.0
        """Seconds spent widening and labelling blocks in `take`."""

    @property
    def queue_depth(self) -> int:
        """Blocks that are ready, in the queue or read ahead."""
        queue = self._queue  # another thread may close the stream meanwhile, here as in `memory`
        return (queue.in_flight if queue is not None else 0) + self._built.source.blocks_ready()

    def memory(self) -> MemoryHeld:
        """Bytes held on a GPU and for it."""
        held, queue = self._built.source.placement.memory(), self._queue
        if self._loans is None or queue is None:
            return held
        block_bytes = self._built.block_bytes([self._config.row_len] * self._built.source.batches_per_run)
        return replace(held, dali_bytes=queue.in_flight * block_bytes + self._loans.bytes_held)

    def seek(self, position: Position) -> None:
        """Make `position` the start of the next block. Free when the stream stands there already."""
        with self._gate:
            end_thread_at_exit()
            try:
                self._seek(position)
            except BaseException:
                self._drop_queue()  # an interrupt half way leaves nothing to build on
                end_thread_at_exit()
                raise

    def _seek(self, position: Position) -> None:
        if self._queue is not None and self._error is None and not self._is_stale:
            ahead = self.peek()
            if ahead.first_step == 0 and Position(ahead.epoch, ahead.base) == position:
                return
        if self._queue is None or self._error is not None:
            self._drop_queue()
            self._queue, self.engine = open_queue(self._built, self._config, self._graph, self._with_dali)
            _streams.add(self)
            if not _at_exit:  # registered after DALI's own handler, so it runs before that one
                _at_exit.append(atexit.register(_close_streams))
        self._is_stale = False
        self._next_iteration = self._queue.drain()
        self._built.source.restart(position, self._next_iteration)

    def read_again(self) -> None:
        """Let the next `seek` drop what has been read ahead, even where the stream stands there already."""
        self._is_stale = True

    def peek(self) -> StepRange:
        """Steps of the next block."""
        steps = self._built.source.steps(BlockInfo(self._next_iteration, 0))
        assert steps is not None, "a loader's source is endless"
        return steps

    def take(self, stream: int | None = None) -> Iterator[Batches]:
        """The batches of the next block, some at a time. Blocks while it is not ready.

        stream: on a GPU, the raw handle of the stream that they are for.

        An error of the source is raised after the good blocks before it have been taken. The stream must then `seek`.
        """
        with self._gate:
            end_thread_at_exit()
            _users.add(threading.current_thread())
            steps, queue = self.peek(), self._queue
            if queue is None:
                raise LoaderClosedError("the queue was closed by an error, or because the interpreter is shutting down")
            try:
                self._fill(queue)
                if queue.in_flight == 0 and self._error is not None:
                    raise self._error
                try:
                    arrays = queue.take(None if self._built.gpu is None else self._built.gpu.handover)
                except Exception as error:
                    if self._error is not None:  # a block that DALI could not copy was counted but does not exist
                        raise self._error from error
                    if isinstance(error, StopIteration):
                        raise RuntimeError("DALI did not hand out a block") from error
                    raise
                block = BlockInfo(self._next_iteration, 0)
                self._built.source.check(block)
                plan = self._built.source.take_plan(block)
                self._next_iteration += 1
            except BaseException:
                self._drop_queue()  # what the queue holds after an interrupt is not known; seek makes a new one
                end_thread_at_exit()
                raise
        schedule = self._built.schedule
        sizes = [schedule.batch_size] * (steps.num_steps - 1)
        sizes.append(schedule.step_rows(steps.base, steps.first_step + steps.num_steps - 1, steps.epoch))
        widths = [self._config.row_len] * len(sizes)
        if plan is not None and plan.widths is not None:
            widths = plan.widths[np.cumsum(sizes) - 1].tolist()
        if self._loans is not None and self._built.gpu is not None:
            assert stream is not None, "a GPU's blocks are taken for a stream"
            arrays, self._loan = self._loans.lend(arrays, self._built.block_bytes(widths), self._built.gpu, stream)
        if self._built.staged:
            assert plan is not None, "tokens are read for planned rows"
            staging = dict(zip(self._built.source.arrays, map(np.from_dlpack, arrays), strict=True))
            return self._built.ranges.each("kernels", self._assembled(staging, plan, sizes, widths))
        named = dict(zip(self._built.source.arrays, arrays, strict=True))
        is_flat = self._config.varies_width
        values = self._host_values(None if plan is None else plan.pieces, sizes, widths)
        return iter([Batches(named, sizes, values, widths, is_flat)])

    def use(self, stream: int) -> None:
        """On a GPU: the next batch of the block taken last is for `stream`, even if the block was for another."""
        if self._loans is not None and self._loan is not None:
            self._loans.hand_out(self._loan, stream)

    def order(self, before: int, after: int) -> None:
        """On a GPU: let stream `after` wait for what has been queued on stream `before`."""
        if self._loans is not None:
            self._loans.order(before, after)

    def close(self) -> None:
        """Drop the queue, stop the reader threads and close the corpus; idempotent."""
        self._drop_queue()
        self._loan = None
        self._built.close()

    def _assembled(
        self, staging: dict[str, npt.NDArray[Any]], plan: Plan, sizes: list[int], widths: list[int]
    ) -> Iterator[Batches]:
        """Batches from the tokens of a block, some at a time."""
        outputs, row_begins = self._built.outputs, plan.row_begins(self._built.rows.rows)
        block_tokens, loss_mask = staging["tokens"], staging.get("loss_mask")
        pieces = None if plan.pieces is None else staged(plan.pieces, row_begins)
        from_tokens = [(name, OUTPUTS[name].dtype) for name in outputs.from_tokens]
        from_plan = {name: plan.field(name) for name in made_from_plans(outputs.names)}
        begin = 0
        for first in range(0, len(sizes), self._batches_at_a_time):
            started = time.perf_counter()
            batches = slice(first, first + self._batches_at_a_time)
            part_sizes, part_widths = sizes[batches], widths[batches]
            end = begin + sum(part_sizes)
            arrays: dict[str, Any] = {}
            for name, dtype in from_tokens:
                shape = outputs.shape(name, end - begin, part_widths[0])
                arrays[name] = self._buffers.take(shape) if dtype == np.int64 else np.empty(shape, dtype)
            row_ids = plan.row_ids[begin:end]
            if pieces is None:
                part, tokens = None, block_tokens[row_begins[begin] : row_begins[end]]
            else:
                part, tokens = some_rows(pieces, begin, end), block_tokens
            assemble(outputs, row_ids, tokens, part, arrays, loss_mask=loss_mask, width=part_widths[0])
            # The plan is kept, and the batch is the trainer's.
            arrays |= {name: array[begin:end].copy() for name, array in from_plan.items()}
            begin = end
            values = self._host_values(part, part_sizes, part_widths)
            self.kernels_s += time.perf_counter() - started
            yield Batches(arrays, part_sizes, values, part_widths)

    def _host_values(self, pieces: Pieces | None, sizes: list[int], widths: list[int]) -> list[dict[str, int]]:
        """Of each batch, the fields that are numbers on the host."""
        if not self._has_numbers:
            return [{}] * len(sizes)
        assert pieces is not None
        if len(sizes) == 1:
            return [self._built.outputs.host_values(pieces, widths[0])]
        ends = np.cumsum(sizes).tolist()
        return [
            self._built.outputs.host_values(some_rows(pieces, end - size, end), width)
            for size, end, width in zip(sizes, ends, widths, strict=True)
        ]

    def _fill(self, queue: BlockQueue) -> None:
        while self._error is None and queue.in_flight < queue.depth:
            ahead = BlockInfo(self._next_iteration + queue.in_flight, 0)
            if queue.in_flight > 0 and not self._built.source.ready(ahead):
                return
            try:
                queue.schedule()
            except Exception as error:
                self._error = to_keep(error)

    def _drop_queue(self) -> None:
        queue, self._queue, self._error = self._queue, None, None
        if queue is not None:
            queue.close()


_streams: "weakref.WeakSet[BlockStream]" = weakref.WeakSet()
_users: "weakref.WeakSet[threading.Thread]" = weakref.WeakSet()
_at_exit: list[Callable[[], None]] = []


def _close_streams() -> None:
    """Take every queue down in the main thread, with no other thread inside: daemon threads may still be running."""
    for stream in list(_streams):
        # In a forked process the thread that is inside does not exist, and will never leave.
        if stream._gate.acquire(timeout=0 if stream._built.source.is_forked else _EXIT_WAIT_S):
            stream._drop_queue()
            stream._gate.release()
    # They end at their next `next()`. Left running, one may be inside torch or DALI when the interpreter is gone, which
    # aborts the process.
    for thread in set(_users) - {threading.main_thread()}:
        thread.join(_USER_WAIT_S)
