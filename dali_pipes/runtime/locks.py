"""Locks that keep processes from making the same files twice. A lock goes with its process, however that ends."""

import contextlib
import fcntl
import os
from pathlib import Path


def lock(path: Path, *, wait: bool = True) -> tuple[int | None, bool]:
    """A descriptor that holds the lock, None where there is no lock to be had; and whether another had it before.

    Blocks while another has it; BlockingIOError if `wait` is false.
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
    """Lock an open file that is new, until it is closed; without effect on a file system without locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def unlock(descriptor: int) -> None:
    """Let the lock go."""
    # Said, because a child forked meanwhile has the descriptor too, and closing ours alone would not release it.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
