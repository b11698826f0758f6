"""Batches of one block on their way to the trainer, handed out by an iterator that is not Python code.

A training step leaves nothing of the loader in the CPU's caches, and every line of Python that `next()` then runs is
fetched from memory again. So none runs for a batch:

    map(list.pop, repeat(rest, n))      `repeat` knows how often it may still be asked, and `list.pop` forgets the batch

How many batches have been taken is counted when somebody asks. Each step of it is one call of a C function, which no
other thread and no signal can interrupt.
"""

from collections.abc import Iterator
from itertools import repeat
from operator import length_hint
from typing import Any, NamedTuple

from dali_pipes.schedule import StepRange

Batch = dict[str, Any]


class Taken(NamedTuple):
    """How much of a block was handed out: batches, one a step, and their tokens with padding."""

    steps: StepRange
    batches: int
    num_tokens: int


class _Block:
    __slots__ = ("left", "num_tokens", "rest", "steps", "stopped")

    def __init__(self, batches: list[Batch], steps: StepRange, num_tokens: list[int]) -> None:
        assert len(batches) == steps.num_steps, "a block has a batch for each of its steps"
        self.rest = batches[::-1]
        self.left = repeat(self.rest, len(batches))
        """Has an entry for each batch that can still be handed out."""
        self.stopped: list[object] = []
        """Has an entry for each batch that will not be handed out."""
        self.steps, self.num_tokens = steps, num_tokens


class Handout:
    """The batches of an iteration's current block. Any thread may call `taken` and `stop`, at any moment."""

    __slots__ = ("__weakref__", "_block")

    def __init__(self) -> None:
        self._block = _Block([], StepRange(0, 0, 0, 0), [])

    def fill(self, batches: list[Batch], steps: StepRange, num_tokens: list[int]) -> Iterator[Batch]:
        """Begin the next block. Returns its batches, each of which is forgotten here when it is handed out.

        num_tokens: of each batch, with padding
        """
        self._block = block = _Block(batches, steps, num_tokens)
        return map(list.pop, block.left)

    def taken(self) -> Taken:
        """What was handed out of the block."""
        block, stopped, left = self._block, -1, 0  # the next block may begin meanwhile
        while stopped != len(block.stopped):  # else it was stopped between the two lines below
            stopped = len(block.stopped)
            left = length_hint(block.left)
        count = block.steps.num_steps - stopped - left
        return Taken(block.steps, count, sum(block.num_tokens[:count]))

    def stop(self) -> None:
        """Let go of the batches that were not handed out: the next one is asked for where the block came from."""
        block = self._block
        block.stopped.extend(block.left)
        block.rest.clear()
