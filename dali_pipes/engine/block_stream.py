"""Blocks in order, ahead of the trainer: DALI's prefetch queue, and what a loader needs around it.

`BlockStream` keeps the queue filled, hands out good blocks before an error that lies behind them, and can be moved to
another position. It never waits for a block that is still being read while another one is ready.

On the CPU the queue carries tokens in the file's own width. They are widened, shifted and labelled a piece at a time,
just before they are handed out, into memory that is kept and used again once nobody holds it: fresh pages would cost
more than the work itself.
"""

import atexit
import contextlib
import importlib.util
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dali_pipes.config import LoaderConfig
from dali_pipes.documents import Pieces
from dali_pipes.engine.block_source import BlockInfo, BlockSource
from dali_pipes.engine.buffers import PieceMemory
from dali_pipes.engine.dali import BuiltSource, Graph, define_pipeline
from dali_pipes.errors import LoaderClosedError
from dali_pipes.monitoring.stats import MemoryHeld
from dali_pipes.operators.shuffled_rows import IGNORE_INDEX
from dali_pipes.placement.cpu import staged_rows
from dali_pipes.placement.cuda import Loan, loans_of
from dali_pipes.runtime.threads import end_thread_at_exit, to_keep
from dali_pipes.schedule import PADDING, Position, StepRange
from dali_pipes.schedule.plans import some_rows, staged

_EXIT_WAIT_S = 10.0
_USER_WAIT_S = 1.0

PIECE_TOKENS = 1 << 18
"""Tokens widened at a time on the CPU, 2 MiB an output. Less costs more calls, each at the price of a cold cache."""


class BlockQueue(Protocol):
    """Blocks in order, some of them on their way. For one thread at a time."""

    depth: int
    """Blocks worth having in flight."""

    @property
    def in_flight(self) -> int:
        """Blocks that were asked for and have not been taken."""

    def schedule(self) -> None:
        """Ask for more blocks, at least one. May block while tokens are read; raises the source's errors."""

    def take(self, stream: int | None = None) -> list[Any]:
        """Arrays of the oldest block asked for, one an output, each supporting DLPack and owned by the caller.

        On a GPU they are ready in the order of `stream`, a raw handle, without waiting for the device; None waits.
        """

    def drain(self) -> int:
        """Drop what is in flight; returns the number that the source will see for the next block."""

    def close(self) -> None:
        """Drop the queue and what is in it."""


class DaliQueue:
    """DALI's prefetch queue over a pipeline.

    Blocks are counted where DALI asks for them: its first `schedule_run` asks for as many as the queue is deep, later
    ones for one each, and an error may come after some of them.
    """

    def __init__(self, pipe: Any, source: BlockSource, on_device: Callable[[], Any] = contextlib.nullcontext) -> None:
        pipe.build()
        self._on_device = on_device
        self.depth = pipe.prefetch_queue_depth
        self._pipe = pipe
        self._source = source
        self._before = source.delivered
        self._taken = 0

    @property
    def in_flight(self) -> int:
        return self._source.delivered - self._before - self._taken

    def schedule(self) -> None:
        self._pipe.schedule_run()

    def take(self, stream: int | None = None) -> list[Any]:
        pipe = self._pipe  # another thread may close the queue meanwhile
        if pipe is None:
            raise LoaderClosedError("this queue was closed")
        with self._on_device():  # 0 is the default stream of the current device, whichever DALI works for
            outputs = [output[0] for output in pipe.share_outputs(stream)]
        pipe.release_outputs()  # gives DALI its queue place back; the outputs own their memory (exec_dynamic)
        self._taken += 1
        return outputs

    def drain(self) -> int:
        while self.in_flight:
            self.take()
        return self._taken

    def close(self) -> None:
        self._pipe = None


class DirectQueue:
    """The same blocks without DALI, for CPU machines where it is not installed. Valid until the next `take`.

    It asks the source when a block is taken; reading ahead is the source's own.
    """

    depth = 1

    def __init__(self, source: BlockSource) -> None:
        self._source = source
        self._next_iteration = 0
        self._asked = 0

    @property
    def in_flight(self) -> int:
        return self._asked

    def schedule(self) -> None:
        self._asked += 1

    def take(self, stream: int | None = None) -> list[Any]:
        arrays = self._source(BlockInfo(self._next_iteration, 0))
        self._next_iteration += 1
        self._asked -= 1
        return [array[0] for array in arrays]

    def drain(self) -> int:
        self._asked = 0
        return self._next_iteration

    def close(self) -> None:
        self._asked = 0


def open_queue(
    built: BuiltSource, config: LoaderConfig, graph: Graph | None, with_dali: bool
) -> tuple[BlockQueue, str]:
    """A queue over a source and the name of its engine: "dali", or "direct" on a CPU without DALI."""
    if built.device is None and graph is None and not (with_dali and _dali_installed()):
        return DirectQueue(built.source), "direct"
    on_device = contextlib.nullcontext if built.gpu is None else built.gpu.on_device
    return DaliQueue(define_pipeline(built, config, graph), built.source, on_device), "dali"


class Piece(NamedTuple):
    """Part of a block: an array an array-valued output, with the rows of its batches one behind the other."""

    arrays: dict[str, Any]
    """By output; `cu_seqlens` has a row for each batch."""
    sizes: list[int]
    """Rows of each batch."""
    values: list[dict[str, int]]
    """Of each batch, what is known on the host."""
    widths: list[int]
    """Positions in a row, of each batch."""
    is_flat: bool = False
    """Whether all arrays are in one line, because the batches have different widths."""


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
        batch_tokens = config.batch_size * config.seq_len
        self._batches_per_piece = max(1, min(PIECE_TOKENS // batch_tokens, built.source.batches_per_run))
        self._memory = PieceMemory(self._batches_per_piece * batch_tokens * max(1, config.mtp))
        self._loans = None if built.device is None else loans_of(built.device)
        self._loan: Loan | None = None
        self._gate = threading.RLock()  # held by whoever is inside the queue; at exit nobody must be
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
        block_bytes = self._block_bytes([self._config.seq_len] * self._built.source.batches_per_run)
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
        if self._queue is not None and self._error is None:
            ahead = self.peek()
            if ahead.first_step == 0 and Position(ahead.epoch, ahead.base) == position:
                return
        if self._queue is None or self._error is not None:
            self._drop_queue()
            self._queue, self.engine = open_queue(self._built, self._config, self._graph, self._with_dali)
            _streams.add(self)
            if not _at_exit:  # registered after DALI's own handler, so it runs before that one
                _at_exit.append(atexit.register(_close_streams))
        self._next_iteration = self._queue.drain()
        self._built.source.restart(position, self._next_iteration)

    def peek(self) -> StepRange:
        """Steps of the next block."""
        steps = self._built.source.steps(BlockInfo(self._next_iteration, 0))
        assert steps is not None, "a loader's source is endless"
        return steps

    def take(self, stream: int | None = None) -> Iterator[Piece]:
        """The next block in pieces; on a GPU, for use on the stream of this raw handle. Blocks while it is not ready.

        An error of the source is raised after the good blocks before it have been taken. The stream must then `seek`.
        """
        with self._gate:
            end_thread_at_exit()
            _users.add(threading.current_thread())
            steps, queue = self.peek(), self._queue
            if queue is None:
                raise LoaderClosedError("the queue is gone: an error or the end of the interpreter closed it")
            try:
                self._fill(queue)
                if queue.in_flight == 0 and self._error is not None:
                    raise self._error
                try:
                    arrays = queue.take(stream)
                except Exception as error:
                    if self._error is not None:  # a block that DALI could not copy was counted but does not exist
                        raise self._error from error
                    if isinstance(error, StopIteration):
                        raise RuntimeError("DALI has no block to hand out") from error
                    raise
                self._built.source.check(BlockInfo(self._next_iteration, 0))
                self._next_iteration += 1
            except BaseException:
                self._drop_queue()  # what the queue holds after an interrupt is not known; seek makes a new one
                end_thread_at_exit()
                raise
        schedule = self._built.schedule
        sizes = [schedule.batch_size] * (steps.num_steps - 1)
        sizes.append(schedule.step_rows(steps.base, steps.first_step + steps.num_steps - 1, steps.epoch))
        if self._loans is not None:
            assert stream is not None, "a GPU's blocks are taken for a stream"
            widths = [width for _, width in self._batches(steps, sizes)]
            arrays, self._loan = self._loans.lend(arrays, self._block_bytes(widths), stream)
        if self._built.staged:
            staging = [np.from_dlpack(array) for array in arrays]
            pieces = self._widened if self._built.row_outputs is None else self._built_up
            return self._built.ranges.each("kernels", pieces(staging, steps, sizes))
        outputs, batches = self._built.row_outputs, self._batches(steps, sizes)
        values = [{} if pieces is None or outputs is None else outputs.host_values(pieces, w) for pieces, w in batches]
        named = dict(zip(self._built.source.outputs, arrays, strict=True))
        return iter([Piece(named, sizes, values, [w for _, w in batches], self._config.length_buckets is not None)])

    def use(self, stream: int) -> None:
        """On a GPU: the next batch of the block taken last is for `stream`, whatever stream the block was taken for."""
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
        self._built.source.close()
        self._built.source.corpus.close()

    def _widened(self, staging: list[npt.NDArray[Any]], steps: StepRange, sizes: list[int]) -> Iterator[Piece]:
        (tokens,) = staging
        seq_len, row_ids = self._config.seq_len, self._built.schedule.rows(steps)
        begin = 0
        for first in range(0, len(sizes), self._batches_per_piece):
            started = time.perf_counter()
            part = sizes[first : first + self._batches_per_piece]
            end = begin + sum(part)
            inputs, labels = self._memory.take((end - begin, seq_len)), self._memory.take((end - begin, seq_len))
            staged_rows(tokens[begin:end], self._config.label_shift, inputs, labels)
            ids = row_ids[begin:end]
            if self._built.schedule.pads:
                labels[ids == PADDING] = IGNORE_INDEX
            begin = end
            self.kernels_s += time.perf_counter() - started
            arrays = {"input_ids": inputs, "labels": labels, "row_ids": ids}
            yield Piece(arrays, part, [{} for _ in part], [seq_len] * len(part))

    def _built_up(self, staging: list[npt.NDArray[Any]], steps: StepRange, sizes: list[int]) -> Iterator[Piece]:
        """Batches of rows that are put together from pieces, one at a time."""
        outputs, layout = self._built.row_outputs, self._built.layout
        assert outputs is not None
        assert layout is not None
        plan, begin = self._built.source.plans.plan(steps), 0
        assert plan.pieces is not None
        in_staging = staged(plan.pieces, plan.places(layout.width))
        tokens, *learn = staging
        for size, (pieces, width) in zip(sizes, self._batches(steps, sizes), strict=True):
            assert pieces is not None
            started = time.perf_counter()
            end = begin + size
            arrays: dict[str, Any] = {}
            for name in outputs.outputs:
                shape = outputs.shape(name, size, width)
                arrays[name] = np.empty(shape, np.int32) if name == "cu_seqlens" else self._memory.take(shape)
            mine = some_rows(in_staging, begin, end)
            outputs.build(tokens, mine, arrays, width=width, learn=learn[0] if learn else None)
            arrays["row_ids"] = plan.row_ids[begin:end].copy()  # the plan is kept, and the batch is the trainer's
            begin = end
            self.kernels_s += time.perf_counter() - started
            yield Piece(arrays, [size], [outputs.host_values(pieces, width)], [width])

    def _batches(self, steps: StepRange, sizes: list[int]) -> list[tuple[Pieces | None, int]]:
        """What each batch of a block is made of, where that is pieces, and the positions in a row of it."""
        seq_len = self._config.seq_len
        if self._built.row_outputs is None:
            return [(None, seq_len)] * len(sizes)
        plan = self._built.source.plans.plan(steps)
        assert plan.pieces is not None
        ends = np.cumsum(sizes).tolist()
        widths = [seq_len] * len(sizes) if plan.widths is None else plan.widths[np.array(ends) - 1].tolist()
        pieces = [some_rows(plan.pieces, end - size, end) for size, end in zip(sizes, ends, strict=True)]
        return list(zip(pieces, widths, strict=True))

    def _block_bytes(self, widths: list[int]) -> int:
        """Bytes of a delivered block of whole batches of these widths."""
        return sum(self._built.batch_bytes(name, width) for name in self._built.source.outputs for width in widths)

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


def _dali_installed() -> bool:
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:  # no package called nvidia at all
        return False
