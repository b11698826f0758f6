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
from typing import NamedTuple, Protocol

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


class WindowMark(NamedTuple):
    """A window of an epoch's plan, and the rows of the windows before it."""

    window: int
    rows_before: int


class RowCounts(Protocol):
    """How many rows an epoch has, where that depends on the documents in it and is found out as it goes."""

    def count(self, epoch: int, at_least: int | None = None) -> int:
        """Rows known by now: all of the epoch's, or at least `at_least` of them; None counts all. May block."""

    def is_complete(self, epoch: int) -> bool:
        """Whether all rows of the epoch have been counted. Counts none."""

    def estimate(self, epoch: int) -> int:
        """Rows of the epoch, as far as that can be said without counting them all."""

    def mark(self, epoch: int, row: int) -> WindowMark:
        """Where `row`, which has been counted, is in the plan. Does not block."""

    def seek(self, epoch: int, row: int, mark: WindowMark) -> bool:
        """Count on from a saved mark. False if `row` cannot be there. May block."""


@dataclass(frozen=True)
class Schedule:
    """The order of one rank. With windows every method is a pure function and costs the same at any position.

    Rows made of documents are counted by `documents` instead, window by window of its plan, so a method may have to
    wait for the plan of the rows it is asked about.
    """

    windows: Windows
    batch_size: int
    rank: int = 0
    world_size: int = 1
    shuffle: bool = True
    seed: int = 0
    drop_last: bool = True
    documents: RowCounts | None = None

    def __post_init__(self) -> None:
        if self.steps(most=1) == 0:
            raise ConfigError(
                f"{self.rows_known(0)} rows make no step of {self.global_rows} rows ({self.world_size} ranks x "
                f"batch_size {self.batch_size}) on any rank; use more data, a smaller batch_size, or drop_last = False"
            )

    def rows_known(self, epoch: int, at_least: int | None = None) -> int:
        """Rows of an epoch, over all ranks; with documents counted no further than `at_least` needs."""
        return self.windows.count if self.documents is None else self.documents.count(epoch, at_least)

    @property
    def global_rows(self) -> int:
        """Rows of a whole step, over all ranks (G)."""
        return self.world_size * self.batch_size

    @property
    def token_span(self) -> int:
        """Tokens from `windows.first` on that rows are made of, the labels behind them included."""
        return self.windows.num_tokens if self.documents is not None else self.windows.span

    @property
    def pads(self) -> bool:
        """Whether a step may hold padding rows on this or another rank (see `step_rows`)."""
        return not self.drop_last and self.world_size > 1

    def steps(self, base: int = 0, epoch: int = 0, most: int | None = None) -> int:
        """Number of steps from row `base` to the end of its epoch, the same on every rank; counted up to `most`."""
        rows = self.rows_known(epoch, None if most is None else base + most * self.global_rows) - base
        steps = self.steps_of(rows)
        return steps if most is None else min(steps, most)

    def steps_of(self, rows: int) -> int:
        """Steps that a number of rows makes."""
        return rows // self.global_rows if self.drop_last else -(-rows // self.global_rows)

    def step_rows(self, base: int, step: int, epoch: int = 0) -> int:
        """Rows this rank gets in one step, padding rows included: batch_size, or fewer in a last partial step.

        The rows of a partial step are shared so that every rank gets equally many; where they do not divide evenly,
        the ranks that come out short get one padding row: row number -1, every label ignored.
        """
        return -(-(self.rows_after(base, step, epoch) - base - step * self.global_rows) // self.world_size)

    def rows_after(self, base: int, step: int, epoch: int = 0) -> int:
        """Rows of the epoch consumed by all ranks when `step` is done."""
        end = base + (step + 1) * self.global_rows
        return min(end, self.rows_known(epoch, end))

    def rows(self, steps: StepRange) -> Int64Array:
        """Row numbers of this rank in a range of steps, step after step: int64 (R,), -1 for padding rows."""
        first, count = self.first_row(steps), self.row_count(steps)
        rows = np.arange(first, first + count * self.world_size, self.world_size, dtype=np.int64)
        rows[rows >= self.rows_known(steps.epoch, first + count * self.world_size)] = PADDING
        return rows

    def first_row(self, steps: StepRange) -> int:
        """Row number of this rank's first row in a range of steps; the next ones follow at a distance of world_size."""
        return steps.base + steps.first_step * self.global_rows + self.rank

    def row_count(self, steps: StepRange) -> int:
        """Rows this rank gets in a range of steps, padding rows included."""
        last_step = steps.first_step + steps.num_steps - 1
        return (steps.num_steps - 1) * self.batch_size + self.step_rows(steps.base, last_step, steps.epoch)

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
        return position if self.steps(position.rows, position.epoch, most=1) > 0 else Position(position.epoch + 1, 0)


class Blocks:
    """Blocks of up to `batches_per_run` steps, from `start` through epoch after epoch; a block never crosses one."""

    def __init__(self, schedule: Schedule, batches_per_run: int, start: Position) -> None:
        self.schedule, self.batches_per_run, self.start = schedule, batches_per_run, start
        self._walked = (0, 0)  # an epoch, counted from the start, and the number of its first block

    def steps(self, block: int, epoch_index: int | None = None) -> StepRange | None:
        """Steps of a block. `epoch_index` None: blocks are numbered on through all epochs.

        Otherwise they are numbered within the epoch_index-th epoch from the start, and None says that it has no such
        block. Cheap at any block for windows; with documents, for blocks asked for in order.
        """
        if epoch_index is None:
            epoch_index, block = self._walk(block) if self.schedule.documents is not None else self._divide(block)
        base = self._base(epoch_index)
        first = block * self.batches_per_run
        end = self.schedule.steps(base, self.start.epoch + epoch_index, most=first + self.batches_per_run)
        return StepRange(self.start.epoch + epoch_index, base, first, end - first) if end > first else None

    def _base(self, epoch_index: int) -> int:
        return self.start.rows if epoch_index == 0 else 0

    def _divide(self, block: int) -> tuple[int, int]:
        """Epoch and block within it, where all epochs are equally long."""
        first_blocks = -(-self.schedule.steps(self.start.rows) // self.batches_per_run)
        if block < first_blocks:
            return 0, block
        epochs, rest = divmod(block - first_blocks, -(-self.schedule.steps() // self.batches_per_run))
        return epochs + 1, rest

    def _walk(self, block: int) -> tuple[int, int]:
        """The same where they are not: an epoch's end is met when its rows have been counted."""
        epoch_index, first_block = self._walked if block >= self._walked[1] else (0, 0)
        while True:
            most = (block - first_block + 1) * self.batches_per_run
            steps = self.schedule.steps(self._base(epoch_index), self.start.epoch + epoch_index, most)
            if steps > most - self.batches_per_run:
                self._walked = epoch_index, first_block
                return epoch_index, block - first_block
            first_block += -(-steps // self.batches_per_run)
            epoch_index += 1
