"""The schedule: which rows belong to which step of which rank, in which epoch.

Row i of an epoch belongs to step i // G, G = world_size * batch_size, and to rank i % world_size. With batch_size 2 on
two ranks, an epoch of 10 rows is

    step      0          1          2
    rank 0    0 2        4 6        8        (the partial step exists only with drop_last = False)
    rank 1    1 3        5 7        9

Row numbers are places in the epoch's order: what they hold, the interleave says. The schedule knows how many there are,
and nothing of sources, tokens or documents. With `batch_tokens` a place holds the rows of a batch, and batch_size is 1.

A run that goes on with another world_size or batch_size counts its steps from the row where it stopped, so a range of
steps always has a `base` row; it is 0 for a whole epoch.

A curriculum changes the length of rows between two steps, so it ends a run of steps, too.

Steps that are left out (`Schedule.skip_steps`) change no row and no number: what is left of an epoch is a series of
runs of steps, each with its own base. Without step 1, the epoch above is the runs with base 0 and base 8.
"""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import ConfigError
from dali_pipes.rows.base import PADDING
from dali_pipes.runtime.messages import counted
from dali_pipes.schedule.curriculum import Curriculum
from dali_pipes.schedule.interleave import Counted, Interleave

Int64Array = npt.NDArray[np.int64]
_MOST_EPOCHS_WITHOUT_STEPS = 10_000


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
class Steps:
    """The steps of one rank, of rows of any kind. Where all epochs are equally long, every method costs the same at any
    position.
    """

    interleave: Counted
    batch_size: int
    rank: int = 0
    world_size: int = 1
    drop_last: bool = True
    skip_steps: tuple[tuple[int, int, int], ...] = ()
    """(first, end, epoch), rising, apart from one another: steps first to end - 1 of an epoch are not handed out."""

    def __post_init__(self) -> None:
        if self.steps(most=1) == 0:
            raise ConfigError(
                f"{counted(self.rows_known(0), 'row')} {'is' if self.rows_known(0) == 1 else 'are'} fewer than one "
                f"step: {counted(self.global_rows, 'row')} ({counted(self.world_size, 'rank')} x batch_size "
                f"{self.batch_size:,}); use more data, a smaller batch_size, or drop_last = False"
            )
        if self.normalize(Position(0, 0)).epoch > 0:
            raise ConfigError(
                f"skip_steps skips {self.steps():,} of {self.steps():,} steps of epoch 0 "
                f"({counted(self.world_size, 'rank')} x batch_size {self.batch_size:,}): "
                f"{[list(steps) for steps in self.skip_steps]}; skip fewer steps"
            )

    def rows_known(self, epoch: int, at_least: int | None = None) -> int:
        """Rows of an epoch, over all ranks, counted no further than `at_least` needs."""
        return self.interleave.count(epoch, at_least)

    @property
    def global_rows(self) -> int:
        """Rows of a whole step, over all ranks (G)."""
        return self.world_size * self.batch_size

    @property
    def pads(self) -> bool:
        """Whether a step may hold padding rows on this or another rank (see `step_rows`)."""
        return not self.drop_last and self.world_size > 1

    def steps(self, base: int = 0, epoch: int = 0, most: int | None = None) -> int:
        """Number of steps from row `base` to the end of its epoch, the same on every rank; counted up to `most`.

        Those of `skip_steps` count, here and wherever steps are numbered.
        """
        rows = max(0, self.rows_known(epoch, None if most is None else base + most * self.global_rows) - base)
        steps = self.steps_of(rows)
        return steps if most is None else min(steps, most)

    def steps_of(self, rows: int) -> int:
        """Steps that a number of rows makes."""
        return rows // self.global_rows if self.drop_last else -(-rows // self.global_rows)

    def skipped(self, epoch: int) -> list[tuple[int, int]]:
        """The ranges of `skip_steps` in one epoch: first step, and the one after the last."""
        return [(first, end) for first, end, number in self.skip_steps if number == epoch]

    def left_of(self, steps: int, epoch: int) -> int:
        """How many of the first `steps` steps of an epoch are handed out."""
        return steps - sum(max(0, min(end, steps) - first) for first, end in self.skipped(epoch))

    def step_number(self, row: int) -> int:
        """Number, within its epoch, of the step that begins at `row`, in a run with steps of this size."""
        return -(-row // self.global_rows)

    def counted_from(self, begun: Position, epoch: int) -> int:
        """The row that steps of an epoch are numbered from, in a run that went on at `begun`: see `plan_step`."""
        return begun.rows if begun.epoch == epoch and begun.rows % self.global_rows else 0

    def runs(self, base: int, epoch: int) -> Iterator[tuple[int, int | None]]:
        """Runs of steps that are handed out from row `base` of an epoch on: base row, and number of steps.

        None is as many as the epoch has. Ranges of `skip_steps` past the end of the epoch give runs without steps. Rows
        of one run have one length.
        """
        switches = self._switches(epoch)
        for begin, length in self._not_skipped(base, epoch):
            first, left = begin, length
            for switch in switches:
                steps = (switch - first) // self.global_rows
                if first < switch and (left is None or steps < left):
                    yield first, steps
                    first, left = switch, None if left is None else left - steps
            yield first, left

    @property
    def is_one_run(self) -> bool:
        """Whether the steps of an epoch are one run, but for those of `skip_steps`."""
        return True

    def _switches(self, epoch: int) -> list[int]:
        """The rows of an epoch, rising, from which rows have another length."""
        return []

    def _not_skipped(self, base: int, epoch: int) -> Iterator[tuple[int, int | None]]:
        """The same for rows of any length."""
        step = self.step_number(base)
        for first, end in self.skipped(epoch):
            if first > step:
                yield base, first - step
            if end > step:
                base, step = base + (end - step) * self.global_rows, end
        yield base, None

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
        rows[rows >= self.rows_known(steps.epoch, first + (count - 1) * self.world_size + 1)] = PADDING
        return rows

    def first_row(self, steps: StepRange) -> int:
        """Row number of this rank's first row in a range of steps; the next ones follow at a distance of world_size."""
        return steps.base + steps.first_step * self.global_rows + self.rank

    def row_count(self, steps: StepRange) -> int:
        """Rows this rank gets in a range of steps, padding rows included."""
        last_step = steps.first_step + steps.num_steps - 1
        return (steps.num_steps - 1) * self.batch_size + self.step_rows(steps.base, last_step, steps.epoch)

    def normalize(self, position: Position) -> Position:
        """The same place, written as the start of the next step that is handed out, in this epoch or a later one.

        Epochs without any are passed over: those that are left out whole, and, where rows of documents are few and
        differ from epoch to epoch, those that make no whole step. ConfigError after ten thousand of them.
        """
        epoch, rows = position
        for _ in range(_MOST_EPOCHS_WITHOUT_STEPS):
            step = self.step_number(rows)
            rows += sum(end - step for first, end in self.skipped(epoch) if first <= step < end) * self.global_rows
            if self.steps(rows, epoch, most=1) > 0:
                return Position(epoch, rows)
            epoch, rows = epoch + 1, 0
            if self.interleave.is_uniform and not self.skipped(epoch):
                return Position(epoch, rows)
        raise ConfigError(
            f"epochs {position.epoch:,} to {epoch:,} do not contain a single step of {self.global_rows:,} rows to hand "
            "out; use more data, a smaller batch_size, or drop_last = False"
        )

    def after(self, steps: StepRange, count: int) -> Position:
        """The place after the first `count` steps of a range, at least one."""
        step_rows = self.global_rows
        rows = steps.base + (steps.first_step + count) * step_rows
        if count < steps.num_steps:
            return Position(steps.epoch, rows)
        known = self.rows_known(steps.epoch, rows + step_rows)
        if known >= rows + step_rows and not self.skip_steps:  # another whole step, as nearly always
            return Position(steps.epoch, rows)
        return self.normalize(Position(steps.epoch, min(rows, known)))

    def next_epoch(self, epoch: int) -> Position:
        """Where the next epoch that has a step begins."""
        return self.normalize(Position(epoch + 1, 0))


@dataclass(frozen=True)
class Schedule(Steps):
    """The steps of rows of tokens, whose length a curriculum may change.

    Rows that hold documents are counted as they are planned, so a method may have to wait for the plan of the rows that
    it is asked about.
    """

    interleave: Interleave

    def __post_init__(self) -> None:
        if self.curriculum is not None:
            self.curriculum.check_steps()
        super().__post_init__()

    @property
    def curriculum(self) -> Curriculum | None:
        """What changes the length of rows, and of optimizer steps, during the run."""
        return self.interleave if isinstance(self.interleave, Curriculum) else None

    def places(self, position: Position) -> int:
        """Places of the interleave, from the beginning of an epoch, that a run which stands there has begun."""
        curriculum, (epoch, rows) = self.curriculum, position
        if curriculum is None or not curriculum.cuts:
            return rows
        return curriculum.places_begun(rows, curriculum.segments(epoch), curriculum.num_places(epoch))

    @property
    def is_one_run(self) -> bool:
        return self.curriculum is None

    def _switches(self, epoch: int) -> list[int]:
        return [] if self.curriculum is None else self.curriculum.switches(epoch)


class Blocks:
    """Blocks of up to `batches_per_run` steps, from `start` through epoch after epoch; a block never crosses one.

    Nor does it cross steps that are left out. Epochs without any other step are passed over.
    """

    def __init__(self, schedule: Steps, batches_per_run: int, start: Position) -> None:
        self.schedule, self.batches_per_run, self.start = schedule, batches_per_run, start
        self._firsts = [0]  # number of the first block of each epoch walked to, counted from the start
        self._begins = [start]  # of epochs, as far as they are known, where they are not all alike
        self._are_alike = schedule.interleave.is_uniform and not schedule.skip_steps
        # Where epochs are alike and in one run: the steps of the one that the start is in, and of each later one.
        self._num_steps = (
            (schedule.steps(start.rows, start.epoch), schedule.steps(0, start.epoch))
            if self._are_alike and schedule.is_one_run
            else None
        )

    def steps(self, block: int, epoch_index: int | None = None) -> StepRange | None:
        """Steps of a block. `epoch_index` None: blocks are numbered on through all epochs.

        Otherwise they are numbered within the epoch_index-th epoch from the start; None for a block past its end. Cheap
        at any block where epochs are equally long; else, and with `skip_steps`, the epochs before it are walked through
        once.
        """
        if epoch_index is None:
            epoch_index, block = self._divide(block) if self._are_alike else self._walk(block)
        if self._num_steps is not None:
            start, first = self._begin(epoch_index), block * self.batches_per_run
            left = self._num_steps[epoch_index > 0] - first
            return StepRange(start.epoch, start.rows, first, min(left, self.batches_per_run)) if left > 0 else None
        found = self._in_epoch(epoch_index, block)
        return found if isinstance(found, StepRange) else None

    def _in_epoch(self, epoch_index: int, block: int) -> StepRange | int:
        """Steps of a block of an epoch, or the number of its blocks where that is not above `block`."""
        start = self._begin(epoch_index)
        blocks = 0
        for base, length in self.schedule.runs(start.rows, start.epoch):
            first = (block - blocks) * self.batches_per_run
            most = first + self.batches_per_run
            steps = self.schedule.steps(base, start.epoch, most=most if length is None else min(most, length))
            if steps > first:
                return StepRange(start.epoch, base, first, steps - first)
            blocks += -(-steps // self.batches_per_run)
        return blocks

    def _begin(self, epoch_index: int) -> Position:
        """Where an epoch begins, counted from the start and without those that are passed over."""
        if self._are_alike:
            return self.start if epoch_index == 0 else Position(self.start.epoch + epoch_index, 0)
        while len(self._begins) <= epoch_index:
            self._begins.append(self.schedule.next_epoch(self._begins[-1].epoch))
        return self._begins[epoch_index]

    def _divide(self, block: int) -> tuple[int, int]:
        """Epoch and block within it, where all epochs are equally long."""
        first_steps, later_steps = self._num_steps or (self.schedule.steps(self.start.rows), self.schedule.steps())
        first_blocks = -(-first_steps // self.batches_per_run)
        if block < first_blocks:
            return 0, block
        epochs, rest = divmod(block - first_blocks, -(-later_steps // self.batches_per_run))
        return epochs + 1, rest

    def _walk(self, block: int) -> tuple[int, int]:
        """The same where they are not: an epoch's end is met when its rows have been counted."""
        # Blocks are asked for again, from further back than the last one: an epoch that was walked to is not again.
        epoch_index = bisect_right(self._firsts, block) - 1
        while True:
            first_block = self._firsts[epoch_index]
            found = self._in_epoch(epoch_index, block - first_block)
            if isinstance(found, StepRange):
                return epoch_index, block - first_block
            epoch_index += 1
            if epoch_index == len(self._firsts):
                self._firsts.append(first_block + found)
