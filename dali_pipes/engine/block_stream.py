"""Blocks in order, ahead of the trainer: a queue, and what a loader needs around it.

`BlockStream` keeps the queue filled, hands out good blocks before an error that comes after them, and can be moved to
another position. It never waits for a block that is still being read while another one is ready.
"""

import atexit
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace

from dali_pipes.config import LoaderConfig
from dali_pipes.engine.batches_ahead import BatchesAhead, Taken, take_block
from dali_pipes.engine.block_source import BlockInfo
from dali_pipes.engine.build import BuiltSource, Graph
from dali_pipes.engine.dali import DaliQueue, define_pipeline, require_dali
from dali_pipes.engine.queues import BlockQueue, DirectQueue
from dali_pipes.errors import LoaderClosedError
from dali_pipes.monitoring.stats import MemoryHeld
from dali_pipes.placement.loans import Loan, loans_of
from dali_pipes.runtime.threads import end_thread_at_exit, to_keep
from dali_pipes.schedule import Position, StepRange

_EXIT_WAIT_S = 10.0
_USER_WAIT_S = 1.0


class BlockStream:
    """The blocks from a position on, through epoch after epoch. For one thread at a time.

    Raises `BackendError` if DALI is needed and is not installed.
    """

    def __init__(self, built: BuiltSource, config: LoaderConfig, graph: Graph | None = None) -> None:
        if built.engine == "dali":
            require_dali()
        self._built, self._config, self._graph = built, config, graph
        self._loans = None if built.device is None else loans_of(built.device)
        self._ahead = BatchesAhead(built, self._loans)  # before the queue: what it holds must go first
        self._queue: BlockQueue | None = None
        self._next_iteration = 0  # the number by which the source knows the next block to take
        self._error: Exception | None = None
        self._loan: Loan | None = None
        self._gate = threading.RLock()  # held by the thread inside the queue; at exit it must be free
        self._is_stale = False  # what has been read ahead is of another order
        self._user: threading.Thread | None = None  # that took the last block

    @property
    def queue_depth(self) -> int:
        """Blocks that are ready, in the queue or read ahead."""
        queue = self._queue  # another thread may close the stream meanwhile, here as in `memory`
        in_queue = 0 if queue is None else queue.in_flight + self._ahead.ready
        return in_queue + self._built.source.blocks_ready()

    def memory(self) -> MemoryHeld:
        """Bytes held on a GPU and for it."""
        held, queue = self._built.source.placement.memory(), self._queue
        if self._loans is None or queue is None:
            return held
        return replace(held, dali_bytes=queue.in_flight * self._built.whole_block_bytes + self._loans.bytes_held)

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
            self._queue = self._open_queue()
            _streams.add(self)
            if not _at_exit:  # registered after DALI's own handler, so it runs before that one
                _at_exit.append(atexit.register(_close_streams))
        self._is_stale = False
        self._ahead.drop()
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

    def take(self, stream: int | None = None) -> Taken:
        """The batches of the next block. Blocks while it is not ready.

        stream: on a GPU, the raw handle of the stream that they are for.

        An error of the source is raised after the good blocks before it have been taken. The stream must then `seek`.
        """
        with self._gate:
            end_thread_at_exit()
            if self._user is not (user := threading.current_thread()):
                _users.add(user)
                self._user = user
            queue = self._queue
            if queue is None:
                raise LoaderClosedError("the queue was closed by an error, or because the interpreter is shutting down")
            try:
                taken = self._ahead.take()
                self._fill(queue, taken_ahead=int(taken is not None))
                if taken is None:
                    taken = self._take(queue)
                if self._loans is not None:
                    self._built.source.check(BlockInfo(self._next_iteration, 0))
                self._next_iteration += 1
                self._loan = taken.loan
                if taken.loan is not None and self._loans is not None:
                    assert stream is not None, "a GPU's blocks are taken for a stream"
                    self._loans.hand_out(taken.loan, stream)
                # The direct queue's source makes batches. Blocks before an error are taken where it can be raised.
                if self._built.engine == "dali" and queue.in_flight and self._error is None:
                    self._ahead.begin(queue, self._next_iteration)
            except BaseException:
                self._drop_queue()  # what the queue holds after an interrupt is not known; seek makes a new one
                end_thread_at_exit()
                raise
        return taken

    def _take(self, queue: BlockQueue) -> Taken:
        if queue.in_flight == 0 and self._error is not None:
            raise self._error
        try:
            return take_block(queue, self._built, self._loans, self._next_iteration)
        except Exception as error:
            if self._error is not None:  # a block that DALI could not copy was counted but does not exist
                raise self._error from error
            raise

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

    def _open_queue(self) -> BlockQueue:
        if self._built.engine == "direct":
            return DirectQueue(self._built.source)
        return DaliQueue(define_pipeline(self._built, self._config, self._graph), self._built.source, self._built.gpu)

    def _fill(self, queue: BlockQueue, taken_ahead: int = 0) -> None:
        while self._error is None and (in_flight := queue.in_flight + taken_ahead) < queue.depth:
            ahead = BlockInfo(self._next_iteration + in_flight, 0)
            if in_flight > 0 and not self._built.source.ready(ahead):
                return
            try:
                queue.schedule()
            except Exception as error:
                self._error = to_keep(error)

    def _drop_queue(self) -> None:
        queue, self._queue, self._error = self._queue, None, None
        self._ahead.close()
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
