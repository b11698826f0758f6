"""What took work to find out, kept in the user's cache folder for the next start and for other processes.

    name-0123...cdef.npy         replaced whole, never changed
    name-0123...cdef.lock        empty; whoever is about to make the file holds it
    name-0123...cdef.*.tmp       being written; its writer holds it; what a killed one left is removed by the next

The name says, as a hash, all that the content depends on. A file that cannot be trusted is replaced. Nothing here fails
a run: what cannot be kept is handed out all the same, with the reason.
"""

import contextlib
import hashlib
import os
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from dali_pipes.runtime.locks import hold, lock, unlock

Kept = TypeVar("Kept")


def default_cache_dir() -> Path:
    """`DALI_PIPES_CACHE`, else `dali_pipes` in `XDG_CACHE_HOME`, else in `~/.cache`. RuntimeError without a home."""
    own = os.environ.get("DALI_PIPES_CACHE")
    if own:
        return Path(own).expanduser()
    shared = os.environ.get("XDG_CACHE_HOME")
    # The XDG specification has relative paths ignored.
    base = Path(shared) if shared and Path(shared).is_absolute() else Path.home() / ".cache"
    return base / "dali_pipes"


def cache_folder(data_files: Iterable[Path], cache_dir: Path | None = None) -> tuple[Path | None, str | None]:
    """The folder to keep things in, absolute: `cache_dir` or the default; None where that holds the data, and why."""
    try:
        directory = (default_cache_dir() if cache_dir is None else cache_dir).absolute()
        holds_data = directory.resolve() in {folder.resolve() for folder in {file.parent for file in data_files}}
    except (OSError, RuntimeError) as error:  # no home folder, a loop of links
        return None, str(error)
    if holds_data:
        return None, f"nothing is written to {directory}, which holds the data"
    return directory, None


def kept_name(kind: str, about: bytes, suffix: str = "") -> str:
    """The name of what is kept of a kind: a hash of `about`, which is all that it depends on."""
    return f"{kind}-{hashlib.sha256(about).hexdigest()[:32]}{suffix}"


def load_or_make(
    path: Path,
    load: Callable[[Path], Kept | None],
    make: Callable[[], Kept],
    store: Callable[[Path, Kept], None],
    *,
    anew: bool = False,
) -> tuple[Kept, str | None]:
    """What `load` finds at `path`, else what `make` returns, which is then kept. The second is why that failed.

    load:  None if there is nothing that can be trusted; what was just stored is loaded again
    store: by `write_whole`; may raise OSError
    anew:  make it even if it is there, and replace that

    Blocks while another process that has the lock makes it.
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
                # The one before could not keep it either. Let those that wait go on side by side, not one by one.
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
    """Put a file of these bytes at `path` in one step: a reader sees the old file or the whole new one. OSError."""
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


def _remove_leftovers(path: Path) -> None:
    """Those that no living process holds: others may be writing theirs at this moment."""
    for leftover in path.parent.glob(f"{path.stem}.*.tmp"):
        with contextlib.suppress(OSError):
            held, _ = lock(leftover, wait=False)
            if held is not None:
                leftover.unlink()
                unlock(held)


def _reason(path: Path, error: OSError) -> str:
    return f"{path}: {error.strerror or error}"
