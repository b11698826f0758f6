"""Keyed numbers: equal to a slow oracle, frozen, and as random as uniform numbers have to be."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.samples.keyed_numbers import NUMBERS_NAME, uniform

WORD = 2**64 - 1


def splitmix64(state: int) -> int:
    """The output after one step from `state`, in plain integers."""
    state = (state + 0x9E3779B97F4A7C15) & WORD
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


def number(seed: int, epoch: int, row: int, draw: int) -> float:
    digest = hashlib.sha256(f"dali_pipes sample numbers {seed} {epoch}".encode()).digest()
    key = int.from_bytes(digest[:8], "little")
    row_key = splitmix64((key + row * 0x9E3779B97F4A7C15) & WORD)
    return float((splitmix64((row_key + draw * 0x9E3779B97F4A7C15) & WORD) >> 40) / 2**24)


def test_the_oracle_knows_the_published_outputs() -> None:
    """Of splitmix64 seeded with 1234567, as its author's C code prints them."""
    outputs = [splitmix64((1234567 + count * 0x9E3779B97F4A7C15) & WORD) for count in range(3)]
    assert outputs == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(
    st.integers(-(2**70), 2**70),
    st.integers(0, 2**40),
    st.lists(st.one_of(st.integers(0, 100), st.integers(0, 2**63 - 1)), max_size=8),
    st.integers(0, 20),
)
def test_numbers_equal_the_oracle(seed: int, epoch: int, rows: list[int], num_draws: int) -> None:
    found = uniform(seed, epoch, np.array(rows, np.int64), num_draws)
    assert found.dtype == np.float32
    assert found.shape == (len(rows), num_draws)
    assert found.tolist() == [[number(seed, epoch, row, draw) for draw in range(num_draws)] for row in rows]


def test_numbers_are_frozen() -> None:
    """Under their name: a saved state continues with the numbers that it began with."""
    assert NUMBERS_NAME == "splitmix24-v1"
    assert (uniform(0, 2, np.array([0, 7]), 2) * 2**24).tolist() == [[10137626, 13252072], [7602762, 13432709]]


@given(st.permutations(range(12)), st.integers(1, 12), st.integers(0, 9))
def test_numbers_depend_on_neither_order_nor_batch(order: list[int], batch_size: int, num_draws: int) -> None:
    whole = uniform(5, 1, np.arange(12), 9)
    for first in range(0, 12, batch_size):
        rows = np.array(order[first : first + batch_size])
        assert np.array_equal(uniform(5, 1, rows, num_draws), whole[rows, :num_draws])


def test_numbers_are_uniform_and_independent() -> None:
    """One fixed draw of 2^20 numbers; the bounds are five standard deviations of truly random ones."""
    count, num_draws = 2**16, 16
    numbers = uniform(11, 0, np.arange(count), num_draws).astype(np.float64)
    assert numbers.min() >= 0
    assert numbers.max() < 1
    centred = (numbers - 0.5) * np.sqrt(12)
    assert np.abs(centred.mean(0)).max() < 5 / np.sqrt(count)
    assert np.abs((centred**2).mean(0) - 1).max() < 5 * np.sqrt(0.8 / count)
    between_draws = centred.T @ centred / count - np.eye(num_draws)
    np.fill_diagonal(between_draws, 0)
    assert np.abs(between_draws).max() < 5 / np.sqrt(count)
    for distance in (1, 2, 7, 256):
        assert np.abs((centred[distance:] * centred[:-distance]).mean(0)).max() < 5 / np.sqrt(count - distance)
    bins = np.bincount((numbers * 1024).astype(np.int64).ravel(), minlength=1024)
    expected = numbers.size / 1024
    assert abs(((bins - expected) ** 2 / expected).sum() - 1023) < 5 * np.sqrt(2 * 1023)


@pytest.mark.parametrize("other", [(11, 1), (12, 0)])
def test_epochs_and_seeds_are_independent(other: tuple[int, int]) -> None:
    rows = np.arange(2**16)
    first, second = uniform(11, 0, rows, 1)[:, 0], uniform(*other, rows, 1)[:, 0]
    assert abs(np.corrcoef(first, second)[0, 1]) < 5 / np.sqrt(len(rows))
    assert not (first == second).all()


def test_other_rows_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows\[1\] is -3"):
        uniform(0, 0, np.array([4, -3]), 1)
    with pytest.raises(TypeError, match="int32"):
        uniform(0, 0, np.array([4], np.int32), 1)
    with pytest.raises(TypeError, match=r"\(1, 1\)"):
        uniform(0, 0, np.array([[4]]), 1)
