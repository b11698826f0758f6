"""Reads and look-ups that fail for a reason that may pass are tried again, after waits that grow.

    try 1   0.05 s   try 2   0.2 s   try 3   0.8 s   try 4   3.2 s   try 5   the error, with the number of tries

What may pass is what a storage system says while it is busy with itself. What is wrong with the file, its name, the
rights of the user or the program (EBADF, EACCES, ENOENT, EISDIR ...) is told at once, and so is a file that ends early.
"""

import atexit
import contextlib
import errno
import threading
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Self, TypeVar

Result = TypeVar("Result")

DEFAULT_RETRIES = 4

_FIRST_WAIT_S = 0.05
_GROWTH = 4
_LONGEST_WAIT_S = 3.2

LOST_HANDLES = frozenset({errno.ESTALE, errno.ENOTCONN})
"""The server, or the process behind a FUSE mount, was started again and does not know the descriptor any more: the file
has to be opened anew."""

_PASSING = LOST_HANDLES | {
    # A disk, a controller or the other end of a network file system reports an error; another path may take over.
    errno.EIO,
    errno.EREMOTEIO,
    # The network, or the server, is away.
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
    # Ask again later: short of room for requests, or interrupted by a signal.
    errno.EAGAIN,
    errno.EINTR,
    errno.ENOBUFS,
}


class ReadRetries:
    """How often what failed is tried again, and how often that was. Safe for several threads.

    most: tries after the first one; 0: none
    """

    def __init__(self, most: int = DEFAULT_RETRIES) -> None:
        self._most = most
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._count = 0

    @property
    def count(self) -> int:
        """Reads and look-ups that were tried again so far."""
        return self._count

    def wait(self, error: OSError, tries: int, pause: bool = True) -> bool:
        """Whether to try again what has failed `tries` times, the last time with `error`. Blocks for the wait.

        pause: False for another read that failed at the same time as one that has waited
        """
        if error.errno not in _PASSING or tries > self._most or self._ended.is_set():
            return False
        if pause:
            _waiting.add(self)
            if not _at_exit:
                _at_exit.append(atexit.register(_end_all))
            if self._ended.wait(min(_LONGEST_WAIT_S, _FIRST_WAIT_S * _GROWTH ** (tries - 1))):
                return False
        with self._lock:
            self._count += 1
        return True

    def end(self) -> None:
        """Try nothing again any more, and wait for nothing. Idempotent."""
        self._ended.set()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[Self]:
        """Files that are opened inside, by this thread, are read with these retries."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)


def current_retries() -> ReadRetries:
    """Those in use in this thread, else some of their own."""
    return _current.get() or ReadRetries()


def tried_again(call: Callable[[], Result]) -> Result:
    """What a look-up returns. Blocks while what it fails for may pass; raises its last OSError."""
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
    """Registered when first needed, so it runs before what waits at exit for threads that read."""
    for retries in list(_waiting):
        retries.end()
