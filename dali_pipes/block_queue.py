"""Blocks in order, ahead of the trainer: DALI's prefetch queue, and what a loader needs around it.

`BlockStream` keeps the queue filled, hands out good blocks before an error that lies behind them, and can be moved to
another position. It never waits for a block that is still being read while another one is ready.
"""

import importlib.util
from typing import Any, Protocol

import numpy as np

from dali_pipes.config import LoaderConfig
from dali_pipes.pipeline import BuiltSource, Graph, define_pipeline
from dali_pipes.schedule import Blocks, Position, StepRange
from dali_pipes.source import BlockInfo, BlockSource


class BlockQueue(Protocol):
    """Blocks in order, some of them on their way. For one thread at a time."""

    in_flight: int

    def schedule(self) -> None:
        """Ask for one more block. May block while its tokens are read; raises the source's errors."""

    def take(self, stream: Any = None) -> list[Any]:
        """Arrays of the oldest block asked for, one an output, each supporting DLPack and owned by the caller.

        On a GPU they are ready in the order of `stream`, without waiting for the device; None waits for it.
        """

    def drain(self) -> int:
        """Drop what is in flight; returns the number that the source will see for the next block."""

    def close(self) -> None:
        """Drop the queue and what is in it."""


class DaliQueue:
    """DALI's prefetch queue over a pipeline."""

    def __init__(self, pipe: Any) -> None:
        pipe.build()
        self._pipe = pipe
        self._scheduled = 0
        self.in_flight = 0

    def schedule(self) -> None:
        self._pipe.schedule_run()
        self._scheduled += 1
        self.in_flight += 1

    def take(self, stream: Any = None) -> list[Any]:
        outputs = [output[0] for output in self._pipe.share_outputs(stream)]
        self._pipe.release_outputs()  # gives DALI its queue place back; the outputs own their memory (exec_dynamic)
        self.in_flight -= 1
        return outputs

    def drain(self) -> int:
        while self.in_flight:
            self.take()
        return self._scheduled

    def close(self) -> None:
        self._pipe = None
        self.in_flight = 0


class DirectQueue:
    """The same blocks without DALI, for CPU machines where it is not installed: widened in the calling thread."""

    def __init__(self, source: BlockSource) -> None:
        self._source = source
        self._next_iteration = 0
        self.in_flight = 0

    def schedule(self) -> None:
        self.in_flight += 1

    def take(self, stream: Any = None) -> list[Any]:
        arrays = self._source(BlockInfo(self._next_iteration, 0))
        self._next_iteration += 1
        self.in_flight -= 1
        return [array[0].astype(np.int64) for array in arrays]

    def drain(self) -> int:
        self.in_flight = 0
        return self._next_iteration

    def close(self) -> None:
        self.in_flight = 0


def open_queue(built: BuiltSource, config: LoaderConfig, graph: Graph | None) -> tuple[BlockQueue, str]:
    """A queue over a source and the name of its engine: "dali", or "direct" on a CPU without DALI."""
    if built.device is None and graph is None and not _dali_installed():
        return DirectQueue(built.source), "direct"
    return DaliQueue(define_pipeline(built, config, graph)), "dali"


class BlockStream:
    """The blocks from a position on, through epoch after epoch. For one thread at a time."""

    def __init__(self, built: BuiltSource, config: LoaderConfig, graph: Graph | None = None) -> None:
        self._built, self._config, self._graph = built, config, graph
        self._queue: BlockQueue | None = None
        self._first_iteration = 0
        self._next_block = 0
        self._blocks = self._blocks_from(Position(0, 0))
        self._error: Exception | None = None
        self.engine = "not started"

    @property
    def queue_depth(self) -> int:
        """Blocks that are ready, in the queue or read ahead."""
        return (self._queue.in_flight if self._queue is not None else 0) + self._built.source.blocks_ready()

    def seek(self, position: Position) -> None:
        """Make `position` the start of the next block. Free when the stream stands there already."""
        if self._queue is not None and self._error is None:
            ahead = self._blocks.steps(self._next_block)
            if ahead is not None and ahead.first_step == 0 and Position(ahead.epoch, ahead.base) == position:
                return
        if self._queue is None or self._error is not None:
            self._drop_queue()
            self._queue, self.engine = open_queue(self._built, self._config, self._graph)
        self._first_iteration = self._queue.drain()
        self._built.source.restart(position, self._first_iteration)
        self._blocks = self._blocks_from(position)
        self._next_block = 0

    def peek(self) -> StepRange:
        """Steps of the next block."""
        steps = self._blocks.steps(self._next_block)
        assert steps is not None
        return steps

    def take(self, stream: Any = None) -> list[Any]:
        """Arrays of the next block, one an output, for use on `stream`. Blocks while it is not ready.

        An error of the source is raised after the good blocks before it have been taken. The stream must then `seek`.
        """
        assert self._queue is not None
        try:
            self._fill(self._queue)
            if self._queue.in_flight == 0 and self._error is not None:
                raise self._error
            arrays = self._queue.take(stream)
        except BaseException:
            self._drop_queue()  # what the queue holds after an interrupt is not known; seek makes a new one
            raise
        self._next_block += 1
        return arrays

    def close(self) -> None:
        """Drop the queue, stop the reader threads and close the corpus; idempotent."""
        self._drop_queue()
        self._built.source.close()
        self._built.source.corpus.close()

    def _fill(self, queue: BlockQueue) -> None:
        while self._error is None and queue.in_flight < self._config.prefetch_queue_depth:
            iteration = self._first_iteration + self._next_block + queue.in_flight
            if queue.in_flight > 0 and not self._built.source.ready(BlockInfo(iteration, 0)):
                return
            try:
                queue.schedule()
            except Exception as error:
                self._error = error

    def _drop_queue(self) -> None:
        if self._queue is not None:
            self._queue.close()
        self._queue = None
        self._error = None

    def _blocks_from(self, position: Position) -> Blocks:
        return Blocks(self._built.schedule, self._built.source.batches_per_run, position)


def _dali_installed() -> bool:
    try:
        return importlib.util.find_spec("nvidia.dali") is not None
    except ModuleNotFoundError:  # no package called nvidia at all
        return False
