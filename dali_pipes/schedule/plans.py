"""The plan of a range of steps: which tokens of the corpus are in which row, and where they go in a staging buffer.

windows      row r is tokens starts[r] ... starts[r] + T of the corpus, as they lie
pieces       row r is put together from pieces of documents; a piece knows how far its labels may look ahead
"""

import threading
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus import Corpus
from dali_pipes.documents import Pieces, pieces_of_windows
from dali_pipes.errors import ConfigError
from dali_pipes.operators import permute
from dali_pipes.operators.permute import preimage
from dali_pipes.rows.document_rows import DocumentRows
from dali_pipes.schedule import PADDING, Schedule, StepRange

Int64Array = npt.NDArray[np.int64]

PLAN_ROWS = 1024
STEP_ROWS_PLANNED = 1 << 16
"""Rows made of documents, over all ranks, that are planned at once, though at least a block of steps. Every rank plans
the windows of a whole step, so a first batch among 1,024 ranks waited seconds for the plans of 128 steps."""


class RowLocation(NamedTuple):
    """Where a row's tokens come from."""

    file: Path
    offset: int
    """First token of the row, counted in tokens from the first token of the file's data."""
    source: int
    """Number of the data source; 0 while there is one."""
    position: int
    """First token of the row, counted in the corpus seen as one stream."""
    row_id: int
    """Place of the row in its epoch's order."""


@dataclass
class Plan:
    """Rows of one block: row numbers in the epoch (-1: padding) and the first token of each (-1: none); int64 (R,)."""

    steps: StepRange
    row_ids: Int64Array
    starts: Int64Array
    pieces: Pieces | None = None
    widths: Int64Array | None = None
    """(R,): positions of each row, with length buckets: the same for all rows of a step, on every rank."""

    def protect(self) -> None:
        """Let nobody write to the arrays, who may have been handed a view of them."""
        for array in (self.row_ids, self.starts, self.widths, *(self.pieces or ())):
            if array is not None:
                array.flags.writeable = False

    def rows(self, steps: StepRange, begin: int, end: int) -> "Plan":
        """The plan of rows begin ... end - 1, which are those of `steps`."""
        pieces = None if self.pieces is None else some_rows(self.pieces, begin, end)
        widths = None if self.widths is None else self.widths[begin:end]
        return Plan(steps, self.row_ids[begin:end], self.starts[begin:end], pieces, widths)

    def runs(self, seq_len: int) -> list[tuple[int, int]]:
        """How many rows of one width follow one another, and that width, from the first row to the last."""
        if self.widths is None:
            return [(len(self.row_ids), seq_len)]
        firsts = np.flatnonzero(np.diff(self.widths, prepend=0))
        return list(zip(np.diff(firsts, append=len(self.widths)).tolist(), self.widths[firsts].tolist(), strict=True))

    def places(self, width: int) -> Int64Array:
        """Where each row begins in a staging buffer, and the end of the last: (R + 1,).

        A row takes `width` tokens there, or with length buckets as many as it has positions.
        """
        return np.concatenate(
            ([0], np.cumsum(np.full(len(self.row_ids), width) if self.widths is None else self.widths))
        )

    def position(self, row: int, column: int) -> int:
        """Where in the corpus the token at `column` of a row comes from."""
        if self.pieces is None or self.starts[row] < 0:
            return int(self.starts[row]) + column
        piece = int(self.pieces.row_offsets[row])
        last = int(self.pieces.row_offsets[row + 1]) - 1
        while piece < last and column >= self.pieces.lengths[piece]:
            column -= int(self.pieces.lengths[piece])
            piece += 1
        return int(self.pieces.starts[piece]) + column


def some_rows(pieces: Pieces, begin: int, end: int) -> Pieces:
    """The pieces of rows begin ... end - 1."""
    first, last = int(pieces.row_offsets[begin]), int(pieces.row_offsets[end])
    return Pieces(pieces.row_offsets[begin : end + 1] - first, *(column[first:last] for column in pieces[1:]))


@dataclass(frozen=True)
class StreamPieces:
    """Windows of the stream, cut where documents end (at the rows' ends alone, without `offsets`).

    A row reads `lookahead` tokens more than it shows, for its last labels, but none from `limit` on.
    """

    offsets: Int64Array | None
    seq_len: int
    lookahead: int
    limit: int
    mask_boundaries: bool
    """Whether labels end with their document; else they go on as the stream does."""

    @property
    def width(self) -> int:
        """Tokens that a row takes in a staging buffer."""
        return self.seq_len + self.lookahead

    def pieces(self, starts: Int64Array, row_ids: Int64Array) -> Pieces:
        """Pieces of the windows that begin at `starts`; padding rows have none."""
        real = row_ids != PADDING
        if self.offsets is None:
            lengths = np.full(int(real.sum()), self.seq_len)
            cut = Pieces(np.arange(len(lengths) + 1), starts[real], lengths, np.full(len(lengths), self.limit))
        else:
            cut = pieces_of_windows(self.offsets, starts[real], self.seq_len)
        counts = np.zeros(len(starts), np.int64)
        counts[real] = np.diff(cut.row_offsets)
        rows = np.repeat(starts, counts)
        ends = np.minimum(rows + self.width, self.limit)
        if self.mask_boundaries:
            ends = np.minimum(ends, cut.document_ends)
        return Pieces(np.concatenate(([0], np.cumsum(counts))), cut.starts, cut.lengths, ends)

    def reads(self, plan: Plan) -> tuple[Int64Array, Int64Array, Int64Array]:
        """What to read for a plan: starts in the corpus, lengths, places in the staging buffer."""
        lengths = np.where(plan.row_ids == PADDING, 0, np.minimum(self.width, self.limit - plan.starts))
        return plan.starts, lengths, self.width * np.arange(len(plan.starts))


class PackedPieces:
    """Rows made of documents, laid out piece behind piece."""

    def __init__(self, rows: DocumentRows) -> None:
        self.documents = rows
        self.width = rows.seq_len

    def reads(self, plan: Plan) -> tuple[Int64Array, Int64Array, Int64Array]:
        """What to read for a plan: starts in the corpus, lengths, places in the staging buffer."""
        assert plan.pieces is not None
        return plan.pieces.starts, plan.pieces.lengths, staged(plan.pieces, plan.places(self.width)).starts

    def step_widths(self, schedule: Schedule, plan: Plan) -> Int64Array | None:
        """`Plan.widths`: for each step the bucket of the longest row that any rank has in it."""
        buckets, steps = self.documents.buckets, plan.steps
        if buckets is None or plan.pieces is None or not len(plan.row_ids):
            return None
        first = steps.base + steps.first_step * schedule.global_rows
        end = schedule.rows_after(steps.base, steps.first_step + steps.num_steps - 1, steps.epoch)
        longest = self.documents.longest_rows(steps.epoch, first, end, schedule.global_rows)
        return np.repeat(buckets.widths(longest), schedule.batch_size)[: len(plan.row_ids)]


Layout = StreamPieces | PackedPieces | None


def token_span(schedule: Schedule, layout: Layout) -> int:
    """Tokens of the corpus, from `windows.first` on, that rows and their labels read."""
    if isinstance(layout, StreamPieces):
        return min(schedule.windows.span + layout.lookahead - 1, layout.limit - schedule.windows.first)
    return schedule.token_span


def staged(pieces: Pieces, places: Int64Array) -> Pieces:
    """The same pieces by their places in a staging buffer, where rows begin at `places` (R + 1,)."""
    rows = np.repeat(np.arange(len(pieces.row_offsets) - 1), np.diff(pieces.row_offsets))
    before = np.cumsum(pieces.lengths) - pieces.lengths
    row_begins = np.concatenate((before, [0]))[pieces.row_offsets[:-1]]
    starts = places[rows] + before - row_begins[rows]
    return Pieces(pieces.row_offsets, starts, pieces.lengths, starts + (pieces.document_ends - pieces.starts))


def plan_rows(schedule: Schedule, steps: StepRange, layout: Layout = None) -> Plan:
    """Row numbers and tokens of a range of steps. With windows its cost depends on the number of rows alone."""
    row_ids = schedule.rows(steps)
    if isinstance(layout, PackedPieces):
        pieces = layout.documents.pieces(steps.epoch, row_ids)
        has_some = np.diff(pieces.row_offsets) > 0
        starts = np.full(len(row_ids), -1)
        starts[has_some] = pieces.starts[pieces.row_offsets[:-1][has_some]]
        plan = Plan(steps, row_ids, starts, pieces)
        plan.widths = layout.step_widths(schedule, plan)
        return plan
    order = np.maximum(row_ids, 0) if schedule.pads else row_ids  # a padding row shows the epoch's first row
    key = schedule.key(steps.epoch)
    windows = order if key is None else permute(order, schedule.windows.count, key)
    starts = schedule.starts(windows)
    return Plan(steps, row_ids, starts, None if layout is None else layout.pieces(starts, row_ids))


def plan_step(schedule: Schedule, layout: Layout, epoch: int, step: int, base: int = 0) -> Plan:
    """The plan of step `step` of an epoch, whose steps are counted as if those before row `base` had been full.

    Rows made of documents are planned as far as the step. Raises `ConfigError` for a step that does not exist.
    """
    first_step = -(-base // schedule.global_rows)
    if epoch < 0 or step < first_step or schedule.steps(base, epoch, most=step - first_step + 1) <= step - first_step:
        last_step = first_step + schedule.steps(base, max(epoch, 0)) - 1
        raise ConfigError(f"step {step} of epoch {epoch}: expected {first_step} to {last_step}, epoch 0 or later")
    return plan_rows(schedule, StepRange(epoch, base, step - first_step, 1), layout)


def steps_reading(schedule: Schedule, steps: StepRange, position: int, width: int) -> list[int]:
    """Steps of an epoch, numbered as in `plan_step`, in which a rank reads a token of the corpus; `width` a row.

    For rows that are windows: those on the border of two are read for both, and more often where windows overlap. A
    partial step's padding rows, which may show the epoch's first row, are not counted.
    """
    windows, key, base = schedule.windows, schedule.key(steps.epoch), steps.base
    behind = position - windows.first
    lowest, highest = -((width - 1 - behind) // windows.stride), behind // windows.stride
    numbers = range(max(0, lowest), min(highest, windows.count - 1) + 1)
    rows = [number if key is None else preimage(number, windows.count, key) for number in numbers]
    if base % schedule.global_rows:  # steps before a resume within the epoch have no number in this run
        rows = [row for row in rows if row >= base]
    first = schedule.step_number(base)
    end = first + schedule.steps(base, steps.epoch)
    return sorted({step for row in rows if (step := first + (row - base) // schedule.global_rows) < end})


def locate_row(corpus: Corpus, plan: Plan, step: int, row: int) -> RowLocation:
    """Where row `row` of the plan of step `step` comes from. Raises `ConfigError` for one that comes from nowhere."""
    if not 0 <= row < len(plan.row_ids):
        raise ConfigError(f"row {row}: step {step} has rows 0 to {len(plan.row_ids) - 1} on this rank")
    if plan.row_ids[row] == PADDING:
        raise ConfigError(f"row {row} of step {step} is padding: it comes from no file and its labels are ignored")
    position = int(plan.starts[row])
    place = corpus.locate(position)
    return RowLocation(place.file, place.offset, 0, position, int(plan.row_ids[row]))


class PlanCache:
    """Plans of ranges of steps, computed for about `PLAN_ROWS` rows at a time; safe for several threads.

    A permutation costs some 150 small NumPy calls whatever the number of rows, so planning a block of 64 rows by itself
    costs nearly as much as planning 1,024: measured 2 us a row against 0.3.

    num_threads, queue_depth: how many plan blocks ahead, and how many blocks then wait to be handed out. A loader asks
    for a block's pieces again when it hands it out, and no plan is made twice for blocks that are asked for in order.
    """

    def __init__(
        self,
        schedule: Schedule,
        batches_per_run: int,
        layout: Layout = None,
        *,
        num_threads: int = 1,
        queue_depth: int = 1,
    ) -> None:
        self._schedule, self._layout, self._batches_per_run = schedule, layout, batches_per_run
        blocks = PLAN_ROWS // (batches_per_run * schedule.batch_size)
        if isinstance(layout, PackedPieces):
            blocks = min(blocks, STEP_ROWS_PLANNED // (batches_per_run * schedule.global_rows))
        blocks = max(1, blocks)
        self._steps_per_plan = blocks * batches_per_run
        # The oldest plan goes first. While a block is on its way, threads may plan `num_threads` blocks before it and
        # all that are read ahead by the time it is handed out, each with the rest of its plan; after a restart, also
        # the blocks that were on their way from the place left.
        self._blocks_kept = 3 * (num_threads + 1) + queue_depth + 4 * blocks
        self._plans: dict[tuple[int, int, int], Plan] = {}
        self._lock = threading.Lock()

    def plan(self, steps: StepRange) -> Plan:
        """The plan of one block, whose first step is a multiple of batches_per_run."""
        number = steps.first_step // self._steps_per_plan
        first_step = number * self._steps_per_plan
        key = (steps.epoch, steps.base, number)
        whole = self._plans.get(key)  # without the lock, which is held while other plans are made
        if whole is None:
            whole = self._whole_plan(key, steps)
        begin = (steps.first_step - first_step) * self._schedule.batch_size
        return whole.rows(steps, begin, begin + self._schedule.row_count(steps))

    def _whole_plan(self, key: tuple[int, int, int], steps: StepRange) -> Plan:
        first_step = key[2] * self._steps_per_plan
        with self._lock:
            if key not in self._plans:
                end = first_step + self._steps_per_plan
                _, length = next(self._schedule.runs(steps.base, steps.epoch))  # up to the next step that is left out
                end = self._schedule.steps(steps.base, steps.epoch, most=end if length is None else min(end, length))
                whole_steps = steps._replace(first_step=first_step, num_steps=end - first_step)
                plan = plan_rows(self._schedule, whole_steps, self._layout)
                plan.protect()  # before it is kept: blocks are told their rows, and batches theirs, as views of it
                self._plans[key] = plan
                self._drop_oldest()
            return self._plans[key]

    def _drop_oldest(self) -> None:
        """As long as the plans behind it are those of enough blocks."""
        blocks = {key: -(-plan.steps.num_steps // self._batches_per_run) for key, plan in self._plans.items()}
        behind = sum(blocks.values())
        for key, count in blocks.items():
            behind -= count
            if behind < self._blocks_kept:
                return
            del self._plans[key]

    def plan_behind(self, plan: Plan) -> None:
        """See that nobody will have to wait for the documents behind a plan to be packed. Blocks."""
        if isinstance(self._layout, PackedPieces) and len(plan.row_ids) and plan.row_ids[0] != PADDING:
            self._layout.documents.plan_behind(plan.steps.epoch, int(plan.row_ids[0]))
