"""`balance = "cost"`: the same rows, in an order in which neighbors cost about the same; even work on every rank."""

import hashlib
import itertools
import math
import random
import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from row_oracle import END, write_documents
from streams import check_resumes_on_other_ranks
from test_named_rows import document_rows, tokens_of

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.errors import ConfigError, StateError
from dali_pipes.operators import permute
from dali_pipes.rows import cost_balance
from dali_pipes.rows.cost_balance import CostBalance, rows_at, run_rows
from dali_pipes.rows.document_rows import DocumentRows
from dali_pipes.rows.step_costs import PERCENTILES, StepCosts

SEED = 3


def key_of(*what: object) -> int:
    text = " ".join(map(str, ("dali_pipes", SEED, *what)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def shuffled(count: int, key: int) -> list[int]:
    numbers: list[int] = permute(np.arange(count), count, key).tolist() if count else []
    return numbers


def stratum(cost: int) -> tuple[int, int]:
    """The power of two at or below a cost, and in which 64th of the way to the next one it is."""
    power = cost.bit_length() - 1
    return power, (cost - (1 << power)) * 64 // (1 << power)


def ordered(costs: Sequence[int], begin: int, size: int, epoch: int, window: int) -> list[int]:
    """Slow and plain: the rows of a window, as numbers of `costs`, in their order."""
    rows = shuffled(len(costs), key_of("balance", epoch, window, "rows"))
    rows.sort(key=lambda row: stratum(costs[row]))
    head = min((size - begin % size) % size, len(rows))
    count, tail = divmod(len(rows) - head, size)
    lower = min(max(round_half_up(Fraction(len(rows) // 2 - head, size)), 0), count)
    ends = rows[lower * size : lower * size + head + tail]
    rest = rows[: lower * size] + rows[lower * size + head + tail :]
    runs = [rest[at : at + size] for at in range(0, len(rest), size)]
    assert len(runs) == count
    middle = [row for run in shuffled(count, key_of("balance", epoch, window, "runs")) for row in mixed(runs[run])]
    return ends[:head][::-1] + middle + ends[head:][::-1]


def mixed(run: list[int]) -> list[int]:
    """In blocks of a power of two of rows up to 128; those whose number has an odd number of bits are in reverse."""
    block = next(size for size in (128, 64, 32, 16, 8, 4, 2, 1) if len(run) % size == 0)
    blocks = [run[at : at + block] for at in range(0, len(run), block)]
    return [row for number, rows in enumerate(blocks) for row in halves(rows[:: -1 if number.bit_count() % 2 else 1])]


def halves(rows: list[int]) -> list[int]:
    """The second half in reverse; so in each half."""
    half = len(rows) // 2
    return rows if half == 0 else halves(rows[:half]) + halves(rows[half:][::-1])


def round_half_up(number: Fraction) -> int:
    return int((number + Fraction(1, 2)).__floor__())


@settings(max_examples=examples(60))
@given(
    st.lists(st.integers(1, 23), min_size=1, max_size=80),
    st.sampled_from(["pack", "pad"]),
    st.sampled_from(["split", "truncate", "drop"]),
    st.integers(0, 3),
    st.integers(0, 3),
    st.integers(1, 30),
    st.sampled_from([1, 2, 3, 6, 8]),
)
def test_the_order_equals_the_oracle(
    lengths: list[int], mode: str, long_documents: str, a: int, b: int, window: int, size: int
) -> None:
    """Window by window; the rows themselves are those without `balance`."""
    if a + b == 0 or (long_documents == "drop" and min(lengths) > 8):
        a, long_documents = 1, "split"
    options: dict[str, Any] = {"mode": mode, "long_documents": long_documents, "window_documents": window}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_balance, "run_rows", lambda num_rows: size)
        rows = document_rows(lengths, **options, balance=CostBalance(a, b))
        for epoch in (0, 1):
            expected: list[tuple[int, ...]] = []
            for number in range(rows.num_windows):
                packing = document_rows(lengths, **options)._plan(epoch, number)
                begins = np.cumsum([0, *lengths])[packing.piece_documents] + packing.piece_begins
                sizes, bounds = packing.piece_lengths.tolist(), packing.row_offsets.tolist()
                pieces = [list(range(low, high)) for low, high in itertools.pairwise(bounds)]
                costs = [sum(a * sizes[piece] + b * sizes[piece] ** 2 for piece in row) for row in pieces]
                for row in ordered(costs, len(expected), size, epoch, number):
                    runs = (range(int(begins[piece]), int(begins[piece]) + sizes[piece]) for piece in pieces[row])
                    expected.append(tuple(token for run in runs for token in run))
            assert tokens_of(rows, epoch) == expected


@settings(max_examples=examples(60))
@given(st.integers(1, 20_000), st.integers(0, 2**40), st.integers(0, 2**64 - 1))
def test_every_row_is_at_one_place(num_rows: int, begin: int, key: int) -> None:
    size = run_rows(num_rows)
    rows = rows_at(np.arange(num_rows), num_rows, begin, key)
    assert sorted(rows.tolist()) == list(range(num_rows))
    some = np.unique(np.random.default_rng(key % 2**32).integers(0, num_rows, 50))
    assert rows_at(some, num_rows, begin, key).tolist() == rows[some].tolist()
    # Places that share a run of the epoch hold neighbors by cost.
    runs = (np.arange(num_rows) + begin) // size
    for run in np.unique(runs)[1:-1]:
        of_run = np.sort(rows[runs == run])
        assert np.count_nonzero(np.diff(of_run) != 1) <= 1


@given(st.integers(1, 10**6))
def test_runs_fit_into_those_of_other_windows_and_are_many(num_rows: int) -> None:
    size = run_rows(num_rows)
    assert 3072 % size == 0
    assert num_rows < 4 or num_rows // size >= 4


@pytest.mark.parametrize("size", [3, 48, 384, 3072])
def test_a_run_equals_the_oracle(size: int) -> None:
    num_rows = 16 * size if size > 1536 else 4 * size
    assert run_rows(num_rows) == size
    rows = rows_at(np.arange(num_rows), num_rows, 0, 5)
    expected = [run * size + row for run in shuffled(num_rows // size, 5) for row in mixed(list(range(size)))]
    assert rows.tolist() == expected


@settings(max_examples=examples(30))
@given(st.integers(0, 7), st.integers(1, 3), st.integers(0, 2**64 - 1))
def test_ranks_share_rising_costs_evenly(exponent: int, more: int, key: int) -> None:
    """Up to 128 ranks, if a power of two: each row of a step is one of neighbors, and the sums of a step are equal."""
    ranks, batch_size = 2**exponent, 2 * more
    rows = rows_at(np.arange(4 * 768), 4 * 768, 0, key)
    groups = rows.reshape(-1, ranks)
    assert (np.sort(groups, axis=1) == groups.min(axis=1)[:, None] + np.arange(ranks)).all()
    steps = groups[: len(groups) // batch_size * batch_size].reshape(-1, batch_size, ranks)
    assert (np.ptp(steps.sum(axis=1), axis=1) == 0).all()


@settings(max_examples=examples(60))
@given(st.lists(st.lists(st.integers(1, 9), max_size=9), max_size=6), st.integers(1, 4), st.integers(1, 3))
def test_step_costs_equal_the_oracle(parts: list[list[int]], world_size: int, batch_size: int) -> None:
    costs, steps = [cost for part in parts for cost in part], StepCosts(world_size, batch_size)
    for part in parts:
        steps.add(np.array(part, np.int64))
    most, total, ratios = 0, Fraction(0), [Fraction(1)]
    size = world_size * batch_size
    for at in range(0, len(costs) // size * size, size):
        of_ranks = [sum(costs[at + rank : at + size : world_size]) for rank in range(world_size)]
        mean = Fraction(sum(of_ranks), world_size)
        most, total = most + max(of_ranks), total + mean
        ratios.append(max(of_ranks) / mean)
    assert steps.ratio == pytest.approx(float(most / total) if total else 1.0)
    assert steps.worst == pytest.approx(float(max(ratios)))
    even = [ratio <= Fraction(105, 100) for ratio in ratios[1:]]
    assert steps.even_steps == pytest.approx(sum(even) / len(even) if even else 1.0)
    rising = sorted(ratios[1:])
    chosen = [max(0, math.ceil(Fraction(percent * len(rising), 100)) - 1) for percent in range(PERCENTILES)]
    assert list(steps.percentiles) == [pytest.approx(float(rising[i]), abs=1e-4) for i in chosen if rising]


@settings(max_examples=examples(60))
@given(st.lists(st.lists(st.integers(1, 9), max_size=12), max_size=4), st.integers(1, 4), st.integers(1, 3))
def test_sorted_steps_equal_the_oracle(windows: list[list[int]], world_size: int, batch_size: int) -> None:
    steps, pool = StepCosts(world_size, batch_size), list[int]()
    most, total = 0, Fraction(0)
    for window in windows:
        steps.add_sorted(np.array(window, np.int64))
        pool = sorted([*pool, *window], reverse=True)
        while len(pool) >= world_size * batch_size:
            of_ranks = [0] * world_size
            for number in range(batch_size):
                row, pool = pool[:world_size], pool[world_size:]
                of_ranks = [a + b for a, b in zip(of_ranks, row[::-1] if number % 2 else row, strict=True)]
            most, total = most + max(of_ranks), total + Fraction(sum(of_ranks), world_size)
    assert steps.ratio == pytest.approx(float(most / total) if total else 1.0)


@settings(max_examples=examples(40))
@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(1, 3), st.randoms())
def test_no_order_loses_less_than_the_sorted_one(costs: list[int], world_size: int, dice: random.Random) -> None:
    """With one row a rank; where each row is in a step."""
    costs = (costs * world_size)[: len(costs) // world_size * world_size] or [1] * world_size
    best, other = StepCosts(world_size, 1), StepCosts(world_size, 1)
    best.add_sorted(np.array(costs, np.int64))
    dice.shuffle(costs)
    other.add(np.array(costs, np.int64))
    assert best.ratio <= other.ratio + 1e-9


@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_windows_without_rows_are_passed_over(mode: str) -> None:
    lengths = [3, 9, 0, 5, 12, 1]
    options: dict[str, Any] = {"mode": mode, "long_documents": "drop", "window_documents": 1}
    rows = document_rows(lengths, **options, balance=CostBalance(1, 1))
    assert sorted(tokens_of(rows, 0)) == sorted(tokens_of(document_rows(lengths, **options), 0))
    assert len(tokens_of(rows, 0)) == rows.report(0, None, (1, 1)).rows == 3


@pytest.mark.parametrize("mode", ["pack", "pad"])
@pytest.mark.parametrize("seq_len", [2048, 8192])
def test_steps_of_a_long_tailed_corpus_are_even(mode: Any, seq_len: int) -> None:
    """Whatever the number of ranks: all steps together within 5 %, and nearly every one by itself."""
    lengths = np.random.default_rng(1).lognormal(np.log(400), 1.2, 131_072).astype(np.int64).clip(1)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    options: dict[str, Any] = {"mode": mode, "long_documents": "split", "window_documents": 65_536}
    rows = DocumentRows(offsets, seq_len, **options, shuffle=True, seed=0, balance=CostBalance(12 * 2048, 1))
    for shape in ((8, 4), (64, 1), (64, 8), (48, 4), (72, 2)):
        report = rows.report(0, None, shape)
        assert report.cost_ratio is not None
        assert report.unbalanced_cost_ratio is not None
        assert report.even_steps is not None
        assert 1 <= report.cost_ratio <= 1.05, shape
        assert report.cost_ratio - 1 < (report.unbalanced_cost_ratio - 1) / 5, shape
        assert report.even_steps >= 0.95, shape


@pytest.mark.parametrize("window", [16_384, 131_072])
def test_long_rows_are_even_with_wide_windows(window: int) -> None:
    """One document in 100 fills a third of a row of 131,072 tokens or more. Near the best order of each window."""
    draw = np.random.default_rng(3)
    lengths = draw.lognormal(np.log(400), 1.2, 131_072)
    is_long = draw.random(len(lengths)) < 0.01
    lengths[is_long] = draw.uniform(32_000, 131_072, np.count_nonzero(is_long))
    offsets = np.concatenate(([0], np.cumsum(lengths.astype(np.int64).clip(1))))
    options: dict[str, Any] = {"mode": "pack", "long_documents": "split", "window_documents": window}
    rows = DocumentRows(offsets, 131_072, **options, shuffle=True, seed=0, balance=CostBalance(12 * 2048, 1))
    report = rows.report(0, None, (16, 1))
    ratios = report.cost_ratio, report.sorted_cost_ratio, report.unbalanced_cost_ratio
    assert all(ratio is not None for ratio in ratios)
    balanced, best, random = (ratio or 0.0 for ratio in ratios)
    assert best <= balanced + 0.02 < random
    assert (balanced <= 1.05) == (window > 16_384), balanced
    assert (balanced - 1) <= 2 * (best - 1) + 0.01


def test_runs_end_between_steps_of_ranks_that_divide_them() -> None:
    """All that is uneven is within a run, and where two windows meet: never a run of cheap rows beside a costly one."""
    draw = np.random.default_rng(2)
    offsets = np.concatenate(([0], np.cumsum(draw.choice([10, 1000], 70_000))))
    rows = DocumentRows(
        offsets,
        1024,
        mode="pad",
        long_documents="split",
        window_documents=20_001,
        shuffle=True,
        seed=0,
        balance=CostBalance(0, 1),
    )
    report = rows.report(0, None, (64, 1))
    assert report.even_steps is not None
    steps = report.rows // 64
    # A step where the cheap rows of a window end and the costly ones begin, and one where two windows meet.
    assert report.even_steps >= 1 - 8 / steps


DOCUMENTS = [[number % 8 + 1] * random.Random(number).choice([0, 1, 2, 4, 7, 12, 25]) + [END] for number in range(50)]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    write_documents(tmp_path / "corpus", DOCUMENTS)
    return str(tmp_path / "corpus")


def settings_of(corpus: str, **changes: Any) -> dict[str, Any]:
    common: dict[str, Any] = {"corpus": corpus, "dtype": "uint16", "eos_id": END, "rows": "pad", "seq_len": 16}
    common |= {"batch_size": 2, "window_documents": 23, "device": "cpu", "quiet": True, "drop_last": False}
    common |= {"outputs": ("input_ids", "labels", "row_ids"), "balance": "cost", "balance_cost": [2, 1]}
    return common | changes


def shown(batch: Any) -> list[Any]:
    return [row for row in zip(*(tensor.tolist() for tensor in batch.values()), strict=True) if row[2] >= 0]


@pytest.mark.parametrize("rows", ["pack", pytest.param("pad", marks=pytest.mark.slow)])
def test_a_resume_at_every_step_on_other_ranks(corpus: str, rows: str) -> None:
    check_resumes_on_other_ranks(lambda **changes: TokenLoader(**settings_of(corpus, rows=rows, **changes)))


def test_the_rows_are_those_without_it(corpus: str) -> None:
    for rows in ("pack", "pad"):
        found = []
        for changes in ({}, {"balance": None, "balance_cost": None}):
            with TokenLoader(**settings_of(corpus, rows=rows, **changes)) as loader:
                found.append([row[:2] for batch in loader for row in shown(batch)])
                report = loader.plan_report()
                assert (report.cost_ratio is None) == bool(changes)
        assert found[0] != found[1]
        assert sorted(found[0]) == sorted(found[1])


def test_reports_are_kept_for_each_shape_of_a_step(corpus: str) -> None:
    reports: dict[int, Any] = {}
    for world_size in (1, 2, 4, 2):
        with TokenLoader(**settings_of(corpus, rank=0, world_size=world_size)) as loader:
            report = loader.plan_report()
        assert reports.setdefault(world_size, report) == report
    assert reports[1].cost_ratio == 1.0
    assert reports[4].cost_ratio > 1.0
    assert reports[4].unbalanced_worst_cost_ratio >= reports[4].unbalanced_cost_ratio > 1.0


def test_windows_of_few_rows_for_many_ranks_are_told(corpus: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Until one window holds all documents, or has 64 rows for each rank."""

    def said(**changes: Any) -> str:
        with TokenLoader(**settings_of(corpus, rank=0, quiet=False, **changes)):
            pass
        return capfd.readouterr().err

    def advice(text: str) -> int | None:
        found = re.search(r"set window_documents = ([\d,]+)", text.replace("\n", " "))
        return None if found is None else int(found[1].replace(",", ""))

    for rows, few, enough in (("pad", 2, 1), ("pack", 1, None)):
        told = said(rows=rows, world_size=few, window_documents=40)
        wanted = advice(told)
        assert wanted == 80, told
        for changes in ({"window_documents": wanted}, {"balance": None, "balance_cost": None}):
            assert advice(said(rows=rows, world_size=few, **{"window_documents": 40, **changes})) is None
        assert enough is None or advice(said(rows=rows, world_size=enough, window_documents=40)) is None


def test_a_state_says_what_a_row_costs(corpus: str) -> None:
    with TokenLoader(**settings_of(corpus)) as loader:
        state = loader.state_dict()
    assert state["config"]["balance_cost"] == [2, 1]
    assert cost_balance.BALANCE_NAME in state["order"]
    for changes in ({"balance_cost": [3, 1]}, {"balance": None, "balance_cost": None}):
        with TokenLoader(**settings_of(corpus, **changes)) as loader:
            with pytest.raises(StateError, match=r"balance_cost: saved \[2, 1\], now"):
                loader.load_state_dict(state)
            if "balance" in changes:
                assert "balance_cost" not in loader.state_dict()["config"]


def test_a_state_of_another_release_says_who_can_go_on(corpus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("dali_pipes.rows.document_rows.BALANCE_NAME", "balance-v1")
        with TokenLoader(**settings_of(corpus)) as loader:
            state = loader.state_dict()
    with TokenLoader(**settings_of(corpus)) as loader, pytest.raises(StateError, match=r"balance-v1") as refused:
        loader.load_state_dict(state)
    assert cost_balance.BALANCE_NAME in str(refused.value)
    assert "release" in str(refused.value)
    assert "settings" not in str(refused.value)


def test_validation_is_in_corpus_order(corpus: str) -> None:
    """With the settings of training, as a validation loader has them."""
    found: list[Any] = []
    for changes in ({}, {"balance": None, "balance_cost": None}):
        settings = settings_of(corpus, split="validation", validation_fraction=0.4, **changes)
        with TokenLoader(**settings) as loader:
            found.append([shown(batch) for batch in loader])
            found.append(loader.state_dict())
    assert found[:2] == found[2:]


def test_costs_of_a_model() -> None:
    """A training step: 6 x 12 h^2 n L for the layers, 6 h V L for the logits, 6 h n L^2 for causal attention."""
    config = LoaderConfig(**settings_of("x", balance_cost=None, hidden_size=64, num_layers=3, vocab_size=500))
    assert config.cost_weights is not None
    a, b = config.cost_weights
    for length in (1, 7, 500):
        operations = 6 * length * (12 * 64 * 64 * 3 + 64 * 500) + 6 * 64 * 3 * length**2
        assert 6 * 64 * (a * length + b * length**2) == operations
    assert LoaderConfig(**settings_of("x", balance_cost=[5, 7])).cost_weights == (5, 7)


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"rows": "stream"}, ['rows = "stream"']),
        ({"length_buckets": [4, 8]}, ["length_buckets = "]),
        ({"shuffle": False}, ["shuffle = False"]),
        ({"rows": "pack", "seq_len": [[0, 8], [100, 16]], "global_batch": 4, "drop_last": True}, ["a seq_len list"]),
        ({"balance_cost": None}, ["hidden_size", "num_layers", "neither"]),
        ({"balance_cost": None, "hidden_size": 8}, ["num_layers", "hidden_size = 8"]),
        ({"hidden_size": 8, "num_layers": 2}, ["hidden_size = 8"]),
        ({"hidden_size": 8}, ["hidden_size = 8", "balance_cost = (2, 1)"]),
        ({"balance_cost": [0, 0]}, ["[0, 0]"]),
        ({"balance_cost": [-1, 3]}, ["[-1, 3]"]),
        ({"balance_cost": [1, 2**60]}, ["2^62", "16 tokens"]),
        ({"balance_cost": [1]}, ["balance_cost"]),
        ({"balance": None}, ["balance_cost = (2, 1)", 'balance = "cost"']),
        ({"balance": None, "balance_cost": None, "num_layers": 2}, ["num_layers = 2"]),
        ({"balance": "work"}, ["balance"]),
    ],
    ids=str,
)
def test_what_it_does_not_go_with(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        LoaderConfig(**settings_of("x", **changes))
    assert all(part in str(raised.value) for part in parts), raised.value


def test_a_mixture_refuses_it() -> None:
    settings = settings_of("x")
    source = {"corpus": settings.pop("corpus"), "weight": 1}
    with pytest.raises(ConfigError, match="balance does not work with mixture"):
        LoaderConfig(**settings, mixture={"web": source})
