"""The schedule is arithmetic: checked against plain enumeration, and at sizes where nothing could be enumerated."""

import itertools
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.config.skip_steps import in_steps, parse_ranges
from dali_pipes.errors import ConfigError
from dali_pipes.rows.window_counts import WindowMark
from dali_pipes.rows.windows import WindowRows, Windows
from dali_pipes.schedule import PADDING, Blocks, Position, Schedule, StepRange
from dali_pipes.schedule.plans import plan_steps


def make(
    rows: int, batch_size: int, rank: int = 0, world_size: int = 1, source: Any = None, **settings: Any
) -> Schedule:
    source = WindowRows(Windows(0, rows, seq_len=4, stride=4, num_tokens=rows * 4 + 1)) if source is None else source
    return Schedule(source, batch_size, rank=rank, world_size=world_size, **settings)


def test_hand_written_steps() -> None:
    expected = {0: [[0, 2], [4, 6], [8]], 1: [[1, 3], [5, 7], [9]]}
    for rank, steps in expected.items():
        schedule = make(10, batch_size=2, rank=rank, world_size=2, drop_last=False)
        assert schedule.steps() == 3
        assert [schedule.rows(StepRange(0, 0, s, 1)).tolist() for s in range(3)] == steps
        assert schedule.rows(StepRange(0, 0, 0, 3)).tolist() == [row for step in steps for row in step]
    assert make(10, batch_size=2, world_size=2).steps() == 2


def test_hand_written_padding() -> None:
    """Nine rows: the last step has one row for two ranks, so the second rank's row is padding."""
    last = StepRange(0, 0, 2, 1)
    assert make(9, 2, rank=0, world_size=2, drop_last=False).rows(last).tolist() == [8]
    assert make(9, 2, rank=1, world_size=2, drop_last=False).rows(last).tolist() == [PADDING]


@given(
    rows=st.integers(1, 60),
    batch_size=st.integers(1, 5),
    world_size=st.integers(1, 5),
    drop_last=st.booleans(),
    base=st.integers(0, 59),
)
def test_ranks_partition_every_step(rows: int, batch_size: int, world_size: int, drop_last: bool, base: int) -> None:
    """Every rank has the same number of steps and of rows in a step; together they hold each row once."""
    base %= rows
    try:
        ranks = [make(rows, batch_size, r, world_size, drop_last=drop_last) for r in range(world_size)]
    except ConfigError:
        assert drop_last
        assert rows < batch_size * world_size
        return
    (steps,) = {schedule.steps(base) for schedule in ranks}
    seen = []
    for step in range(steps):
        parts = [schedule.rows(StepRange(0, base, step, 1)) for schedule in ranks]
        assert {len(part) for part in parts} == {ranks[0].step_rows(base, step)}
        first = base + step * batch_size * world_size
        for rank, part in enumerate(parts):
            assert all((row - first) % world_size == rank for row in part if row != PADDING)
        held = [int(row) for part in parts for row in part if row != PADDING]
        seen += held
        assert ranks[0].rows_after(base, step) == base + len(seen)
    whole = (rows - base) // (batch_size * world_size) * batch_size * world_size
    assert sorted(seen) == list(range(base, base + whole if drop_last else rows))


@given(
    rows=st.integers(1, 40),
    batch_size=st.integers(1, 4),
    per_run=st.integers(1, 7),
    epoch=st.integers(0, 3),
    consumed=st.integers(0, 39),
    drop_last=st.booleans(),
)
def test_blocks_run_through_epochs(
    rows: int, batch_size: int, per_run: int, epoch: int, consumed: int, drop_last: bool
) -> None:
    """Numbered on or numbered within epochs, blocks list every step once, in order, and never cross an epoch."""
    if drop_last and rows < batch_size:
        return
    schedule = make(rows, batch_size, drop_last=drop_last)
    start = schedule.normalize(Position(epoch, consumed % rows))
    blocks = Blocks(schedule, per_run, start)
    expected = [(start.epoch, start.rows, s) for s in range(schedule.steps(start.rows))]
    expected += [(start.epoch + e, 0, s) for e in (1, 2) for s in range(schedule.steps())]
    listed: list[tuple[int, int, int]] = []
    number = 0
    while len(listed) < len(expected):
        block = blocks.steps(number)
        assert block is not None
        listed += [(block.epoch, block.base, block.first_step + i) for i in range(block.num_steps)]
        number += 1
    assert listed == expected
    within: list[StepRange] = []
    for index in range(3):
        number = 0
        while (block := blocks.steps(number, index)) is not None:
            within.append(block)
            number += 1
        assert blocks.steps(number + 3, index) is None
    assert [(b.epoch, b.base, b.first_step + i) for b in within for i in range(b.num_steps)] == expected


def test_a_step_on_no_rank_is_refused_alike_on_all() -> None:
    """Five rows on eight ranks."""
    messages = set()
    for rank in range(8):
        with pytest.raises(ConfigError) as error:
            make(5, batch_size=1, rank=rank, world_size=8)
        messages.add(str(error.value))
    assert len(messages) == 1
    assert "5 rows are fewer than one step: 8 rows" in messages.pop()


def test_keys_follow_seed_and_epoch_alone() -> None:
    windows = Windows(0, 10, 4, 4, 41)
    keys = {WindowRows(windows, seed=seed).key(epoch) for seed in range(20) for epoch in range(20)}
    assert len(keys) == 400
    assert WindowRows(windows, seed=0).key(0) == 10961548640826030687  # frozen: changing it changes every order
    assert WindowRows(windows, shuffle=False).key(0) is None


def test_step_of_ten_to_the_twelve_needs_no_memory() -> None:
    """Planning step 10^12 of a corpus of 10^13 tokens: arrays of the size of one batch, nothing else."""
    num_tokens = 10**13
    windows = Windows(0, (num_tokens - 1 - 8) // 1 + 1, seq_len=8, stride=1, num_tokens=num_tokens)
    schedule = Schedule(WindowRows(windows, seed=7), batch_size=4, rank=1, world_size=2)
    tracemalloc.start()
    plan = plan_steps(schedule, StepRange(0, 0, 10**12, 1))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert plan.row_ids.tolist() == [8 * 10**12 + 1 + 2 * i for i in range(4)]
    assert len(set(plan.starts.tolist())) == 4
    assert all(0 <= start <= num_tokens - 9 for start in plan.starts.tolist())
    assert peak_bytes < 100_000


@pytest.mark.parametrize("num_windows", [1, 2, 3, 7, 8, 9, 64, 1000])
def test_an_epoch_is_a_permutation_of_the_windows(num_windows: int) -> None:
    schedule = make(num_windows, batch_size=1)
    orders = [plan_steps(schedule, StepRange(epoch, 0, 0, num_windows)).starts.tolist() for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(0, num_windows * 4, 4))
    if num_windows >= 64:
        assert len({tuple(order) for order in orders}) == 3


def test_dtype_is_64_bit() -> None:
    plan = plan_steps(make(10, 2), StepRange(0, 0, 0, 2))
    assert plan.starts.dtype == plan.row_ids.dtype == np.int64


class UnevenEpochs:
    """Epochs of different numbers of rows, as documents make them; rows are counted a few at a time."""

    is_uniform = False

    def __init__(self, rows: list[int]) -> None:
        self._rows, self._known = rows, [0] * len(rows)

    def count(self, epoch: int, at_least: int | None = None) -> int:
        number = epoch % len(self._rows)
        rows = self._rows[number]
        self._known[number] = rows if at_least is None else max(self._known[number], min(rows, -(-at_least // 3) * 3))
        return self._known[number]

    def is_complete(self, epoch: int) -> bool:
        return self._known[epoch % len(self._rows)] == self._rows[epoch % len(self._rows)]

    def estimate(self, epoch: int) -> int:
        raise NotImplementedError

    def mark(self, epoch: int, row: int) -> WindowMark:
        raise NotImplementedError

    def seek(self, epoch: int, row: int, mark: WindowMark) -> bool:
        raise NotImplementedError


class WatchedEpochs(UnevenEpochs):
    """Keeps which epochs were counted."""

    def __init__(self, rows: list[int]) -> None:
        super().__init__(rows)
        self.asked: set[int] = set()

    def count(self, epoch: int, at_least: int | None = None) -> int:
        self.asked.add(epoch)
        return super().count(epoch, at_least)


@given(data=st.data())
def test_blocks_asked_for_again_do_not_look_at_epochs_long_past(data: st.DataObject) -> None:
    """Readers ask ahead of the trainer, who asks again. A plan of an epoch that is counted anew takes seconds."""
    draw = data.draw
    documents = WatchedEpochs(draw(st.lists(st.integers(2, 12), min_size=1, max_size=3)))
    spans = st.tuples(st.integers(0, 9), st.integers(10, 12), st.integers(1, 30))
    skip = in_steps(parse_ranges(draw(st.lists(spans, max_size=4))), 12, 8)
    schedule = make(12, 2, source=documents, skip_steps=skip)
    per_run, start = draw(st.integers(1, 4)), Position(draw(st.integers(0, 2)), 0)
    listed, blocks = Blocks(schedule, per_run, start), Blocks(schedule, per_run, start)
    in_order = [listed.steps(number) for number in range(120)]
    at = 0
    for ahead, back in draw(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=20, max_size=60)):
        at = min(at + ahead, len(in_order) - 1)
        before = at - ahead
        for number in (at, max(0, at - back)):
            documents.asked.clear()
            steps = blocks.steps(number)
            assert steps is not None
            assert steps == in_order[number]
            first = in_order[max(0, min(number, before))]
            assert first is not None
            left_out = sum(first.epoch <= epoch <= steps.epoch for _, _, epoch in skip)
            assert len(documents.asked) <= steps.epoch - first.epoch + 2 + left_out, (number, before)


Step = tuple[int, int, list[int]]  # epoch, number, rows


def steps_of_blocks(schedule: Schedule, per_run: int, start: Position, epochs: int, within: bool) -> list[Step]:
    """Step by step what blocks of epochs before `epochs` hold, numbered on or within each epoch."""
    blocks, listed = Blocks(schedule, per_run, start), []
    for index in range(epochs if within else 1):
        for number in itertools.count():
            block = blocks.steps(number, index if within else None)
            if block is None or block.epoch >= epochs:
                assert block is not None or number or not index, "an epoch without a block"
                break
            assert 1 <= block.num_steps <= per_run
            for step in range(block.first_step, block.first_step + block.num_steps):
                rows = schedule.rows(StepRange(block.epoch, block.base, step, 1)).tolist()
                listed.append((block.epoch, schedule.step_number(block.base) + step, rows))
        if block is not None and within:
            break
    return listed


@given(data=st.data())
def test_a_run_without_some_steps_is_the_run_with_them_minus_those(data: st.DataObject) -> None:
    """From any row on, also where it is no whole number of steps; whatever blocks, ranks and epochs are like."""
    draw = data.draw
    world_size, batch_size, per_run = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    size = world_size * batch_size
    rows = draw(st.lists(st.integers(size, size * 8), min_size=1, max_size=3))
    spans = st.tuples(st.integers(0, 9), st.integers(1, 9), st.integers(0, 2))
    ranges = [(first, first + count, epoch) for first, count, epoch in draw(st.lists(spans, max_size=4))]
    skip = in_steps(parse_ranges(ranges), 12, 8)
    settings: dict[str, Any] = {"drop_last": draw(st.booleans())}
    if draw(st.booleans()):
        settings["source"] = UnevenEpochs(rows)
    how = (rows[0], batch_size, draw(st.integers(0, world_size - 1)), world_size)
    whole = make(*how, **settings)
    left_out = {(epoch, step) for first, end, epoch in skip for step in range(first, end)}
    if all((0, step) in left_out for step in range(whole.steps())):
        with pytest.raises(ConfigError, match="steps of epoch 0"):
            make(*how, skip_steps=skip, **settings)
        return
    some = make(*how, skip_steps=skip, **settings)
    start = whole.normalize(Position(draw(st.integers(0, 2)), draw(st.integers(0, rows[0]))))
    expected = [
        step
        for step in steps_of_blocks(whole, per_run, start, start.epoch + 4, within=False)
        if step[:2] not in left_out
    ]
    for within in (False, True):
        assert steps_of_blocks(some, per_run, some.normalize(start), start.epoch + 4, within) == expected
        assert steps_of_blocks(some, per_run, start, start.epoch + 4, within) == expected
    begin = some.normalize(start)
    assert (begin.epoch, some.step_number(begin.rows)) == expected[0][:2]
    assert some.normalize(begin) == begin
    for epoch in range(3):
        number = sum((epoch, step) not in left_out for step in range(whole.steps(0, epoch)))
        assert some.left_of(some.steps(0, epoch), epoch) == number


def test_hand_written_runs_of_steps() -> None:
    """Ten rows in steps of two, without steps 1 and 3; from row 3 on, steps begin at 3 (number 2), 5, 7."""
    schedule = make(10, 2, skip_steps=((1, 2, 0), (3, 4, 0), (0, 5, 1)))
    assert list(schedule.runs(0, 0)) == [(0, 1), (4, 1), (8, None)]
    assert list(schedule.runs(3, 0)) == [(3, 1), (7, None)]
    assert [schedule.normalize(Position(0, row)) for row in (0, 2, 4, 5)] == [(0, 0), (0, 4), (0, 4), (0, 7)]
    assert schedule.normalize(Position(0, 10)) == (2, 0)
    assert schedule.normalize(Position(1, 4)) == (2, 0)
