"""Batches of one block on their way to the trainer, handed out by an iterator that is not Python code.

A training step leaves nothing of the loader in the CPU's caches, and every line of Python that `next()` then runs is
fetched from memory again. So none runs for a batch: `list.pop` is called until it gives the end mark. How many batches
have been taken is counted when somebody asks.
"""

from collections.abc import Callable, Iterator
from typing import Any

from dali_pipes.schedule import StepRange

Batch = dict[str, Any]

_END_MARKS = 8
"""One ends an iterator; the others are there for threads that stop it at the same moment, and take one meanwhile."""


class Handout:
    """The batches of an iteration's current block. Any thread may call `stop`, at any moment.

    steps:      those of the block, one a batch
    num_tokens: of each batch, with padding
    """

    __slots__ = ("__weakref__", "_rest", "_stopped", "num_tokens", "steps")

    def __init__(self) -> None:
        self.fill([], StepRange(0, 0, 0, 0), [])

    def fill(self, batches: list[Batch], steps: StepRange, num_tokens: list[int]) -> Iterator[Batch]:
        """Begin the next block. Returns its batches, each of which is forgotten here when it is handed out."""
        assert len(batches) == steps.num_steps, "a block has a batch for each of its steps"
        rest: list[Batch | None] = [None] * _END_MARKS
        rest += reversed(batches)
        self.steps, self.num_tokens, self._stopped, self._rest = steps, num_tokens, 0, rest
        pop: Callable[[], Batch] = rest.pop  # type: ignore[assignment]
        return iter(pop, None)

    @property
    def taken(self) -> int:
        """Batches of the block that were handed out."""
        return self.steps.num_steps - self._stopped - max(0, len(self._rest) - _END_MARKS)

    @property
    def tokens(self) -> int:
        """Those of the batches that were handed out."""
        return sum(self.num_tokens[: self.taken])

    def stop(self) -> None:
        """Let go of the batches that were not handed out: the next one is asked for where the block came from."""
        rest = self._rest
        while rest.pop() is not None:
            self._stopped += 1
        rest.append(None)
