"""Lengths that are known only after all shards were read or decompressed, kept in the user's cache for the next start.

    counts-0123...cdef.npy       uint32 (n,), in the .npy format; replaced whole, never changed
    counts-0123...cdef.lock      empty; whoever is about to read the shards holds it

The name is a hash of what the counts depend on: the index, and names, sizes and sampled bytes of the shards.
"""

import contextlib
import hashlib
import os
import uuid
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dali_pipes.kept_files import default_cache_dir, lock, unlock

Counts: TypeAlias = npt.NDArray[np.uint32]

_FORMAT_VERSION = 1


def kept_or_made(
    about: bytes, data_folder: Path, make: Callable[[], Counts], is_plausible: Callable[[Counts], bool]
) -> Counts:
    """The counts kept for `about`, if they are plausible, else what `make` returns, which is then kept. Blocks.

    Of several processes that ask at once, one makes them and the others wait. Counts that cannot be kept, or whose
    cache folder is `data_folder`, are a warning, and are made again at the next start.
    """
    name = hashlib.sha256(b"dali_pipes counts %d " % _FORMAT_VERSION + about).hexdigest()[:32]
    try:
        folder = default_cache_dir().absolute()
        if folder.resolve() == data_folder.resolve():
            raise OSError("it holds the data, to which nothing is written")
        path = folder / f"counts-{name}.npy"
        kept = _load(path, is_plausible)
        if kept is not None:
            return kept
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder, a loop of links
        counts = make()
        _warn(error)
        return counts
    held, has_waited = lock(path.with_suffix(".lock"))
    try:
        if has_waited:
            kept = _load(path, is_plausible)
            if kept is not None:
                return kept
        counts = make()
        try:
            _store(path, counts)
        except OSError as error:
            _warn(error)
        return counts
    finally:
        if held is not None:
            unlock(held)


def _load(path: Path, is_plausible: Callable[[Counts], bool]) -> Counts | None:
    try:
        with path.open("rb") as file:
            counts: npt.NDArray[Any] = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError):  # not there, not readable, cut off, not ours
        return None
    return counts if counts.dtype == np.uint32 and counts.ndim == 1 and is_plausible(counts) else None


def _store(path: Path, counts: Counts) -> None:
    """Put them at `path` in one step: a reader sees the old file or the whole new one. Raises OSError."""
    temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            np.save(file, counts)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _warn(error: Exception) -> None:
    warnings.warn(
        f"the lengths found in the shards are not kept: {error}; the next start reads them again. Name a folder to "
        f"keep them in: DALI_PIPES_CACHE.",
        RuntimeWarning,
        stacklevel=2,
    )
