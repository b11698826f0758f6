"""A process group that has other ranks than a loader was built with is refused: ranks would share rows."""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from dali_pipes import TokenLoader
from dali_pipes.errors import ConfigError

Group = tuple[int, int] | None


class Groups:
    """Stands in for torch's default process group."""

    now: Group = None


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Groups:
    groups = Groups()
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    monkeypatch.setattr("dali_pipes.runtime.ranks.process_group", lambda: groups.now)
    monkeypatch.setattr("dali_pipes.loader.token_loader._group_exists", lambda: groups.now is not None)
    return groups


def make(corpus: Any, **how: Any) -> TokenLoader:
    common: dict[str, Any] = {"corpus": corpus.pattern, "dtype": corpus.dtype, "device": "cpu", "quiet": True}
    common |= {"seq_len": 4, "batch_size": 2, "outputs": ("row_ids",), "batches_per_run": 1}
    return TokenLoader(**{**common, **how})


USES: dict[str, Callable[[TokenLoader, Any], Any]] = {
    "iter": lambda loader, iterator: iter(loader),
    "next": lambda loader, iterator: next(iterator),
    "len": lambda loader, iterator: len(loader),
    "step": lambda loader, iterator: loader.step,
    "locate": lambda loader, iterator: loader.locate(0, 0),
    "load": lambda loader, iterator: loader.load_state_dict(loader.state_dict()),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("taken", [0, 1, 3])
@pytest.mark.parametrize(
    ("before", "after"), [(None, (0, 2)), (None, (1, 2)), ((1, 2), (3, 4)), ((1, 2), (0, 2)), ((0, 1), (0, 2))]
)
def test_another_group_is_refused_at_every_use(
    counting: Callable[..., Any], group: Groups, before: Group, after: Group, taken: int, use: str
) -> None:
    """Also where none was in between; and with the old one, or with none, the loader continues. `next()` asks once a
    block, here of one batch.
    """
    group.now = before
    rank, world_size = before or (0, 1)
    assert after is not None
    with make(counting(401)) as loader:
        iterator = iter(loader)
        for _ in range(taken):
            next(iterator)
        group.now = None
        assert loader.step == taken
        group.now = after
        if before is not None and taken and use == "next":
            return  # a group agreed at an earlier batch, and is not asked again within a `for`
        for _ in range(2 if use != "next" else 1):
            with pytest.raises(ConfigError) as caught:
                USES[use](loader, iterator)
            for fact in (f"rank {rank} of {world_size}", f"rank {after[0]} of {after[1]}", "init_process_group"):
                assert fact in str(caught.value)
        group.now = before
        state = loader.state_dict()
        assert state["rows"] == 2 * world_size * taken
        loader.load_state_dict(state)
        first = state["rows"] + rank
        assert next(iter(loader))["row_ids"].tolist() == [first, first + world_size]


@pytest.mark.parametrize("ranks", [None, (0, 1)])
def test_a_group_with_the_same_ranks_is_accepted(counting: Callable[..., Any], group: Groups, ranks: Group) -> None:
    """As of one process that comes after the loader: it agrees with what the loader was built as."""
    with make(counting(401)) as loader:
        iterator = iter(loader)
        next(iterator)
        group.now = ranks
        assert next(iterator)["row_ids"].tolist() == [2, 3]
        assert (loader.step, loader.config.rank, loader.config.world_size) == (2, 0, 1)


def test_ranks_from_the_environment_are_those_of_the_group_to_come(
    counting: Callable[..., Any], group: Groups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun sets them, so a loader may be built before init_process_group."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with make(counting(401)) as loader:
        group.now = (1, 2)
        assert next(iter(loader))["row_ids"].tolist() == [1, 3]


def test_ranks_that_were_given_are_never_compared(counting: Callable[..., Any], group: Groups) -> None:
    """They may be those of a mesh, where several processes are one data-parallel rank."""
    group.now = (0, 2)
    with make(counting(401), rank=1, world_size=2) as loader:
        state = loader.state_dict()
        group.now = (3, 4)
        loader.load_state_dict(state)
        assert next(iter(loader))["row_ids"].tolist() == [1, 3]


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE"])
def test_half_an_environment_is_refused(
    counting: Callable[..., Any], group: Groups, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Lightning's own launcher sets WORLD_SIZE alone."""
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=name) as caught:
        make(counting(401))
    assert "train_dataloader" in str(caught.value)
