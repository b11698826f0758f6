"""permute looks like a random permutation. All keys are fixed, so a result never changes from run to run.

A statistic z has mean 0 and deviation 1 for random permutations; the bound of 4.5 is passed by chance about once in
150,000 times. The last test shows that the bound catches a poor order.
"""

from __future__ import annotations

import importlib
import math
from itertools import permutations

import numpy as np
import pytest
from numpy.typing import NDArray

from dali_pipes.operators import permute

BOUND = 4.5
RANDOM_KEYS = [int(key) for key in np.random.default_rng(2021).integers(0, 2**64, 6000, np.uint64)]
EPOCH_KEYS = list(range(6000))
LARGE = [10**13 // 1024, 2**40 + 1, 2**45, 3 * 2**50, 2**63 - 1]


def chi_square_z(counts: NDArray[np.int64]) -> float:
    """Pearson's chi-square against equal expected counts, brought to mean 0 and deviation 1."""
    expected = counts.sum() / counts.size
    assert expected >= 5
    freedom = counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


def poisson_z(count: int, mean: float) -> float:
    return (count - mean) / math.sqrt(mean)


def orders_of_five_z(keys: list[int]) -> float:
    number = {order: i for i, order in enumerate(permutations(range(5)))}
    seen = [number[tuple(permute(np.arange(5), 5, key).tolist())] for key in keys]
    return chi_square_z(np.bincount(seen, minlength=120))


@pytest.mark.parametrize("keys", [RANDOM_KEYS, EPOCH_KEYS], ids=["random keys", "consecutive keys"])
def test_all_orders_of_five_are_equally_frequent(keys: list[int]) -> None:
    assert abs(orders_of_five_z(keys)) < BOUND


def inversions(orders: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of each row: pairs of items that are in the wrong order."""
    pairs = [(orders[:, place + 1 :] < orders[:, [place]]).sum(axis=1) for place in range(orders.shape[1])]
    return np.asarray(np.sum(pairs, axis=0))


@pytest.mark.parametrize(
    "n", [3, 8, 16, 32, 128, *(pytest.param(n, marks=pytest.mark.slow) for n in (5, 15, 17, 31, 64))]
)
def test_even_and_odd_orders_are_equally_frequent(n: int) -> None:
    """Rounds alone give even orders of 16, of 32, ... without exception, and too many of smaller sets."""
    count = 3000
    orders = np.array([permute(np.arange(n), n, key) for key in RANDOM_KEYS[:count]])
    even = int((inversions(orders) % 2 == 0).sum())
    assert abs(even - count / 2) / math.sqrt(count / 4) < BOUND


@pytest.mark.parametrize("n", [16, 20, 33])
def test_positions_of_two_items_are_independent(n: int) -> None:
    orders = np.array([permute(np.arange(n), n, key) for key in RANDOM_KEYS[:4000]])
    off_diagonal = ~np.eye(n, dtype=bool)
    for first, second in ((0, 1), (0, n - 1), (n // 2 - 1, n // 2), (1, n // 2)):
        pairs = np.bincount(orders[:, first] * n + orders[:, second], minlength=n * n).reshape(n, n)
        if pairs.sum() >= 5 * n * (n - 1):  # else too few a pair for this statistic, as for n = 33
            assert abs(chi_square_z(pairs[off_diagonal])) < BOUND
        assert abs(chi_square_z(pairs.sum(axis=0))) < BOUND
        above = int((orders[:, first] > orders[:, second]).sum())
        assert abs(above - 2000) / math.sqrt(1000) < BOUND


@pytest.mark.parametrize("n", [2**16, 100_003, 2**17 + 1])
@pytest.mark.parametrize("key", RANDOM_KEYS[:3])
def test_neighbours_are_uncorrelated(n: int, key: int) -> None:
    images = permute(np.arange(n), n, key)
    centred = images - images.mean()
    variance = float((centred**2).mean())
    for lag in (1, 2, 3, 7, 16, 64, 256, 257, 1024, 4096, n // 2):
        correlation = float((centred[:-lag] * centred[lag:]).mean()) / variance
        assert abs(correlation) * math.sqrt(n - lag) < BOUND, lag
        steps = (images[lag:] - images[:-lag]) % n
        assert abs(chi_square_z(np.bincount(steps * 64 // n, minlength=64))) < BOUND, lag


def test_fixed_points_number_one_on_average() -> None:
    keys, n = RANDOM_KEYS[:1500], 1000
    indices = np.arange(n)
    counts = [int((permute(indices, n, key) == indices).sum()) for key in keys]
    assert abs(poisson_z(sum(counts), len(keys))) < BOUND
    without = sum(count == 0 for count in counts) / len(keys)  # 1/e of all permutations have none
    assert abs(without - 1 / math.e) / math.sqrt(0.2325 / len(keys)) < BOUND


@pytest.mark.parametrize("n", LARGE)
@pytest.mark.parametrize("first", [0, 12_345_678_901], ids=["beginning", "middle"])
def test_images_in_a_large_set_do_not_cluster(n: int, first: int) -> None:
    count = 100_000
    images = permute(np.arange(first % (n - count), first % (n - count) + count), n, 0xC0FFEE)
    unit = images / n
    assert abs(chi_square_z(np.bincount((unit * 256).astype(np.int64), minlength=256))) < BOUND
    assert abs(chi_square_z(np.bincount(images % 256, minlength=256))) < BOUND
    assert abs(chi_square_z(np.bincount(images // 2**16 % 256, minlength=256))) < BOUND
    gaps = np.diff(np.sort(unit)) * count  # exponential with mean 1 for points thrown at random
    assert abs(chi_square_z(np.bincount(((1 - np.exp(-gaps)) * 50).astype(np.int64), minlength=50))) < BOUND
    correlation = float(np.corrcoef(unit[:-1], unit[1:])[0, 1])
    assert abs(correlation) * math.sqrt(count) < BOUND


@pytest.mark.parametrize("bits", [33, 40, 45, 62])
def test_every_bit_of_an_image_is_balanced(bits: int) -> None:
    count = 50_000
    images = permute(np.arange(count), 2**bits, 0xBEEF)
    ones = np.array([int((images >> bit & 1).sum()) for bit in range(bits)])
    assert (np.abs(ones - count / 2) < BOUND * math.sqrt(count) / 2).all()


@pytest.mark.parametrize("bits", [14, 33, 62])
def test_one_bit_of_the_index_changes_half_of_the_image(bits: int) -> None:
    indices = np.arange(4000)
    images = permute(indices, 2**bits, 31337)
    for bit in range(12):
        difference = images ^ permute(indices ^ (1 << bit), 2**bits, 31337)
        changed = np.unpackbits(difference.view(np.uint8)).sum() / indices.size
        # pairs of indices are counted twice, so the deviation is that of 2000 of them
        assert abs(float(changed) - bits / 2) < BOUND * math.sqrt(bits / 4 / 2000) + 0.01


def test_different_keys_give_unrelated_orders() -> None:
    n = 1000
    indices = np.arange(n)
    near = [(key, key + 1) for key in range(200)] + [(0x5EED, 0x5EED ^ (1 << bit)) for bit in range(64)]
    orders = {key: permute(indices, n, key) for pair in near for key in pair}
    agreements = [int((orders[one] == orders[other]).sum()) for one, other in near]
    assert abs(poisson_z(sum(agreements), len(near))) < BOUND
    assert max(agreements) < 10
    correlations = [float(np.corrcoef(orders[one], orders[other])[0, 1]) for one, other in near]
    assert np.abs(correlations).max() < 5 / math.sqrt(n)


def test_the_bound_catches_an_order_of_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("dali_pipes.operators.permute")
    whole = module._key_schedule
    monkeypatch.setattr(module, "_key_schedule", lambda key: whole(key)._replace(round_keys=whole(key).round_keys[:6]))
    assert orders_of_five_z(RANDOM_KEYS) > 2 * BOUND
