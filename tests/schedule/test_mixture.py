"""The order of a mixture: shares at every stratum, each row of a source once, stages, caps, any place by formula."""

import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixture_oracle import counts_of, permuted, row_of, tree_of, walk
from profiles import examples

from dali_pipes.schedule.mixture import MOST_PLACES, MixtureOrder, _left_rows

Weights = Mapping[str, Fraction | int]
Policy = Literal["drop", "stop"]

weight_values: st.SearchStrategy[Fraction | int] = st.one_of(
    st.integers(0, 5).map(Fraction),
    st.fractions(0, 1, max_denominator=1000),
    st.sampled_from([Fraction(1, 10**6), Fraction(1, 3), Fraction(10**9), Fraction(7, 10)]),
)


def named(values: Sequence[Fraction]) -> dict[str, Fraction]:
    return {f"source {number}": value for number, value in enumerate(values)}


def family(kind: str, count: int) -> dict[str, Fraction]:
    random = np.random.default_rng(count)
    if kind == "equal":
        return named([Fraction(1)] * count)
    if kind == "zipf":
        return named([Fraction(1, rank) for rank in range(1, count + 1)])
    if kind == "dirichlet":
        return named([Fraction(round(share * 10**9) + 1, 10**9) for share in random.dirichlet([0.3] * count).tolist()])
    if kind == "one dominant":
        return named([Fraction(99, 100), *[Fraction(1, 100 * count)] * (count - 1)])
    return named([Fraction(1), *[Fraction(1, 10**6)] * (count - 1)])


FAMILIES = ["equal", "zipf", "dirichlet", "one dominant", "millionths"]


def order_of(weights: Weights, seed: int = 1, caps: dict[str, int] | None = None) -> MixtureOrder:
    return MixtureOrder(list(weights), [(0, weights)], seed=seed, caps=caps)


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[str], list[tuple[int, dict[str, Fraction | int]]]]:
    names = [f"s{number}" for number in range(draw(st.integers(1, 6)))]
    places = sorted(draw(st.sets(st.integers(1, 1500), max_size=3)))
    stages: list[tuple[int, dict[str, Fraction | int]]] = []
    for place in [0, *places]:
        weights: dict[str, Fraction | int] = {name: draw(weight_values) for name in names}
        if not any(weights.values()):
            weights[names[0]] = 1
        stages.append((place, weights))
    return names, stages


words = st.one_of(st.integers(0, 2**64 - 1), st.sampled_from([0, 1, 2**32 - 1, 2**32, 2**63 - 1, 2**63, 2**64 - 1]))


@given(pairs=st.lists(st.tuples(st.one_of(st.integers(0, 2**33), words.map(lambda k: k >> 2)), words), min_size=1))
def test_rows_of_the_left_half_equal_integers_of_any_length(pairs: list[tuple[int, int]]) -> None:
    k, shares = (np.array(column, np.uint64) for column in zip(*pairs, strict=True))
    high, low = _left_rows(k, shares)
    exact = [rows * share + 2**63 for rows, share in pairs]
    assert high.tolist() == [number >> 64 for number in exact]
    assert low.tolist() == [number % 2**64 for number in exact]


@settings(max_examples=examples(25))
@given(
    mixture=mixtures(),
    seed=st.integers(0, 2**40),
    policy=st.sampled_from(["drop", "stop"]),
    data=st.data(),
)
def test_equals_the_walk_over_strata(
    mixture: tuple[list[str], list[tuple[int, dict[str, Fraction | int]]]],
    seed: int,
    policy: Policy,
    data: st.DataObject,
) -> None:
    names, stages = mixture
    capped = data.draw(st.sets(st.sampled_from(names)))
    caps = {name: data.draw(st.integers(0, 900)) for name in sorted(capped)}
    order = MixtureOrder(names, stages, seed=seed, caps=caps, on_exhausted=policy)
    walked = walk(names, stages, seed, caps, policy, strata=14)
    horizon = 14 * 128
    assert (order.end if order.end is not None and order.end < horizon else None) == walked.end
    left = [(name, place, used) for name, place, used, _ in order.exhausted if place < horizon]
    assert sorted(left) == sorted(walked.left)
    shuffled = np.random.default_rng(seed).permutation(len(walked.rows))
    sources, counts = order.rows(shuffled)
    found = [(names[source], count) for source, count in zip(sources.tolist(), counts.tolist(), strict=True)]
    assert found == [walked.rows[place] for place in shuffled.tolist()]

    place = data.draw(st.integers(0, len(walked.rows)))
    before = [name for name, _ in walked.rows[:place]]
    assert order.counts_before(place).tolist() == [before.count(name) for name in names]
    if walked.rows:
        place = data.draw(st.integers(0, len(walked.rows) - 1))
        name, count = walked.rows[place]
        assert order.place_of(names.index(name), count) == place
    if order.end is not None:
        total = order.counts_before(order.end)
        for source in range(len(names)):
            assert order.place_of(source, int(total[source])) is None
        with pytest.raises(ValueError, match=f"{order.end:,}"):
            order.rows(np.array([order.end]))


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_any_place_equals_integers_of_any_length(kind: str, count: int) -> None:
    weights = family(kind, count)
    order, tree, names = order_of(weights), tree_of(weights), list(weights)
    random = np.random.default_rng(15)
    places = np.concatenate([random.integers(0, 2**bits, 3) for bits in (7, 20, 33, 47, 62)] + [[MOST_PLACES - 1]])
    sources, counts = order.rows(places)
    for place, source, row in zip(places.tolist(), sources.tolist(), counts.tolist(), strict=True):
        assert (names[source], row) == row_of(tree, permuted(place, 1))
        assert order.place_of(source, row) == place
    place = int(places[-2]) // 128 * 128
    whole = counts_of(tree, place)
    assert order.counts_before(place).tolist() == [whole[name] for name in names]


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("count", [1, 2, 3, 10, 100, 1000])
def test_named_mixtures_are_at_most_a_row_off_their_shares(kind: str, count: int) -> None:
    """At the end of a stratum; inside one, a source is no further from there than the rows it has in it."""
    weights = family(kind, count)
    order, total = order_of(weights), sum(weights.values())
    strata = [*range(1, 12), *np.random.default_rng(2).integers(1, 10**14 // 128, 6).tolist()]
    for stratum in strata:
        place = stratum * 128
        for weight, rows in zip(weights.values(), order.counts_before(place).tolist(), strict=True):
            assert abs(rows - place * weight / total) <= 1
        inside = order.counts_before(place + 77) - order.counts_before(place)
        assert inside.sum() == 77
        assert (inside <= order.counts_before(place + 128) - order.counts_before(place)).all()


@settings(max_examples=examples(100))
@given(
    values=st.lists(st.integers(1, 10**9), min_size=1, max_size=50),
    strata=st.lists(st.integers(0, 10**14 // 128), min_size=1, max_size=20),
)
def test_no_mixture_is_two_rows_off_its_shares(values: list[int], strata: list[int]) -> None:
    """What the module's text proves; about 1.3 rows is the worst that random weights have shown."""
    order, total = order_of(named([Fraction(value) for value in values])), sum(values)
    for place in (stratum * 128 for stratum in strata):
        for value, rows in zip(values, order.counts_before(place).tolist(), strict=True):
            assert abs(rows - Fraction(place * value, total)) < 2


@settings(max_examples=examples(20))
@given(mixture=mixtures(), seed=st.integers(0, 9))
def test_every_row_of_a_source_comes_once(
    mixture: tuple[list[str], list[tuple[int, dict[str, Fraction | int]]]], seed: int
) -> None:
    names, stages = mixture
    sources, counts = MixtureOrder(names, stages, seed=seed).rows(np.arange(16 * 128))
    for source in range(len(names)):
        rows = counts[sources == source]
        assert sorted(rows.tolist()) == list(range(rows.size))


@settings(max_examples=examples(20))
@given(mixture=mixtures(), place=st.integers(0, 2000), data=st.data())
def test_other_weights_change_nothing_before_them(
    mixture: tuple[list[str], list[tuple[int, dict[str, Fraction | int]]]], place: int, data: st.DataObject
) -> None:
    names, stages = mixture
    caps = {name: data.draw(st.integers(0, 900)) for name in names[1:]}
    order = MixtureOrder(names, stages, seed=4, caps=caps)
    weights = {name: Fraction(number + 1) for number, name in enumerate(names)}
    changed = order.with_stage(place, weights)
    start = -(-place // 128) * 128
    both = min(start, order.end if order.end is not None else start)
    assert [rows.tolist() for rows in changed.rows(np.arange(both))] == [
        rows.tolist() for rows in order.rows(np.arange(both))
    ]
    assert [one for one in changed.exhausted if one.place < start] == [
        one for one in order.exhausted if one.place < start
    ]
    if order.end is None or order.end > start:
        in_effect = [weights for place, weights in changed.stages if place == start]
        gone = {one.name for one in changed.exhausted if one.place <= start}
        assert in_effect == [{n: Fraction(0) if n in gone else weight for n, weight in weights.items()}]
        assert changed.given_stages[-1] == (start, weights)


def test_a_change_may_keep_the_later_stages() -> None:
    order = MixtureOrder("ab", [(0, {"a": 1, "b": 1}), (200, {"a": 1, "b": 2}), (500, {"a": 1, "b": 3})], seed=0)
    changed = order.with_stage(130, {"a": 5, "b": 1}, keep_later=True)
    assert [(place, weights["a"] / weights["b"]) for place, weights in changed.stages] == [
        (0, 1),
        (256, 5),
        (512, Fraction(1, 3)),
    ]


@pytest.mark.parametrize("policy", ["drop", "stop"])
@pytest.mark.parametrize("kind", FAMILIES)
def test_a_cap_is_kept_and_no_stratum_that_fits_is_lost(kind: str, policy: Policy) -> None:
    weights, cap = family(kind, 5), 10**11 + 7
    name = "source 1"
    order = MixtureOrder(list(weights), [(0, weights)], seed=1, caps={name: cap}, on_exhausted=policy)
    [(left, place, used, of)] = order.exhausted
    assert (left, of) == (name, cap)
    free = order_of(weights)
    assert used == free.counts_before(place)[1] == order.counts_before(place)[1] <= cap
    assert free.counts_before(place + 128)[1] > cap
    assert order.place_of(1, used) is None
    last = order.place_of(1, used - 1)
    assert last is not None
    assert last < place
    assert order.end == (place if policy == "stop" else None)
    assert [start for start, _ in order.stages] == ([0] if policy == "stop" else [0, place])


def test_the_order_ends_where_all_sources_have_left() -> None:
    order = order_of({"a": 1, "b": 1}, caps={"a": 640, "b": 10_000})
    assert order.stages[1] == (1280, {"a": Fraction(0), "b": Fraction(1)})
    assert order.exhausted == [("a", 1280, 640, 640), ("b", 1280 + 9344, 9984, 10_000)]
    assert order.end == 1280 + 9344
    assert order.counts_before(order.end).tolist() == [640, 9984]


def test_an_order_may_be_empty() -> None:
    order = order_of({"a": 1}, caps={"a": 100})
    assert (order.end, order.stages, order.exhausted) == (0, [], [("a", 0, 0, 100)])
    assert order.counts_before(0).tolist() == [0]
    assert order.place_of(0, 0) is None
    assert [rows.tolist() for rows in order.rows(np.arange(0))] == [[], []]


def chi_square(table: npt.NDArray[np.int64]) -> float:
    expected = table.sum(1, keepdims=True) * table.sum(0, keepdims=True) / table.sum()
    return float(((table - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("kind", ["halves", *FAMILIES[:-1]])  # millionths are too few rows
@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
@pytest.mark.parametrize("seed", range(2))
def test_a_rank_gets_its_share_of_each_source(ranks: int, seed: int, kind: str) -> None:
    """By chance, as far as chi-square tells, also where steps have an even number of rows of two equal weights."""
    weights = family("equal", 2) if kind == "halves" else family(kind, 6)
    places = np.arange(2**16)
    sources, _ = order_of(weights, seed).rows(places)
    tables = [np.bincount(places[sources == source] % ranks, minlength=ranks) for source in range(len(weights))]
    # Sources of which a rank has too few rows count as one.
    few = [table for table in tables if table.sum() < 5 * ranks]
    table = np.stack([table for table in tables if table.sum() >= 5 * ranks] + ([sum(few)] if few else []))
    degrees = (len(table) - 1) * (ranks - 1)
    # Strata hold whole shares, so the statistic is a little below that of a free split. 5 sigma either side.
    assert 0 < chi_square(table) < degrees + 5 * (2 * degrees) ** 0.5 + 5


def test_seeds_give_different_orders() -> None:
    orders = [order_of({"a": 1, "b": 1}, seed).rows(np.arange(128))[0].tobytes() for seed in range(20)]
    assert len(set(orders)) == 20


def test_the_order_is_frozen() -> None:
    """A change of any of these needs another MIXTURE_ORDER_NAME."""
    order = order_of({"a": Fraction(1, 5), "b": Fraction(3, 10), "c": Fraction(1, 2)}, seed=2024)
    sources, counts = order.rows(np.array([0, 1, 2, 3, 127, 128, 10**6, 10**14, 2**61]))
    assert sources.tolist() == [2, 0, 1, 1, 2, 2, 1, 2, 1]
    assert counts.tolist() == [16, 16, 33, 27, 12, 122, 299995, 50000000000052, 691752902764108204]


@pytest.mark.parametrize(
    ("stages", "caps", "words"),
    [
        ([(0, {"a": 1})], {}, ["place 0", "'b'"]),
        ([(0, {"a": 1, "b": 1, "c": 1})], {}, ["place 0", "'c'"]),
        ([(0, {"a": 0, "b": 0})], {}, ["place 0", "0"]),
        ([(0, {"a": 1, "b": -1})], {}, ["'b'", "-1"]),
        ([(5, {"a": 1, "b": 1})], {}, ["[5]"]),
        ([], {}, ["[]"]),
        ([(0, {"a": 1, "b": 1}), (9, {"a": 1, "b": 1}), (9, {"a": 1, "b": 1})], {}, ["[0, 9, 9]"]),
        ([(0, {"a": 1, "b": 1}), (2**62, {"a": 1, "b": 1})], {}, [f"{2**62:,}"]),
        ([(0, {"a": 1, "b": 1})], {"x": 1}, ["'x'"]),
        ([(0, {"a": 1, "b": 1})], {"a": -3}, ["'a'", "-3"]),
    ],
)
def test_wrong_input_is_named(stages: list[tuple[int, Weights]], caps: dict[str, int], words: list[str]) -> None:
    with pytest.raises(ValueError, match="".join(f"(?=.*{re.escape(word)})" for word in words)):
        MixtureOrder(["a", "b"], stages, seed=0, caps=caps)


def test_weights_are_not_floats() -> None:
    with pytest.raises(TypeError, match=r"'a'.*0\.5"):
        MixtureOrder(["a"], [(0, {"a": 0.5})], seed=0)  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="different names"):
        MixtureOrder(["a", "a"], [(0, {"a": 1})], seed=0)
    with pytest.raises(ValueError, match="'error'"):
        MixtureOrder(["a"], [(0, {"a": 1})], seed=0, on_exhausted="error")  # type: ignore[arg-type]


@pytest.mark.parametrize("place", [-1, MOST_PLACES, MOST_PLACES + 1])
def test_a_place_outside_is_named(place: int) -> None:
    order = order_of({"a": 1})
    with pytest.raises(ValueError, match=f"{place:,}"):
        order.rows(np.array([0, place]))
    if place != MOST_PLACES:
        with pytest.raises(ValueError, match=f"{place:,}"):
            order.counts_before(place)
