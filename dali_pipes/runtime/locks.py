"""File locks that keep processes from doing the same work twice. The system releases them when a process ends.

Plain `flock`, since what a run must not lose is spelled out here: a file system without locks does not fail or block
it, a waiting process is woken immediately, and an open file can be locked before it has its final name.
"""

import contextlib
import fcntl
import os
from pathlib import Path


def lock(path: Path, *, wait: bool = True) -> tuple[int | None, bool]:
    """A descriptor that holds the lock, or None if the file system does not support locks; and whether it had to wait.

    Blocks while another process holds the lock; with `wait` false raises BlockingIOError instead.
    """
    has_waited = False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return None, has_waited
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if not wait:
                raise
            has_waited = True
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None, has_waited
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, has_waited


def hold(descriptor: int) -> None:
    """Lock a new, open file until it is closed. Does nothing on a file system without locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(descriptor: int) -> None:
    """Release the lock."""
    # Explicitly: a child forked meanwhile holds the descriptor too, so closing ours would not release the lock.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
