"""How many windows a resumed run plans, and in which thread: few, wherever it goes on, whatever is asked meanwhile."""

import random
import threading
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pytest
from row_oracle import END, pieces_of, write_documents
from streams import loader_stream, take

from dali_pipes import TokenLoader
from dali_pipes.errors import StateError
from dali_pipes.rows.document_rows import DocumentRows
from dali_pipes.rows.length_buckets import LengthBuckets
from dali_pipes.schedule import plans as row_plan

FEW = 12
"""Windows, for a start and some batches: of about 90 in an epoch."""
KINDS = [
    ("pack", True),
    ("pad", False),
    ("buckets", True),
    *(pytest.param(rows, False, marks=pytest.mark.slow) for rows in ("pack", "buckets")),
]

State = dict[str, Any]
Batch = dict[str, Any]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("windows") / "corpus"
    draw = random.Random(8)
    write_documents(folder, [[draw.randint(1, 8) for _ in range(draw.randint(4, 12))] + [END] for _ in range(900)])
    return str(folder)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each window that has been planned, whether the main thread did it. Few rows are planned at a time."""
    monkeypatch.setattr(row_plan, "PLAN_ROWS", 8)
    windows: list[bool] = []
    real = DocumentRows._make_plan

    def counted(self: DocumentRows, epoch: int, window: int) -> Any:
        windows.append(threading.current_thread() is threading.main_thread())
        return real(self, epoch, window)

    monkeypatch.setattr(DocumentRows, "_make_plan", counted)
    return windows


def load(corpus: str, rows: str, shuffle: bool, state: State | None = None) -> TokenLoader:
    how: dict[str, Any] = {"rows": "pad" if rows == "buckets" else rows, "shuffle": shuffle, "seq_len": 16}
    how |= {"batch_size": 2, "window_documents": 10, "seed": 3, "batches_per_run": 1, "device": "cpu"}
    if rows == "buckets":
        how["length_buckets"] = [8, 16]
    outputs = ("input_ids", "labels", "row_ids")
    loader = TokenLoader(corpus=corpus, dtype="uint16", eos_id=END, outputs=outputs, **how)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def plain(batch: Batch) -> Batch:
    return {name: value.tolist() for name, value in batch.items()}


@cache
def unbroken(corpus: str, rows: str, shuffle: bool) -> tuple[list[Batch], list[State]]:
    """The batches of two epochs, and the states before the first and behind each."""
    with load(corpus, rows, shuffle) as loader:
        states, batches = [loader.state_dict()], []
        for _ in range(2):
            for batch in loader:
                batches.append(plain(batch))
                states.append(loader.state_dict())
        assert loader.epoch == 2
        return batches, states


def others(loader: TokenLoader, corpus: str) -> Iterator[None]:
    """What a trainer may ask for that lies somewhere else, one at a time."""
    last = loader.state_dict()
    loader.locate(0, 0)
    yield
    loader.locate(2, 1, epoch=0)
    yield
    for epoch in range(4, 9):
        loader.locate(0, 0, epoch=epoch)
    yield
    loader.summary()
    with pytest.raises(StateError):
        loader.load_state_dict({**last, "epoch": last["epoch"] + 1})
    yield
    loader.plan_report()
    yield


@pytest.mark.parametrize(("rows", "shuffle"), KINDS)
def test_a_resume_plans_few_windows(corpus: str, planned: list[bool], rows: str, shuffle: bool) -> None:
    """From places all over two epochs, across their ends, and no state plans any."""
    batches, states = unbroken(corpus, rows, shuffle)
    epoch = next(step for step, state in enumerate(states) if state["epoch"] == 1)
    assert states[epoch - 1]["window"][0] > 80
    places = [*range(5, len(states) - 12, len(states) // 9), epoch - 6, epoch - 2, epoch, epoch + 1]
    for place in places:
        planned.clear()
        with load(corpus, rows, shuffle, states[place]) as loader:
            stream = loader_stream(loader)
            for step in range(place, place + 8):
                assert plain(take(stream, 1)[0]) == batches[step]
                before = planned.count(True)
                assert loader.state_dict() == states[step + 1]
                assert planned.count(True) == before
        assert len(planned) <= FEW, place


@pytest.mark.parametrize(("rows", "shuffle"), KINDS)
def test_a_state_plans_nothing_whatever_was_asked(corpus: str, planned: list[bool], rows: str, shuffle: bool) -> None:
    batches, states = unbroken(corpus, rows, shuffle)
    epoch = next(step for step, state in enumerate(states) if state["epoch"] == 1)
    for place in (epoch - 9, epoch - 3, epoch + 7, len(states) - 20):
        with load(corpus, rows, shuffle, states[place]) as loader:
            stream = loader_stream(loader)
            step = place
            for _ in others(loader, corpus):
                before = planned.count(True)
                assert loader.state_dict() == states[step]
                assert planned.count(True) == before
                assert plain(take(stream, 1)[0]) == batches[step]
                assert planned.count(True) <= before + FEW
                step += 1


@pytest.mark.parametrize("shuffle", [True, False])
def test_loading_back_and_forth_plans_few_windows(corpus: str, planned: list[bool], shuffle: bool) -> None:
    batches, states = unbroken(corpus, "pack", shuffle)
    draw = random.Random(5)
    with load(corpus, "pack", shuffle) as loader:
        for _ in range(12):
            place = draw.randrange(len(states) - 5)
            planned.clear()
            loader.load_state_dict(states[place])
            assert loader.state_dict() == states[place]
            assert list(map(plain, take(loader_stream(loader), 4))) == batches[place : place + 4]
            assert loader.state_dict() == states[place + 4]
            assert planned.count(True) <= FEW
            assert len(planned) <= 2 * FEW  # reader threads may still be at the place before


@pytest.mark.parametrize("buckets", [None, LengthBuckets(np.array([4, 8]))])
@pytest.mark.parametrize("shuffle", [True, False])
def test_rows_and_marks_are_those_of_a_whole_count(shuffle: bool, buckets: LengthBuckets | None) -> None:
    """Any rows in any order after any marks, with windows that have none. Marks of rows just had cost no plan."""
    draw = random.Random(2)
    lengths = [0 if n // 5 % 4 == 1 else n * 7 % 11 for n in range(300)]
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)

    def make() -> DocumentRows:
        return DocumentRows(
            offsets,
            8,
            mode="pack" if buckets is None else "pad",
            long_documents="drop",
            window_documents=5,
            shuffle=shuffle,
            seed=3,
            buckets=buckets,
        )

    whole = make()
    counts = [whole.count(epoch) for epoch in range(3)]
    rows = make()
    real = rows._make_plan

    def refuse(epoch: int, window: int) -> Any:
        raise AssertionError("planned for a mark")

    for _ in range(300):
        epoch = draw.randrange(3)
        row, other = (draw.randrange(counts[epoch] - 3) for _ in range(2))
        if draw.random() < 0.3:
            assert rows.seek(epoch, row, whole.mark(epoch, row))
        some = np.arange(row, row + 3)
        for mine, theirs in zip(pieces_of(rows, epoch, some)[:4], pieces_of(whole, epoch, some)[:4], strict=True):
            assert mine.tolist() == theirs.tolist()
        rows._make_plan = refuse  # type: ignore[method-assign]
        assert rows.mark(epoch, row) == whole.mark(epoch, row)
        rows._make_plan = real  # type: ignore[method-assign]
        assert rows.mark(epoch, other) == whole.mark(epoch, other)
    assert [rows.count(epoch) for epoch in range(3)] == counts
