"""Offsets that took a scan to find, kept in the user's cache folder for the next start and for other processes.

    documents-0123...cdef.npy         int64 (D + 1,), in the .npy format; replaced whole, never changed
    documents-0123...cdef.lock        empty; whoever is about to scan holds it
    documents-0123...cdef.*.tmp       being written; what a killed process left is removed by the next that scans

The name is a hash of what the offsets depend on. A file is used only if its header is, byte for byte, the one that its
size asks for and its offsets are plausible; every other file is replaced. Nothing here fails a run: offsets that cannot
be kept are handed out all the same, with the reason.
"""

import contextlib
import hashlib
import mmap
import os
import uuid
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from dali_pipes.kept_files import lock, unlock

Int64Array = npt.NDArray[np.int64]

_FORMAT_VERSION = 1
_HEADER_BYTES = 128
_CHECKED_WHOLE = 1 << 16  # offsets at either end whose order is checked one by one
_CHECKED_BETWEEN = 1024  # offsets in between, evenly spread: each may cost a read from disk


def kept_name(fingerprint: str, kind: str, token_id: int) -> str:
    """Name of the file that keeps the offsets found in the corpus of this fingerprint by an id of this kind."""
    about = f"dali_pipes documents {_FORMAT_VERSION} {fingerprint} {kind} {token_id}"
    return f"documents-{hashlib.sha256(about.encode()).hexdigest()[:32]}.npy"


def load_or_make(path: Path, num_tokens: int, make: Callable[[], Int64Array]) -> tuple[Int64Array, str | None]:
    """The offsets kept at `path`, else what `make` returns, which is then kept. The second is why that failed.

    num_tokens: the last offset. Offsets that were kept, also just now, are mapped from the file, read-only. Blocks
    while another process that has the lock makes them.
    """
    kept = _load(path, num_tokens)
    if kept is not None:
        return kept, None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return make(), _reason(path.parent, error)
    held, has_waited = lock(path.with_suffix(".lock"))
    try:
        if held is not None:
            kept = _load(path, num_tokens)
            if kept is not None:
                return kept, None
            if has_waited:
                # The one before could not keep them either. Let those that wait go on side by side, not one by one.
                unlock(held)
                held = None
            else:
                _remove_leftovers(path)
        offsets = make()
        try:
            _store(path, offsets)
        except OSError as error:
            return offsets, _reason(path, error)
    finally:
        if held is not None:
            unlock(held)
    kept = _load(path, num_tokens)
    return (offsets if kept is None else kept), None


def _load(path: Path, num_tokens: int) -> Int64Array | None:
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
    return offsets if _is_plausible(offsets, num_tokens) else None


def _is_plausible(offsets: Int64Array, num_tokens: int) -> bool:
    """Whether offsets of a scan, which rise strictly, may be those of `num_tokens` tokens. Looks at some of them."""
    between = offsets[np.linspace(0, len(offsets) - 1, min(len(offsets), _CHECKED_BETWEEN)).astype(np.int64)]
    parts = offsets[:_CHECKED_WHOLE], offsets[-_CHECKED_WHOLE:], between
    return bool(offsets[0] == 0 and offsets[-1] == num_tokens and all((part[1:] > part[:-1]).all() for part in parts))


def _store(path: Path, offsets: Int64Array) -> None:
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


def _remove_leftovers(path: Path) -> None:
    for leftover in path.parent.glob(f"{path.stem}.*.tmp"):
        with contextlib.suppress(OSError):
            leftover.unlink()


def _reason(path: Path, error: OSError) -> str:
    return f"document offsets are not kept: {path}: {error.strerror or error}"
