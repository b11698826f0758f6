"""Threads that run tasks in the background and never keep a process alive.

`concurrent.futures` has such threads too, but it refuses tasks once the main thread has ended, although another thread
may still be training. These end when they are stopped, when their owner is collected, and at interpreter exit.
"""

import atexit
import contextlib
import os
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from queue import SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

from dali_pipes.errors import LoaderClosedError

Failure = TypeVar("Failure", bound=BaseException)
Result = TypeVar("Result")
_EXIT_WAIT_S = 10.0
_ALIVE_S = 1.0  # between checks that the threads are alive

_live: "weakref.WeakSet[ReaderThreads]" = weakref.WeakSet()
_at_exit: list[Callable[[], None]] = []
_is_exiting = False
_AT_EXIT = "the interpreter is shutting down and the reader threads have stopped; data can no longer be read"


class Stoppable(Protocol):
    """What must not go on in a fork of its process, nor while the interpreter shuts down."""

    def stop(self) -> None: ...


def stop_with_process(one: Stoppable) -> None:
    """Let `one.stop()` be called in a process that is forked from this one, and when the interpreter exits."""
    _stoppable.add(one)


def _stop_stoppable() -> None:
    for one in list(_stoppable):
        one.stop()


_stoppable: "weakref.WeakSet[Stoppable]" = weakref.WeakSet()
os.register_at_fork(after_in_child=_stop_stoppable)


class Task(Generic[Result]):
    """A call on its way to a thread, and its result. Safe for several threads.

    As `concurrent.futures.Future`, in a third of the steps: each costs microseconds after copies have emptied the
    caches. The thread that gets `_claim` makes the call, or cancels it. Without a call it waits for `finish`.
    """

    __slots__ = ("__weakref__", "_arguments", "_claim", "_error", "_finished", "_function", "_result", "_told")

    def __init__(self, function: Callable[..., Any] | None = None, arguments: tuple[Any, ...] = ()) -> None:
        self._function = function
        self._arguments = arguments
        self._claim = threading.Lock()
        self._result: Any = None
        self._error: BaseException | None = None
        self._finished = False
        self._told: list[Callable[[Task[Result]], object]] = []

    def run(self) -> bool:
        """Make the call, and keep what it returns or raises; False if another thread did, does, or has canceled it."""
        if not self._claim.acquire(blocking=False):
            return False
        assert self._function is not None, "the claim is never given back"
        try:
            result = self._function(*self._arguments)
        except SystemExit as error:  # the trainer would end silently, as if it had succeeded
            ended = RuntimeError(f"a task of a reader thread raised SystemExit({error.code!r})")
            ended.__cause__ = to_keep(error)
            self.finish(error=ended)
            del ended
        except BaseException as error:
            self.finish(error=to_keep(error))
        else:
            self.finish(result)
        finally:
            del self  # or an error, whose frames hold this one, would hold itself
        return True

    def cancel(self, error: BaseException | None = None) -> bool:
        """Cancel the call; False if it has begun or ended. Whoever waits gets `error`, by default CancelledError."""
        is_first = self._claim.acquire(blocking=False)
        if is_first:
            self.finish(error=error or CancelledError())
        return is_first

    def done(self) -> bool:
        """Whether there is a result or an error, or the call was canceled."""
        return self._finished

    def result(self) -> Result:
        """What the call returned. Blocks; raises what it raised, CancelledError if it was canceled."""
        if not self._finished:
            self.wait()
        try:
            if self._error is not None:
                raise self._error
            result: Result = self._result
            return result
        finally:
            del self  # or an error, whose traceback holds this frame, would hold itself

    def exception(self) -> BaseException | None:
        """What the call raised, CancelledError if it was canceled. Blocks."""
        self.wait()
        return self._error

    def wait(self, timeout_s: float = -1) -> bool:
        """Block until the task ends; False if it does not within this time. -1: no limit."""
        if self._finished:
            return True
        done = threading.Lock()
        done.acquire()
        self.add_done_callback(lambda _: done.release())
        return done.acquire(timeout=timeout_s)

    def add_done_callback(self, tell: Callable[["Task[Result]"], object]) -> None:
        """Call `tell` with the task once it ends: in the thread that ends it, or here if it has ended."""
        self._told.append(tell)
        if self._finished:
            self._tell()

    def finish(self, result: Any = None, error: BaseException | None = None) -> None:
        """End a task without a call. Call it once."""
        self._function, self._arguments = None, ()  # hold nothing that is no longer needed
        self._result, self._error = result, error
        self._finished = True
        if self._told:
            self._tell()

    def _tell(self) -> None:
        while True:
            try:
                tell = self._told.pop()  # by one thread each
            except IndexError:
                return
            tell(self)


class ReaderThreads:
    """Daemon threads, `count` of them; they hold the tasks they run, never their owner. Safe for several threads."""

    def __init__(self, count: int, name: str = "dali_pipes-reader") -> None:
        """Start the threads; `name` is the beginning of theirs. Raises `LoaderClosedError` while Python shuts down."""
        if _is_exiting:
            raise LoaderClosedError(_AT_EXIT)
        self._name = name
        self.count = 0
        """Threads that run, or will once those that were told to end have done so."""
        self._stopped = False
        self._tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._threads: list[threading.Thread] = []  # in which one that has ended may stay
        self._ended: set[threading.Thread] = set()  # of them, those that were told to
        weakref.finalize(self, _release, self._tasks, self._threads).atexit = False
        _live.add(self)
        try:
            self.resize(count)
        except BaseException:  # such as a limit on threads: those that have started must not wait forever
            self.stop()
            raise
        if not _at_exit:  # registered after DALI's own handler, so it runs before that one
            _at_exit.append(atexit.register(_stop_all))

    def resize(self, count: int) -> None:
        """Start threads, or let some end, each after the tasks submitted so far. Not for two threads at a time.

        Raises RuntimeError if a thread cannot be started; `count` says how many there are then.
        """
        for thread in list(self._ended):
            self._threads.remove(thread)
            self._ended.remove(thread)
        while self.count > count:
            self.count -= 1
            self._tasks.put(None)
        while self.count < count:
            arguments, name = (self._tasks, self._ended), f"{self._name}-{len(self._threads)}"
            thread = threading.Thread(target=_work, args=arguments, name=name, daemon=True)
            self._threads.append(thread)  # before it runs: an interrupt may come when it does
            try:
                thread.start()
            except (RuntimeError, MemoryError):
                self._threads.remove(thread)
                raise
            self.count += 1
        if self._stopped:  # meanwhile, by someone who has not seen all of them
            self.stop(0)

    def submit(self, function: Callable[..., Result], *arguments: Any) -> Task[Result]:
        """Run `function` in one of the threads; does not block. After `stop` the task fails immediately."""
        task: Task[Result] = Task(function, arguments)
        self._tasks.put(task)
        if self._stopped:  # it may be queued after the marks that end the threads
            task.cancel(LoaderClosedError(_AT_EXIT))
        return task

    @property
    def are_alive(self) -> bool:
        """Whether all threads that were started still run, but for those that were told to end."""
        return not self._stopped and all(
            thread.is_alive() or thread.ident is None or thread in self._ended for thread in self._threads
        )

    def result(self, task: Task[Result]) -> Result:
        """What a task returned. Blocks; raises what it raised, or RuntimeError if a thread has died."""
        try:
            if not task.done():
                self._wait_for(task)
            return task.result()
        finally:
            del task  # or an error, whose traceback holds this frame, would hold itself

    def _wait_for(self, task: Task[Any]) -> None:
        while not task.wait(_ALIVE_S):
            # Threads that have been stopped end one after another, and one of them may be running the task.
            is_lost = not any(thread.is_alive() for thread in self._threads) if self._stopped else not self.are_alive
            if is_lost and not task.done():
                raise RuntimeError("a reader thread died: something outside dali_pipes ended it")

    def stop(self, wait_s: float | None = None) -> None:
        """End the threads after the tasks submitted so far (cancel those that need not run); wait `wait_s` for each.

        Idempotent; if an interrupt cut it short, another call does all of it.
        """
        self._stopped = True
        _release(self._tasks, self._threads)
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                with contextlib.suppress(RuntimeError):  # an interrupt came before it had started
                    thread.join(wait_s)


def _work(tasks: "SimpleQueue[Task[Any] | None]", told_to_end: set[threading.Thread]) -> None:
    while (task := tasks.get()) is not None:
        task.run()
        del task  # hold nothing while waiting for the next one
    told_to_end.add(threading.current_thread())


def to_keep(error: Failure) -> Failure:
    """An error that was just caught, without the frame that caught it and the local variables of the frames below.

    They hold the object that keeps the error, which would then live until the garbage collector runs.
    """
    chained: list[BaseException | None] = [error]
    while chained:
        one = chained.pop()
        if one is not None:
            traceback.clear_frames(one.__traceback__)  # skips frames that still run
            chained += [one.__cause__, one.__context__]
    return error if error.__traceback__ is None else error.with_traceback(error.__traceback__.tb_next)


def _release(tasks: "SimpleQueue[Task[Any] | None]", threads: list[threading.Thread]) -> None:
    for _ in range(len(threads)):  # too many marks do no harm
        tasks.put(None)


def end_thread_at_exit() -> None:
    """Silently end a daemon thread that still trains while the interpreter shuts down: its data is gone."""
    if _is_exiting and threading.current_thread() is not threading.main_thread():
        raise SystemExit


def _stop_all() -> None:
    """No thread may fill a buffer while the interpreter frees memory."""
    global _is_exiting
    _is_exiting = True
    _stop_stoppable()
    for threads in list(_live):
        threads.stop(_EXIT_WAIT_S)
