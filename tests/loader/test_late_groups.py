"""A process group that comes after a loader was built, or in another's place: nothing depends on when it came."""

import contextlib
import itertools
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from at_lines import AtLine, Line, lines_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes import TokenLoader
from dali_pipes.errors import ConfigError, CorpusError, DaliPipesError, LoaderClosedError, StateError

State = dict[str, Any]
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
    return TokenLoader(**{**common, "seq_len": 4, "batch_size": 2, "outputs": ("row_ids",), **how})


def attempt(call: Callable[[], Any]) -> Any:
    """What a call returns, or what it is refused with."""
    try:
        return call()
    except DaliPipesError as error:
        return f"{type(error).__name__}: {error}"


def rows(loader: TokenLoader) -> list[list[int]]:
    return [batch["row_ids"].tolist() for batch in itertools.islice(loader, 12)]


USES: dict[str, Callable[[TokenLoader], Any]] = {
    "step": lambda loader: loader.step,
    "epoch": lambda loader: loader.epoch,
    "len": len,
    "state": lambda loader: loader.state_dict(),
    "rows": rows,
}


@settings(
    max_examples=examples(5), phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    saved_by=st.sampled_from([1, 2, 3]),
    taken=st.integers(0, 12),
    now=st.sampled_from([(0, 1), (0, 2), (1, 2), (2, 3)]),
    skip=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 4)), max_size=2),
    counted=st.sampled_from([None, None, 2, 4]),
    change=st.sampled_from([{}, {}, {"seq_len": 8}, {"seq_len": 2}]),
    loaded_late=st.booleans(),
    uses=st.permutations(sorted(USES)),
)
def test_a_group_that_comes_late_is_as_if_it_had_been_there(
    counting: Callable[..., Any],
    group: Groups,
    saved_by: int,
    taken: int,
    now: tuple[int, int],
    skip: list[tuple[int, int]],
    counted: int | None,
    change: dict[str, Any],
    loaded_late: bool,
    uses: list[str],
) -> None:
    """Whatever is asked of the loader first; a refusal comes with each use until a state is loaded that fits."""
    corpus = counting(401)
    group.now = None
    with make(corpus, rank=0, world_size=saved_by) as loader:
        list(itertools.islice(loader, taken))
        state = json.loads(json.dumps(loader.state_dict()))
    how = {**change, "skip_steps": [given_in(counted, first, first + more) for first, more in skip]}
    how["on_change"] = "nearest"
    try:
        expected_loader = make(corpus, **how, rank=now[0], world_size=now[1])
        late = make(corpus, **how)
    except ConfigError:
        return  # steps of one size do not begin where those of the other do, or none is left
    with expected_loader, late:
        refusal = attempt(lambda: expected_loader.load_state_dict(state))
        expected = {name: attempt(lambda name=name: USES[name](expected_loader)) for name in uses}  # type: ignore[misc]
        if loaded_late:
            group.now = now
            assert attempt(lambda: late.load_state_dict(state)) == refusal
        else:
            late.load_state_dict(state)
            group.now = now
        found = {name: attempt(lambda name=name: USES[name](late)) for name in uses}  # type: ignore[misc]
        if refusal is None or loaded_late:
            assert found == expected
            return
        assert set(found.values()) == {refusal}
        kept = {**state, "step_rows": now[1] * 2, "config": late._states.at(late._position)["config"]}
        late.load_state_dict({**kept, "rows": 0})
        with make(corpus, **how, rank=now[0], world_size=now[1]) as fresh:
            fresh.load_state_dict({**kept, "rows": 0})
            assert rows(late) == rows(fresh)


def given_in(step_rows: int | None, first: int, end: int) -> Any:
    """A range of steps; of a run with `step_rows` rows in each as the rows that they have."""
    return [first, end] if step_rows is None else {"rows": [first * step_rows, end * step_rows]}


PACKED: dict[str, Any] = {"rows": "pack", "eos_id": 0, "window_documents": 5}
SLOWLY = pytest.param(PACKED, marks=pytest.mark.slow)
BECOMING = ("loader.py", "loader_parts.py", "ranks.py")


def becoming(corpus: Any, group: Groups, how: dict[str, Any]) -> list[Line]:
    """The lines that a loader comes to when an iterator is asked for and it becomes another rank."""
    group.now = None
    with make(corpus, **how) as loader:
        group.now = (1, 2)
        return [line for line in lines_of(lambda: iter(loader)) if line[0].endswith(BECOMING)]


@pytest.mark.parametrize("how", [{}, {"skip_steps": [[0, 2]]}, SLOWLY], ids=["plain", "skip", "packed"])
def test_an_interrupt_while_it_becomes_another_rank(
    counting: Callable[..., Any], group: Groups, how: dict[str, Any]
) -> None:
    """Whatever is done by then, the next use ends with the rows of that rank."""
    corpus = counting(401, dtype="uint16", vocab_size=7)
    with make(corpus, **how, rank=1, world_size=2) as given:
        expected = rows(given)
    lines = becoming(corpus, group, how)
    assert len(lines) > 40
    for line in lines:
        group.now = None
        with make(corpus, **how) as loader:
            group.now = (1, 2)
            with AtLine(line, interrupt) as cut, contextlib.suppress(KeyboardInterrupt):
                iter(loader)
            assert cut.acted, line
            assert rows(loader) == expected, line


@pytest.mark.parametrize("how", [{}, SLOWLY], ids=["plain", "packed"])
def test_a_handler_closes_while_it_becomes_another_rank(
    counting: Callable[..., Any], group: Groups, how: dict[str, Any]
) -> None:
    corpus = counting(401, dtype="uint16", vocab_size=7)
    before = set(threading.enumerate())
    for line in becoming(corpus, group, how):
        group.now = None
        loader = make(corpus, **how)
        group.now = (1, 2)
        iterator = None
        with AtLine(line, loader.close) as cut, contextlib.suppress(LoaderClosedError):
            iterator = iter(loader)
        assert cut.acted, line
        with pytest.raises(LoaderClosedError):
            next(iter(loader) if iterator is None else iterator)
        assert {thread for thread in threading.enumerate() if "dali_pipes" in thread.name} <= before, line
        with pytest.raises(CorpusError, match="closed"):
            loader.corpus.tokens(0, 1)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_without_any_group_a_state_of_other_ranks_is_refused_at_its_first_use(
    counting: Callable[..., Any], group: Groups
) -> None:
    corpus = counting(401)
    with make(corpus, rank=1, world_size=4) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make(corpus, skip_steps=[[5, 6]]) as alone:
        alone.load_state_dict(state)  # a job of four may be about to begin
        for use in USES.values():
            with pytest.raises(StateError, match=r"8 rows .* 2\."):
                use(alone)
        alone.load_state_dict({**state, "step_rows": 2})
        assert rows(alone)[:2] == [[8, 9], [12, 13]]


def test_a_state_for_nobody_s_ranks_moves_nothing(counting: Callable[..., Any], group: Groups) -> None:
    """One that is refused leaves the one before, and its refusal."""
    corpus = counting(401)
    with make(corpus) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with make(corpus, skip_steps=[[5, 6]]) as loader:
        loader.load_state_dict(state)
        group.now = (1, 2)
        with pytest.raises(StateError, match="state version"):
            loader.load_state_dict({**state, "version": 7})
        with pytest.raises(StateError, match=r"2 rows .* 4\."):
            next(iter(loader))


@pytest.mark.parametrize("use", USES)
def test_an_iterator_from_before_the_group(counting: Callable[..., Any], group: Groups, use: str) -> None:
    """Whatever makes the loader follow: its first batch is that of the ranks there are then."""
    with make(counting(401), skip_steps=[[0, 2]]) as loader:
        iterator = iter(loader)
        group.now = (1, 2)
        if use != "rows":
            USES[use](loader)
        assert next(iterator)["row_ids"].tolist() == [9, 11]


def test_two_threads_follow_at_once(counting: Callable[..., Any], group: Groups) -> None:
    """The one that comes second finds the loader as the first has left it."""
    with make(counting(401)) as loader:
        become, started, results = loader._become_late, threading.Event(), []

        def second() -> None:
            started.set()
            results.append(attempt(lambda: next(iter(loader))["row_ids"].tolist()))

        other = threading.Thread(target=second)

        def become_watched() -> None:
            if not other.ident:
                other.start()
                started.wait()
            become()

        loader._become_late = become_watched  # type: ignore[method-assign]
        group.now = (1, 2)
        assert loader.state_dict()["step_rows"] == 4
        other.join()
        assert results == [[1, 3]]


@pytest.mark.parametrize("use", ["iter", "load"])
@pytest.mark.parametrize("taken", [0, 3])
@pytest.mark.parametrize(("before", "after"), [((1, 2), (3, 4)), ((1, 2), (0, 2)), ((0, 1), (0, 2))])
def test_a_group_in_another_s_place_is_refused(
    counting: Callable[..., Any], group: Groups, before: Group, after: Group, taken: int, use: str
) -> None:
    """Else ranks would share rows. Also where it had no place in between, and every time."""
    assert before is not None
    assert after is not None
    group.now = before
    with make(counting(401)) as loader:
        state = loader.state_dict()
        list(itertools.islice(loader, taken))
        for between in (before, None):
            group.now = between
            assert loader.step == 0
            group.now = after
            message = f"rank {before[0]} of {before[1]}, but torch.distributed now says rank {after[0]} of {after[1]}"
            for _ in range(2):
                with pytest.raises(ConfigError, match=message):
                    iter(loader) if use == "iter" else loader.load_state_dict(state)
        group.now = before
        loader.load_state_dict(state)
        assert rows(loader)[0] == [before[0], before[0] + before[1]]


def test_ranks_that_were_given_are_never_asked_for(counting: Callable[..., Any], group: Groups) -> None:
    group.now = (0, 2)
    with make(counting(401), rank=1, world_size=2) as loader:
        state = loader.state_dict()
        group.now = (3, 4)
        loader.load_state_dict(state)
        assert rows(loader)[0] == [1, 3]
