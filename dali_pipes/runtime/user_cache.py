"""Results of slow scans, cached in the user's cache folder for the next start and for other processes.

    name-0123...cdef.npy         replaced as a whole, never modified
    name-0123...cdef.lock        empty; locked by the process that computes the file
    name-0123...cdef.*.tmp       being written and locked by its writer; the next process removes those of killed ones

The hash in the name covers everything that the content depends on. A file that fails its checks is replaced. The cache
never fails a run: a result that cannot be stored is returned anyway, with the reason.
"""

import contextlib
import hashlib
import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from dali_pipes.runtime.locks import hold, lock, remove_unlocked, unlock
from dali_pipes.uris import FilePath

Kept = TypeVar("Kept")


def default_cache_dir() -> Path:
    """`DALI_PIPES_CACHE`, else `dali_pipes` in `XDG_CACHE_HOME` or `~/.cache`. RuntimeError without a home folder."""
    own = os.environ.get("DALI_PIPES_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification says to ignore relative paths.
    base = Path(shared) if shared and Path(shared).is_absolute() else Path.home() / ".cache"
    return base / "dali_pipes"


def cache_folder(data_files: Iterable[FilePath], cache_dir: Path | None = None) -> tuple[Path | None, str | None]:
    """The absolute path of the cache folder, or None and the reason: for example, it contains the data files."""
    try:
        directory = (default_cache_dir() if cache_dir is None else cache_dir).absolute()
        holds_data = directory.resolve() in {
            folder.resolve() for folder in {file.parent for file in data_files if isinstance(file, Path)}
        }
    except (OSError, RuntimeError) as error:  # no home folder, a loop of links
        return None, str(error)
    if holds_data:
        return None, f"{directory} contains the data, so nothing is written there"
    return directory, None


def kept_name(kind: str, about: bytes, suffix: str = "") -> str:
    """The name of a cached file: its kind and a hash of `about`, everything that its content depends on."""
    return f"{kind}-{hashlib.sha256(about).hexdigest()[:32]}{suffix}"


def load_or_make(
    path: Path,
    load: Callable[[Path], Kept | None],
    make: Callable[[], Kept],
    store: Callable[[Path, Kept], None],
    *,
    anew: bool = False,
) -> tuple[Kept, str | None]:
    """What `load` finds at `path`, else what `make` returns, which is then stored; and the reason if that failed.

    load:  returns None if there is no valid file; called again after storing
    store: uses `write_whole`; may raise OSError
    anew:  compute and replace the file even if it exists

    Blocks while another process holds the lock to compute the same file.
    """
    kept = None if anew else load(path)
    if kept is not None:
        return kept, None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return make(), _reason(path.parent, error)
    held, has_waited = lock(path.with_suffix(".lock"))
    try:
        if held is not None:
            kept = None if anew else load(path)
            if kept is not None:
                return kept, None
            _remove_leftovers(path)
            if has_waited:
                # The previous process could not store it either: let those that wait continue in parallel.
                unlock(held)
                held = None
        made = make()
        try:
            store(path, made)
        except OSError as error:
            return made, _reason(path, error)
    finally:
        if held is not None:
            unlock(held)
    kept = load(path)
    return (made if kept is None else kept), None


def write_whole(path: Path, *parts: Any) -> None:
    """Write a file atomically: a reader sees the old file or the complete new one. OSError."""
    temporary = path.with_suffix(f".{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            hold(file.fileno())
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def replace_whole(path: Path, *parts: Any) -> None:
    """As `write_whole`, in a folder that need not exist, after removing what killed processes left there. OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(path)
    write_whole(path, *parts)


def _remove_leftovers(path: Path) -> None:
    """Remove temporary files that no living process has locked; other processes may be writing theirs right now."""
    for leftover in path.parent.glob(f"{path.stem}.*.tmp"):
        with contextlib.suppress(OSError):
            remove_unlocked(leftover)


def _reason(path: Path, error: OSError) -> str:
    return f"{path}: {error.strerror or error}"
