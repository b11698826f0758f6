"""The schedule: which rows belong to which step of which rank, in which epoch.

Row i of an epoch belongs to step i // G, G = world_size * batch_size, and to rank i % world_size. With batch_size 2 on
two ranks, an epoch of 10 rows is

    step      0          1          2
    rank 0    0 2        4 6        8        (the partial step exists only with drop_last = False)
    rank 1    1 3        5 7        9

Row numbers are places in the epoch's order, not yet windows of the corpus: the order maps one to the other
(`operators.permute`, keyed by `Schedule.key`; the identity for validation and for shuffle = False).

A run that goes on with another world_size or batch_size counts its steps from the row where it stopped, so a range of
steps always has a `base` row; it is 0 for a whole epoch.
"""

import hashlib
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import ConfigError
from dali_pipes.schedule.windows import Windows

Int64Array = npt.NDArray[np.int64]
PADDING = -1


class Position(NamedTuple):
    """A place in the data order: `rows` of `epoch` have been consumed, counted over all ranks."""

    epoch: int
    rows: int


class StepRange(NamedTuple):
    """`num_steps` steps of `epoch`, counted from the step that begins at row `base`."""

    epoch: int
    base: int
    first_step: int
    num_steps: int


@dataclass(frozen=True)
class Schedule:
    """The order of one rank. Every method is a pure function of its arguments and costs the same at any position."""

    windows: Windows
    batch_size: int
    rank: int = 0
    world_size: int = 1
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = True

    def __post_init__(self) -> None:
        if self.steps() == 0:
            raise ConfigError(
                f"{self.num_rows} rows make no step of {self.global_rows} rows ({self.world_size} ranks x batch_size "
                f"{self.batch_size}) on any rank; use more data, a smaller batch_size, or drop_last = False"
            )

    @property
    def num_rows(self) -> int:
        """Rows of an epoch, over all ranks."""
        return self.windows.count

    @property
    def global_rows(self) -> int:
        """Rows of a whole step, over all ranks (G)."""
        return self.world_size * self.batch_size

    @property
    def pads(self) -> bool:
        """Whether a step may hold padding rows on this or another rank (see `step_rows`)."""
        return not self.drop_last and self.world_size > 1

    def steps(self, base: int = 0) -> int:
        """Number of steps from row `base` to the end of its epoch: the same on every rank."""
        rows = self.num_rows - base
        return rows // self.global_rows if self.drop_last else -(-rows // self.global_rows)

    def step_rows(self, base: int, step: int) -> int:
        """Rows this rank gets in one step, padding rows included: batch_size, or fewer in a last partial step.

        The rows of a partial step are shared so that every rank gets equally many; where they do not divide evenly,
        the ranks that come out short get one padding row: row number -1, every label ignored.
        """
        rows = min(self.global_rows, self.num_rows - base - step * self.global_rows)
        return -(-rows // self.world_size)

    def rows_after(self, base: int, step: int) -> int:
        """Rows of the epoch consumed by all ranks when `step` is done."""
        return min(base + (step + 1) * self.global_rows, self.num_rows)

    def rows(self, steps: StepRange) -> Int64Array:
        """Row numbers of this rank in a range of steps, step after step: int64 (R,), -1 for padding rows."""
        first, count = self.first_row(steps), self.row_count(steps)
        rows = np.arange(first, first + count * self.world_size, self.world_size, dtype=np.int64)
        rows[rows >= self.num_rows] = PADDING
        return rows

    def first_row(self, steps: StepRange) -> int:
        """Row number of this rank's first row in a range of steps; the next ones follow at a distance of world_size."""
        return steps.base + steps.first_step * self.global_rows + self.rank

    def row_count(self, steps: StepRange) -> int:
        """Rows this rank gets in a range of steps, padding rows included."""
        last_step = steps.first_step + steps.num_steps - 1
        return (steps.num_steps - 1) * self.batch_size + self.step_rows(steps.base, last_step)

    def key(self, epoch: int) -> int | None:
        """The 64-bit key of an epoch's order, drawn from (seed, epoch) with SHA-256; None for the identity order."""
        if not self.shuffle:
            return None
        digest = hashlib.sha256(f"dali_pipes order {self.seed} {epoch}".encode()).digest()
        return int.from_bytes(digest[:8], "little")

    def starts(self, window_numbers: Int64Array) -> Int64Array:
        """First token, in the corpus, of each window: int64, same shape."""
        return window_numbers * self.windows.stride + self.windows.first

    def normalise(self, position: Position) -> Position:
        """The same place, written as the start of the next epoch when no step is left in this one."""
        return position if self.steps(position.rows) > 0 else Position(position.epoch + 1, 0)


@dataclass(frozen=True)
class Blocks:
    """Blocks of up to `batches_per_run` steps, from `start` through epoch after epoch; a block never crosses one."""

    schedule: Schedule
    batches_per_run: int
    start: Position

    def steps(self, block: int, epoch_index: int | None = None) -> StepRange | None:
        """Steps of a block. `epoch_index` None: blocks are numbered on through all epochs.

        Otherwise they are numbered within the epoch_index-th epoch from the start, and None says that it has no such
        block.
        """
        first_blocks = -(-self.schedule.steps(self.start.rows) // self.batches_per_run)
        if epoch_index is None:
            if block < first_blocks:
                epoch_index = 0
            else:
                whole_blocks = -(-self.schedule.steps() // self.batches_per_run)
                epochs, block = divmod(block - first_blocks, whole_blocks)
                epoch_index = epochs + 1
        base = self.start.rows if epoch_index == 0 else 0
        first = block * self.batches_per_run
        count = min(self.batches_per_run, self.schedule.steps(base) - first)
        return StepRange(self.start.epoch + epoch_index, base, first, count) if count > 0 else None
