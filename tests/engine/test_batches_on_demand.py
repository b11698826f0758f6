"""Plain rows on the CPU are widened some batches at a time: in a reader thread, or in the trainer's."""

import random
from collections.abc import Callable
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import epoch_batches
from profiles import examples
from streams import all_same, take

from dali_pipes import TokenLoader
from dali_pipes.engine import block_source
from dali_pipes.operators.rows import widen_rows
from dali_pipes.placement import cpu
from dali_pipes.runtime.threads import ReaderThreads, Task

T = 8
Load = Callable[..., TokenLoader]
Who = Literal["reader", "trainer", "either"]


def readers_that(who: Who, seed: int = 0) -> type[ReaderThreads]:
    """Reader threads that make batches at once, never, or now and then."""
    draw = random.Random(seed)

    class Readers(ReaderThreads):
        def submit(self, function: Callable[..., Any], *arguments: Any) -> Task[Any]:
            if function.__name__ != "_group":
                return super().submit(function, *arguments)
            task: Task[Any] = Task(function, arguments)
            if who == "reader" or (who == "either" and draw.random() < 0.5):
                task.run()
            return task

    return Readers


@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    who=st.sampled_from(["reader", "trainer", "either"]),
    at_once=st.integers(1, 5),
    per_run=st.integers(1, 7),
    batch_size=st.integers(1, 3),
    drop_last=st.booleans(),
    seed=st.integers(0, 100),
)
def test_batches_are_the_same_whoever_makes_them(
    counting: Callable[..., Any],
    load: Load,
    who: Who,
    at_once: int,
    per_run: int,
    batch_size: int,
    drop_last: bool,
    seed: int,
) -> None:
    """Through epochs, after a `break`, and after a resume in the middle of what is made together."""
    corpus = counting(300, 101)
    shape: dict[str, Any] = {"batch_size": batch_size, "seq_len": T, "drop_last": drop_last}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "_GROUP_BATCHES", at_once)
        patch.setattr(block_source, "ReaderThreads", readers_that(who, seed))
        with load(corpus, batches_per_run=per_run, engine="direct", **shape) as loader:
            for epoch in range(2):
                assert all_same(loader, epoch_batches(corpus.tokens, epoch=epoch, **shape))
            expected = list(epoch_batches(corpus.tokens, epoch=2, **shape))
            left_after = random.Random(seed).randrange(1, len(expected))
            iterator = iter(loader)
            assert all_same(take(iterator, left_after), expected[:left_after])
            loader.load_state_dict(loader.state_dict())
            assert all_same(loader, expected[left_after:])
            times = loader.stats().block_times
            assert 0.0 < times.in_trainer_s <= times.kernels_s


def test_who_made_them_is_counted(counting: Callable[..., Any], load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first batches of a block by the trainer's thread; the others by a reader thread, if it got to it."""
    monkeypatch.setattr(cpu, "_GROUP_BATCHES", 1)
    made: list[bool] = []
    group = block_source.BlockSource._group

    def counted(source: Any, *arguments: Any, **options: Any) -> list[Any]:
        made.append(True)
        return group(source, *arguments, **options)

    counted.__name__ = "_group"
    monkeypatch.setattr(block_source.BlockSource, "_group", counted)
    shares = {}
    for who in ("reader", "trainer"):
        monkeypatch.setattr(block_source, "ReaderThreads", readers_that(who))
        with load(counting(300), batch_size=2, seq_len=T, batches_per_run=6, engine="direct") as loader:
            batches = sum(1 for _ in loader)
            times = loader.stats().block_times
            shares[who] = times.in_trainer_s / times.kernels_s
        assert len(made) == batches
        made.clear()
    assert shares["reader"] < 0.9 < shares["trainer"]


@pytest.mark.parametrize("who", ["reader", "trainer"])
def test_an_error_while_they_are_made(
    counting: Callable[..., Any], load: Load, monkeypatch: pytest.MonkeyPatch, who: Who
) -> None:
    """Comes after the batches before it; the next `for` goes on there."""
    corpus = counting(300)
    monkeypatch.setattr(cpu, "_GROUP_BATCHES", 2)
    monkeypatch.setattr(block_source, "ReaderThreads", readers_that(who))
    calls: list[int] = []

    def failing(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError("no memory for batches 4 and 5")
        widen_rows(*arguments)

    monkeypatch.setattr(cpu, "widen_rows", failing)
    expected = list(epoch_batches(corpus.tokens, batch_size=2, seq_len=T))
    with load(corpus, batch_size=2, seq_len=T, batches_per_run=8, engine="direct") as loader:
        iterator = iter(loader)
        assert all_same(take(iterator, 4), expected[:4])
        with pytest.raises(MemoryError, match="batches 4"):
            next(iterator)
        assert all_same(loader, expected[4:])
