"""`skip_steps`: the run without some steps is the run with them minus those, wherever and with whatever it goes on."""

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from profiles import examples
from row_oracle import END, write_documents
from streams import take

from dali_pipes import LoaderConfig, TokenLoader, build_pipeline
from dali_pipes.errors import ConfigError, StateError
from dali_pipes.tools.reports.step_report import explain_step

State = dict[str, Any]
Numbered = list[tuple[int, int, dict[str, Any]]]
"""Epoch and number of each step, and its batch."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """About 100 documents of 1 to 12 tokens, 640 tokens; tokens before an end tell where they are."""
    folder = tmp_path_factory.mktemp("skip") / "corpus"
    write_documents(folder, [[*range(100 * n + 10, 100 * n + 10 + n * 7 % 12), END] for n in range(98)])
    return str(folder)


def load(corpus: str, state: State | None = None, **how: Any) -> TokenLoader:
    common: dict[str, Any] = {
        "dtype": "uint16",
        "eos_id": END,
        "device": "cpu",
        "seq_len": 8,
        "window_documents": 30,
        "seed": 2,
        "rank": 0,
        "world_size": 1,
    }
    outputs = ("input_ids", "labels", "row_ids")
    loader = TokenLoader(corpus=corpus, **{**common, "outputs": outputs, "batches_per_run": 3, **how})
    if state is not None:
        loader.load_state_dict(state)
    return loader


def numbered(loader: TokenLoader, steps: int) -> tuple[Numbered, list[State]]:
    """At least so many steps, in whole epochs, and the states before the first and behind each."""
    batches: Numbered = []
    states = [loader.state_dict()]
    while len(batches) < steps:
        place = loader.epoch, loader.step
        for batch in loader:
            batches.append((*place, {name: value.tolist() for name, value in batch.items()}))
            states.append(loader.state_dict())
            place = loader.epoch, loader.step
    return batches, states


@settings(
    max_examples=examples(4), phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_the_rest_is_as_it_was_from_every_place_on(
    corpus: str, monkeypatch: pytest.MonkeyPatch, data: st.DataObject
) -> None:
    """Every row mode; resumed before, in and behind ranges, after a run with the same steps and one with others."""
    monkeypatch.setitem(
        sys.modules, "nvidia.dali", None
    )  # eleven loaders an example: without DALI's queue, to be quick
    draw = data.draw
    mode = draw(st.sampled_from(["stream", "pack", "pad", "buckets"]))
    rows: dict[str, Any] = {"rows": "pad", "length_buckets": [3, 6]} if mode == "buckets" else {"rows": mode}
    world_size, batch_size = draw(st.sampled_from([(1, 5), (2, 3), (2, 5), (3, 2)]))
    how: dict[str, Any] = {
        **rows,
        "batch_size": batch_size,
        "world_size": world_size,
        "rank": draw(st.integers(0, world_size - 1)),
        "drop_last": draw(st.booleans()),
        "batches_per_run": draw(st.integers(1, 4)),
    }
    size = world_size * batch_size
    spans = st.tuples(st.integers(0, 12), st.integers(1, 6), st.integers(0, 1))
    skip = [(first, first + count, epoch) for first, count, epoch in draw(st.lists(spans, min_size=1, max_size=3))]
    left_out = {(epoch, step) for first, end, epoch in skip for step in range(first, end)}
    with load(corpus, **how) as loader:
        _, own = numbered(loader, 20)
        if all((0, step) in left_out for step in range(loader._schedule.steps())):
            return  # refused, see below
        whole = len([step for step in range(loader._schedule.steps()) if (0, step) not in left_out])
    with load(corpus, **how, skip_steps=skip) as loader:
        assert len(loader) == whole
    with load(corpus, **rows, batch_size=7) as loader:
        _, others = numbered(loader, 1)
    of_others = draw(st.sampled_from(others[:-1]))
    for state in [own[0], draw(st.sampled_from(own[:-1])), of_others]:
        unit = draw(st.sampled_from(["rows", "tokens"] if state is of_others else ["steps", "rows", "tokens"]))
        how["skip_steps"] = given_in(unit, skip, size, state)
        with load(corpus, state, **{**how, "skip_steps": []}) as loader:
            expected = [step for step in numbered(loader, 20)[0] if step[:2] not in left_out]
        with load(corpus, state, **how) as loader:
            if loader.epoch == 0:  # and not behind the last step of it, where the state may stand
                had = [step for step in range(loader.step) if (0, step) not in left_out]
                assert len(loader) == len(had) + sum(epoch == 0 for epoch, *_ in expected)
            found, states = numbered(loader, len(expected))
        assert found[: len(expected)] == expected
        middle = draw(st.integers(0, len(expected) - 1))
        with load(corpus, states[middle], **how) as loader:
            assert loader.state_dict() == states[middle]
            assert (loader.epoch, loader.step) == expected[middle][:2]
            assert numbered(loader, 1)[0] == [step for step in expected[middle:] if step[0] == expected[middle][0]]


def given_in(unit: str, steps: list[tuple[int, int, int]], size: int, state: State) -> list[Any]:
    """Ranges of steps of a run that resumes from `state` with `size` rows in a step, in another unit."""
    ranges: list[Any] = []
    for first, end, epoch in steps:
        shift = -state["rows"] % size if epoch == state["epoch"] else 0  # its steps are counted from where it resumes
        rows = [max(0, first * size - shift), end * size - shift]
        table = {"rows": {"rows": rows}, "tokens": {"tokens": [8 * row for row in rows]}}
        ranges.append([first, end, epoch] if unit == "steps" else {**table[unit], "epoch": epoch})
    return ranges


def row_ids(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch["row_ids"].tolist()]


def test_written_out(corpus: str) -> None:
    """79 rows in steps of 10; the state from before a range stands behind it, and behind an epoch left out whole."""
    with load(
        corpus, batch_size=10, skip_steps=[[0, 2], [3, 4], [2, 9, 1], [0, 1, 1], [1, 2, 1], [6, 99, 2]]
    ) as loader:
        assert loader.config.model_dump()["skip_steps"] == [[0, 2], [3, 4], [0, 9, 1], [6, 99, 2]]
        assert (len(loader), loader.epoch, loader.step, loader.state_dict()["rows"]) == (4, 0, 2, 20)
        assert "79 rows, 4 steps" in loader.summary()
        firsts, states = [], []
        for batch in loader:
            firsts.append(int(batch["row_ids"][0]))
            states.append(loader.state_dict()["rows"])
        assert firsts == [20, 40, 50, 60]
        assert states == [40, 50, 60, 0]
        assert (loader.epoch, loader.step, len(loader), loader.state_dict()["epoch"]) == (2, 0, 6, 2)
        assert row_ids(loader) == list(range(60))
        assert (loader.epoch, len(loader)) == (3, 7)
        assert loader.locate(3, 0, epoch=0).row_id == 30  # what was left out can still be looked at


@pytest.mark.parametrize("mode", ["stream", "pack"])
def test_ranges_behind_a_state_may_be_removed(corpus: str, mode: str) -> None:
    """Also by a run with other steps, which need not say then which were meant."""
    with load(corpus, rows=mode, batch_size=4, drop_last=False, skip_steps=[[1, 3], [5, 6]]) as loader:
        take(loader, 4)
        state = loader.state_dict()
        with load(corpus, state, rows=mode, batch_size=4, drop_last=False, skip_steps=[[1, 3], [5, 6]]) as same:
            rest = row_ids(same)
    for batch_size in (4, 3, 8):
        with load(corpus, state, rows=mode, batch_size=batch_size, drop_last=False) as without:
            assert row_ids(without) == rest


def test_numbers_of_steps_count_those_left_out_and_lengths_do_not(corpus: str) -> None:
    with load(corpus, batch_size=10, skip_steps=[[2, 5]]) as loader:
        numbers = [loader.step for _ in loader]
        assert (len(numbers), len(loader)) == (4, 7)  # of epoch 0, and of epoch 1
        assert numbers == [1, 5, 6, 0]


def test_a_loop_left_early_passes_over_the_next_epoch(corpus: str) -> None:
    with load(corpus, batch_size=10, skip_steps=[[0, 7, 1], [0, 3, 2]]) as loader:
        take(loader, 2)
        assert (loader.epoch, loader.step, len(loader)) == (2, 3, 4)
        assert row_ids(loader) == list(range(30, 70))


def test_a_run_without_end(corpus: str) -> None:
    """Blocks read ahead go over the ends of epochs, ranges and an epoch that is left out."""
    skip = [[1, 5], [0, 7, 1], [6, 7, 2]]
    with load(corpus, batch_size=10, skip_steps=skip, repeat=True, num_threads=4, prefetch_queue_depth=5) as loader:
        wanted = [(0, 0), (0, 5), (0, 6), *((2, n) for n in range(6)), *((3, n) for n in range(7)), (4, 0)]
        assert [row // 10 for row in row_ids(take(loader, len(wanted)))[::10]] == [number for _, number in wanted]


def test_a_bare_pipeline(corpus: str) -> None:
    settings: dict[str, Any] = {
        "dtype": "uint16",
        "device": "cpu",
        "batch_size": 10,
        "seq_len": 8,
        "outputs": ["row_ids"],
    }
    config = LoaderConfig(corpus=corpus, **settings, batches_per_run=2, skip_steps=[[1, 2], [0, 7, 1], [3, 5, 2]])
    pipe = build_pipeline(config)
    pipe.build()
    seen = []
    for length in (4, 3):
        for _ in range(length):
            (ids,) = pipe.run()
            seen.append([row // 10 for row in np.array(ids[0])[::10].tolist()])
        with pytest.raises(StopIteration):
            pipe.run()
        pipe.reset()
    assert seen == [[0], [2, 3], [4, 5], [6], [0, 1], [2], [5, 6]]


@pytest.mark.parametrize("placement", ["host", "device", "pinned"])
@pytest.mark.parametrize("rows", ["stream", "pack"])
def test_on_a_gpu(corpus: str, rows: str, placement: str) -> None:
    if gpu_stand_in.why_not():
        pytest.skip(str(gpu_stand_in.why_not()))
    how: dict[str, Any] = {
        "rows": rows,
        "batch_size": 5,
        "skip_steps": [[0, 1], [3, 4], [5, 7, 1]],
        "rank": 1,
        "world_size": 2,
    }
    with load(corpus, **how) as loader:
        expected, _ = numbered(loader, 12)
    with gpu_stand_in.installed("late"), load(corpus, **how, device="cuda", placement=placement) as loader:
        found, _ = numbered(loader, 12)
    assert found == expected


@pytest.mark.parametrize("steps", [[[0, 7]], [[0, 3], [3, 10**18]]])
def test_an_epoch_without_steps_is_refused(corpus: str, steps: Any) -> None:
    with pytest.raises(ConfigError, match=r"skip_steps .* 7 steps of epoch 0"):
        load(corpus, batch_size=10, skip_steps=steps)


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ([[3, 3]], "[3, 3]"),
        ([[-1, 3]], "[-1, 3]"),
        ([[0, 3, -1]], "[0, 3, -1]"),
        ([[0, 3.0]], "[0, 3.0]"),
        ([[False, True]], "[False, True]"),
        ([["0", "3"]], "['0', '3']"),
        ([[1]], "[1]"),
        ([[1, 2, 3, 4]], "[1, 2, 3, 4]"),
        ([5, 6], "5"),
        (7, "7"),
        ([{}], "{}"),
        ([{"epoch": 1}], "{'epoch': 1}"),
        ([{"rows": 5}], "{'rows': 5}"),
        ([{"rows": [5]}], "{'rows': [5]}"),
        ([{"rows": [1, 2, 3]}], "{'rows': [1, 2, 3]}"),
        ([{"rows": [1, 2], "tokens": [8, 16]}], "'tokens': [8, 16]"),
        ([{"row": [1, 2]}], "{'row': [1, 2]}"),
        ([{"rows": [2, 1]}], "{'rows': [2, 1]}"),
        ([{"rows": [1, 2], "epoch": -1}], "'epoch': -1"),
        ([{"tokens": ["1X", "2B"]}], "['1X', '2B']"),
        ([{"tokens": ["0.5", "2B"]}], "['0.5', '2B']"),
        ([{"tokens": [1, 2**63]}], f"[1, {2**63}]"),
        ([{"tokens": ["9999999999T", "99999999999T"]}], "99999999999T"),
    ],
)
def test_an_invalid_range_is_refused(steps: Any, found: str) -> None:
    with pytest.raises(ConfigError) as error:
        LoaderConfig(corpus="a.bin", batch_size=1, seq_len=1, skip_steps=steps)
    assert str(error.value).startswith("skip_steps: ")
    assert found in str(error.value)


def test_ranges_that_meet_become_one(tmp_path: Path) -> None:
    given = [[5, 9], [2, 4, 1], [9, 10], [1, 6], {"tokens": ["1.5K", "10_000"]}, {"rows": [7, 9], "epoch": 2}]
    config = LoaderConfig(corpus="a.bin", batch_size=1, seq_len=1, skip_steps=[*given, {"rows": ["8", 12], "epoch": 2}])
    spelled = [[1, 10], [2, 4, 1], {"rows": [7, 12], "epoch": 2}, {"tokens": [1500, 10_000]}]
    assert config.model_dump()["skip_steps"] == spelled
    assert config.replace() == config == config.replace(skip_steps=spelled)
    for name, text in {"c.toml": config.to_toml(), "c.json": config.model_dump_json()}.items():
        (tmp_path / name).write_text(text)
        assert LoaderConfig.from_file(tmp_path / name) == config


def rows_of(loader: TokenLoader) -> list[int]:
    return [row for batch in loader for row in batch["row_ids"].tolist()]


def ranges_in(message: object) -> list[Any]:
    """The ranges that an error spells, in order."""
    found = re.findall(r"\{(?:rows|tokens) = [^{}]*\}", str(message))
    return [tomllib.loads(f"range = {text}")["range"] for text in found]


@pytest.mark.parametrize("skipped_before", [True, False])
def test_a_run_with_steps_of_another_size_names_the_rows_that_may_be_meant(corpus: str, skipped_before: bool) -> None:
    """Steps 4 and 5 of 8 rows are rows 32 to 47, and of 4 rows others, whether the saving run skipped them or not."""
    skip: dict[str, Any] = {"skip_steps": [[4, 6]]}
    with load(corpus, batch_size=8, **(skip if skipped_before else {})) as loader:
        take(loader, 2)
        state = loader.state_dict()
    with load(corpus, batch_size=4, **skip) as loader, pytest.raises(StateError) as error:
        loader.load_state_dict(state)
    assert ranges_in(error.value) == [{"rows": [32, 48]}, {"rows": [16, 24]}]
    for meant, rows in zip(ranges_in(error.value), ([*range(16, 32), *range(48, 76)], [*range(24, 76)]), strict=True):
        with load(corpus, state, batch_size=4, skip_steps=[meant]) as loader:
            assert rows_of(loader) == rows
            assert loader.state_dict()["epoch"] == 1
    with load(corpus, state, batch_size=2, world_size=2, rank=1, skip_steps=[{"tokens": [256, 384]}]) as loader:
        assert rows_of(loader)[:12] == [*range(17, 32, 2), *range(49, 57, 2)]


def test_what_lies_before_a_state_is_not_ambiguous(corpus: str) -> None:
    with load(corpus, batch_size=8, skip_steps=[[1, 2]]) as loader:
        take(loader, 2)
        state = loader.state_dict()
    with load(corpus, state, batch_size=4, skip_steps=[[1, 3], {"rows": [5, 23]}]) as loader:
        assert next(iter(loader))["row_ids"].tolist() == [24, 25, 26, 27]
    with load(corpus, batch_size=4, skip_steps=[[2, 4]]) as loader, pytest.raises(StateError) as error:
        loader.load_state_dict(state)  # steps of 4 rows lie before it, those of 8 that may be meant do not
    assert ranges_in(error.value) == [{"rows": [16, 32]}, {"rows": [8, 16]}]
    del state["step_rows"]  # of an older release
    with load(corpus, batch_size=4, skip_steps=[[7, 8]]) as loader, pytest.raises(StateError) as error:
        loader.load_state_dict(state)
    assert ranges_in(error.value) == [{"rows": [28, 32]}]
    with load(corpus, state, batch_size=4, skip_steps=ranges_in(error.value)) as loader:
        assert rows_of(loader)[:8] == [24, 25, 26, 27, 32, 33, 34, 35]


def test_rows_that_are_not_whole_steps_are_refused_with_ranges_that_are(corpus: str) -> None:
    with load(corpus, batch_size=5, skip_steps=[{"rows": [32, 48]}]) as loader:
        assert len(loader) == 12  # so far: a state may be loaded in whose run these are whole steps
        with pytest.raises(ConfigError, match="5 rows") as error:
            iter(loader)
    assert ranges_in(error.value) == [{"rows": [32, 48]}, {"rows": [30, 50]}, {"rows": [35, 45]}]
    with load(corpus, batch_size=5, skip_steps=[{"rows": [0, 33]}]) as loader, pytest.raises(ConfigError) as error:
        iter(loader)  # whose first step is after the range, if that is rounded up
    assert ranges_in(error.value) == [{"rows": [0, 33]}, {"rows": [0, 35]}, {"rows": [0, 30]}]
    tokens = {"tokens": [256, 264], "epoch": 3}
    with load(corpus, batch_size=5, skip_steps=[tokens]) as loader, pytest.raises(ConfigError, match="40 ") as error:
        iter(loader)
    assert ranges_in(error.value) == [tokens, {"tokens": [240, 280], "epoch": 3}]
    how: dict[str, Any] = {"dtype": "uint16", "device": "cpu", "seq_len": 8, "rank": 0, "world_size": 1}
    with pytest.raises(ConfigError, match="5 rows"):
        build_pipeline(corpus, **how, batch_size=5, skip_steps=[{"rows": [32, 48]}])


def test_steps_are_counted_from_where_a_run_resumes_within_an_epoch(corpus: str) -> None:
    with load(corpus, batch_size=6) as loader:
        take(loader, 1)
        state = loader.state_dict()
    how: dict[str, Any] = {"batch_size": 4, "skip_steps": [{"rows": [32, 48]}]}
    with load(corpus, **how) as loader, pytest.raises(StateError, match="row 6") as error:
        loader.load_state_dict(state)
    assert ranges_in(error.value) == [{"rows": [32, 48]}, {"rows": [30, 50]}, {"rows": [34, 46]}]
    with load(corpus, state, batch_size=4, skip_steps=[{"rows": [34, 46]}]) as loader:
        assert rows_of(loader) == [*range(6, 34), *range(46, 78)]
    # Steps 2, 3, 4 and 5 begin at rows 6, 10, 14 and 18.
    with load(corpus, batch_size=4, skip_steps=[[4, 6]]) as loader, pytest.raises(StateError) as error:
        loader.load_state_dict(state)
    assert ranges_in(error.value) == [{"rows": [24, 36]}, {"rows": [14, 22]}]
    with load(corpus, state, batch_size=4, skip_steps=[{"rows": [14, 22]}]) as loader:
        assert rows_of(loader)[:12] == [6, 7, 8, 9, 10, 11, 12, 13, 22, 23, 24, 25]
        state = loader.state_dict()
    with load(corpus, state, batch_size=4, skip_steps=[[1, 3, 1]]) as loader:
        assert rows_of(loader)[:6] == [0, 1, 2, 3, 12, 13]


def test_explain_knows_which_steps_of_a_resumed_run_are_skipped(corpus: str, tmp_path: Path) -> None:
    with load(corpus, batch_size=6) as loader:
        take(loader, 1)
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    with load(corpus, batch_size=4, skip_steps=[{"rows": [14, 22]}]) as loader:
        config = loader.config

    def is_skipped(step: int, **how: Any) -> bool:
        return explain_step(config, step, all_ranks=True, most=1, **how).is_skipped

    assert [step for step in range(2, 8) if is_skipped(step, state=tmp_path / "state.json")] == [4, 5]
    with pytest.raises(ConfigError) as error:
        is_skipped(4)  # in a run from the start these rows are not whole steps
    assert ranges_in(error.value)[1:] == [{"rows": [12, 24]}, {"rows": [16, 20]}]


def test_validation_leaves_out_nothing(corpus: str) -> None:
    with pytest.raises(ConfigError, match=r"skip_steps = \[\]"):
        load(corpus, batch_size=4, skip_steps=[[4, 6]], split="validation", validation_fraction=0.5)


@pytest.mark.parametrize(("skip", "said"), [([[1, 3]], "13 steps (2 "), ([[90, 99]], "15 steps (0 ")])
def test_the_start_says_how_many(corpus: str, skip: list[list[int]], said: str) -> None:
    """So that a range beside the epoch, a slip of the pen, is seen."""
    with load(corpus, batch_size=5, skip_steps=skip) as loader:
        assert said in loader.summary()


@settings(
    max_examples=examples(30), phases=[Phase.generate], suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    sizes=st.tuples(*[st.integers(1, 6)] * 3),
    taken=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    counted=st.none() | st.integers(1, 12),
    first=st.integers(0, 12),
    length=st.integers(1, 5),
    older=st.booleans(),
)
def test_rows_that_are_left_out_are_those_that_were_meant(
    corpus: str,
    monkeypatch: pytest.MonkeyPatch,
    sizes: tuple[int, int, int],
    taken: tuple[int, int],
    counted: int | None,
    first: int,
    length: int,
    older: bool,
) -> None:
    """After two runs, the second resumed anywhere: either exactly the rows in question, or a refusal.

    counted: the range is given in rows, this many times `first`; None: in steps.
    older: of a release that did not save the rows of a step, so that they may be any.
    """
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    state: dict[str, Any] | None = None
    for size, steps in zip(sizes[:2], taken, strict=True):
        with load(corpus, state, batch_size=size) as loader:
            take(loader, steps)
            state = loader.state_dict()
    assert state is not None
    assert state["epoch"] == 0
    if older:
        del state["step_rows"]
    size, now, row, end = sizes[1], sizes[2], state["rows"], first + length
    if counted is None:
        shift = -row % now  # its steps are counted from where it resumes
        left_out = range(max(0, first * now - shift), end * now - shift)
        skip: Any = [first, end]
        fits = not older and (size == now or end * max(size, now) <= row)
    else:
        left_out = range(first * counted, end * counted)
        skip = {"rows": [left_out.start, left_out.stop]}
        begins, ends = left_out.start <= row or not (left_out.start - row) % now, not (left_out.stop - row) % now
        fits = left_out.stop <= row or (begins and ends)
    how: dict[str, Any] = {"batch_size": now, "drop_last": False, "skip_steps": [skip]}
    try:
        loader = load(corpus, **how)
    except ConfigError as error:
        assert "steps of epoch 0" in str(error)  # noqa: PT017
        return
    with loader:
        if fits:
            loader.load_state_dict(state)
            found = rows_of(loader) if loader.epoch == 0 else []
            assert found == [number for number in range(row, 79) if number not in left_out]
            return
        with pytest.raises(StateError) as refused:
            loader.load_state_dict(state)
    for suggestion in ranges_in(refused.value)[counted is not None :]:  # what was given comes first
        how["skip_steps"] = [suggestion]
        left_out = range(*suggestion["rows"])
        try:
            with load(corpus, state, **how) as loader:
                found = rows_of(loader) if loader.epoch == 0 else []
            assert found == [number for number in range(row, 79) if number not in left_out]
        except ConfigError as error:
            assert "steps of epoch 0" in str(error)  # noqa: PT017
        except StateError as error:  # the steps of the saving run need not be whole steps of this one
            assert counted is None
            assert size != now
            assert suggestion in ranges_in(error)  # noqa: PT017
