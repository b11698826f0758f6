"""Curricula: which part of which row of the order is in which row, and where steps end, against an oracle of loops."""

import itertools
from typing import Any

import numpy as np
import pytest
from curriculum_oracle import Piece, walk_epoch
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes.config.curriculum import merged_stages
from dali_pipes.errors import ConfigError
from dali_pipes.rows.windows import WindowRows, split_windows
from dali_pipes.schedule import Position, Schedule
from dali_pipes.schedule.curriculum import Curriculum

ORDER_LEN = 12
LENGTHS = [1, 2, 3, 4, 6, 12]


def curriculum(num_places: int, seq_len: Any, global_batch: Any, *, seed: int = 0, shuffle: bool = True) -> Curriculum:
    windows = split_windows(num_places * ORDER_LEN + 1, ORDER_LEN)
    rows = WindowRows(windows, shuffle=shuffle, seed=seed)
    return Curriculum(rows, merged_stages(seq_len, global_batch), cuts=True, seed=seed)


def rows_of(schedule: Schedule, epoch: int) -> list[tuple[int, int]]:
    """First token and positions of each row of an epoch, run by run."""
    found: list[tuple[int, int]] = []
    interleave = schedule.interleave
    for base, length in schedule.runs(0, epoch):
        end = min(schedule.rows_known(epoch), base + (1 << 40 if length is None else length * schedule.global_rows))
        if base < end:  # a change of length may come after the end of the epoch
            widths = interleave.widths(epoch, base, end, 1)
            starts = interleave.plan(epoch, np.arange(base, end)).starts
            assert widths is not None
            found += zip(starts.tolist(), widths.tolist(), strict=True)
    return found


def steps(values: list[int]) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Stages at any tokens of the first two epochs, also ones that are over before they can begin."""
    later = st.lists(st.tuples(st.integers(1, 700 * ORDER_LEN), st.sampled_from(values)), max_size=4)
    first = st.sampled_from(values)
    return st.builds(lambda value, rest: [(0, value), *sorted(dict(rest).items())], first, later)


@settings(max_examples=examples(40))
@given(
    num_places=st.integers(64, 400),
    seq_len=steps(LENGTHS),
    global_batch=steps([1, 2, 6, 10, 16]),
    seed=st.integers(0, 2**64 - 1),
    shuffle=st.booleans(),
)
def test_rows_and_steps_equal_the_oracle(
    num_places: int, seq_len: Any, global_batch: Any, seed: int, shuffle: bool
) -> None:
    own = curriculum(num_places, seq_len, global_batch, seed=seed, shuffle=shuffle)
    windows = WindowRows(split_windows(num_places * ORDER_LEN + 1, ORDER_LEN), shuffle=shuffle, seed=seed)
    schedule = Schedule(own, 1)
    for epoch in range(3):
        walked = walk_epoch(num_places, ORDER_LEN, seq_len, global_batch, epoch=epoch, seed=seed, shuffle=shuffle)
        starts = windows.plan(epoch, np.arange(num_places)).starts.tolist()
        expected = [(starts[piece.place] + piece.part * piece.seq_len, piece.seq_len) for piece in walked.rows]
        assert rows_of(schedule, epoch) == expected
        assert own.count(epoch) == len(expected)
        assert [row for row in range(1, len(expected) + 1) if own.is_step_end(epoch, row)] == walked.step_ends


@settings(max_examples=examples(25))
@given(num_places=st.integers(64, 400), seq_len=steps(LENGTHS), seed=st.integers(0, 9))
def test_every_schedule_has_the_tokens_of_the_epoch_once(num_places: int, seq_len: Any, seed: int) -> None:
    own = curriculum(num_places, seq_len, [(0, 1)], seed=seed)
    for epoch in range(2):
        tokens = np.concatenate([np.arange(start, start + width) for start, width in rows_of(Schedule(own, 1), epoch)])
        assert sorted(tokens.tolist()) == list(range(num_places * ORDER_LEN))


def test_parts_of_one_row_do_not_sit_side_by_side() -> None:
    """Without a permutation of the groups, all four parts of a row would be in one batch of four."""
    own = curriculum(640, [(0, 3)], [(0, 4)])
    rows = rows_of(Schedule(own, 1), 0)
    places = [start // ORDER_LEN for start, _ in rows]
    together = sum(a == b for a, b in itertools.pairwise(places))
    assert together < 0.02 * len(places)  # 3 of 255 by chance


@settings(max_examples=examples(25))
@given(
    num_places=st.integers(64, 300),
    seq_len=steps(LENGTHS),
    global_batch=steps([2, 6]),
    epoch=st.integers(0, 1),
    seed=st.integers(0, 9),
)
def test_places_of_a_token_are_the_rows_that_read_it(
    num_places: int, seq_len: Any, global_batch: Any, epoch: int, seed: int
) -> None:
    own = curriculum(num_places, seq_len, global_batch, seed=seed)
    rows = rows_of(Schedule(own, 1), epoch)
    for position in range(0, num_places * ORDER_LEN + 1, 7):
        reading = [row for row, (start, width) in enumerate(rows) if start <= position <= start + width]
        assert sorted(own.places_of(epoch, position) or []) == reading


@settings(max_examples=examples(25))
@given(
    num_places=st.integers(200, 400),
    seq_len=steps(LENGTHS),
    global_batch=steps([6, 12, 24]),
    later=steps(LENGTHS),
    data=st.data(),
)
def test_a_later_stage_changes_no_row_before_it(
    num_places: int, seq_len: Any, global_batch: Any, later: Any, data: st.DataObject
) -> None:
    """A run that goes on with another schedule has the rows that it had, and then takes the new lengths up."""
    own = curriculum(num_places, seq_len, global_batch)
    ends = [row for row in range(own.count(0)) if own.is_step_end(0, row)]
    rows = data.draw(st.sampled_from(ends))
    changed = curriculum(num_places, later, global_batch)
    segments = [segment for segment in own.segments(0) if segment.row < rows or not segment.row]
    changed.go_on((0, rows), 0, segments, 0)
    before, after = (rows_of(Schedule(each, 1), 0) for each in (own, changed))
    assert after[:rows] == before[:rows]
    tokens = np.concatenate([np.arange(start, start + width) for start, width in after])
    assert len(np.unique(tokens)) == len(tokens) > (num_places - 1) * ORDER_LEN - 24 * ORDER_LEN
    for segment in changed.segments(0):
        at = max(segment.place, own.places_begun(rows, segments, num_places))
        if segment.row >= rows and at < num_places:
            assert segment.seq_len in {value for _, value in later}


@pytest.mark.parametrize("batch_size", [1, 3, 4])
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_runs_of_steps_have_one_length(batch_size: int, world_size: int) -> None:
    own = curriculum(500, [(0, 2), (900, 6), (2_500, 12)], [(0, 48), (1_500, 96)])
    schedule = Schedule(own, batch_size, rank=world_size - 1, world_size=world_size)
    rows = 0
    for base, length in schedule.runs(0, 0):
        steps_here = schedule.steps(base, 0, most=length)
        widths = own.widths(0, base, base + steps_here * schedule.global_rows, schedule.global_rows)
        assert widths is not None
        assert len(widths) == steps_here
        assert len(set(widths.tolist())) == 1
        assert base == rows
        rows += steps_here * schedule.global_rows
    assert rows == own.count(0)
    assert len(list(schedule.runs(0, 0))) == 3


def test_stages_are_reached_when_their_tokens_are_seen_rounded_up_to_whole_groups_and_steps() -> None:
    own = curriculum(1_000, [(0, 3), (100 * ORDER_LEN, 12)], [(0, 8), (700 * ORDER_LEN - 1, 16)])
    # A group has 64 places, 256 rows, which are whole steps of 8: the change at place 100 waits for place 128. The next
    # may come at any multiple of 64 places from there on: 128 + 9 * 64 = 704.
    assert [tuple(segment) for segment in own.segments(0)] == [(0, 0, 3, 8), (512, 128, 12, 8), (1088, 704, 12, 16)]
    assert [own.tokens_before(0, row) for row in (0, 1, 512, 513)] == [0, 3, 128 * ORDER_LEN, 129 * ORDER_LEN]
    assert own.switches(0) == [512]
    assert own.switches(1) == []
    assert own.segments(1) == [(0, 0, 12, 16)]
    assert own.tokens_before(1, 0) == 1_000 * ORDER_LEN


@pytest.mark.parametrize("global_batch", [[(0, 80)], [(0, 8), (10 * ORDER_LEN, 80)], [(0, 8), (10**6, 80), (10**7, 8)]])
def test_a_step_longer_than_an_epoch_is_refused_also_if_it_comes_later(global_batch: Any) -> None:
    with pytest.raises(ConfigError, match=r"global_batch = 80 .*70 rows"):
        Schedule(curriculum(70, [(0, 12)], global_batch), 1)
    Schedule(curriculum(80, [(0, 12)], global_batch), 1)
    Schedule(curriculum(70, [(0, 6)], global_batch), 1)


def test_far_places_cost_no_more() -> None:
    """10^13 tokens, and no memory that grows with them."""
    windows = split_windows(10**13, 8192)
    own = Curriculum(WindowRows(windows), [(0, 2048, 256), (2 * 10**12, 8192, 512)], cuts=True)
    schedule = Schedule(own, 8, rank=3, world_size=8)
    row = own.segments(0)[1].row
    assert abs(own.tokens_before(0, row) - 2 * 10**12) < 64 * 8192 * 2
    for base in (0, row // 64 * 64, own.count(0) - 64):
        assert len(own.plan(0, np.arange(base, base + 64)).starts) == 64
    assert schedule.normalize(Position(0, own.count(0))) == Position(1, 0)


def test_the_oracle_is_what_is_written_in_the_module() -> None:
    """Rows of half the length: all parts of the first 64 places, each once, before those of the next."""
    walked = walk_epoch(128, 12, [(0, 6)], [(0, 4)], epoch=0, seed=3)
    first = {Piece(place, part, 6) for place in range(64) for part in range(2)}
    assert set(walked.rows[:128]) == first
    assert walked.rows[:128] != sorted(first)
    assert walked.step_ends == list(range(4, 257, 4))
