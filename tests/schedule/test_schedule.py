"""The schedule is arithmetic: checked against plain enumeration, and at sizes where nothing could be enumerated."""

import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.errors import ConfigError
from dali_pipes.row_plan import plan_rows
from dali_pipes.schedule import PADDING, Blocks, Position, Schedule, StepRange, Windows


def make(rows: int, batch_size: int, rank: int = 0, world_size: int = 1, **settings: Any) -> Schedule:
    windows = Windows(first=0, count=rows, seq_len=4, stride=4, num_tokens=rows * 4 + 1)
    return Schedule(windows, batch_size, rank=rank, world_size=world_size, **settings)


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
    start = schedule.normalise(Position(epoch, consumed % rows))
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
    """B31 b: five rows on eight ranks."""
    messages = set()
    for rank in range(8):
        with pytest.raises(ConfigError) as error:
            make(5, batch_size=1, rank=rank, world_size=8)
        messages.add(str(error.value))
    assert len(messages) == 1
    assert "5 rows make no step of 8 rows" in messages.pop()


def test_keys_follow_seed_and_epoch_alone() -> None:
    windows = Windows(0, 10, 4, 4, 41)
    keys = {Schedule(windows, 2, seed=seed).key(epoch) for seed in range(20) for epoch in range(20)}
    assert len(keys) == 400
    assert Schedule(windows, 2, seed=3).key(5) == Schedule(windows, 1, rank=2, world_size=3, seed=3).key(5)
    assert Schedule(windows, 2, seed=0).key(0) == 10961548640826030687  # frozen: changing it changes every order
    assert Schedule(windows, 2, shuffle=False).key(0) is None


def test_step_of_ten_to_the_twelve_needs_no_memory() -> None:
    """Planning step 10^12 of a corpus of 10^13 tokens: arrays of the size of one batch, nothing else."""
    num_tokens = 10**13
    windows = Windows(0, (num_tokens - 1 - 8) // 1 + 1, seq_len=8, stride=1, num_tokens=num_tokens)
    schedule = Schedule(windows, batch_size=4, rank=1, world_size=2, seed=7)
    tracemalloc.start()
    plan = plan_rows(schedule, StepRange(0, 0, 10**12, 1))
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert plan.row_ids.tolist() == [8 * 10**12 + 1 + 2 * i for i in range(4)]
    assert len(set(plan.starts.tolist())) == 4
    assert all(0 <= start <= num_tokens - 9 for start in plan.starts.tolist())
    assert peak_bytes < 100_000


@pytest.mark.parametrize("num_windows", [1, 2, 3, 7, 8, 9, 64, 1000])
def test_an_epoch_is_a_permutation_of_the_windows(num_windows: int) -> None:
    schedule = make(num_windows, batch_size=1)
    orders = [plan_rows(schedule, StepRange(epoch, 0, 0, num_windows)).starts.tolist() for epoch in range(3)]
    for order in orders:
        assert sorted(order) == list(range(0, num_windows * 4, 4))
    if num_windows >= 64:
        assert len({tuple(order) for order in orders}) == 3


def test_dtype_is_64_bit() -> None:
    plan = plan_rows(make(10, 2), StepRange(0, 0, 0, 2))
    assert plan.starts.dtype == plan.row_ids.dtype == np.int64
