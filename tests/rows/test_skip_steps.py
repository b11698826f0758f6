"""`skip_steps`: the run without some steps is the run with them minus those, wherever and with whatever it goes on."""

import sys
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
        "skip_step_rows": world_size * batch_size,
    }
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
    for state in [own[0], draw(st.sampled_from(own[:-1])), draw(st.sampled_from(others[:-1]))]:
        with load(corpus, state, **how) as loader:
            expected = [step for step in numbered(loader, 20)[0] if step[:2] not in left_out]
        with load(corpus, state, **how, skip_steps=skip) as loader:
            if loader.epoch == 0:  # and not behind the last step of it, where the state may stand
                had = [step for step in range(loader.step) if (0, step) not in left_out]
                assert len(loader) == len(had) + sum(epoch == 0 for epoch, *_ in expected)
            found, states = numbered(loader, len(expected))
        assert found[: len(expected)] == expected
        middle = draw(st.integers(0, len(expected) - 1))
        with load(corpus, states[middle], **how, skip_steps=skip) as loader:
            assert loader.state_dict() == states[middle]
            assert (loader.epoch, loader.step) == expected[middle][:2]
            assert numbered(loader, 1)[0] == [step for step in expected[middle:] if step[0] == expected[middle][0]]


def row_ids(batches: Any) -> list[int]:
    return [row for batch in batches for row in batch["row_ids"].tolist()]


def test_written_out(corpus: str) -> None:
    """79 rows in steps of 10; the state from before a range stands behind it, and behind an epoch left out whole."""
    with load(
        corpus, batch_size=10, skip_steps=[[0, 2], [3, 4], [2, 9, 1], [0, 1, 1], [1, 2, 1], [6, 99, 2]]
    ) as loader:
        assert loader.config.skip_steps == ((0, 2, 0), (3, 4, 0), (0, 9, 1), (6, 99, 2))
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


@pytest.mark.parametrize("placement", ["host", "device"])
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
    with pytest.raises(ConfigError, match=r"skip_steps .* leave no step of epoch 0, which has 7"):
        load(corpus, batch_size=10, skip_steps=steps)


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        ([[3, 3]], r"\[3, 3\]: expected 0 <= first < end"),
        ([[-1, 3]], "0 <= first < end"),
        ([[0, 3, -1]], "epoch >= 0"),
        ([[0, 3.0]], "whole numbers"),
        ([[False, True]], "whole numbers"),
        ([["0", "3"]], "whole numbers"),
        ([[1]], r"expected \[first, end\] or"),
        ([[1, 2, 3, 4]], r"expected \[first, end\] or"),
        ([5, 6], "5: expected"),
        (7, "found 7"),
    ],
)
def test_what_is_no_range_is_refused(steps: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"skip_steps: .*{message}"):
        LoaderConfig(corpus="a.bin", batch_size=1, seq_len=1, skip_steps=steps)


def test_ranges_that_meet_become_one(tmp_path: Path) -> None:
    config = LoaderConfig(corpus="a.bin", batch_size=1, seq_len=1, skip_steps=[[5, 9], [2, 4, 1], [9, 10], [1, 6]])
    assert config.skip_steps == ((1, 10, 0), (2, 4, 1))
    (tmp_path / "c.toml").write_text(config.to_toml())
    assert LoaderConfig.from_file(tmp_path / "c.toml") == config


def rows_of(loader: TokenLoader) -> list[int]:
    return [row for batch in loader for row in batch["row_ids"].tolist()]


@pytest.mark.parametrize("skipped_before", [True, False])
def test_a_run_with_steps_of_another_size_has_to_say_which_are_meant(corpus: str, skipped_before: bool) -> None:
    """Steps 4 and 5 of 8 rows are rows 32 to 47, and of 4 rows others, whether the saving run left them out or not."""
    skip: dict[str, Any] = {"skip_steps": [[4, 6]]}
    with load(corpus, batch_size=8, **(skip if skipped_before else {})) as loader:
        take(loader, 2)
        state = loader.state_dict()
    with (
        load(corpus, batch_size=4, **skip) as loader,
        pytest.raises(StateError, match=r"say which they count.* = 8 or"),
    ):
        loader.load_state_dict(state)
    expected = {8: [*range(16, 32), *range(48, 76)], 4: [*range(24, 76)]}
    for counted, rows in expected.items():
        with load(corpus, state, batch_size=4, **skip, skip_step_rows=counted) as loader:
            assert rows_of(loader) == [row for row in rows if row < len(loader) * 4 + 16], counted
            assert loader.state_dict()["epoch"] == 1
    with load(corpus, state, batch_size=2, world_size=2, rank=1, **skip, skip_step_rows=8) as loader:
        assert rows_of(loader)[:12] == [*range(17, 32, 2), *range(49, 57, 2)]


def test_what_lies_behind_needs_no_word(corpus: str) -> None:
    with load(corpus, batch_size=8, skip_steps=[[1, 2]]) as loader:
        take(loader, 2)
        state = loader.state_dict()
    with load(corpus, state, batch_size=4, skip_steps=[[1, 3]]) as loader:
        assert next(iter(loader))["row_ids"].tolist() == [24, 25, 26, 27]
    with load(corpus, batch_size=4, skip_steps=[[2, 4]]) as loader, pytest.raises(StateError, match="say which they"):
        loader.load_state_dict(state)  # steps of 4 rows lie behind, those of 8 that may be meant do not
    del state["step_rows"]  # of an older release
    with load(corpus, state, batch_size=4, skip_steps=[[7, 8]], skip_step_rows=4) as loader:
        assert rows_of(loader)[:8] == [24, 25, 26, 27, 32, 33, 34, 35]


def test_steps_that_do_not_begin_where_others_do_are_refused(corpus: str) -> None:
    with pytest.raises(ConfigError, match=r"rows 32 to 47.*nearest that leave them all out are \[6, 10\]"):
        load(corpus, batch_size=5, skip_steps=[[4, 6]], skip_step_rows=8)
    with load(corpus, batch_size=6) as loader:
        take(loader, 1)
        state = loader.state_dict()
    how: dict[str, Any] = {"batch_size": 4, "skip_steps": [[4, 6]]}
    with (
        load(corpus, **how, skip_step_rows=8) as loader,
        pytest.raises(StateError, match="none begins where those of 8"),
    ):
        loader.load_state_dict(state)
    # It goes on at row 6, so steps 2, 3, 4 and 5 begin at rows 6, 10, 14 and 18.
    with load(corpus, state, **how, skip_step_rows=4) as loader:
        assert rows_of(loader)[:12] == [6, 7, 8, 9, 10, 11, 12, 13, 22, 23, 24, 25]


def test_validation_leaves_out_nothing(corpus: str) -> None:
    with pytest.raises(ConfigError, match=r"skip_steps = \[\] with split"):
        load(corpus, batch_size=4, skip_steps=[[4, 6]], split="validation", validation_fraction=0.5)


@pytest.mark.parametrize(("skip", "said"), [([[1, 3]], "13 steps (2 skipped)"), ([[90, 99]], "15 steps (0 skipped)")])
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
    """After two runs, the second gone on anywhere: either exactly the rows of the steps in question, or a refusal.

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
    now, rows, end = sizes[2], state["rows"], first + length
    skip: dict[str, Any] = {"batch_size": now, "drop_last": False, "skip_steps": [[first, end]]}
    skip["skip_step_rows"] = counted
    in_rows = counted not in (None, now)
    if in_rows:
        assert counted is not None
        left_out = range(first * counted, end * counted)
        fits = not (first * counted % now or end * counted % now)
    else:
        begin = rows % now  # of its steps, which go on from where it began
        left_out = range(*(max(0, number * now - (now - begin if begin else 0)) for number in (first, end)))
        fits = True
    is_ahead = left_out.stop > rows
    try:
        with load(corpus, state, **skip) as loader:
            found = rows_of(loader) if loader.epoch == 0 else []
    except ConfigError as error:
        assert "leave no step of epoch 0" in str(error) or not fits  # noqa: PT017
    except StateError:
        size = sizes[1]
        if in_rows:
            assert is_ahead
            assert rows % now or (counted == size and rows % size)
        else:  # it may be steps of either size, and may be ahead
            assert counted is None
            assert older or size != now
            assert older or end * max(size, now) > rows
    else:
        assert fits
        assert not (older and counted is None)
        assert found == [row for row in range(rows, 79) if row not in left_out]
        assert not (in_rows and is_ahead and counted == sizes[1] and rows % sizes[1] and not older)
