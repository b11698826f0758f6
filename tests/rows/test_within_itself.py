"""A signal handler that asks for a state while the plan it needs is being made, by the thread that it interrupts."""

import threading
from typing import Any

import numpy as np
import pytest
from at_lines import AtLine, lines_of
from row_oracle import pieces_of

from dali_pipes.rows import document_rows, window_counts
from dali_pipes.rows.document_rows import DocumentRows

LENGTHS = [3, 9, 1, 4, 2, 7, 8, 8]


def make(shuffle: bool = True) -> DocumentRows:
    offsets = np.concatenate(([0], np.cumsum(LENGTHS))).astype(np.int64)
    options: dict[str, Any] = {"mode": "pack", "long_documents": "split", "window_documents": 3, "seed": 3}
    return DocumentRows(offsets, 8, shuffle=shuffle, **options)


def use(rows: DocumentRows) -> list[Any]:
    """All of two epochs, so that plans and counts are made, found and let go."""
    told: list[Any] = []
    for epoch in (0, 1):
        count = rows.count(epoch)
        told.append([column.tolist() for column in pieces_of(rows, epoch, np.arange(count))])
        told.append([rows.mark(epoch, row) for row in range(0, count, 2)])
        rows.plan_next(epoch, 1)
        rows.estimate(epoch)  # depends on what has been planned
        told += [rows.is_counted(epoch), count]
    return told


@pytest.mark.parametrize("shuffle", [True, False])
def test_it_may_ask_at_any_line(monkeypatch: pytest.MonkeyPatch, shuffle: bool) -> None:
    """For places that have been counted and others, in as many epochs as are kept: all are told what they would be."""
    monkeypatch.setattr(document_rows, "_WINDOWS_KEPT", 2)
    monkeypatch.setattr(window_counts, "_FEWEST_EPOCHS", 2)
    monkeypatch.setattr(window_counts, "_MOST_EPOCHS", 2)
    untouched = make(shuffle)
    places = [(epoch, row) for epoch in (0, 2) for row in (1, 4)]
    marks = [untouched.mark(*place) for place in places]
    expected, fresh = use(make(shuffle)), make(shuffle)
    files = document_rows.__file__, window_counts.__file__
    lines = [line for line in lines_of(lambda: use(fresh)) if line[0] in files]
    assert len(lines) > 100
    for line in lines:
        rows = make(shuffle)
        told: list[Any] = []

        def ask(rows: DocumentRows = rows, told: list[Any] = told) -> None:
            told += [rows.mark(*place) for place in places]
            told.append(rows.plan_bytes() >= 0)

        with AtLine(line, ask) as cut:
            assert use(rows) == expected, line
        assert cut.acted, line
        assert told == [*marks, True], line
        assert use(rows) == expected, line


def test_another_thread_plans_meanwhile() -> None:
    """Under the handler the lock of the counts is held; whoever plans must not wait for it, or both wait for ever."""
    rows, planning, go_on = make(), threading.Event(), threading.Event()
    make_plan = rows._make_plan

    def slowly(epoch: int, window: int) -> Any:
        if threading.current_thread() is thread:
            planning.set()
            go_on.wait()
        return make_plan(epoch, window)

    rows._make_plan = slowly  # type: ignore[method-assign]
    thread = threading.Thread(target=rows.count, args=(0,))
    thread.start()
    planning.wait()
    with rows._lock:  # here a handler interrupts this thread
        go_on.set()
        mark = rows.mark(0, 4)
    thread.join()
    assert mark == make().mark(0, 4)
