"""Queues of blocks: what DALI's and the direct one have in common, and the direct one."""

from typing import Any, Protocol

from dali_pipes.engine.block_source import BlockInfo, BlockSource


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

        None at all where the source has cut the block into batches: see `BlockSource.take_block`.

        On a GPU they are ready in the order of `stream`, a raw handle, without waiting for the device; None waits.
        """

    def drain(self) -> int:
        """Drop what is in flight; returns the number that the source will see for the next block."""

    def close(self) -> None:
        """Drop the queue and what is in it."""


class DirectQueue:
    """The blocks of a source on the CPU without DALI, which `BlockSource.take_block` then has.

    It asks the source when a block is taken; the source itself reads ahead.
    """

    depth = in_flight = 0

    def __init__(self, source: BlockSource) -> None:
        self._source = source
        self._next_iteration = 0

    def schedule(self) -> None:
        pass

    def take(self, stream: int | None = None) -> list[Any]:
        self._source(BlockInfo(self._next_iteration, 0))
        self._next_iteration += 1
        return []

    def drain(self) -> int:
        return self._next_iteration

    def close(self) -> None:
        pass
