"""Retry reads and look-ups after transient failures, with growing waits.

    try 1   0.05 s   try 2   0.2 s   try 3   0.8 s   try 4   3.2 s   try 5   the error, with the number of tries

Errors of a storage system that may recover are transient. Errors about the file, its name, the user's permissions or
the program (EBADF, EACCES, ENOENT, EISDIR ...) are raised immediately, and so is a file that ends early.

Many ranks ask the same object store, so waits for one are spread at random. Where it says that there are too many
requests (429, 503), they are about 1, 4, 16 and 30 s. obstore does not tell what `Retry-After` says; where it is known,
the wait is as long, at least.
"""

import atexit
import contextlib
import errno
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Self, TypeVar

Result = TypeVar("Result")

DEFAULT_RETRIES = 4
DEFAULT_REQUESTS = 64

_FIRST_WAIT_S = 0.05
_GROWTH = 4
_LONGEST_WAIT_S = 3.2
_BUSY_WAIT_S = 1.0
_LONGEST_BUSY_WAIT_S = 30.0
_LONGEST_ASKED_WAIT_S = 300.0

LOST_HANDLES = frozenset({errno.ESTALE, errno.ENOTCONN})
"""The server, or the process of a FUSE mount, restarted and does not know the descriptor: the file has to be opened
again."""

_PASSING = LOST_HANDLES | {
    # A disk, a controller or a network file system reports an error; another path may take over.
    errno.EIO,
    errno.EREMOTEIO,
    # The network or the server is down.
    errno.ETIMEDOUT,
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.ENETRESET,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.ESHUTDOWN,
    # Too many requests, or interrupted by a signal.
    errno.EAGAIN,
    errno.EINTR,
    errno.ENOBUFS,
}


class StoreError(OSError):
    """What a request to an object store ended with.

    busy:    the store asks for fewer requests (429, 503)
    after_s: the pause that it asks for; 0: not known
    """

    def __init__(self, number: int, reason: str, *, busy: bool = False, after_s: float = 0) -> None:
        super().__init__(number, reason)
        self.busy, self.after_s = busy, after_s


class ReadRetries:
    """Limit and count of retries. Thread-safe.

    most:     retries of one read; 0: none
    requests: that are in flight to object stores, in all threads of the process together
    """

    def __init__(self, most: int = DEFAULT_RETRIES, requests: int = DEFAULT_REQUESTS) -> None:
        self._most = most
        self.requests = requests
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """Number of retries so far."""
        return self._count

    def wait(self, error: OSError, tries: int, pause: bool = True) -> bool:
        """Whether to retry after `tries` failures, the last one with `error`. Blocks for the wait.

        pause: False for a read that failed together with one that has waited
        """
        if error.errno not in _PASSING or tries > self._most or self._ended.is_set():
            return False
        if pause:
            _waiting.add(self)
            if not _at_exit:
                _at_exit.append(atexit.register(_end_all))
            if self._ended.wait(_wait_s(error, tries)):
                return False
        with self._lock:
            self._count += 1
        return True

    def end(self) -> None:
        """Stop all retries and waits. Idempotent."""
        self._ended.set()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[Self]:
        """Files that this thread opens inside are read with these retries."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)


def _wait_s(error: OSError, tries: int) -> float:
    growth = float(_GROWTH ** (tries - 1))
    wait_s = min(_LONGEST_WAIT_S, _FIRST_WAIT_S * growth)
    if not isinstance(error, StoreError):
        return wait_s
    if error.busy:
        wait_s = max(wait_s, min(_LONGEST_BUSY_WAIT_S, _BUSY_WAIT_S * growth))
    asked_s = min(_LONGEST_ASKED_WAIT_S, error.after_s) * random.uniform(1, 1.25)
    return max(wait_s * random.uniform(0.5, 1.5), asked_s)


def current_retries() -> ReadRetries:
    """The retries in use in this thread, else new ones."""
    return _current.get() or ReadRetries()


def tried_again(call: Callable[[], Result]) -> Result:
    """The result of a look-up. Blocks for retries of transient failures; raises the last OSError."""
    retries, tries = current_retries(), 1
    while True:
        try:
            return call()
        except OSError as error:
            if not retries.wait(error, tries):
                raise
        tries += 1


_current: ContextVar[ReadRetries | None] = ContextVar("read_retries", default=None)
_waiting: "weakref.WeakSet[ReadRetries]" = weakref.WeakSet()
_at_exit: list[object] = []


def _end_all() -> None:
    """Registered when first needed, so that it runs before exit handlers that wait for reader threads."""
    for retries in list(_waiting):
        retries.end()
