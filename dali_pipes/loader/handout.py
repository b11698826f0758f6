"""Batches of one block on their way to the trainer, handed out by an iterator that is not Python code.

A training step leaves nothing of the loader in the CPU's caches, and every line of Python that `next()` then runs is
fetched from memory again. So none runs for a batch:

    map(list.pop, islice(repeat(rest, n), k))   `repeat` knows how often it may still be asked, and `list.pop` forgets
                                                the batch; k of the n batches of the block have been made

How many batches have been taken is counted when somebody asks. Each step of it is one call of a C function, which no
other thread and no signal can interrupt.
"""

import time
from collections.abc import Iterable, Iterator
from itertools import chain, islice, repeat
from operator import length_hint
from typing import Any, NamedTuple

from dali_pipes.runtime.threads import to_keep
from dali_pipes.schedule import StepRange

Batch = dict[str, Any]


class Taken(NamedTuple):
    """How much of a block was handed out: batches, one a step, and their tokens with padding."""

    steps: StepRange
    batches: int
    num_tokens: int


class _Block:
    __slots__ = ("left", "num_tokens", "rest", "steps", "stopped")

    def __init__(self, steps: StepRange, num_tokens: list[int]) -> None:
        self.rest: list[Batch] = []
        """Batches that have been made, the next one last."""
        self.left = repeat(self.rest, steps.num_steps)
        """Has an entry for each batch that can still be handed out."""
        self.stopped: list[object] = []
        """Has an entry for each batch that will not be handed out."""
        self.steps, self.num_tokens = steps, num_tokens


class Handout:
    """The batches of an iteration's current block. Any thread may call `taken` and `stop`, at any moment."""

    __slots__ = ("__weakref__", "_block", "_error", "made_s")

    def __init__(self) -> None:
        self._block = _Block(StepRange(0, 0, 0, 0), [])
        self._error: Exception | None = None
        self.made_s = 0.0
        """Spent in making batches that were handed out."""

    def fill(self, groups: Iterable[list[Batch]], steps: StepRange, num_tokens: list[int]) -> Iterator[Batch]:
        """Begin the next block. Returns its batches, each of which is forgotten here when it is handed out.

        They end early where `groups` raises an error, which `check` then raises.

        groups:     the batches, some at a time; the next ones are asked for once these have been handed out, and the
                    lists are emptied
        num_tokens: of each batch, with padding
        """
        self._block = block = _Block(steps, num_tokens)
        return chain.from_iterable(self._made(block, groups))

    def _made(self, block: _Block, groups: Iterable[list[Batch]]) -> Iterator[Iterator[Batch]]:
        if not length_hint(block.left):  # it was stopped before
            return
        following = iter(groups)
        while True:
            asked = time.perf_counter()
            try:
                batches = next(following, None)
            except Exception as error:
                self._error = to_keep(error)
                return
            if batches is None:
                return
            count = len(batches)
            batches.reverse()
            block.rest.extend(batches)
            batches.clear()  # or they would be held here while they are used
            self.made_s += time.perf_counter() - asked
            yield map(list.pop, islice(block.left, count))
            if not length_hint(block.left):  # all were handed out, or it was stopped: the rest is not made
                block.rest.clear()
                return

    def check(self) -> None:
        """Raise the error that ended the batches of the block, once."""
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # or its traceback, which holds this frame, would hold it

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
