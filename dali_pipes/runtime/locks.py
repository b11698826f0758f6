"""File locks that keep processes from doing the same work twice. The system releases them when a process ends.

Plain `flock`, since what a run must not lose is spelled out here: a file system without locks does not fail or block
it, a waiting process is woken immediately, and an open file can be locked before it has its final name.
"""

import contextlib
import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from pathlib import Path

_FLOCK = struct.Struct("@hhqqi0q")
"""`struct flock`: type, whence, first byte, length, process."""
_F_OFD_SETLK = 37
"""As in Linux. `fcntl` lacks it where Python was built for a libc of before 2014, as those of conda and uv are."""


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


@contextlib.contextmanager
def locked(path: Path) -> Iterator[bool]:
    """Hold the lock; False on a file system without locks. Blocks while another process has it."""
    held, _ = lock(path)
    try:
        yield held is not None
    finally:
        if held is not None:
            unlock(held)


def lock_number(path: Path, number: int, *, shared: bool = False) -> int | None:
    """A descriptor that holds lock `number`, 0 <= number < 2^63, of a file, or None without support for such locks.

    Any number of locks in one empty file, each of them a byte that need not exist. Does not block: raises
    BlockingIOError while another process or thread holds it; a shared lock and others that are shared go together.
    OSError if the file cannot be opened for writing.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    kind = fcntl.F_RDLCK if shared else fcntl.F_WRLCK
    try:
        # Of the open file, not of the process: threads exclude one another, too.
        fcntl.fcntl(descriptor, _F_OFD_SETLK, _FLOCK.pack(kind, os.SEEK_SET, number, 1, 0))
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            raise BlockingIOError(errno.EAGAIN, "the lock is held") from None
        return None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def unlock_number(descriptor: int) -> None:
    """Release a numbered lock, also where a child that was forked meanwhile has its descriptor."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(descriptor, _F_OFD_SETLK, _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, 0, 0, 0))
    os.close(descriptor)


def remove_unlocked(path: Path) -> bool:
    """Remove a file that no process has locked, such as one of a killed process. Whether it is gone.

    False on a file system without locks, and for one that was replaced meanwhile. Does not block; OSError.
    """
    try:
        held, _ = lock(path, wait=False)
    except BlockingIOError:
        return False
    if held is None:
        return False
    try:
        if not os.path.samestat(os.fstat(held), path.stat()):
            return False
        path.unlink()
        return True
    finally:
        unlock(held)


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
