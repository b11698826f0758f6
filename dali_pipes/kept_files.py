"""Offsets that took a scan to find, kept in the user's cache folder for the next start and for other processes.

    NAME.npy         int64 (N + 1,), in the .npy format; replaced whole, never changed
    NAME.lock        empty; whoever is about to scan holds it
    NAME.*.tmp       being written; what a killed process left is removed by the next that scans

NAME is made of a hash of what the offsets depend on. A file is used only if its header is, byte for byte, the one that
its size asks for and its offsets are plausible; every other file is replaced. Nothing here fails a run: offsets that
cannot be kept are handed out all the same, with the reason.
"""

import contextlib
import fcntl
import mmap
import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]

_HEADER_BYTES = 128
_CHECKED_WHOLE = 1 << 16  # offsets at either end whose order is checked one by one
_CHECKED_BETWEEN = 1024  # offsets in between, evenly spread: each may cost a read from disk


def default_cache_dir() -> Path:
    """`DALI_PIPES_CACHE`, else `dali_pipes` in `XDG_CACHE_HOME`, else in `~/.cache`. RuntimeError without a home."""
    own = os.environ.get("DALI_PIPES_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification has relative paths ignored.
    base = Path(shared) if shared and Path(shared).is_absolute() else Path.home() / ".cache"
    return base / "dali_pipes"


def cache_dir_for(files: Iterable[Path], cache_dir: Path | None = None) -> Path:
    """Where to keep what was found in `files`: `cache_dir` or the default, absolute.

    Raises OSError with the reason where there is no such folder, or where it holds the data.
    """
    try:
        directory = (default_cache_dir() if cache_dir is None else cache_dir).absolute()
        holds_data = directory.resolve() in {folder.resolve() for folder in {file.parent for file in files}}
    except RuntimeError as error:  # no home folder, a loop of links
        raise OSError(str(error)) from error
    if holds_data:
        raise OSError(f"nothing is written to {directory}, which holds the data")
    return directory


def load_or_make(
    path: Path, is_plausible: Callable[[Int64Array], bool], make: Callable[[], Int64Array]
) -> tuple[Int64Array, str | None]:
    """The offsets kept at `path`, else what `make` returns, which is then kept. The second is why that failed.

    is_plausible: whether kept offsets, at least two, may be those that `make` would return. Offsets that were kept,
    also just now, are mapped from the file, read-only. Blocks while another process that has the lock makes them.
    """
    kept = load(path, is_plausible)
    if kept is not None:
        return kept, None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return make(), _reason(path.parent, error)
    lock, has_waited = _lock(path.with_suffix(".lock"))
    try:
        if lock is not None:
            kept = load(path, is_plausible)
            if kept is not None:
                return kept, None
            if has_waited:
                # The one before could not keep them either. Let those that wait go on side by side, not one by one.
                _unlock(lock)
                lock = None
            else:
                _remove_leftovers(path)
        offsets = make()
        try:
            store(path, offsets)
        except OSError as error:
            return offsets, _reason(path, error)
    finally:
        if lock is not None:
            _unlock(lock)
    kept = load(path, is_plausible)
    return (offsets if kept is None else kept), None


def load(path: Path, is_plausible: Callable[[Int64Array], bool]) -> Int64Array | None:
    """The offsets kept at `path`, or None if there are none, or none that can be trusted."""
    try:
        with path.open("rb") as file:
            count = (os.fstat(file.fileno()).st_size - _HEADER_BYTES) // 8
            if count < 2 or file.read(_HEADER_BYTES) != _header(count):
                return None
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # not there, not readable, not a file; cut off since its size was asked for
        return None
    if len(mapped) != _HEADER_BYTES + 8 * count:
        return None
    offsets: Int64Array = np.frombuffer(mapped, np.int64, offset=_HEADER_BYTES)
    return offsets if is_plausible(offsets) else None


def may_be_offsets(offsets: Int64Array, *, strictly: bool) -> bool:
    """Whether `offsets` seem to rise from 0, `strictly` or with equal neighbours. Looks at some of them."""
    between = offsets[np.linspace(0, len(offsets) - 1, min(len(offsets), _CHECKED_BETWEEN)).astype(np.int64)]
    parts = offsets[:_CHECKED_WHOLE], offsets[-_CHECKED_WHOLE:], between
    rises = np.greater if strictly else np.greater_equal
    return bool(offsets[0] == 0 and all(rises(part[1:], part[:-1]).all() for part in parts))


def store(path: Path, offsets: Int64Array) -> None:
    """Put `offsets` at `path` in one step: a reader sees the old file or the whole new one. Raises OSError."""
    temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(_header(len(offsets)))
            file.write(offsets.data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _header(count: int) -> bytes:
    """The .npy header of int64 (count,), always of one length so that a file's size tells its count."""
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({count},), }}"
    start = b"\x93NUMPY\x01\x00" + (_HEADER_BYTES - 10).to_bytes(2, "little")
    return start + text.encode().ljust(_HEADER_BYTES - len(start) - 1) + b"\n"


def _lock(path: Path) -> tuple[int | None, bool]:
    """A descriptor that holds the lock, None where there is no lock to be had; and whether another had it before."""
    has_waited = False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return None, has_waited
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            has_waited = True
            fcntl.flock(descriptor, fcntl.LOCK_EX)
    except OSError:  # a file system without locks
        os.close(descriptor)
        return None, has_waited
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, has_waited


def _unlock(descriptor: int) -> None:
    # Said, because a child forked meanwhile has the descriptor too, and closing ours alone would not release it.
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _remove_leftovers(path: Path) -> None:
    for leftover in path.parent.glob(f"{path.stem}.*.tmp"):
        with contextlib.suppress(OSError):
            leftover.unlink()


def _reason(path: Path, error: OSError) -> str:
    return f"{path}: {error.strerror or error}"
