"""Threads that run tasks in the background and never keep a process alive.

`concurrent.futures` has such threads too, but takes no task once the main thread has ended, although another thread may
still be training. These end when they are stopped, when their owner is collected, and at interpreter exit.
"""

import atexit
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

from dali_pipes.errors import LoaderClosedError

_Task = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]
_EXIT_WAIT_S = 10.0
_ALIVE_S = 1.0  # between looks at whether the threads live

_live: "weakref.WeakSet[ReaderThreads]" = weakref.WeakSet()
_at_exit: list[Callable[[], None]] = []
_exiting = threading.Event()
_AT_EXIT = "the interpreter is shutting down and the reader threads have been stopped; no more data can be read"


class ReaderThreads:
    """`count` daemon threads; they hold the tasks they run, never their owner."""

    def __init__(self, count: int) -> None:
        """Starts the threads. Raises `LoaderClosedError` while the interpreter goes down."""
        if _exiting.is_set():
            raise LoaderClosedError(_AT_EXIT)
        self._lock = threading.Lock()
        self._stopped = False
        self._tasks: SimpleQueue[_Task | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=_work, args=(self._tasks,), name=f"dali_pipes-reader-{n}", daemon=True)
            for n in range(count)
        ]
        for thread in self._threads:
            thread.start()
        self._finish = weakref.finalize(self, _release, self._tasks, count)
        self._finish.atexit = False
        _live.add(self)
        if not _at_exit:  # registered after DALI's own handler, so it runs before that one
            _at_exit.append(atexit.register(_stop_all))

    def submit(self, function: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        """Run `function` in one of the threads; does not block. After `stop` the future fails at once."""
        future: Future[Any] = Future()
        with self._lock:
            if not self._stopped:
                self._tasks.put((future, function, arguments))
                return future
        future.set_exception(LoaderClosedError(_AT_EXIT))
        return future

    @property
    def are_alive(self) -> bool:
        """Whether all of the threads still run."""
        return all(thread.is_alive() for thread in self._threads)

    def result(self, future: "Future[Any]") -> Any:
        """What a task returned. Blocks; raises what it raised, or RuntimeError if a thread has died meanwhile."""
        try:
            if not future.done():
                self._wait_for(future)
            return future.result()
        finally:
            del future  # or an error, whose traceback holds this frame, would hold itself

    def _wait_for(self, future: "Future[Any]") -> None:
        # By a bare lock: an interrupt in `future.result` may find its condition half acquired, and be a RuntimeError.
        done = threading.Lock()
        done.acquire()
        future.add_done_callback(lambda _: done.release())
        while not (done.acquire(timeout=_ALIVE_S) or future.done()):
            if not self._stopped and not self.are_alive:
                raise RuntimeError("a reader thread died: something outside of dali_pipes ended it")

    def stop(self, wait_s: float | None = None) -> None:
        """End the threads behind the tasks submitted so far (cancel those that need not run); waits. Idempotent."""
        with self._lock:
            self._stopped = True
        self._finish()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(wait_s)


def _work(tasks: "SimpleQueue[_Task | None]") -> None:
    while (task := tasks.get()) is not None:
        future, function, arguments = task
        if future.set_running_or_notify_cancel():
            try:
                result = function(*arguments)
            except SystemExit as error:  # the trainer would end without a word, as if all was well
                ended = RuntimeError(f"a task of a reader thread raised SystemExit({error.code!r})")
                ended.__cause__ = error
                future.set_exception(ended)
                del ended
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
                del result
        del task, future, function, arguments  # hold nothing while waiting for the next one


def _release(tasks: "SimpleQueue[_Task | None]", count: int) -> None:
    for _ in range(count):
        tasks.put(None)


def end_thread_at_exit() -> None:
    """End a daemon thread that trains on while the interpreter goes down, quietly: its data is gone."""
    if _exiting.is_set() and threading.current_thread() is not threading.main_thread():
        raise SystemExit


def _stop_all() -> None:
    """No thread may be filling a buffer while the interpreter takes memory down."""
    _exiting.set()
    for threads in list(_live):
        threads.stop(_EXIT_WAIT_S)
