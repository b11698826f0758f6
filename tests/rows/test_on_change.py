"""A state of rows of another length: refused, or with "nearest" gone on with at the same count of tokens."""

import json
import sys
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from profiles import examples
from row_oracle import END, write_documents
from streams import row_ids, take

from dali_pipes import TokenLoader
from dali_pipes.errors import ConfigError, StateError
from dali_pipes.loader.state_change import StateChange
from dali_pipes.runtime.messages import say_once

State = dict[str, Any]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Documents of 1 to 60 tokens, 3,000 tokens; those before an end tell where they are in the corpus."""
    folder = tmp_path_factory.mktemp("change") / "corpus"
    lengths = [n * 17 % 60 + 1 for n in range(100)]
    ends = [0, *(sum(lengths[: n + 1]) for n in range(100))]
    write_documents(folder, [[*range(10 + begin, 9 + end), END] for begin, end in pairwise(ends)])
    return str(folder)


def load(corpus: str, **how: Any) -> TokenLoader:
    common: dict[str, Any] = {
        "dtype": "uint16",
        "eos_id": END,
        "device": "cpu",
        "window_documents": 30,
        "batch_size": 2,
        "quiet": True,
    }
    return TokenLoader(corpus=corpus, **{**common, "outputs": ["input_ids", "labels", "row_ids"], "seq_len": 16, **how})


def state_after(corpus: str, steps: int, **how: Any) -> State:
    with load(corpus, **how) as loader:
        take(loader, steps)
        state: State = json.loads(json.dumps(loader.state_dict()))
    return state


def nearest(tokens: int, each: int, rows: int) -> int:
    """The row whose beginning is nearest, the first of them: tried one by one."""
    return min(range(rows + 1), key=lambda row: (abs(row * each - tokens), row))


lengths = st.integers(3, 40)


@settings(
    max_examples=examples(5), phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    mode=st.sampled_from(["stream", "stream", "pack", "pad"]),
    shuffle=st.booleans(),
    seq_lens=st.tuples(lengths, lengths),
    strides=st.tuples(st.none() | lengths, st.none() | lengths),
    steps=st.integers(0, 60),
    world_size=st.integers(1, 3),
)
def test_the_nearest_row(
    corpus: str,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    shuffle: bool,
    seq_lens: tuple[int, int],
    strides: tuple[int | None, int | None],
    steps: int,
    world_size: int,
) -> None:
    """Then every row from there on, once; the states behind it are those of a run that had no other lengths."""
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    if mode != "stream":
        strides = (None, None)
    lengths: Iterator[dict[str, Any]] = (
        {"seq_len": seq, "stride": stride} for seq, stride in zip(seq_lens, strides, strict=True)
    )
    old, new = lengths
    common: dict[str, Any] = {"rows": mode, "shuffle": shuffle}
    state = state_after(corpus, steps, **common, **old)
    each_old, each_new = (how["stride"] or how["seq_len"] for how in (old, new))
    tokens, epoch = state["rows"] * each_old, state["epoch"]
    with load(corpus, **common, **new, batch_size=1) as loader:
        epochs = [
            {int(batch["row_ids"][0]): batch["input_ids"][0].tolist() for batch in loader} for _ in range(epoch + 1)
        ]
    rows = nearest(tokens, each_new, len(epochs[epoch]))
    with load(corpus, **common, **new, rank=0, world_size=world_size, drop_last=False) as loader:
        if (old["seq_len"], each_old) == (new["seq_len"], each_new):
            loader.load_state_dict(state, "nearest")
            assert loader.state_change is None
            assert loader.state_dict() == state | {"step_rows": 2 * world_size}
            return
        with pytest.raises(StateError, match='on_change = "nearest"'):
            loader.load_state_dict(state)
        loader.load_state_dict(state, "nearest")
        change = loader.state_change
        assert change is not None
        assert (change.epoch, change.rows_before, change.rows) == (epoch, state["rows"], rows)
        assert (change.tokens_before, change.tokens) == (tokens, rows * each_new)
        is_end = rows == len(epochs[epoch])
        assert (loader.epoch, loader.state_dict()["rows"]) == ((epoch + 1, 0) if is_end else (epoch, rows))
        if not is_end:
            batches = list(loader)
            assert [row for row in row_ids(batches) if row >= 0] == list(range(rows, len(epochs[epoch]), world_size))
            first = batches[0]
            assert first["input_ids"].tolist() == [epochs[epoch][row] for row in first["row_ids"].tolist() if row >= 0]


def test_without_a_shuffle_the_stream_goes_on_where_it_stopped(corpus: str) -> None:
    """From 30 rows of 16 tokens to rows of 32, and to rows of 7: at token 480, and at 483 (476 is further)."""
    state = state_after(corpus, 15, shuffle=False)
    for seq_len, token in ((32, 480), (7, 483)):
        with load(corpus, shuffle=False, seq_len=seq_len, on_change="nearest") as loader:
            loader.load_state_dict(state)
            assert loader.corpus.tokens(token, 1)[0] == next(iter(loader))["input_ids"][0, 0]
            assert loader.state_change == StateChange(
                {"seq_len": (16, seq_len), "stride": (16, seq_len)}, 0, 30, token // seq_len, 480, token, True
            )


def test_what_is_said(corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, from the first rank alone; nothing where the state fits, and a state that fits forgets the change."""
    say_once.cache_clear()
    state = state_after(corpus, 15)
    with load(corpus, seq_len=7, on_change="nearest", rank=1, world_size=2) as loader:
        loader.load_state_dict(state)
        assert loader.state_change is not None
    assert capsys.readouterr().err == ""
    with load(corpus, seq_len=7, stride=16, on_change="nearest", rank=0, world_size=2) as loader:
        loader.load_state_dict(state)
        said = capsys.readouterr().err
        assert said.startswith("dali_pipes: ")
        assert said.count("\n") == 1
        for fact in ("seq_len 16 is now 7", "epoch 0", "row 30 (was 30)", "480 tokens (was 480)", "repeated or missed"):
            assert fact in said
        own = loader.state_dict()
        loader.load_state_dict(own)
        assert loader.state_change is None
        assert loader.state_dict() == own
    assert capsys.readouterr().err == ""


@settings(
    max_examples=examples(8), phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    mode=st.sampled_from(["stream", "stream", "pad"]),
    seq_lens=st.tuples(lengths, lengths),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)),
    steps=st.integers(1, 25),
    first=st.integers(0, 30),
    length=st.integers(1, 6),
    unit=st.sampled_from(["steps", "rows", "tokens"]),
)
def test_steps_are_left_out_of_the_rows_there_are_now(
    corpus: str,
    monkeypatch: pytest.MonkeyPatch,
    mode: str,
    seq_lens: tuple[int, int],
    sizes: tuple[int, int],
    steps: int,
    first: int,
    length: int,
    unit: str,
) -> None:
    """Given in rows or tokens. Steps are ambiguous: they may be those of the saving run, whose rows were others."""
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    state = state_after(corpus, steps, rows=mode, seq_len=seq_lens[0], batch_size=sizes[0])
    if state["epoch"] or seq_lens[0] == seq_lens[1]:
        return
    now, end, width = sizes[1], first + length, sizes[1] * seq_lens[1]
    how: dict[str, Any] = {"rows": mode, "seq_len": seq_lens[1], "batch_size": now, "drop_last": False}
    with load(corpus, **how) as loader:
        most = loader._schedule.rows_known(0)
    row = nearest(state["rows"] * seq_lens[0], seq_lens[1], most)
    in_unit = {"rows": {"rows": [first * now, end * now]}, "tokens": {"tokens": [first * width, end * width]}}
    how |= {"rank": 0, "world_size": 1, "on_change": "nearest", "skip_steps": [in_unit.get(unit, [first, end])]}
    try:
        loader = load(corpus, **how)
    except ConfigError as error:
        assert "steps of epoch 0" in str(error)  # noqa: PT017
        return
    with loader:
        before = loader.state_dict()
        try:
            loader.load_state_dict(state)
        except StateError as error:
            assert loader.state_dict() == before
            assert unit == "steps" or (row % now and end * now > row)
            assert "{rows = [" in str(error) or unit == "tokens"  # noqa: PT017
            return
        assert unit != "steps"
        assert loader.state_change is not None
        assert loader.state_change.rows == row
        found = row_ids(loader) if loader.epoch == 0 else []
    assert found == [number for number in range(row, most) if not first * now <= number < end * now]


def test_the_line_names_the_row_behind_steps_that_are_left_out(corpus: str, capsys: pytest.CaptureFixture[str]) -> None:
    """From 30 rows of 16 tokens to row 15 of 32, on which a step of five rows begins, number 3."""
    say_once.cache_clear()
    state = state_after(corpus, 15)
    how: dict[str, Any] = {"seq_len": 32, "batch_size": 5, "rank": 0, "world_size": 1}
    with load(corpus, **how, on_change="nearest", skip_steps=[{"rows": [15, 25]}]) as loader:
        loader.load_state_dict(state)
        said = capsys.readouterr().err
        assert "row 15 (was 30)" in said
        assert said.endswith("row 25 of epoch 0\n")
        assert next(iter(loader))["row_ids"].tolist() == [25, 26, 27, 28, 29]


def test_other_buckets_go_on_at_the_same_row(corpus: str) -> None:
    state = state_after(corpus, 12, rows="pad", length_buckets=[4, 8])
    for buckets in (None, [5]):
        with load(corpus, rows="pad", length_buckets=buckets) as loader:
            with pytest.raises(StateError, match="length_buckets: saved"):
                loader.load_state_dict(state)
            loader.load_state_dict(state, "nearest")
            assert loader.state_change is not None
            assert set(loader.state_change.settings) == {"length_buckets"}
            assert (state["rows"], loader.state_dict()["rows"]) == (24, 24)
            assert next(iter(loader))["row_ids"].tolist() == [24, 25]


@pytest.mark.parametrize("change", [{"seed": 1}, {"shuffle": False}, {"rows": "pack"}, {"validation_fraction": 0.5}])
def test_all_else_is_refused_as_ever(corpus: str, change: dict[str, Any]) -> None:
    state = state_after(corpus, 3)
    with load(corpus, seq_len=7, **change) as loader:
        with pytest.raises(StateError, match="seq_len: saved 16, now 7") as caught:
            loader.load_state_dict(state, "nearest")
        assert "nearest" not in str(caught.value)
        assert loader.state_dict()["rows"] == 0


@pytest.mark.parametrize(
    ("rows", "change"),
    [
        ("stream", {"rows": 10**9}),
        ("stream", {"rows": 2.0}),
        ("stream", {"config": {"seq_len": 0}}),
        ("stream", {"config": {"stride": None}}),
        ("pack", {"config": {"seq_len": True}}),
        ("pack", {"config": {"seq_len": 17}}),
        ("pack", {"config": {"length_buckets": "x"}}),
        ("pack", {"rows": 7}),
        ("pack", {"window": [0, 1]}),
        ("pack", {"window": None}),
        ("pack", {"check": "00000000"}),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused(corpus: str, rows: str, change: dict[str, Any]) -> None:
    """Also where its settings may differ: they are part of what the check value is of."""
    state = state_after(corpus, 3, rows=rows)
    settings = {**state["config"], **change.get("config", {})}
    with load(corpus, rows=rows, seq_len=7) as loader:
        before = loader.state_dict()
        with pytest.raises(StateError):
            loader.load_state_dict({**state, **change, "config": settings}, "nearest")
        assert loader.state_dict() == before


def test_an_unknown_answer_is_refused(corpus: str) -> None:
    with pytest.raises(ConfigError, match="on_change"):
        load(corpus, on_change="closest")
    with load(corpus) as loader, pytest.raises(ConfigError, match="on_change = 'closest'"):
        loader.load_state_dict(loader.state_dict(), "closest")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["stream", "pack", "pad"])
def test_at_the_end_of_an_epoch_nothing_comes_again(corpus: str, mode: str) -> None:
    """The next epoch is that of a run that had no other length; in mid-epoch some of what was seen comes again."""
    with load(corpus, rows=mode, drop_last=False) as loader:
        seen = {token for batch in take(loader, len(loader) // 2) for token in batch["input_ids"].flatten().tolist()}
        middle = loader.state_dict()
    with load(corpus, rows=mode, drop_last=False) as loader:
        list(loader)
        end = loader.state_dict()
    how: dict[str, Any] = {"rows": mode, "seq_len": 24, "drop_last": False, "on_change": "nearest"}
    with load(corpus, **how) as changed, load(corpus, **how) as other:
        changed.load_state_dict(end)
        assert changed.state_change is not None
        assert changed.state_change.is_exact
        list(other)
        ids = [[batch["input_ids"].tolist() for batch in loader] for loader in (changed, other)]
        assert ids[0] == ids[1]
    with load(corpus, **how) as changed:
        changed.load_state_dict(middle)
        assert changed.state_change is not None
        assert not changed.state_change.is_exact
        rest = {token for batch in changed for token in batch["input_ids"].flatten().tolist()}
        assert len(seen & rest) > 100
        assert len({*range(10, 3000)} - seen - rest) > 100
