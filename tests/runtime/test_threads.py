"""Reader threads by themselves: none is left, and no task waits for ever, however starting and stopping them is cut."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError

import pytest
from at_lines import AtLine, lines_of
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.errors import LoaderClosedError
from dali_pipes.runtime.threads import ReaderThreads, Task


@pytest.fixture
def others() -> Callable[[], list[threading.Thread]]:
    """The threads that there were not before the test."""
    before = set(threading.enumerate())
    return lambda: [thread for thread in threading.enumerate() if thread not in before]


def starting_at_most(patch: pytest.MonkeyPatch, most: int, error: BaseException) -> list[threading.Thread]:
    """Let only so many threads start, and the next one raise `error`. Returns those that have started."""
    start = threading.Thread.start
    started: list[threading.Thread] = []

    def some_start(thread: threading.Thread) -> None:
        if len(started) == most:
            raise error
        started.append(thread)
        start(thread)

    patch.setattr(threading.Thread, "start", some_start)
    return started


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError(), KeyboardInterrupt()])
@pytest.mark.parametrize("failing", range(4))
def test_a_thread_that_cannot_be_started(
    others: Callable[[], list[threading.Thread]],
    monkeypatch: pytest.MonkeyPatch,
    failing: int,
    error: BaseException,
) -> None:
    """Ends those that were started before it."""
    with monkeypatch.context() as patch:
        started = starting_at_most(patch, failing, error)
        with pytest.raises(type(error)):
            ReaderThreads(4)
    assert len(started) == failing
    assert others() == []


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_while_they_are_stopped(others: Callable[[], list[threading.Thread]]) -> None:
    """Wherever it comes, stopping them again ends them all; without that, their owner's end does."""
    for line in lines_of(ReaderThreads(3).stop):
        for is_stopped_again in (True, False):
            readers = ReaderThreads(3)
            threads = others()
            with AtLine(line, interrupt), contextlib.suppress(KeyboardInterrupt):
                readers.stop()
            if is_stopped_again:
                readers.stop()
                assert others() == []
            del readers
            for thread in threads:
                thread.join()


def test_they_are_stopped_while_a_task_is_submitted(others: Callable[[], list[threading.Thread]]) -> None:
    """By another thread, at any line: the task is run, or fails, and whoever waits for it is told."""
    readers = ReaderThreads(2)
    lines = lines_of(lambda: readers.result(readers.submit(int, "7")))
    readers.stop()
    for line in lines:
        readers = ReaderThreads(2)
        with AtLine(line, readers.stop), contextlib.suppress(LoaderClosedError, CancelledError):
            assert readers.result(readers.submit(int, "7")) == 7
        readers.stop()
        assert others() == []


def test_another_thread_stops_them(others: Callable[[], list[threading.Thread]]) -> None:
    """Every task that was submitted meanwhile ends in one way or the other."""
    for _ in range(100):
        readers = ReaderThreads(2)
        futures: list[Task[int]] = []
        stopping = threading.Thread(target=readers.stop)
        stopping.start()
        for number in range(20):
            futures.append(readers.submit(int, str(number)))
        stopping.join()
        for number, future in enumerate(futures):
            with contextlib.suppress(LoaderClosedError):
                assert readers.result(future) == number
        assert others() == []


@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=8), num_tasks=st.integers(0, 5))
def test_they_grow_and_shrink(sizes: list[int], num_tasks: int) -> None:
    """As many tasks run at a time as there are threads; every task is run once, and none dies of it."""
    before = set(threading.enumerate())
    readers = ReaderThreads(3)
    done: list[Task[int]] = []
    for size in sizes:
        done += [readers.submit(int, str(number)) for number in range(num_tasks)]
        readers.resize(size)
        assert readers.count == size
        all_inside, may_leave = threading.Barrier(size + 1), threading.Event()

        def occupy(inside: threading.Barrier = all_inside, leave: threading.Event = may_leave) -> None:
            inside.wait(60)
            leave.wait(60)

        occupied = [readers.submit(occupy) for _ in range(size)]
        one_more = readers.submit(int, "7")
        all_inside.wait(60)
        assert not one_more.done(), "a thread too many"
        may_leave.set()
        for future in occupied:
            readers.result(future)
        assert readers.result(one_more) == 7
        assert readers.are_alive
    assert [readers.result(future) for future in done] == [*range(num_tasks)] * len(sizes)
    readers.stop()
    assert not readers.are_alive
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize("error", [RuntimeError("can't start new thread"), MemoryError(), KeyboardInterrupt()])
def test_they_cannot_grow(
    others: Callable[[], list[threading.Thread]], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """Those that there are go on, and more may be started later."""
    readers = ReaderThreads(2)
    with monkeypatch.context() as patch:
        starting_at_most(patch, 1, error)
        with pytest.raises(type(error)):
            readers.resize(5)
    assert readers.count == len(others()) == 3
    assert readers.are_alive
    assert readers.result(readers.submit(int, "7")) == 7
    readers.resize(5)
    assert len(others()) == 5
    readers.stop()
    assert others() == []


@pytest.mark.parametrize("size", [1, 5])
def test_they_are_stopped_while_they_grow_or_shrink(others: Callable[[], list[threading.Thread]], size: int) -> None:
    """By another thread or an interrupt, at any line: all end."""
    readers = ReaderThreads(3)
    lines = lines_of(lambda: readers.resize(size))
    readers.stop()
    for line in lines:
        readers = ReaderThreads(3)
        with AtLine(line, readers.stop):
            readers.resize(size)
        readers.stop()
        assert others() == [], line
        readers = ReaderThreads(3)
        with AtLine(line, interrupt), contextlib.suppress(KeyboardInterrupt):
            readers.resize(size)
        assert readers.are_alive
        assert readers.result(readers.submit(int, "7")) == 7
        readers.stop()
        assert others() == [], line


def test_their_owner_forgets_them_after_they_grew(others: Callable[[], list[threading.Thread]]) -> None:
    readers = ReaderThreads(1)
    readers.resize(6)
    readers.resize(2)
    readers.resize(4)
    threads = others()
    assert 4 <= len(threads) <= 8
    del readers
    for thread in threads:
        thread.join(60)
    assert others() == []
