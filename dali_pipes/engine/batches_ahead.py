"""The batches of a block: made from what a queue hands out, if possible in a thread, before the trainer needs them.

    trainer's thread    schedule 5, get 4 ─┐ next() next() ...       schedule 6, get 5 ─┐ next() ...
    another thread                         └──▶ batches of block 5                      └──▶ batches of block 6

A block of K batches is K dicts of tensors, and each tensor over memory of a GPU costs microseconds. What depends on the
trainer, such as its stream, waits until the block is its turn. A block that was taken ahead still counts as one of the
queue's, so no more of them exist than without the thread.
"""

import contextlib
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple

from dali_pipes.engine.block_source import BlockInfo
from dali_pipes.engine.build import BuiltSource
from dali_pipes.engine.queues import BlockQueue
from dali_pipes.placement.loans import Loan, Loans
from dali_pipes.runtime.threads import ReaderThreads, Task


class Taken(NamedTuple):
    """The batches of one block, as `BuiltSource.cut` makes them, some at a time; the tokens of each with padding."""

    groups: Iterable[list[Any]]
    num_tokens: list[int]
    loan: Loan | None
    """On a GPU: the block's memory, which has not been handed out for any stream yet."""


def take_block(queue: BlockQueue, built: BuiltSource, loans: Loans | None, iteration: int) -> Taken:
    """Take the next block of a queue, which is `iteration` to its source, and make its batches.

    Blocks while DALI has not made it; on a GPU not until the device has, whose work comes first on `gpu.handover`.
    """
    try:
        arrays = queue.take(None if built.gpu is None else built.gpu.handover)
    except StopIteration as error:
        raise RuntimeError("DALI did not hand out a block") from error
    (batches, groups), loan = built.source.take_block(BlockInfo(iteration, 0)), None
    if groups is None:
        if loans is not None and built.gpu is not None:
            arrays, loan = loans.lend(arrays, built.block_bytes(batches.sizes, batches.widths), built.gpu)
        named = dict(zip(built.source.arrays, arrays, strict=True))
        assert built.cut is not None, "batches are made for a loader"
        groups = iter((built.ranges.run("batches", built.cut, batches._replace(arrays=named)),))
    return Taken(groups, list(map(operator.mul, batches.sizes, batches.widths)), loan)


class BatchesAhead:
    """Takes one block ahead of the trainer, in a thread. While it does, nothing else may use the queue."""

    def __init__(self, built: BuiltSource, loans: Loans | None) -> None:
        self._built, self._loans = built, loans
        self._future: Task[Taken] | None = None
        self._threads: ReaderThreads | None = None

    @property
    def ready(self) -> int:
        """Blocks that have been taken ahead: 0 or 1."""
        future = self._future  # another thread may ask
        return int(future is not None and future.done())

    def begin(self, queue: BlockQueue, iteration: int) -> None:
        """Take the next block of a queue, which is `iteration` to its source. Does not block."""
        # A limit on threads ends no run: without one the block is taken when the trainer needs it.
        with contextlib.suppress(RuntimeError, MemoryError):
            self._threads = self._threads or ReaderThreads(1, "dali_pipes-batches")
            self._future = self._threads.submit(_take_in_thread, queue, self._built, self._loans, iteration)

    def take(self) -> Taken | None:
        """The block, None if there is none. Blocks while it is being taken; raises what `take_block` raised."""
        future, self._future = self._future, None
        if future is None or self._threads is None:
            return None
        try:
            taken: Taken = self._threads.result(future)
            return taken
        finally:
            del future  # or an error, whose traceback holds this frame, would hold itself

    def drop(self) -> None:
        """Let go of the block. Blocks while it is being taken."""
        with contextlib.suppress(Exception):
            self.take()

    def close(self) -> None:
        """The same, and end the thread, also if an interrupt came before it was known what the thread does."""
        threads, self._threads = self._threads, None
        if threads is not None and not self._built.source.is_forked:
            threads.stop()
        self._future = None


def _take_in_thread(queue: BlockQueue, built: BuiltSource, loans: Loans | None, iteration: int) -> Taken:
    if built.gpu is not None:
        built.gpu.adopt_thread()
    built.source.check_usable()  # it may have been closed before this thread got to run
    return take_block(queue, built, loans, iteration)
