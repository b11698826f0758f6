"""The rules of mixtures that a benchmark compares, against plain loops, and its figures against exact arithmetic."""

import json
from collections import Counter
from fractions import Fraction

import mixture_shares
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mixture_rules import RULES, grain, huggingface, megatron, mosaic

WEIGHTS = [[1, 1], [1, 1, 1, 2], [50, 3, 2, 1], [1, 2, 3, 4, 5, 6, 7]]


def shares(weights: list[int]) -> list[Fraction]:
    return [Fraction(weight, sum(weights)) for weight in weights]


@pytest.mark.parametrize("weights", WEIGHTS)
def test_grain_by_its_counts(weights: list[int]) -> None:
    def counts(k: int) -> list[int]:
        left, found = sum(whole), []
        for weight in whole:
            others = k * (left - weight) // left
            found.append(k - others)
            k, left = others, left - weight
        return found

    whole = [int(float(share) * (100 / float(min(shares(weights))))) for share in shares(weights)]
    expected = [(np.array(counts(k + 1)) - counts(k)).tolist().index(1) for k in range(500)]
    assert grain(shares(weights), 500, 0).tolist() == expected


@pytest.mark.parametrize("weights", WEIGHTS)
def test_megatron_by_plain_loops(weights: list[int]) -> None:
    counts = [0] * len(weights)
    for row, source in enumerate(megatron(shares(weights), 500, 0).tolist()):
        below = [float(share) * max(row, 1.0) - count for share, count in zip(shares(weights), counts, strict=True)]
        assert source == below.index(max(below))
        counts[source] += 1


def test_random_rules() -> None:
    weights = shares([1, 2, 5])
    assert len(huggingface(weights, 2500, 3)) == 2500
    assert Counter(mosaic(weights, 800, 3).tolist()) == {0: 100, 1: 200, 2: 500}
    assert sum(Counter(mosaic(weights, 803, 3).tolist()).values()) == 803
    for rule in (huggingface, mosaic):
        assert rule(weights, 800, 3).tolist() == rule(weights, 800, 3).tolist() != rule(weights, 800, 4).tolist()


@given(st.lists(st.integers(1, 50), min_size=2, max_size=6), st.integers(0, 400), st.integers(0, 2**32))
def test_rows_off_by_fractions(weights: list[int], extra: int, seed: int) -> None:
    exact = shares(weights)
    sources = np.random.default_rng(seed).integers(0, len(weights), 1 + extra)
    counts, every, ends = [0] * len(weights), Fraction(0), Fraction(0)
    for row, source in enumerate(sources.tolist(), start=1):
        # Before this row the source itself is lowest; after it, every source may be.
        counts[source] += 1
        worst = max(abs(count - share * row) for count, share in zip(counts, exact, strict=True))
        every = max(every, worst)
        if row % 128 == 0:
            ends = max(ends, worst)
    found = mixture_shares.rows_off(sources, exact)
    assert found.every_row == pytest.approx(float(every))
    assert found.stratum_ends == pytest.approx(float(ends))
    final = sum(abs(Fraction(count, len(sources)) - share) for count, share in zip(counts, exact, strict=True)) / 2
    assert mixture_shares.share_error(sources, exact) == pytest.approx(float(final))


def test_rank_error_finds_parity() -> None:
    in_turn = np.arange(8000) % 2
    assert mixture_shares.rank_error(in_turn, 2) == pytest.approx(500 / np.sqrt(4000 * 7 / 64))
    assert mixture_shares.rank_error(np.random.default_rng(1).permutation(in_turn), 2) < 5


def test_a_small_run(capsys: pytest.CaptureFixture[str]) -> None:
    mixture_shares.main(sources="5,30", rows="1e3,2e3", seed=2)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["rows"] == [1000, 2000]
    cases = [(entry["sources"], entry["weights"], entry["rule"]) for entry in report["entries"]]
    families, rules = mixture_shares.FAMILIES, [rule.name for rule in RULES]
    assert cases == [(count, family, rule) for count in (5, 30) for family in families for rule in rules]
    for entry in report["entries"]:
        assert entry["rows_off_stratum_ends"] <= entry["rows_off_every_row"]
        assert set(entry["share_error"]) == {"1000", "2000"}
        if entry["rule"] == "dali_pipes":
            assert entry["rows_off_stratum_ends"] < 2
            assert entry["stratum_ends_ratio"] == 1
