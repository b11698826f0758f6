"""What one process of a node found in a store, for the others that start with it: they ask nothing.

    rank 0    started 10.0 s   lists 14.0 - 16.5 s, keeps it
    rank 1    started 10.1 s   wants to list at 14.2 s, waits, uses that of rank 0
    restart   started 95.0 s   what began at 14.0 s may be out of date: lists anew

A listing is used if it began after this process did and after it last used one of the same entries, and ended within a
minute. So nobody sees less than it would if it had listed when it started, and no process waits for a dead one: the
lock ends with its holder. Times are those of the machine's clock since its start; another machine makes another file.
"""

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dali_pipes.runtime import user_cache
from dali_pipes.runtime.locks import lock, unlock
from dali_pipes.storage.listings import Listings
from dali_pipes.storage.stores import Facts
from dali_pipes.uris import HIDDEN, Uri

_MOST_AGE_S = 60.0
_HASH_BYTES = 32
_PLACES = ("ACCOUNT_NAME", "ENDPOINT", "PROFILE", "REGION")
"""Parts of the names of variables that say where a store is, rather than who asks."""
_last_used: dict[Path, float] = {}


@contextlib.contextmanager
def listings_kept(entries: Sequence[Uri]) -> Iterator[None]:
    """Inside, this thread uses what another process found for these entries, or new listings, which are then kept.

    Blocks while another process opens the same entries. A cache that fails never fails a run.
    """
    path = _path(entries)
    if path is None:
        with Listings().in_use():
            yield
        return
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
    held, has_waited = lock(path.with_suffix(".lock"))
    try:
        listings, began = _load(path), _now()
        _last_used[path] = began
        if held is not None and (listings is not None or has_waited):
            # The one before this may have failed: let those that wait continue in parallel.
            unlock(held)
            held = None
        with (Listings() if listings is None else listings).in_use() as used:
            yield
        if listings is None:
            _store(path, used, began)
    finally:
        if held is not None:
            unlock(held)


def _path(entries: Sequence[Uri]) -> Path | None:
    shared = [entry for entry in entries if entry.scheme != "memory"]
    folder = user_cache.cache_folder([])[0] if shared and _process_start() is not None else None
    if folder is None:
        return None
    places = [f"{name}={os.environ[name]}" for name in sorted(os.environ) if any(part in name for part in _PLACES)]
    about = "\n".join(["dali_pipes listings 1", _boot(), *places, *shared])
    return folder / user_cache.kept_name("listing", about.encode("utf-8", "surrogatepass"))


def _store(path: Path, listings: Listings, began: float) -> None:
    facts, objects, folders, found = listings.content()
    if any(HIDDEN in uri for some in (objects, folders) for group in some.values() for uri in group):
        return  # their credentials would be missing
    content = {"began": began, "ended": _now(), "facts": facts, "objects": objects, "folders": folders, "found": found}
    data = json.dumps(content).encode()
    with contextlib.suppress(OSError):
        user_cache.replace_whole(path, hashlib.sha256(data).digest(), data)


def _load(path: Path) -> Listings | None:
    """None without a file that this process may use."""
    try:
        whole = path.read_bytes()
    except OSError:
        return None
    data = memoryview(whole)[_HASH_BYTES:]
    if hashlib.sha256(data).digest() != whole[:_HASH_BYTES]:
        return None
    content: dict[str, Any] = json.loads(bytes(data))
    since = max(_process_start() or 0.0, _last_used.get(path, 0.0))
    if content["began"] <= since or _now() - content["ended"] > _MOST_AGE_S:
        return None
    facts = {Uri(uri): None if one is None else Facts(*one) for uri, one in content["facts"].items()}
    objects, folders = (
        {Uri(uri): [Uri(one) for one in some] for uri, some in content[name].items()} for name in ("objects", "folders")
    )
    return Listings(facts, objects, folders, {Uri(uri) for uri in content["found"]})


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _process_start() -> float | None:
    """In seconds since the start of the machine; None if the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


def _boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
