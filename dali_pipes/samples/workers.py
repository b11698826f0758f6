"""Worker processes: those of torch's `DataLoader`, which gets whole requests as its items.

They keep running across epochs and resumes. When one dies, all are stopped, and new ones make the batches before the
batch that the dead worker was reading; that batch then raises an error. Each worker writes its row to shared memory.

    step      4       5       6          worker 1 dies at a row of step 6 while the trainer is at step 4
    batch     4       5       error      4 and 5 come from fresh workers

torch reports a death by a signal handler that raises wherever the main thread is, in the trainer's code too. Here that
handler does not know the workers: what waits for their messages sees the processes end.

This module alone uses private names of torch's iterator and of multiprocessing's queue (torch 2.13, Python 3.11).
"""

import contextlib
import math
import os
import pickle
import queue
import signal
import struct
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing import connection
from typing import Any

import torch
from torch.utils.data import DataLoader

from dali_pipes.errors import ConfigError, LoaderClosedError
from dali_pipes.samples.fetch import IDLE, Failure, Fetch, Progress, Request, batch_text, item_text

_DEATH_WAIT_S = 1.0
"""How long after an error of the queue a worker's death is waited for: a broken pipe is often seen first."""
_END_WAIT_S = 5.0
_STATUS_S = 5.0
_LOOK_S = 0.2


class Workers:
    """`num_workers` processes that make the batches of requests, in order.

    settings: of torch's `DataLoader`, but for the dataset and what decides the order.
    """

    def __init__(self, fetch: Fetch, progress: Progress, name: str, **settings: Any) -> None:
        self._fetch, self._progress, self._name, self._settings = fetch, progress, name, settings
        self._requests = _Requests()
        self._loader: DataLoader[Any] | None = None
        self._iterator: Any = None
        self._owner = os.getpid()

    def batches(self, requests: Iterator[Request]) -> Iterator[tuple[Request, Any]]:
        """Each request with its batch or `Failure`. Ends after a failure; the next call goes on with fresh workers."""
        doomed: Failure | None = None
        while True:
            sent: deque[Request] = deque()
            errors: list[Exception] = []
            self._requests.now = _recorded(requests, sent, errors)
            try:
                self._begin()
                while (held := [self._next()])[0] is not _NO_MORE:
                    if isinstance(held[0], Failure):
                        self.close()
                        yield sent.popleft(), held.pop()
                        return
                    yield sent.popleft(), held.pop()  # held by its consumer alone
                if errors:
                    raise errors.pop()
            except _WorkersFailed as failed:
                self.kill()
                if doomed is None:
                    doomed, before = self._blamed(failed, sent, requests)
                    if before:
                        requests = iter(before)
                        continue
            except GeneratorExit:
                raise
            except BaseException:
                self.kill()  # an interrupt may have come between two messages of theirs
                raise
            if doomed is not None:
                yield _NOTHING, doomed
            return

    def close(self) -> None:
        """End the processes; waits for the items that they are at, at most some seconds."""
        self._leave_to_owner()
        iterator, self._iterator, self._loader = self._iterator, None, None
        if iterator is not None:
            if _are_alive(iterator):
                iterator._shutdown_workers()
            else:
                _kill(iterator)

    def kill(self) -> None:
        """End the processes without asking them: one of them is dead, and may hold a lock of theirs."""
        self._leave_to_owner()
        iterator, self._iterator, self._loader = self._iterator, None, None
        if iterator is not None:
            _kill(iterator)

    @property
    def pids(self) -> list[int]:
        """The processes that run now."""
        self._leave_to_owner()
        workers = [] if self._iterator is None else self._iterator._workers
        return [worker.pid for worker in workers if worker.is_alive()]

    def _begin(self) -> None:
        """Let the processes begin with the current requests; start them if there are none, or not all."""
        self._leave_to_owner()
        iterator = self._iterator
        if iterator is not None and not iterator._shutdown and not _are_alive(iterator):
            self.kill()  # they were interrupted, or killed between two epochs
        if self._loader is None:
            self._progress.of_workers[:] = IDLE
            self._loader = DataLoader(
                self._fetch,  # type: ignore[arg-type]
                batch_size=None,
                sampler=self._requests,
                collate_fn=_as_it_is,
                worker_init_fn=self._fetch.begin_worker,
                generator=torch.Generator(),  # else each start would draw from the trainer's random state
                **self._settings,
            )
        try:
            self._iterator = iter(self._loader)
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"{self._name} or a function setting cannot be sent to worker processes ({error}); make it picklable, "
                'or use multiprocessing_context="fork"'
            ) from error
        except (RuntimeError, _DeadWorker) as error:
            if self._iterator is None:
                raise
            raise self._failed(error) from error
        _forget(self._iterator)
        self._iterator._try_get_data = partial(_message, weakref.ref(self._iterator))

    def _leave_to_owner(self) -> None:
        """In a forked process: forget the processes, which are those of the process that it was forked from."""
        if self._owner != os.getpid():
            self._owner = os.getpid()
            if self._iterator is not None:
                self._iterator._shutdown = True  # else its end would end them
            self._iterator = self._loader = None
            self._progress.renew()

    def _next(self) -> Any:
        if self._owner != os.getpid():  # their messages would be missing there
            raise LoaderClosedError(
                f"this iterator gets its batches from workers of process {self._owner}, which this process was forked "
                "from; begin a new `for`"
            )
        try:
            return next(self._iterator, _NO_MORE)
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> Exception:
        """What an error of torch's iterator means."""
        timeout = self._settings["timeout"]
        is_late = bool(timeout) and "timed out" in str(error)
        ending = {worker.sentinel: worker for worker in self._iterator._workers}
        for sentinel in connection.wait(list(ending), timeout=0 if is_late else _DEATH_WAIT_S):
            ending[sentinel].join(_DEATH_WAIT_S)  # a process closes its pipes before it is gone
        dead = self._dead()
        if dead:
            return _WorkersFailed(dead)
        if is_late:
            return _WorkersFailed([], f"did not arrive within timeout = {timeout:g} s; increase timeout")
        return _WorkersFailed([], f"was lost: {type(error).__name__}: {error}", error)

    def _dead(self) -> list[tuple[int, Any]]:
        return [(number, worker) for number, worker in enumerate(self._iterator._workers) if not worker.is_alive()]

    def _blamed(
        self, failed: "_WorkersFailed", sent: "deque[Request]", requests: Iterator[Request]
    ) -> tuple[Failure, list[Request]]:
        """The failure, and the requests before the one that it belongs to."""
        at = self._progress.of_workers.tolist()
        for number, worker in failed.dead:
            for place, request in enumerate(sent):
                row = _row_of(request, at[number])
                if row is not None:
                    how = f"worker process {worker.pid} {_ending(worker.exitcode)} while reading the item"
                    return self._failure(request, row, how, failed.error), [*sent][:place]
        request = sent[0] if sent else next(requests, _NOTHING)
        if not failed.dead:
            for row in (row for place in at if (row := _row_of(request, place)) is not None):
                return self._failure(request, row, f"its batch {failed.problem}", failed.error), []
        endings = [f"worker process {worker.pid} {_ending(worker.exitcode)}" for _, worker in failed.dead]
        problem = f"was not made: {', '.join(endings)}" if endings else failed.problem
        text = f"{batch_text(request, self._name)} {problem}"
        return Failure(text, request.epoch, next(iter(request.rows), None), None, failed.error), []

    def _failure(self, request: Request, row: int, how: str, error: Exception | None) -> Failure:
        item = request.items[request.rows.index(row)]
        text = f"{item_text(item, self._name, request.epoch, row)}: {how}"
        return Failure(text, request.epoch, row, item, error)


class _Requests:
    """torch's sampler: each iterator of it goes through the current requests."""

    now: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Request]:
        return self.now

    def __len__(self) -> int:
        raise TypeError("the number of requests is not known")


class _WorkersFailed(Exception):
    """Workers are dead, or what they made did not arrive."""

    def __init__(self, dead: list[tuple[int, Any]], problem: str = "", error: Exception | None = None) -> None:
        super().__init__(problem)
        self.dead, self.problem, self.error = dead, problem, error


class _DeadWorker(Exception):
    """A process has ended."""


_NO_MORE = object()
_NOTHING = Request(0, [], [], (0, 0))


def _recorded(requests: Iterator[Request], sent: "deque[Request]", errors: list[Exception]) -> Iterator[Request]:
    """The requests, each noted as sent. An error ends them, so that the batches before it are handed out."""
    try:
        for request in requests:
            sent.append(request)
            yield request
    except Exception as error:
        errors.append(error)


def _message(reference: Callable[[], Any], timeout: float = _STATUS_S) -> tuple[bool, Any]:
    """In place of torch's `_try_get_data`: whether a message came in that time, and the message.

    Raises `_DeadWorker` as soon as a process has ended.
    """
    iterator = reference()
    sentinels = [worker.sentinel for worker in iterator._workers]
    if iterator._pin_memory:  # the messages come from a thread
        for _ in range(math.ceil(timeout / _LOOK_S)):
            with contextlib.suppress(queue.Empty):
                return True, iterator._data_queue.get(timeout=min(timeout, _LOOK_S))
            if connection.wait(sentinels, 0):
                raise _DeadWorker
        return False, None
    messages = iterator._worker_result_queue
    ready = connection.wait([messages._reader, *sentinels], timeout)
    if not ready:
        return False, None
    if messages._reader not in ready:
        raise _DeadWorker
    pickled = _whole_message(messages._reader.fileno(), sentinels)
    messages._sem.release()  # the rest of what `messages.get()` does
    return True, pickle.loads(pickled)


def _whole_message(pipe: int, sentinels: list[int]) -> bytearray:
    """The next message in a pipe of `multiprocessing`: its size, and that many bytes.

    A worker that is killed may leave the beginning of one, for whose end `recv_bytes` would wait forever.
    """

    def read(size: int) -> bytearray:
        found, done = bytearray(size), 0
        while done < size:
            if pipe not in connection.wait([pipe, *sentinels]):
                raise _DeadWorker
            done += os.readv(pipe, [memoryview(found)[done:]])
        return found

    (size,) = struct.unpack("!i", read(4))
    if size == -1:  # 2 GiB or more
        (size,) = struct.unpack("!Q", read(8))
    return read(size)


def _as_it_is(batch: Any) -> Any:
    return batch


def _row_of(request: Request, place: list[int]) -> int | None:
    """The row of a request that a worker is at, by its entry of `progress`; None for another request."""
    epoch, row = place
    return row if row != IDLE and epoch == request.epoch and row in request.rows else None


def _are_alive(iterator: Any) -> bool:
    return all(worker.is_alive() for worker in iterator._workers)


def _forget(iterator: Any) -> None:
    if iterator._worker_pids_set:
        torch._C._remove_worker_pids(id(iterator))
        iterator._worker_pids_set = False


def _kill(iterator: Any) -> None:
    """torch's own end of the workers would wait for locks that a dead one may hold."""
    iterator._shutdown = True
    _forget(iterator)
    for worker in iterator._workers:
        worker.kill()
    for worker in iterator._workers:
        worker.join(_END_WAIT_S)
    queues = [*iterator._index_queues]
    if iterator._pin_memory:
        iterator._pin_memory_thread_done_event.set()  # it looks every few seconds, and reads the other queue until then
    else:
        queues.append(iterator._worker_result_queue)
    for messages in queues:
        messages.cancel_join_thread()
        messages.close()


def _ending(exitcode: int | None) -> str:
    """How a process ended, and what to do."""
    if exitcode is None or exitcode >= 0:
        return f"exited with code {exitcode}"
    name = signal.Signals(-exitcode).name if -exitcode in set(signal.Signals) else str(-exitcode)
    advice = {
        signal.SIGKILL: " (out of memory? use fewer workers or a smaller batch_size)",
        signal.SIGBUS: " (is /dev/shm full? use fewer workers or a smaller batch_size)",
    }.get(-exitcode, "")  # type: ignore[call-overload]
    return f"was killed by {name}{advice}"
