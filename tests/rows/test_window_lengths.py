"""Packed rows that grow from window to window: which length each window has, and the rows of each."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes.rows.document_rows import DocumentRows
from dali_pipes.rows.window_lengths import WindowLengths

Stages = list[tuple[int, int]]
STAGES = st.builds(
    lambda first, later: [(0, first), *sorted(dict(later).items())],
    st.integers(1, 40),
    st.lists(st.tuples(st.integers(1, 900), st.integers(1, 40)), max_size=4),
)


def document_rows(sizes: list[int], seq_len: int, **changes: Any) -> DocumentRows:
    offsets = np.concatenate(([0], np.cumsum(sizes))).astype(np.int64)
    options = {"mode": "pack", "long_documents": "split", "window_documents": 3, "shuffle": True, "seed": 3, **changes}
    return DocumentRows(offsets, seq_len, **options)


def length_of(stages: Stages, tokens: int, windows: int, epoch: int, window: int) -> int:
    """By a loop over the windows of all epochs: the last stage that began before or with a window."""
    length = stages[0][1]
    for number in range(epoch * windows + window + 1):
        begin = number * tokens
        length = [value for at, value in stages if at * windows <= begin][-1]
    return length


@settings(max_examples=examples(40))
@given(
    lengths=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    stages=STAGES,
    shuffle=st.booleans(),
    seed=st.integers(0, 9),
)
def test_each_window_has_the_rows_of_its_length(lengths: list[int], stages: Stages, shuffle: bool, seed: int) -> None:
    growing = document_rows(lengths, max(value for _, value in stages), lengths=stages, shuffle=shuffle, seed=seed)
    windows = -(-len(lengths) // 3)
    for epoch in range(3):
        row = 0
        for window in range(windows):
            length = length_of(stages, sum(lengths), windows, epoch, window)
            plain = document_rows(lengths, length, shuffle=shuffle, seed=seed)
            own = [place for place in range(plain.count(epoch)) if plain._window_of(epoch, place).window == window]
            count = len(own)
            ours = growing.plan(epoch, np.arange(row, row + count))
            expected = plain.plan(epoch, np.array(own, np.int64))
            assert ours.pieces is not None
            assert expected.pieces is not None
            for one, other in zip(ours.pieces[:4], expected.pieces[:4], strict=True):
                assert one.tolist() == other.tolist()
            widths = growing.widths(epoch, row, row + count, 1)
            assert widths is not None
            assert widths.tolist() == [length] * count
            row += count
        assert growing.count(epoch) == row
        assert growing.report(epoch).rows == row


@settings(max_examples=examples(40))
@given(lengths=st.lists(st.integers(1, 50), min_size=4, max_size=40), stages=STAGES, step=st.integers(1, 7))
def test_a_step_is_as_wide_as_its_longest_rows(lengths: list[int], stages: Stages, step: int) -> None:
    growing = document_rows(lengths, max(value for _, value in stages), lengths=stages)
    rows = growing.count(0)
    each = growing.widths(0, 0, rows, 1)
    by_step = growing.widths(0, 0, rows, step)
    assert each is not None
    assert by_step is not None
    assert by_step.tolist() == [max(each[first : first + step].tolist()) for first in range(0, rows, step)]


@given(
    stages=STAGES,
    later=STAGES,
    tokens=st.integers(1, 2_000),
    windows=st.integers(1, 30),
    epoch=st.integers(0, 2),
    window=st.integers(0, 30),
)
def test_windows_that_were_begun_keep_their_length(
    stages: Stages, later: Stages, tokens: int, windows: int, epoch: int, window: int
) -> None:
    window = min(window, windows)
    before, after = WindowLengths(stages, tokens, windows), WindowLengths(later, tokens, windows)
    after.run = after.resumed(epoch, window, [pair for pair in before.in_epoch(epoch) if pair[0] < window])
    for number in range(windows):
        wanted = stages if number < window else later
        assert after.of(epoch, number) == length_of(wanted, tokens, windows, epoch, number)
    assert after.of(epoch + 1, 0) == length_of(later, tokens, windows, epoch + 1, 0)
    assert after.in_epoch(epoch)[0][0] == 0
