"""Requests of a rank: the rows of each of its steps, and the items that they take.

Rows are shared as `schedule` says. Those of a last partial step may not divide evenly: with 2 ranks and batch_size 2,

    step      0          1                an epoch of 7 rows, drop_last = False
    rank 0    0 2        4 6
    rank 1    1 3        5                a shorter batch: nothing is repeated

If the last step has fewer rows than ranks, each rank without a row repeats a row of another rank, so that all ranks
have the same number of steps.
"""

from collections.abc import Iterator
from itertools import count

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import ConfigError
from dali_pipes.rows.base import PADDING
from dali_pipes.samples.fetch import Request
from dali_pipes.samples.order import ItemOrder
from dali_pipes.schedule import Blocks, Position, StepRange, Steps

Int64Array = npt.NDArray[np.int64]
_ROWS_PLANNED = 4_096
"""Rows that are permuted together: one call for few rows costs as much as for hundreds."""


class RequestPlan:
    """The requests of a rank by its steps and the order of items."""

    def __init__(self, steps: Steps, order: ItemOrder) -> None:
        self._steps, self._order = steps, order
        self._together = max(1, _ROWS_PLANNED // steps.batch_size)

    def requests(self, start: Position, *, repeat: bool) -> Iterator[Request]:
        """From a position to the end of its epoch, or through all epochs."""
        blocks = Blocks(self._steps, self._together, start)
        for number in count():
            block = blocks.steps(number, None if repeat else 0)
            if block is None:
                return
            yield from self._of(block)

    def of_step(self, epoch: int, step: int, base: int) -> Request:
        """One step, numbered as if steps before row `base` had been whole. `ConfigError` if it does not exist."""
        steps = self._steps
        first = steps.step_number(base)
        end = first + steps.steps(base, max(epoch, 0))
        if epoch < 0 or not first <= step < end:
            raise ConfigError(
                f"step {step:,} of epoch {epoch:,} does not exist; expected step {first:,} to {end - 1:,} and an "
                "epoch of 0 or more"
            )
        return next(self._of(StepRange(epoch, base, step - first, 1)))

    def repeats(self, epoch: int = 0) -> int:
        """Ranks that repeat a row in the last step of an epoch."""
        steps = self._steps
        rest = steps.rows_known(epoch) % steps.global_rows
        return max(0, steps.world_size - rest) if rest and not steps.drop_last else 0

    def _of(self, block: StepRange) -> Iterator[Request]:
        steps, size = self._steps, self._steps.batch_size
        rows = steps.rows(block)
        parts = [rows[first : first + size] for first in range(0, len(rows), size)]
        repeated = 0
        if parts[-1][-1] == PADDING:
            parts[-1] = parts[-1][:-1]
            if not len(parts[-1]):
                parts[-1], repeated = self._another(block), 1
        items = np.split(
            self._order.items(block.epoch, np.concatenate(parts)), np.cumsum([len(part) for part in parts])[:-1]
        )
        for number, (part, of_part) in enumerate(zip(parts, items, strict=True), start=1):
            after = (block.epoch, steps.rows_after(block.base, block.first_step + number - 1, block.epoch))
            is_last = number == len(parts)
            ends = is_last and not steps.steps(after[1], block.epoch, most=1)
            yield Request(block.epoch, part.tolist(), of_part.tolist(), after, ends, repeated if is_last else 0)

    def _another(self, block: StepRange) -> Int64Array:
        """A row of the last step that another rank has."""
        steps, last = self._steps, block.first_step + block.num_steps - 1
        first = block.base + last * steps.global_rows
        rest = steps.rows_after(block.base, last, block.epoch) - first
        return np.array([first + steps.rank % rest])
