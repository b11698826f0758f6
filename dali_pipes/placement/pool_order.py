"""Which rows of a block of batches are in which window of the pool, and what of the corpus a window holds.

    block of batches    rows 0 ... 5 of window 4, rows 6 ... 8 of window 5
    window 4            block 7 in slot 0, block 2 in slot 1, ...; each with the tokens that its last row reads after it

Integers only, for rows that are windows of one corpus, shuffled by blocks.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import ConfigError
from dali_pipes.operators.shuffled_rows import Slots
from dali_pipes.rows.base import KeyedRange
from dali_pipes.rows.block_order import BlockOrder, Window
from dali_pipes.rows.source import Source
from dali_pipes.schedule import Schedule, StepRange
from dali_pipes.schedule.plans import Plan

Int64Array = npt.NDArray[np.int64]

HALVES = 2
"""Windows in the pool: one that is read, and the next one."""


class PoolWindow(NamedTuple):
    """Which window is meant, and what is in it."""

    epoch: int
    number: int
    order: tuple[int, int]
    """Key of the pass and its first token: without them a window of another order could be taken for this one."""


class Span(NamedTuple):
    """The rows begin ... end - 1 of a block of batches, which are in one window."""

    window: PoolWindow
    rows: Window
    begin: int
    end: int


class PoolOrder:
    """The windows of a schedule's rows, whose order is by blocks."""

    def __init__(self, schedule: Schedule, source: Source) -> None:
        self._schedule, self._rows = schedule, source.rows
        order, stride = self.order(self.formula(0)), self.formula(0).stride
        rows = min(order.block_rows, order.count)
        self.num_slots = -(-order.num_blocks // order.num_windows)
        """Blocks of the largest window."""
        self.slot_tokens = min((rows - 1) * stride + self._rows.row_tokens, self._rows.span)
        self._missing = order.num_blocks * order.block_rows - order.count
        self._num_windows = order.num_windows
        self._fewest_rows = order.num_blocks // order.num_windows * order.block_rows - self._missing

    @property
    def half_tokens(self) -> int:
        return self.num_slots * self.slot_tokens

    @property
    def padding_start(self) -> int:
        """Where in the pool a padding row of plain windows begins: after both halves."""
        return HALVES * self.half_tokens

    def most_steps(self) -> int | None:
        """Steps of a block that reads at most two windows; None: any number. Raises `ConfigError` if there are none."""
        global_rows = self._schedule.global_rows
        if self._num_windows == 1:
            return None
        if global_rows > self._fewest_rows:
            raise ConfigError(
                f'placement = "pool": a step takes {global_rows:,} rows over all ranks, but a window of at most '
                f"{self.num_slots:,} blocks may have only {self._fewest_rows:,} rows; use a larger shuffle_window, a "
                'smaller batch_size, or placement = "host"'
            )
        return self._fewest_rows // global_rows

    def formula(self, epoch: int) -> KeyedRange:
        formula = self._schedule.interleave.formula(epoch)
        assert formula is not None, "rows without a formula"
        return formula

    def order(self, formula: KeyedRange) -> BlockOrder:
        assert formula.order.blocks is not None, "an order by rows"
        assert formula.order.kept_key is None, "a part of the rows"
        return formula.order.blocks

    def half(self, window: PoolWindow) -> int:
        """Which half of the pool a window is in: consecutive ones take turns, from epoch to epoch, too."""
        return (window.epoch * self._num_windows + window.number) % HALVES

    def after(self, window: PoolWindow) -> PoolWindow:
        """The window that is read next, if no steps are left out."""
        epoch, number = window.epoch, window.number + 1
        return self._window(epoch, number) if number < self._num_windows else self._window(epoch + 1, 0)

    def spans(self, steps: StepRange) -> list[Span]:
        """The rows of this rank in a range of steps, without padding, window by window."""
        formula, first, world_size = (
            self.formula(steps.epoch),
            self._schedule.first_row(steps),
            self._schedule.world_size,
        )
        order, key = self.order(formula), formula.key
        assert key is not None, "rows that are not shuffled"
        left = self._schedule.rows_known(steps.epoch) - first
        num_real = min(self._schedule.row_count(steps), -(-max(0, left) // world_size))
        spans: list[Span] = []
        begin = 0
        while begin < num_real:
            number = order.window_number(first + begin * world_size, key)
            rows = order.window(number, key)
            end = min(num_real, -(-(rows.first_place + rows.num_rows - first) // world_size))
            spans.append(Span(self._window(steps.epoch, number), rows, begin, end))
            begin = end
        return spans

    def blocks(self, window: PoolWindow) -> list[tuple[int, int]]:
        """Position and tokens of the part of the corpus in each slot."""
        formula = self.formula(window.epoch)
        order, (key, first) = self.order(formula), window.order
        end = self._rows.first_token + self._rows.span
        parts = []
        for block in order.window(window.number, key).blocks.tolist():
            num_rows = min(order.block_rows, order.count - block * order.block_rows)
            position = first + block * order.block_rows * formula.stride
            parts.append((position, min((num_rows - 1) * formula.stride + self._rows.row_tokens, end - position)))
        return parts

    def slots(self, rows: Window) -> Slots:
        """Where the rows of a window are, as kernels take it."""
        missing = self._missing if rows.short_end < rows.num_rows else 0
        return Slots(self.order(self.formula(0)).block_rows, self.slot_tokens, rows.short_end, missing)

    def moved(self, plan: Plan, spans: Sequence[Span]) -> Int64Array:
        """(R,): by how much the tokens of each row are further on in the pool than in the corpus; 0 for padding."""
        moved = np.zeros(len(plan.row_ids), np.int64)
        formula = self.formula(plan.steps.epoch)
        for window, rows, begin, end in spans:
            starts = plan.starts[begin:end]
            blocks, inside = np.divmod((starts - formula.first) // formula.stride, self.order(formula).block_rows)
            by_block = np.argsort(rows.blocks)
            slots = by_block[np.searchsorted(rows.blocks[by_block], blocks)]
            first = self.half(window) * self.half_tokens
            moved[begin:end] = first + slots * self.slot_tokens + inside * formula.stride - starts
        return moved

    def _window(self, epoch: int, number: int) -> PoolWindow:
        formula = self.formula(epoch)
        assert formula.key is not None, "rows that are not shuffled"
        return PoolWindow(epoch, number, (formula.key, formula.first))
