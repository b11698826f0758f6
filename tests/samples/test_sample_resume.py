"""A run that is saved and resumed anywhere, on any ranks and workers, hands out what the unbroken one does."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_datasets import Augmented, Numbers, flat, items_of
from torch.utils.data import ConcatDataset, Subset

from dali_pipes import SampleLoader
from dali_pipes.errors import StateError

ORDERS: dict[str, dict[str, Any]] = {
    "shuffled": {"shuffle": True},
    "in order": {},
    "weighted": {"weights": [item % 3 + 0.5 for item in range(26)]},
    "grouped": {"groups": ["a"] * 20 + ["b"] * 6, "weights": {"a": 1, "b": 2}},
    "fewer a pass": {"shuffle": True, "num_samples": 17},
}


def samples_of(batch: dict[str, Any]) -> list[tuple[int, list[float]]]:
    return list(zip(batch["item"].tolist(), batch["draws"].tolist(), strict=True))


def in_row_order(by_rank: Sequence[Sequence[Any]]) -> list[Any]:
    """Samples of some steps by rank, in the order of the epoch's rows."""
    return [samples[place] for place in range(max(map(len, by_rank))) for samples in by_rank if place < len(samples)]


def unbroken(epochs: int, order: dict[str, Any]) -> list[list[Any]]:
    loader = SampleLoader(Augmented(26), 1, seed=3, **order)
    return [flat(map(samples_of, loader)) for _ in range(epochs)]


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_every_step(order: dict[str, Any]) -> None:
    whole = unbroken(2, order)
    loader = SampleLoader(Augmented(26), 3, seed=3, **order)
    states = [loader.state_dict()]
    for _ in range(2):
        for _ in loader:
            states.append(loader.state_dict())
    assert len(states) == 1 + 2 * len(loader)
    for number, state in enumerate(states):
        epoch, step = divmod(number, len(loader))
        assert (state["epoch"], state["rows"]) == (epoch, 3 * step)
        resumed = SampleLoader(Augmented(26), 4, seed=3, **order)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        assert (resumed.epoch, resumed.state_dict()["rows"]) == (epoch, 3 * step)
        if epoch < 2:
            assert flat(map(samples_of, resumed)) == whole[epoch][3 * step :]
    assert len(json.dumps(states[-1])) < 1_000


@given(
    order=st.sampled_from(list(ORDERS.values())),
    parts=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=5),
)
def test_elastic(order: dict[str, Any], parts: list[tuple[int, int, int]]) -> None:
    """(ranks, batch size, steps) one after another; then one rank goes on to the end of the epoch."""
    whole = unbroken(1, order)[0]
    found: list[Any] = []
    state: dict[str, Any] | None = None
    for world_size, batch_size, num_steps in [*parts, (1, 5, 100)]:
        by_rank: list[list[Any]] = []
        states = []
        for rank in range(world_size):
            settings = {"seed": 3, "rank": rank, "world_size": world_size, **order}
            loader = SampleLoader(Augmented(26), batch_size, **settings)
            if state is not None:
                loader.load_state_dict(state)
            by_rank.append([])
            if loader.epoch == 0 and num_steps:
                for number, batch in enumerate(loader, start=1):
                    kept = len(batch["item"]) - loader.repeated
                    by_rank[-1] += samples_of(batch)[:kept]
                    if number == num_steps:
                        break
            states.append(loader.state_dict())
        assert all({**one, "rank": 0} == {**states[0], "rank": 0} for one in states)
        found += in_row_order(by_rank) if any(by_rank) else []
        state = states[0]
    assert found == whole


def test_two_ranks_and_workers_to_four_to_one() -> None:
    """Real worker processes: 2 ranks x 2 workers, 4 x 1, 1 x 2."""
    order = ORDERS["shuffled"]
    whole = unbroken(1, order)[0]
    found: list[Any] = []
    state: dict[str, Any] | None = None
    for world_size, num_workers, num_steps in ((2, 2, 2), (4, 1, 1), (1, 2, 100)):
        by_rank: list[list[Any]] = []
        for rank in range(world_size):
            settings = {"seed": 3, "rank": rank, "world_size": world_size, "num_workers": num_workers, **order}
            with SampleLoader(Augmented(26), 2, **settings) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                by_rank.append([])
                for number, batch in enumerate(loader, start=1):
                    by_rank[-1] += samples_of(batch)
                    if number == num_steps:
                        break
                saved = loader.state_dict()
        found += in_row_order(by_rank)
        state = saved
    assert found == whole


def test_an_endless_run_goes_on_in_its_epoch() -> None:
    def endless(state: dict[str, Any] | None, batch_size: int, steps: int) -> tuple[list[int], dict[str, Any]]:
        loader = SampleLoader(Numbers(10), batch_size, True, repeat=True)
        if state is not None:
            loader.load_state_dict(state)
        found: list[int] = []
        for number, batch in enumerate(loader, start=1):
            found += batch["item"].tolist()
            if number == steps:
                break
        return found, loader.state_dict()

    loader = SampleLoader(Numbers(10), 1, True)
    whole = flat(flat(items_of(list(loader))) for _ in range(5))
    first, state = endless(None, 4, 8)  # batches of 4, 4 and 2
    second, state = endless(state, 3, 5)
    assert first + second == whole[: len(first) + len(second)]
    assert (state["epoch"], state["rows"]) == (len(whole[: len(first) + len(second)]) // 10, len(first + second) % 10)


def test_a_run_goes_on_after_a_resume_of_a_resume() -> None:
    whole = flat(items_of(list(SampleLoader(Numbers(40), 1, True))))
    state, found = SampleLoader(Numbers(40), 1, True).state_dict(), []
    for batch_size in (3, 5, 2, 7):
        loader = SampleLoader(Numbers(40), batch_size, True)
        loader.load_state_dict(state)
        iterator = iter(loader)
        found += flat([next(iterator)["item"].tolist(), next(iterator)["item"].tolist()])
        state = loader.state_dict()
    assert found == whole[: 2 * (3 + 5 + 2 + 7)]


def test_steps_are_numbered_on_after_a_resume() -> None:
    loader = SampleLoader(Numbers(40), 4, True)
    loader.load_state_dict({**loader.state_dict(), "rows": 20})
    assert (loader.step, len(loader)) == (5, 10)
    assert loader.locate(5, 0).row == 20
    other = SampleLoader(Numbers(40), 3, True)
    other.load_state_dict(loader.state_dict())
    assert (other.step, len(other)) == (7, 14)
    assert other.locate(7, 0).row == 20


class Fingerprinted(Numbers):
    def __init__(self, length: int, fingerprint: str) -> None:
        super().__init__(length)
        self._fingerprint = fingerprint


def state_of(dataset: Any, **settings: Any) -> dict[str, Any]:
    return SampleLoader(dataset, 2, **settings).state_dict()


@pytest.mark.parametrize(
    ("saved", "now", "message"),
    [
        (state_of(Numbers(8)), SampleLoader(Numbers(9)), "length of Numbers: saved 8, now 9"),
        (state_of(Numbers(8)), SampleLoader(Numbers(8), seed=1), "seed: saved 0, now 1"),
        (state_of(Numbers(8)), SampleLoader(Numbers(8), shuffle=True), "order: saved 'sequential-v1'"),
        (state_of(Numbers(8)), SampleLoader(Numbers(8), num_samples=4), "num_samples: saved 8, now 4"),
        (state_of(Numbers(2), weights=[1, 2]), SampleLoader(Numbers(2), weights=[1, 3]), "weights: saved"),
        (state_of(Numbers(2), groups=[1, 2]), SampleLoader(Numbers(2), groups=[1, 1]), "groups: saved"),
        (state_of(Fingerprinted(8, "a")), SampleLoader(Fingerprinted(8, "b")), "fingerprint of Fing.* 'a', now 'b'"),
        (state_of(Numbers(8), fingerprint="a"), SampleLoader(Numbers(8), fingerprint="b"), "'a', now 'b'"),
        ({**state_of(Numbers(8)), "rows": 9}, SampleLoader(Numbers(8)), "rows 9"),
        ({**state_of(Numbers(8)), "epoch": -1}, SampleLoader(Numbers(8)), "epoch -1"),
        ({**state_of(Numbers(8)), "epoch": "a"}, SampleLoader(Numbers(8)), "epoch 'a'"),
        ({**state_of(Numbers(8)), "version": 9}, SampleLoader(Numbers(8)), "version 9"),
        ({**state_of(Numbers(8)), "config": 3}, SampleLoader(Numbers(8)), "config"),
        ({"version": 1}, SampleLoader(Numbers(8)), "SampleLoader"),
        ({"version": 1, "kind": "samples"}, SampleLoader(Numbers(8)), "order, config"),
        ({"loader": state_of(Numbers(8))}, SampleLoader(Numbers(8)), "'loader'"),
        (None, SampleLoader(Numbers(8)), "None"),
    ],
)
def test_states_that_are_refused(saved: Any, now: SampleLoader, message: str) -> None:
    before = now.state_dict()
    with pytest.raises(StateError, match=message):
        now.load_state_dict(saved)
    assert now.state_dict() == before


def test_a_fingerprint_that_comes_or_goes_is_no_difference() -> None:
    with_one, without = Fingerprinted(8, "a"), Numbers(8)
    SampleLoader(without).load_state_dict(state_of(with_one))
    SampleLoader(with_one).load_state_dict(state_of(without))
    SampleLoader(Fingerprinted(8, "b"), fingerprint="a").load_state_dict(state_of(with_one))


def test_fingerprints_of_parts() -> None:
    def made(fingerprint: str, indices: list[int]) -> Iterator[dict[str, Any]]:
        yield state_of(Subset(Fingerprinted(8, fingerprint), indices))
        yield state_of(ConcatDataset([Fingerprinted(8, fingerprint), Fingerprinted(len(indices), "z")]))

    first, again, other = list(made("a", [1, 2])), list(made("a", [1, 2])), list(made("b", [1, 2]))
    assert first == again
    for one, two in zip(first, other, strict=True):
        assert one["dataset"]["fingerprint"] is not None
        assert one["dataset"]["fingerprint"] != two["dataset"]["fingerprint"]
    assert next(made("a", [2, 1])) != first[0]
    mixed: Any = ConcatDataset([Fingerprinted(8, "a"), Numbers(3)])
    assert state_of(mixed)["dataset"] == {"length": 11, "fingerprint": None}
