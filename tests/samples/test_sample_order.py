"""Which items `SampleLoader` hands out: by epoch, step and rank, whatever the ranks and batches are."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_datasets import Numbers, flat, items_of
from sample_oracle import in_passes, rows_of_ranks
from torch.utils.data import DataLoader

from dali_pipes import SampleLoader
from dali_pipes.errors import ConfigError


def batches(loader: SampleLoader, epochs: int = 1) -> list[list[list[int]]]:
    return [items_of(list(loader)) for _ in range(epochs)]


@given(
    length=st.integers(1, 40),
    num_samples=st.none() | st.integers(1, 60),
    batch_size=st.integers(1, 7),
    world_size=st.integers(1, 5),
    shuffle=st.booleans(),
    drop_last=st.booleans(),
    seed=st.integers(0, 3),
)
def test_order_is_that_of_the_oracle(
    length: int, num_samples: int | None, batch_size: int, world_size: int, shuffle: bool, drop_last: bool, seed: int
) -> None:
    num_rows = length if num_samples is None else num_samples
    settings: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last, "seed": seed}
    settings |= {"shuffle": shuffle, "num_samples": num_samples, "world_size": world_size}
    expected = rows_of_ranks(num_rows, world_size, batch_size, drop_last=drop_last)
    if not expected:
        with pytest.raises(ConfigError, match="drop_last"):
            SampleLoader(Numbers(length), rank=0, **settings)
        return
    for rank in range(world_size):
        loader = SampleLoader(Numbers(length), rank=rank, **settings)
        assert len(loader) == len(expected)
        for epoch, found in enumerate(batches(loader, 3)):
            items = in_passes(length, num_rows, seed, epoch, shuffle=shuffle)
            assert found == [[items[row] for row in step[rank]] for step in expected]


@given(length=st.integers(1, 50), batch_size=st.integers(1, 8), drop_last=st.booleans())
def test_without_shuffle_as_torch(length: int, batch_size: int, drop_last: bool) -> None:
    if drop_last and length < batch_size:
        return
    settings: dict[str, Any] = {"batch_size": batch_size, "drop_last": drop_last}
    of_torch = DataLoader(Numbers(length), **settings)
    loader = SampleLoader(Numbers(length), **settings)
    assert items_of(list(loader)) == items_of(list(of_torch))
    assert len(loader) == len(of_torch)


@given(length=st.integers(1, 60), batch_size=st.integers(1, 5), world_size=st.integers(1, 6))
def test_every_item_once_and_equal_numbers_of_steps(length: int, batch_size: int, world_size: int) -> None:
    """What is not handed out once is `repeated`, and that only if a last step has fewer rows than ranks."""
    seen: list[int] = []
    lengths = set()
    for rank in range(world_size):
        loader = SampleLoader(Numbers(length), batch_size, True, rank=rank, world_size=world_size)
        lengths.add(len(loader))
        for batch in loader:
            items = batch["item"].tolist()
            assert loader.repeated in (0, 1)
            if loader.repeated:
                assert length % (batch_size * world_size) < world_size
            seen += items[: len(items) - loader.repeated]
    assert sorted(seen) == list(range(length))
    assert len(lengths) == 1


def test_epochs_differ_and_repeat_goes_through_them() -> None:
    one, other = SampleLoader(Numbers(10), 3, True), SampleLoader(Numbers(10), 3, True, repeat=True)
    epochs = batches(one, 4)
    assert len({str(epoch) for epoch in epochs}) == 4
    endless = iter(other)
    assert [next(endless)["item"].tolist() for _ in range(16)] == flat(epochs)
    assert other.epoch == 4
    assert batches(SampleLoader(Numbers(10), 3, True, seed=1)) != epochs[:1]


def test_a_loop_that_is_left_ends_its_epoch() -> None:
    whole = batches(SampleLoader(Numbers(10), 3, True), 2)
    loader = SampleLoader(Numbers(10), 3, True)
    for batch in loader:
        assert batch["item"].tolist() == whole[0][0]
        assert (loader.epoch, loader.step) == (0, 1)
        break
    assert loader.state_dict()["rows"] == 3
    assert (loader.epoch, loader.step) == (1, 0)
    assert batches(loader) == whole[1:]


def test_set_epoch_is_not_needed_and_keeps_a_resumed_place() -> None:
    whole = batches(SampleLoader(Numbers(10), 3, True), 3)
    loader, found = SampleLoader(Numbers(10), 3, True), []
    for epoch in range(3):
        loader.set_epoch(epoch)
        found.append(items_of(list(loader)))
    assert found == whole
    loader.set_epoch(1)
    assert items_of(list(loader)) == whole[1]
    begun = SampleLoader(Numbers(10), 3, True)
    next(iter(begun))
    loader.load_state_dict(begun.state_dict())
    loader.set_epoch(0)
    assert items_of(list(loader)) == whole[0][1:]
    with pytest.raises(ConfigError, match="-1"):
        loader.set_epoch(-1)


def test_set_epoch_after_a_look_at_the_first_batch() -> None:
    """Also while the iterator that looked is still there."""
    whole = batches(SampleLoader(Numbers(10), 3, True), 2)
    loader, found = SampleLoader(Numbers(10), 3, True), []
    look = iter(loader)
    assert next(look)["item"].tolist() == whole[0][0]
    for epoch in range(2):
        loader.set_epoch(epoch)
        found.append(items_of(list(loader)))
    assert found == whole


def test_locate_names_what_was_handed_out() -> None:
    settings: dict[str, Any] = {"rank": 1, "world_size": 2, "seed": 5}
    loader = SampleLoader(Numbers(23), 3, True, **settings)
    rows = rows_of_ranks(23, 2, 3, drop_last=False)
    for epoch in range(2):
        for step, batch in enumerate(loader):
            for row, item in enumerate(batch["item"].tolist()):
                found = loader.locate(step, row)
                assert (found.item, found.epoch, found.row) == (item, epoch, rows[step][1][row])
                assert found == SampleLoader(Numbers(23), 3, True, **settings).locate(step, row, epoch)
    for step, row in ((4, 0), (-1, 0), (3, 3), (0, -1)):
        with pytest.raises(ConfigError, match="does not exist"):
            loader.locate(step, row)


def test_large_datasets_cost_nothing() -> None:
    loader = SampleLoader(Numbers(2**40), 4, True, rank=3, world_size=7)
    assert len(loader) == -(-(2**40) // 28)
    loader.load_state_dict({**loader.state_dict(), "epoch": 2**50, "rows": 2**39})
    iterator = iter(loader)
    assert len(set(next(iterator)["item"].tolist())) == 4
    assert (loader.epoch, loader.state_dict()["rows"]) == (2**50, 2**39 + 28)
