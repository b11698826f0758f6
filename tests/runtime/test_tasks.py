"""Calls on their way to a thread: each is made once or canceled, and whoever waits is told once, whatever the order."""

import gc
import threading
import weakref
from collections import Counter
from concurrent.futures import CancelledError
from functools import partial
from typing import Any

import pytest
from at_lines import AtLine, lines_of
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.runtime.threads import Task


def outcome(task: Task[Any]) -> object:
    try:
        return task.result()
    except CancelledError:
        return "canceled"
    except ZeroDivisionError:
        return "failed"


@given(steps=st.lists(st.sampled_from(["run", "cancel", "ask", "wait"]), max_size=8), fails=st.booleans())
def test_the_first_to_run_or_cancel_it_decides(steps: list[str], fails: bool) -> None:
    calls: list[int] = []
    told: list[Task[int]] = []

    def call(number: int) -> int:
        calls.append(number)
        return number // (0 if fails else 1)

    task: Task[int] = Task(call, (7,))
    decided = next((step for step in steps if step in ("run", "cancel")), None)
    asked = 0
    for number, step in enumerate(steps):
        is_first = decided is not None and steps.index(decided) == number
        if step == "run":
            assert task.run() == is_first
        elif step == "cancel":
            assert task.cancel() == is_first
        elif step == "ask":
            asked += 1
            task.add_done_callback(told.append)
        else:
            assert task.wait(0) == task.done()
        assert task.done() == (decided is not None and steps.index(decided) <= number)
    if decided is None:
        assert told == []
        task.cancel(ZeroDivisionError())
        assert outcome(task) == "failed"
    else:
        assert outcome(task) == {"cancel": "canceled", "run": "failed" if fails else 7}[decided]
    assert calls == [7] * (decided == "run")
    assert told == [task] * asked


def test_threads_that_run_cancel_and_wait() -> None:
    """At the same moment: one decides, and all who wait are told once."""
    for _ in range(200):
        calls, told, start = Counter[str](), Counter[int](), threading.Barrier(7)
        task: Task[int] = Task(lambda calls=calls: calls.update(["call"]) or 7)
        results: list[object] = []

        def ask(number: int, task: Task[int] = task, told: Counter[int] = told, start: Any = start) -> None:
            start.wait()
            task.add_done_callback(lambda _: told.update([number]))

        def get(task: Task[int] = task, results: list[object] = results, start: Any = start) -> None:
            start.wait()
            results.append(outcome(task))

        def decide(act: Any, start: Any = start) -> None:
            start.wait()
            act()

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(2)]
        threads += [threading.Thread(target=get) for _ in range(2)]
        threads += [threading.Thread(target=decide, args=(act,)) for act in (task.run, task.run, task.cancel)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert results[0] == results[1] == ("canceled" if not calls else 7)
        assert calls["call"] <= 1
        assert told == {0: 1, 1: 1}


def test_whoever_asks_at_any_line_is_told() -> None:
    """While another thread ends the task, at each line of what it does."""
    for line in lines_of(Task(int, ("7",)).run):
        task: Task[int] = Task(int, ("7",))
        told: list[object] = []
        with AtLine(line, partial(task.add_done_callback, told.append)):
            task.run()
        assert told == [task], line


def test_a_promise() -> None:
    """A task without a call waits for whoever knows the result."""
    task: Task[str] = Task()
    assert not task.wait(0.0)
    threading.Timer(0.01, task.finish, ["seven"]).start()
    assert task.result() == "seven"
    failed: Task[str] = Task()
    failed.finish(error=ZeroDivisionError())
    assert isinstance(failed.exception(), ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        failed.result()


def test_an_error_does_not_hold_its_task() -> None:
    """Nor what the call was made with, once it has ended."""

    class Argument:
        pass

    def fail(argument: Argument) -> None:
        raise ZeroDivisionError

    gc.disable()
    try:
        argument = Argument()
        task: Task[None] = Task(fail, (argument,))
        references: list[weakref.ref[Any]] = [weakref.ref(argument), weakref.ref(task)]
        task.run()
        with pytest.raises(ZeroDivisionError):
            task.result()
        del argument, task
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()
