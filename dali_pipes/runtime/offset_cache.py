"""Offsets found by a scan, cached in the user's cache folder (`user_cache`): int64 (N + 1,), a .npy file.

    header    128 bytes
    offsets   8 bytes each
    files     16 bytes for each data file: a hash of machine, device and inode; time of the last change of its inode

A file is used only if its header matches its size byte for byte and its offsets are plausible. A data file that was
rewritten in place has a new ctime even if its old mtime was restored, so its offsets are computed again. A copy is
another inode and uses the offsets of the original.
"""

import contextlib
import functools
import hashlib
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dali_pipes.runtime import user_cache
from dali_pipes.uris import FilePath, Uri

Int64Array = npt.NDArray[np.int64]

MAPPED_FROM_BYTES = 1 << 26
"""Offsets of at least this size are memory-mapped, so that the ranks of a machine share them. Smaller ones are read:
a mapped page that disappears, because the file is truncated or a network home goes away, ends the process (SIGBUS)."""

_HEADER_BYTES = 128
_CHECKED_WHOLE = 1 << 16  # offsets at each end whose order is checked one by one
_NONE: Int64Array = np.zeros((0, 2), np.int64)
_CHECKED_BETWEEN = 1024  # offsets in between, evenly spread: each may cost a read from disk


@contextlib.contextmanager
def made_anew() -> Iterator[None]:
    """Inside, offsets are computed from the data and replace cached ones."""
    token = _anew.set(True)
    try:
        yield
    finally:
        _anew.reset(token)


def are_made_anew() -> bool:
    """Whether this thread is inside `made_anew`."""
    return _anew.get()


def find_or_make(
    data_files: Sequence[FilePath],
    kind: str,
    about: bytes,
    is_plausible: Callable[[Int64Array], bool],
    make: Callable[[], Int64Array],
    cache_dir: Path | None = None,
) -> tuple[Int64Array, str | None]:
    """Like `load_or_make`, in the cache folder, for one kind of offsets of data files.

    data_files: all files that `make` reads. about: everything that the offsets depend on. Without a usable folder,
    `make` is called each time and the second result is the reason.
    """
    folder, why = user_cache.cache_folder(data_files, cache_dir)
    if folder is None:
        return make(), why
    path = folder / user_cache.kept_name(kind, about, ".npy")
    return load_or_make(path, is_plausible, make, inodes_of(data_files))


def load_or_make(
    path: Path, is_plausible: Callable[[Int64Array], bool], make: Callable[[], Int64Array], inodes: Int64Array = _NONE
) -> tuple[Int64Array, str | None]:
    """Like `user_cache.load_or_make`, for the offsets that `make` returns.

    is_plausible: whether cached offsets, at least two, may be those that `make` would return. Cached offsets, including
    new ones, are read-only, and memory-mapped if they are large (`MAPPED_FROM_BYTES`).
    """
    return user_cache.load_or_make(
        path,
        lambda path: load(path, is_plausible, inodes),
        make,
        lambda path, offsets: store(path, offsets, inodes),
        anew=are_made_anew(),
    )


def inodes_of(data_files: Sequence[FilePath]) -> Int64Array:
    """The identity of each data file as it is cached, int64 (F, 2); zeros for a URI or where a look-up fails."""
    machine = _machine()
    found: Int64Array = np.zeros((len(data_files), 2), np.int64)
    for number, path in enumerate(data_files):
        if isinstance(path, Uri):
            continue
        with contextlib.suppress(OSError):
            about = os.stat(path)
            name = hashlib.blake2b(f"{machine} {about.st_dev} {about.st_ino}".encode(), digest_size=8).digest()
            found[number] = int.from_bytes(name, "little", signed=True), about.st_ctime_ns
    return found


@functools.cache
def _machine() -> str:
    """Local disks of two machines may have the same devices and inodes."""
    return os.uname().nodename


def load(path: Path, is_plausible: Callable[[Int64Array], bool], inodes: Int64Array = _NONE) -> Int64Array | None:
    """The offsets cached at `path`, or None if the file does not exist or fails a check."""
    try:
        with path.open("rb") as file:
            count = (os.fstat(file.fileno()).st_size - _HEADER_BYTES - inodes.nbytes) // 8
            if count < 2 or file.read(_HEADER_BYTES) != _header(count):
                return None
            if 8 * count < MAPPED_FROM_BYTES:
                file.seek(0)
                content: bytes | mmap.mmap = file.read()
            else:
                content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError):  # missing, not readable, not a file, or truncated since its size was read
        return None
    if len(content) != _HEADER_BYTES + 8 * count + inodes.nbytes:
        return None
    kept = np.frombuffer(content, np.int64, offset=_HEADER_BYTES + 8 * count).reshape(-1, 2)
    if ((kept[:, 0] == inodes[:, 0]) & (kept[:, 1] != inodes[:, 1])).any():
        return None
    offsets: Int64Array = np.frombuffer(content, np.int64, count, _HEADER_BYTES)
    return offsets if is_plausible(offsets) else None


def may_be_offsets(offsets: Int64Array, *, strictly: bool) -> bool:
    """Whether `offsets` seem to increase from 0, `strictly` or not. Checks a sample."""
    between = offsets[np.linspace(0, len(offsets) - 1, min(len(offsets), _CHECKED_BETWEEN)).astype(np.int64)]
    parts = offsets[:_CHECKED_WHOLE], offsets[-_CHECKED_WHOLE:], between
    rises = np.greater if strictly else np.greater_equal
    return bool(offsets[0] == 0 and all(rises(part[1:], part[:-1]).all() for part in parts))


def store(path: Path, offsets: Int64Array, inodes: Int64Array = _NONE) -> None:
    """Write `offsets` to `path` atomically, with the inodes of the data as they were before it was read. OSError."""
    user_cache.write_whole(path, _header(len(offsets)), offsets.data, inodes.tobytes())


_anew: ContextVar[bool] = ContextVar("offsets_are_made_anew", default=False)


def _header(count: int) -> bytes:
    """The .npy header of int64 (count,), always of the same length, so that the size of a file gives its count."""
    text = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({count},), }}"
    start = b"\x93NUMPY\x01\x00" + (_HEADER_BYTES - 10).to_bytes(2, "little")
    return start + text.encode().ljust(_HEADER_BYTES - len(start) - 1) + b"\n"
