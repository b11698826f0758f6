"""`len()` is what an epoch has, in every epoch, on every rank, whatever has been planned; no epoch is stuck in."""

import itertools
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples
from row_oracle import END, pieces_of, write_documents
from streams import row_ids

from dali_pipes import TokenLoader
from dali_pipes.rows.document_rows import DocumentRows
from dali_pipes.schedule import Blocks, Position, Schedule


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """400 documents of 1 to 30 tokens, in windows of 20: some rows more or less from epoch to epoch."""
    folder = tmp_path_factory.mktemp("lengths") / "corpus"
    lengths = np.random.default_rng(5).integers(1, 31, 400)
    write_documents(folder, [[number % 90 + 1] * (length - 1) + [END] for number, length in enumerate(lengths)])
    return str(folder)


def load(corpus: str, **how: Any) -> TokenLoader:
    common: dict[str, Any] = {"dtype": "uint16", "eos_id": END, "device": "cpu", "quiet": True, "rows": "pack"}
    common |= {"window_documents": 20, "seq_len": 32, "batch_size": 2, "outputs": ["input_ids", "row_ids"]}
    return TokenLoader(corpus=corpus, **{**common, **how})


@pytest.mark.parametrize(
    ("engine", "repeat"), [("direct", False), ("direct", True), ("dali", True)], indirect=["engine"]
)
def test_late_epochs_plan_no_earlier_ones(
    corpus: str, engine: str, monkeypatch: pytest.MonkeyPatch, repeat: bool
) -> None:
    """Counts of three epochs are kept, so a trainer that walked through the earlier ones again would wait for them."""
    planned: list[tuple[int, int]] = []
    make_plan = DocumentRows._make_plan

    def counted_plan(rows: DocumentRows, epoch: int, window: int) -> Any:
        planned.append((epoch, window))
        return make_plan(rows, epoch, window)

    monkeypatch.setattr(DocumentRows, "_make_plan", counted_plan)
    how: dict[str, Any] = {"window_documents": 1000, "batches_per_run": 8, "repeat": repeat}
    with load(corpus, **how) as loader:
        while loader.epoch < 30:
            for _ in loader:
                if loader.epoch == 30:
                    break
    assert set(planned) >= {(epoch, 0) for epoch in range(30)}
    assert len(planned) <= 3 * 32


HOW: list[dict[str, Any]] = [
    {},
    {"drop_last": False, "batch_size": 3},
    {"rows": "pad", "length_buckets": [8, 32]},
    {"split": "validation", "validation_fraction": 0.5, "drop_last": False},
    {"shuffle": False},
]


@pytest.mark.parametrize(
    ("engine", "how"),
    [
        *(("direct", how) for how in HOW),
        ("dali", {}),
        *(pytest.param("dali", how, marks=pytest.mark.slow) for how in HOW[1:]),
    ],
    indirect=["engine"],
    ids=str,
)
def test_every_epoch_has_as_many_batches_as_it_says(corpus: str, engine: str, how: dict[str, Any]) -> None:
    """As trainers ask: before each pass, at its first batch, and in the middle, where plans are half made."""
    lengths = []
    with load(corpus, **how) as asked, load(corpus, **how) as plain:
        for epoch in range(4):
            said = [len(asked)] if epoch != 2 else []
            count = 0
            for count, _ in enumerate(asked, 1):
                if count in (1, 7):
                    said.append(len(asked))
            assert said == [count] * len(said)
            assert len(list(plain)) == count
            lengths.append(count)
    assert len(set(lengths)) == 1 or how.get("split", "train") == "train"


def test_ranks_say_the_same_at_any_time(corpus: str) -> None:
    """The second rank asks later than the first, with other windows planned."""
    ranks = [load(corpus, rank=rank, world_size=2, batch_size=1, num_threads=2 + rank) for rank in range(2)]
    for _ in range(3):
        iterators = [iter(loader) for loader in ranks]
        said = []
        for number in itertools.count():
            batches = [next(each, None) for each in iterators]
            assert (batches[0] is None) == (batches[1] is None)
            if batches[0] is None:
                break
            said.append(len(ranks[number % 2]))
        assert set(said[:-1]) == {len(said)}, "behind the last batch it is the next epoch's"
    for loader in ranks:
        loader.close()


@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.sampled_from(["stream", "pack", "pad"]),
    before=st.integers(1, 5),
    steps=st.integers(0, 30),
    now=st.integers(1, 7),
    drop_last=st.booleans(),
)
def test_what_is_left_after_a_resume_with_other_steps(
    corpus: str, monkeypatch: pytest.MonkeyPatch, rows: str, before: int, steps: int, now: int, drop_last: bool
) -> None:
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    with load(corpus, rows=rows, batch_size=before) as loader:
        for _ in itertools.islice(loader, steps):
            pass
        state = loader.state_dict()
    with load(corpus, rows=rows, batch_size=now, drop_last=drop_last) as loader:
        loader.load_state_dict(state)
        for number, _ in enumerate(itertools.repeat(None, 3)):
            length, first, epoch = len(loader), loader.step, loader.epoch
            batches = list(loader)
            assert len(batches) == length - first
            if number == 0:
                assert [loader.locate(first + n, 0).row_id for n in range(len(batches))] == row_ids(batches)[::now]
            assert loader.locate(first, 0).row_id == loader.locate(first, 0, epoch=epoch).row_id


def few_documents(folder: Path, seed: int) -> str:
    lengths = np.random.default_rng(seed).integers(1, 15, 12)
    write_documents(folder, [[number + 1] * length + [END] for number, length in enumerate(lengths)])
    return str(folder)


@pytest.mark.parametrize(
    ("engine", "seed"),
    [
        *(("direct", seed) for seed in (1, 2, 3, 4, 9, 13)),
        ("dali", 1),
        *(pytest.param("dali", seed, marks=pytest.mark.slow) for seed in (2, 3, 4, 9, 13)),
    ],
    indirect=["engine"],
)
def test_epochs_without_a_step_are_passed_over(tmp_path: Path, engine: str, seed: int) -> None:
    """Some epochs of a small set have a row less than a step takes: every `for` still hands out something."""
    how: dict[str, Any] = {"seq_len": 16, "window_documents": 4, "seed": seed}
    corpus = few_documents(tmp_path / "few", seed)
    with load(corpus, **how, batch_size=1) as loader:
        documents = loader._schedule.interleave
        counts = [documents.count(epoch) for epoch in range(40)]
    step = counts[0]
    expected = [epoch for epoch, count in enumerate(counts) if count >= step]
    assert 7 <= len(expected) < 40
    with load(corpus, **how, batch_size=step) as loader:
        states = [loader.state_dict()]
        for epoch in expected[:6]:
            assert (loader.epoch, len(loader)) == (epoch, counts[epoch] // step)
            assert len(list(loader)) == counts[epoch] // step
            states.append(loader.state_dict())
        assert [state["epoch"] for state in states] == expected[:7]
    with load(corpus, **how, batch_size=step, repeat=True) as loader:
        seen = []
        for batch in itertools.islice(loader, 8):
            seen.append((loader.locate(0, 0).row_id, len(batch["row_ids"])))
        assert seen == [(0, step)] * 8
    for state in states:
        with load(corpus, **how, batch_size=step) as loader:
            loader.load_state_dict(state)
            assert (loader.epoch, len(list(loader))) == (state["epoch"], counts[state["epoch"]] // step)


def test_blocks_of_a_pipeline_pass_them_over_too(tmp_path: Path) -> None:
    """Blocks by epoch, as DALI's own epochs ask for them, and run on through all of them."""
    lengths = [3, 9, 7, 5, 8, 2, 6, 9]
    offsets = np.cumsum([0, *lengths])
    documents = DocumentRows(offsets, 10, mode="pack", long_documents="split", window_documents=3, shuffle=True, seed=1)
    counts = [documents.count(epoch) for epoch in range(30)]
    assert len(set(counts)) > 1
    size = max(counts[0], sorted(counts)[15])
    if counts[0] < size:
        size = counts[0]
    schedule = Schedule(documents, size)
    having = [epoch for epoch, count in enumerate(counts) if count >= size]
    blocks = Blocks(schedule, 2, Position(0, 0))
    for index, epoch in enumerate(having[:8]):
        steps = blocks.steps(0, index)
        assert steps is not None
        assert (steps.epoch, steps.num_steps) == (epoch, counts[epoch] // size)
        assert blocks.steps(1, index) is None
    assert [blocks.steps(number).epoch for number in range(8)] == having[:8]  # type: ignore[union-attr]


LENGTHS = st.lists(st.integers(0, 23), min_size=1, max_size=40).filter(any)


def make(lengths: list[int], window: int) -> DocumentRows:
    offsets = np.cumsum([0, *lengths]).astype(np.int64)
    return DocumentRows(offsets, 8, mode="pack", long_documents="drop", window_documents=window, shuffle=True, seed=3)


@given(LENGTHS, st.integers(1, 4), st.data())
def test_where_a_run_stands_does_not_depend_on_what_is_planned(
    lengths: list[int], window: int, data: st.DataObject
) -> None:
    """Windows without rows, of long or empty documents, before, in and behind the place."""
    known = make(lengths, window)
    row = data.draw(st.integers(0, known.count(2)))
    fresh = make(lengths, window)
    fresh.count(2, row)
    mark = fresh.mark(2, row)
    assert known.mark(2, row) == mark
    resumed = make(lengths, window)
    assert resumed.seek(2, row, mark)
    assert resumed.mark(2, row) == mark
    resumed.count(2)
    assert resumed.mark(2, row) == mark
    for later in range(row, known.count(2) + 1):
        assert resumed.mark(2, later) == known.mark(2, later)


@given(LENGTHS, st.integers(1, 4), st.data())
def test_rows_of_an_epoch_whose_count_was_pushed_out(lengths: list[int], window: int, data: st.DataObject) -> None:
    """Other threads count other epochs between any two looks at this one, so that it is always begun anew."""
    whole = make(lengths, window)
    count = whole.count(1)
    rows = np.arange(data.draw(st.integers(0, max(0, count - 1))), count)
    pushed = make(lengths, window)
    real, others, draw = pushed.count, itertools.cycle(range(10, 20)), random.Random(count)

    def counted(epoch: int, at_least: int | None = None) -> int:
        found = real(epoch, at_least)
        if draw.random() < 0.5:
            for _ in range(4):
                real(next(others), 1)
        return found

    pushed.count = counted  # type: ignore[method-assign]
    for mine, theirs in zip(pieces_of(pushed, 1, rows)[:4], pieces_of(whole, 1, rows)[:4], strict=True):
        assert mine.tolist() == theirs.tolist()
