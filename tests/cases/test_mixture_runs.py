"""Runs of mixtures in integers alone, of a few hundred rows or of 10^13 tokens, against plain loops and fractions.

The oracle knows the weights of each part of a run, the tree over them, and each source's own order; nothing of states,
ranks and steps.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mixture_oracle import counts_of, permuted, row_of, tree_of
from profiles import examples

from dali_pipes.loader.mixture_state import check_entry, mixture_entry, resume_mixture
from dali_pipes.operators import permute
from dali_pipes.rows.windows import WindowRows, split_windows
from dali_pipes.schedule import Schedule, StepRange
from dali_pipes.schedule.mixed_rows import MixedRows
from dali_pipes.schedule.mixture import MixtureOrder
from dali_pipes.schedule.plans import plan_steps

Stages = list[tuple[int, dict[str, Fraction]]]
SEED = 5


def mixed(sizes: Mapping[str, int], weights: Mapping[str, Fraction], total: int, seq_len: int) -> MixedRows:
    """Sources of `sizes` tokens each."""
    sources = [WindowRows(split_windows(size, seq_len), seed=SEED, name=name) for name, size in sizes.items()]
    order = MixtureOrder(list(sizes), [(0, weights)], seed=SEED)
    return MixedRows(
        list(sizes), sources, np.cumsum([0, *sizes.values()]), order, total, {}, [(0, dict(order.stages[0][1]))]
    )


class Oracle:
    """The rows of a run: at each place a source and the first token of the row in it."""

    def __init__(self, sizes: Mapping[str, int], seq_len: int) -> None:
        self.names, self.seq_len = list(sizes), seq_len
        self.windows = {name: (size - 1) // seq_len for name, size in sizes.items()}
        self.key = cache(self._key)

    def _key(self, name: str, number: int) -> int:
        text = f"dali_pipes order {SEED} {json.dumps(name)} {number}"
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")

    def parts(self, stages: Stages) -> list[tuple[int, Any, dict[str, int]]]:
        """For each stage its first place, its tree, and the rows of each source before."""
        used, parts = dict.fromkeys(self.names, 0), []
        for number, (first, weights) in enumerate(stages):
            tree = tree_of(weights)
            parts.append((first, tree, dict(used)))
            if number + 1 < len(stages):
                for name, rows in counts_of(tree, stages[number + 1][0] - first).items():
                    used[name] += rows
        return parts

    def rows(self, stages: Stages, places: Sequence[int]) -> list[tuple[int, int]]:
        parts, found = self.parts(stages), []
        for place in places:
            first, tree, used = next(part for part in reversed(parts) if part[0] <= place)
            name, count = row_of(tree, permuted(place, SEED) - first)
            number, own = divmod(used[name] + count, self.windows[name])
            window = int(permute(np.array([own]), self.windows[name], self.key(name, number))[0])
            found.append((self.names.index(name), window * self.seq_len))
        return found


def planned(mixture: MixedRows, places: Sequence[int], epoch: int = 0) -> list[tuple[int, int]]:
    """What a mixture plans, in the terms of the oracle."""
    rows = mixture.plan(epoch, np.array(places, np.int64))
    assert rows.sources is not None
    starts = rows.starts - mixture.bases[rows.sources]
    return list(zip(rows.sources.tolist(), starts.tolist(), strict=True))


def resumed(mixture: MixedRows, fresh: MixedRows, epoch: int, rows: int) -> MixedRows:
    """A new mixture that goes on from the state of another one, as JSON."""
    entry = json.loads(json.dumps(mixture_entry(mixture, epoch, rows)))
    check_entry(entry)
    assert resume_mixture(fresh, entry, epoch, rows, rows, None) is None
    return fresh


weights_of = st.sampled_from([Fraction(1), Fraction(1, 3), Fraction(1, 10**6), Fraction(99), Fraction(0), Fraction(2)])


@settings(max_examples=examples(12))
@given(
    weights=st.lists(weights_of, min_size=1, max_size=12).filter(any),
    world_size=st.integers(1, 64),
    batch_size=st.integers(1, 4),
    steps_at_once=st.integers(1, 5),
    epoch=st.integers(0, 2),
    data=st.data(),
)
def test_any_number_of_ranks_has_every_row_once(
    weights: list[Fraction], world_size: int, batch_size: int, steps_at_once: int, epoch: int, data: st.DataObject
) -> None:
    named = {f"source {number}": weight for number, weight in enumerate(weights)}
    sizes = {name: data.draw(st.integers(9, 400)) for name in named}
    total = data.draw(st.integers(1, 400))
    mixture = mixed(sizes, named, total, 8)
    schedule = Schedule(mixture, batch_size, rank=0, world_size=world_size, drop_last=False)
    found: dict[int, tuple[int, int]] = {}
    num_steps = schedule.steps_of(total)
    for rank in range(world_size):
        of_rank = replace(schedule, rank=rank)
        for first in range(0, num_steps, steps_at_once):
            plan = plan_steps(of_rank, StepRange(epoch, 0, first, min(steps_at_once, num_steps - first)))
            real = plan.row_ids >= 0
            assert plan.rows.sources is not None
            starts = (plan.starts - mixture.bases[np.maximum(plan.rows.sources, 0)])[real]
            rows = zip(plan.rows.sources[real].tolist(), starts.tolist(), strict=True)
            fresh = dict(zip(plan.row_ids[real].tolist(), rows, strict=True))
            assert not fresh.keys() & found.keys()
            found |= fresh
    oracle = Oracle(sizes, 8)
    expected = oracle.rows([(0, named)], range(epoch * total, (epoch + 1) * total))
    assert [found[place] for place in range(total)] == expected


def test_a_run_goes_on_from_every_place() -> None:
    """With other weights asked for after rows 100 and 200, and a source that pauses and comes back."""
    sizes, total = {"web": 900, "code": 300, "math": 70}, 320
    first = {"web": Fraction(6, 10), "code": Fraction(3, 10), "math": Fraction(1, 10)}
    changes = {100: {"web": Fraction(1), "code": Fraction(4), "math": Fraction(0)}, 200: {**first, "math": Fraction(7)}}
    run, oracle, stages = mixed(sizes, first, total, 8), Oracle(sizes, 8), [(0, first)]
    rows = oracle.rows(stages, range(total))
    for place in range(total + 1):
        if place in changes:
            begin = -(-place // 128) * 128
            run.set_order(run.order.with_stage(begin, changes[place]))
            stages = [*stages, (begin, changes[place])]
            before, rows = rows, oracle.rows(stages, range(total))
            assert before[:begin] == rows[:begin]
            assert before[begin:] != rows[begin:]
        again = resumed(run, mixed(sizes, first, total, 8), 0, place)
        assert planned(again, range(place, min(total, place + 40))) == rows[place : place + 40]
        if place % 50 == 0:
            assert planned(again, range(total)) == rows
            twice = resumed(again, mixed(sizes, first, total, 8), 0, place)
            assert mixture_entry(twice, 0, place) == mixture_entry(run, 0, place)
            assert planned(twice, range(total - 40, total)) == rows[-40:]
            assert planned(twice, range(9), epoch=1) == oracle.rows(stages, range(total, total + 9))


@settings(max_examples=examples(15))
@given(
    kind=st.sampled_from(["equal", "zipf", "dirichlet", "one dominant", "millionths"]),
    count=st.sampled_from([1, 2, 3, 7, 40]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_large_runs_with_changing_weights_go_on_from_any_place(
    kind: str, count: int, seed: int, data: st.DataObject
) -> None:
    """10^13 tokens: each part of the run, and each resume; each source at most two rows off its share."""
    random, seq_len, total = np.random.default_rng(seed), 4096, 10**13 // 4096
    sizes = {f"s{number}": int(random.integers(10**9, 10**12)) for number in range(count)}
    first = weights_like(kind, list(sizes), random)
    run, oracle, stages = mixed(sizes, first, total, seq_len), Oracle(sizes, seq_len), [(0, first)]
    for place in sorted(data.draw(st.sets(st.integers(1, total - 1000), max_size=4))):
        begin = -(-place // 128) * 128
        weights = weights_like(data.draw(st.sampled_from(["equal", "zipf", "dirichlet"])), list(sizes), random)
        run.set_order(run.order.with_stage(begin, weights))
        stages = [stage for stage in stages if stage[0] < begin] + [(begin, weights)]
        at = data.draw(st.integers(place, total))
        run = resumed(run, mixed(sizes, first, total, seq_len), 0, at)
    place = data.draw(st.integers(stages[-1][0], total - 1))
    again = resumed(run, mixed(sizes, first, total, seq_len), 0, place)
    places = [*range(place, min(total, place + 20)), *random.integers(0, total, 20).tolist()]
    assert planned(again, places) == oracle.rows(stages, places)
    for (begin, weights), (end, _) in zip(stages, [*stages[1:], (total // 128 * 128, {})], strict=True):
        at = begin + 128 * int(random.integers(0, (end - begin) // 128 + 1))
        since = again.order.counts_before(at) - again.order.counts_before(begin)
        whole = sum(weights.values())
        for weight, rows in zip(weights.values(), since.tolist(), strict=True):
            assert abs(rows - (at - begin) * weight / whole) < 2


def weights_like(kind: str, names: list[str], random: np.random.Generator) -> dict[str, Fraction]:
    count = len(names)
    values = {
        "equal": [Fraction(1)] * count,
        "zipf": [Fraction(1, rank) for rank in range(1, count + 1)],
        "dirichlet": [Fraction(round(one * 10**9) + 1, 10**9) for one in random.dirichlet([0.3] * count).tolist()],
        "one dominant": [Fraction(99), *[Fraction(1, count)] * (count - 1)],
        "millionths": [Fraction(1), *[Fraction(1, 10**6)] * (count - 1)],
    }[kind]
    return dict(zip(names, (values[number] for number in random.permutation(count)), strict=True))


def test_a_place_of_a_large_run_needs_little_memory() -> None:
    """Nothing grows with the run or the sizes: a thousand sources at place 0 and near the end of 10^13 tokens."""
    import tracemalloc

    sizes = {f"s{number}": 10**12 for number in range(1000)}
    weights = weights_like("zipf", list(sizes), np.random.default_rng(0))
    run = mixed(sizes, weights, 10**13 // 4096, 4096)
    peaks = []
    for place in (0, 10**13 // 4096 - 64):
        planned(run, range(place, place + 64))
        tracemalloc.start()
        planned(run, range(place, place + 64))
        mixture_entry(run, 0, place)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 4 << 20
    assert peaks[1] == pytest.approx(peaks[0], rel=0.5)
