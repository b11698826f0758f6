"""The plan of a range of steps: which tokens of the corpus are in which row, and where they go in a buffer."""

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.documents import Pieces, some_rows
from dali_pipes.errors import ConfigError
from dali_pipes.rows.base import PADDING, ReadableRows, Rows
from dali_pipes.rows.source import Source
from dali_pipes.schedule.schedule import Schedule, StepRange
from dali_pipes.uris import FilePath

Int64Array = npt.NDArray[np.int64]

PLAN_ROWS = 8192


class RowLocation(NamedTuple):
    """Where a row's tokens come from."""

    file: FilePath
    offset: int
    """First token of the row, counted in tokens from the first token of the file's data."""
    source: int
    """Number of the source, in the order of `mixture`; 0 for the only one."""
    position: int
    """First token of the row, counted in the corpus seen as one stream."""
    row_id: int
    """Place of the row in its epoch's order."""
    source_name: str | None = None
    """Name of the source; None without a mixture."""


@dataclass
class Plan:
    """Rows of one block: their places in the epoch (R,), -1 for padding rows, and where their tokens are."""

    steps: StepRange
    row_ids: Int64Array
    rows: Rows
    widths: Int64Array | None = None
    """(R,): positions of each row, where they differ: the same for all rows of a step, and mostly on every rank."""
    sizes: Int64Array | None = None
    """(K,): rows of each batch, where a place of the order is a batch; None: `batch_size`, the last maybe fewer."""

    @property
    def starts(self) -> Int64Array:
        """(R,): position of each row's first token in the corpus; -1 for a row without tokens."""
        return self.rows.starts

    @property
    def pieces(self) -> Pieces | None:
        """The pieces of the rows; None where each row is one run of tokens."""
        return self.rows.pieces

    def field(self, name: str) -> Int64Array:
        """(R,): a field of the batches that has an entry for each row. A new one needs an entry here."""
        if name == "source_ids":
            return np.minimum(self.row_ids, 0) if self.rows.sources is None else self.rows.sources
        return {"row_ids": self.row_ids}[name]

    def protect(self) -> None:
        """Make the arrays read-only: callers may hold views of them."""
        rows = self.rows
        columns = (*rows._replace(pieces=None, fim=None), *(rows.pieces or ()), *(rows.fim or ()))
        for array in (self.row_ids, self.widths, self.sizes, *columns):
            if array is not None:
                array.flags.writeable = False

    def part(self, steps: StepRange, first: int, batch_size: int) -> "Plan":
        """The plan of some of its steps, from the step that is number `first` here."""
        end_step, sizes = first + steps.num_steps, None
        if self.sizes is None:  # the last step of an epoch may have fewer rows
            begin, end = first * batch_size, min(end_step * batch_size, len(self.row_ids))
        else:
            sizes = self.sizes[first:end_step]
            begin = int(self.sizes[:first].sum())
            end = begin + int(sizes.sum())
        starts, pieces, sources, passes, fim = self.rows
        widths = None if self.widths is None else self.widths[begin:end]
        sources = None if sources is None else sources[begin:end]
        passes = None if passes is None else passes[begin:end]
        if pieces is not None:
            if fim is not None:
                fim = fim.chosen(slice(*pieces.row_offsets[[begin, end]].tolist()))
            pieces = some_rows(pieces, begin, end)
        rows = Rows(starts[begin:end], pieces, sources, passes, fim)
        return Plan(steps, self.row_ids[begin:end], rows, widths, sizes)

    def batch_of(self, row: int, batch_size: int) -> int:
        """The batch that a row is in, counted from the first of the plan."""
        if self.sizes is None:
            return row // batch_size
        return int(np.searchsorted(np.cumsum(self.sizes), row, side="right"))

    def width(self, seq_len: int) -> int:
        """Positions of the first row; `seq_len`: of all, where they do not differ."""
        return seq_len if self.widths is None else int(self.widths[0])

    def runs(self, seq_len: int) -> list[tuple[int, int]]:
        """How many rows of one width follow one another, and that width, from the first row to the last.

        Where a place is a batch, those of each batch.
        """
        if self.widths is None:
            return [(len(self.row_ids), seq_len)]
        if self.sizes is not None:
            ends = np.cumsum(self.sizes)
            return list(zip(self.sizes.tolist(), self.widths[ends - 1].tolist(), strict=True))
        firsts = np.flatnonzero(np.diff(self.widths, prepend=0))
        return list(zip(np.diff(firsts, append=len(self.widths)).tolist(), self.widths[firsts].tolist(), strict=True))

    def row_begins(self, rows: ReadableRows) -> Int64Array:
        """Where each row begins in a buffer, and the end of the last: (R + 1,).

        A row takes the tokens of its positions there, those that are labels alone, and those before its pieces.
        """
        extra = rows.row_tokens - rows.seq_len
        if self.pieces is not None and self.pieces.lookback is not None:
            sizes = np.full(len(self.row_ids), rows.row_tokens) if self.widths is None else self.widths + extra
            before = np.concatenate(([0], np.cumsum(self.pieces.tokens_before)))[self.pieces.row_offsets]
            return np.concatenate(([0], np.cumsum(sizes + np.diff(before))))
        if self.widths is None:
            return _even_begins(len(self.row_ids), rows.row_tokens)
        return np.concatenate(([0], np.cumsum(self.widths + extra)))

    def position(self, row: int, column: int) -> int:
        """Where in the corpus the token at `column` of what is read for a row comes from; below 0 for a sentinel."""
        if self.pieces is None or self.starts[row] < 0:
            return int(self.starts[row]) + column
        starts, lengths = self.runs_of_row(row, as_read=True)
        run, last = 0, len(starts) - 1
        while run < last and column >= lengths[run]:
            column -= int(lengths[run])
            run += 1
        return int(starts[run]) + column

    def runs_of_row(self, row: int, *, as_read: bool = False) -> tuple[Int64Array, Int64Array]:
        """What a row of pieces consists of: where each run of tokens begins in the corpus, and its length.

        A start below 0 is a sentinel, as in `Runs`. as_read: with the tokens before its pieces that are read, too
        """
        assert self.pieces is not None
        part = slice(*self.pieces.row_offsets[row : row + 2].tolist())
        starts, lengths = self.pieces.starts[part], self.pieces.lengths[part]
        before = self.pieces.tokens_before[part] if as_read else np.zeros_like(lengths)
        if self.rows.fim is not None:
            from dali_pipes.objectives.fim import runs_of  # with the first objective of this kind

            runs = runs_of(self.rows.fim.chosen(part), lengths)
            starts, lengths, before = runs.starts, runs.lengths, before[runs.pieces] * (runs.begins == 0)
        return starts - before, lengths + before


@lru_cache(16)
def _even_begins(count: int, row_tokens: int) -> Int64Array:
    begins = np.arange(0, (count + 1) * row_tokens, row_tokens)
    begins.flags.writeable = False
    return begins


def plan_steps(schedule: Schedule, steps: StepRange) -> Plan:
    """The rows of this rank in a range of steps. Where rows are a formula, the cost depends on their number alone."""
    row_ids, interleave = schedule.rows(steps), schedule.interleave
    rows = interleave.plan(steps.epoch, row_ids)
    if interleave.token_batches is not None:
        from dali_pipes.rows.batch_rows import rows_of_batches  # with the first rows of documents

        batches = rows_of_batches(interleave.token_batches, row_ids, rows)
        return Plan(steps, batches.row_ids, batches.rows, np.repeat(batches.widths, batches.sizes), batches.sizes)
    if not len(row_ids):
        return Plan(steps, row_ids, rows)
    first = steps.base + steps.first_step * schedule.global_rows
    end = schedule.rows_after(steps.base, steps.first_step + steps.num_steps - 1, steps.epoch)
    widths = interleave.widths(steps.epoch, first, end, schedule.global_rows)
    if widths is not None:
        widths = np.repeat(widths, schedule.batch_size)[: len(row_ids)]
    return Plan(steps, row_ids, rows, widths)


def plan_step(schedule: Schedule, epoch: int, step: int, base: int = 0) -> Plan:
    """The plan of step `step` of an epoch, whose steps are counted as if those before row `base` had been full.

    Rows that hold documents are planned as far as the step. Raises `ConfigError` for a step that does not exist.
    """
    first_step = -(-base // schedule.global_rows)
    if epoch < 0 or step < first_step or schedule.steps(base, epoch, most=step - first_step + 1) <= step - first_step:
        last_step = first_step + schedule.steps(base, max(epoch, 0)) - 1
        raise ConfigError(
            f"step {step:,} of epoch {epoch:,} does not exist; expected step {first_step:,} to {last_step:,} of "
            "epoch 0 or later"
        )
    return plan_steps(schedule, StepRange(epoch, base, step - first_step, 1))


def steps_reading(schedule: Schedule, steps: StepRange, position: int) -> list[int] | None:
    """Steps of an epoch, numbered as in `plan_step`, in which a rank reads a token of the corpus.

    None: too many to be named. A partial step's padding rows, which may show the epoch's first row, are not counted.
    """
    rows, base = schedule.interleave.places_of(steps.epoch, position), steps.base
    if rows is None:
        return None
    if base % schedule.global_rows:  # steps before a resume within the epoch do not have a number in this run
        rows = [row for row in rows if row >= base]
    first = schedule.step_number(base)
    end = first + schedule.steps(base, steps.epoch)
    return sorted({step for row in rows if (step := first + (row - base) // schedule.global_rows) < end})


def locate_row(source: Source, plan: Plan, step: int, row: int) -> RowLocation:
    """Where row `row` of the plan of step `step` comes from. Raises `ConfigError` for one that does not have tokens."""
    if not 0 <= row < len(plan.row_ids):
        raise ConfigError(
            f"row {row:,} does not exist: step {step:,} has rows 0 to {len(plan.row_ids) - 1:,} on this rank"
        )
    if plan.row_ids[row] == PADDING:
        raise ConfigError(
            f"row {row:,} of step {step:,} is padding: it does not come from a file, and its labels are ignored"
        )
    position = int(plan.starts[row])
    place = source.locate(position)
    source_number, name, position = source.origin(position)
    return RowLocation(place.file, place.offset, source_number, position, int(plan.row_ids[row]), name)


class PlanCache:
    """Plans of ranges of steps, computed for about `PLAN_ROWS` rows at a time; safe for several threads.

    A permutation costs some 150 small NumPy calls whatever the number of rows, so planning a block of 64 rows alone
    costs half as much as planning 1,024. Measured with 64, 1,024 and 8,192 rows: 1.7, 0.20 and 0.06 us a row for one
    source, 7.0, 0.71 and 0.20 for a mixture of 5, 7.9, 0.82 and 0.25 for one of 100.

    num_threads, queue_depth: how many plan blocks ahead, and how many blocks then wait to be handed out. No plan is
    made twice for blocks that are asked for in order.
    """

    def __init__(self, schedule: Schedule, batches_per_run: int, *, num_threads: int = 1, queue_depth: int = 1) -> None:
        self._schedule, self._batches_per_run = schedule, batches_per_run
        blocks = PLAN_ROWS // (batches_per_run * schedule.batch_size)
        if schedule.interleave.most_planned is not None:
            blocks = min(blocks, schedule.interleave.most_planned // (batches_per_run * schedule.global_rows))
        blocks = max(1, blocks)
        self._steps_per_plan = blocks * batches_per_run
        self._blocks_kept, self._blocks_a_plan = 0, blocks
        self.keep_for(num_threads=num_threads, queue_depth=queue_depth)
        self._plans: dict[tuple[int, int, int], Plan] = {}
        self._making: dict[tuple[int, int, int], threading.Lock] = {}
        self._lock = threading.Lock()

    def keep_for(self, *, num_threads: int, queue_depth: int) -> None:
        """Keep at least this many plans from now on; a smaller number than before changes nothing."""
        # The oldest plan goes first. While a block is on its way, threads may plan `num_threads` blocks before it and
        # all that are read ahead by the time it is handed out, each with the rest of its plan; after a restart, also
        # the blocks that were on their way from the place left.
        needed = 3 * (num_threads + 1) + queue_depth + 4 * self._blocks_a_plan
        self._blocks_kept = max(self._blocks_kept, needed)

    def plan(self, steps: StepRange) -> Plan:
        """The plan of one block, whose first step is a multiple of batches_per_run."""
        number = steps.first_step // self._steps_per_plan
        first_step = number * self._steps_per_plan
        key = (steps.epoch, steps.base, number)
        whole = self._plans.get(key)
        if whole is None:
            whole = self._whole_plan(key, steps)
        return whole.part(steps, steps.first_step - first_step, self._schedule.batch_size)

    def _whole_plan(self, key: tuple[int, int, int], steps: StepRange) -> Plan:
        with self._lock:
            making = self._making.setdefault(key, threading.Lock())
        with making:  # others make other plans meanwhile
            whole = self._plans.get(key)
            if whole is None:
                first_step = key[2] * self._steps_per_plan
                end = first_step + self._steps_per_plan
                _, length = next(self._schedule.runs(steps.base, steps.epoch))  # up to the next step that is left out
                end = self._schedule.steps(steps.base, steps.epoch, most=end if length is None else min(end, length))
                whole_steps = steps._replace(first_step=first_step, num_steps=end - first_step)
                whole = plan_steps(self._schedule, whole_steps)
                if whole.pieces is not None:
                    widths = self._schedule.interleave.seq_len if whole.widths is None else whole.widths
                    whole.rows = whole.rows._replace(pieces=whole.pieces.with_rows(widths))
                whole.protect()  # before it is kept: blocks are told their rows, and batches theirs, as views of it
            with self._lock:
                if key not in self._plans:
                    self._plans[key] = whole
                    self._drop_oldest()
                self._making.pop(key, None)
            return whole

    def _drop_oldest(self) -> None:
        """As long as the plans made since are those of enough blocks."""
        blocks = {key: -(-plan.steps.num_steps // self._batches_per_run) for key, plan in self._plans.items()}
        newer = sum(blocks.values())
        for key, count in blocks.items():
            newer -= count
            if newer < self._blocks_kept:
                return
            del self._plans[key]

    def plan_next(self, plan: Plan) -> None:
        """Pack the documents after those of a plan in advance, so that later calls do not wait. May block."""
        if len(plan.row_ids) and plan.row_ids[0] != PADDING:
            self._schedule.interleave.plan_next(plan.steps.epoch, int(plan.row_ids[0]))
