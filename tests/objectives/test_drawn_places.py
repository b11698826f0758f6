"""drawn_places: every row against one draw after the other, and each choice of places as likely as others."""

import itertools
from collections import Counter
from unittest import mock

import numpy as np
import objective_oracle as oracle
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dali_pipes.objectives import drawn_places as module
from dali_pipes.objectives.drawn_places import drawn_places
from dali_pipes.operators.permute import splitmix64

Row = tuple[int, int, int]
"""Places, how many of them are wanted, and the key."""


@st.composite
def of_rows(draw: st.DrawFn) -> list[Row]:
    rows = []
    for _ in range(draw(st.integers(1, 6))):
        places = draw(st.integers(0, 6) | st.integers(0, 900))
        rows.append((places, draw(st.integers(0, places)), draw(st.integers(0, 2**64 - 1))))
    return rows


def found(rows: list[Row], width: int) -> list[list[int]]:
    places, wanted, keys = zip(*rows, strict=True)
    taken: list[list[int]] = drawn_places(np.array(places), np.array(wanted), np.array(keys, np.uint64), width).tolist()
    return taken


def expected(rows: list[Row], width: int) -> list[list[int]]:
    taken = [oracle.drawn_places(*row) for row in rows]
    return [own + [places] * (width - len(own)) for own, (places, _, _) in zip(taken, rows, strict=True)]


@settings(max_examples=150, deadline=None)
@given(rows=of_rows(), spare=st.integers(0, 3), words=st.none() | st.integers(1, 3))
@example(rows=[(1, 1, 0)], spare=0, words=None)
@example(rows=[(300, 150, 5), (300, 151, 5), (0, 0, 5)], spare=0, words=None)
def test_rows_are_those_of_one_draw_after_the_other(rows: list[Row], spare: int, words: int | None) -> None:
    """However many outputs are taken at first: a row without enough draws again."""
    width = max(wanted for _, wanted, _ in rows) + spare
    if words is None:
        assert found(rows, width) == expected(rows, width)
    else:
        with mock.patch.object(module, "_likely_words", return_value=words):
            assert found(rows, width) == expected(rows, width)


@pytest.mark.parametrize("key", [1557, 1587, 20247, 40478])
def test_a_draw_that_would_make_its_place_likelier_is_thrown_away(key: int) -> None:
    """Of these keys, one of the first four draws is."""
    places = 3_000_000
    outputs = [oracle.splitmix64(key, number) for number in (1, 2)]
    draws = [half for output in outputs for half in divmod(output, 2**32)]
    assert sum(draw * places % 2**32 < 2**32 % places for draw in draws) == 1
    assert 2**32 % places > 10**6
    rows = [(places, 4, key), (places, 4, key + 1), (7, 3, key)]
    assert found(rows, 4) == expected(rows, 4)


@pytest.mark.parametrize("wanted", [1, 2, 3, 4])
def test_every_choice_is_as_likely(wanted: int) -> None:
    """Chi-square over 30,000 keys, all choices from five places."""
    keys = splitmix64(np.array(9, np.uint64), np.arange(30_000, dtype=np.uint64))
    rows = drawn_places(np.full(len(keys), 5), np.full(len(keys), wanted), keys, wanted)
    counts = Counter(map(tuple, rows.tolist()))
    choices = list(itertools.combinations(range(5), wanted))
    assert set(counts) == set(choices)
    share = len(keys) / len(choices)
    assert sum((count - share) ** 2 / share for count in counts.values()) < 27.9  # p = 0.001 of 9 degrees of freedom


def test_no_rows() -> None:
    nothing = np.zeros(0, np.int64)
    assert drawn_places(nothing, nothing, nothing.view(np.uint64), 3).shape == (0, 3)
