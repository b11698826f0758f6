"""Requests to object stores and web servers, by obstore: one look-up, one range, or a listing each.

    s3://bucket/prefix/a.bin      store of s3://bucket            key prefix/a.bin
    https://host/data/a.bin?sig   store of https://host/data?sig  key a.bin

Credentials come from the environment, as obstore finds them. Its own retries are off for reading: `retries` has ours,
which are counted. What a request ends with is an `OSError` whose text is ours, for theirs shows addresses with their
signatures.
"""

import base64
import contextlib
import errno
import os
import re
import threading
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

from dali_pipes.errors import ConfigError
from dali_pipes.runtime.optional import optional_package
from dali_pipes.storage import hub
from dali_pipes.storage.aws_profiles import ProfileError, find_profile
from dali_pipes.storage.retries import StoreError
from dali_pipes.storage.store_errors import CREDENTIALS, VARIABLES, ChangedError, failures_of
from dali_pipes.uris import WEB, Uri

STALL_S = 30.0
"""Seconds without a byte of an answer after which a request is tried again."""
_MOST_STALLS = 10
"""Times `STALL_S`: the longest that a whole request may take; many of them share a slow line."""
_CONNECT_S = 10.0
_PUT_RETRIES = 8

_lock = threading.Lock()
_stores: dict[tuple[object, ...], Any] = {}
_lost: list[str] = []  # in a fork of a process that had stores, whose threads it lacks


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread may have held it
    if _stores:
        _lost.append("forked")


os.register_at_fork(after_in_child=_after_fork)


class Facts(NamedTuple):
    """Of an object. identity: its entity tag, else time of modification and size."""

    size: int
    identity: str


class Answer(NamedTuple):
    """Some bytes of an object, the first of them at byte `first`, and what it was when they were read."""

    facts: Facts
    first: int
    data: memoryview


class Place(NamedTuple):
    """A store, and the key of an object in it."""

    store: Any
    key: str


def look_up(uri: Uri) -> Facts | None:
    """One request; None if there is no such object. Blocks; raises OSError."""
    obstore, (store, key) = _obstore(uri), place_of(uri)
    try:
        with _failures(uri) as failures:
            if uri.scheme != "hf":
                return _facts(obstore.head(store, key))
            # It sends readers on to addresses that may be signed for reading alone.
            return _facts(obstore.get(store, key, options={"range": (0, 1)}).meta)
        failure = failures.error
        if uri.scheme != "hf" and isinstance(failure, OSError) and failure.errno in (errno.EACCES, errno.EINVAL):
            # Answers to HEAD do not have a text, which says whether a token has expired; some servers refuse HEAD.
            return get(uri, 0, 1).facts
        raise failure
    except FileNotFoundError as error:
        if error.errno == errno.ENOENT:
            return None
        raise


def get(uri: Uri, first: int, last: int, expected: str | None = None, place: Place | None = None) -> Answer:
    """Bytes `first` to `last - 1`, or fewer at the end of the object. Blocks, without the interpreter lock.

    expected: the identity that it must have; a condition of the request where stores honor that, and compared
    place:    `place_of(uri)`, if it is known

    Raises OSError, ChangedError.
    """
    obstore, (store, key) = _obstore(uri), place_of(uri) if place is None else place
    options: dict[str, Any] = {"range": (first, last)}
    if expected is not None and _is_strong(expected):
        options["if_match"] = expected
    with _failures(uri) as failures:
        result = obstore.get(store, key, options=options)
        answer = Answer(_facts(result.meta), result.range[0], memoryview(result.bytes()))
        if expected is not None and answer.facts.identity != expected:
            raise ChangedError
        return answer
    raise failures.error


def list_below(uri: Uri, *, deep: bool) -> tuple[dict[Uri, Facts], list[Uri]]:
    """The objects of a folder, and the folders in it; `deep`: all objects below, and no folders. Blocks; OSError."""
    if uri.scheme == "hf":
        entries = list(hub.list_entries(uri, deep=deep))
        objects = {one: Facts(size, f"blob {version}") for one, size, version in entries if size is not None}
        return objects, [] if deep else [one for one, size, _ in entries if size is None]
    obstore, store, prefix = _obstore(uri), _store(uri), uri.path or None
    root = Uri(f"{uri.full.partition('://')[0]}://{uri.server}")
    with _failures(uri) as failures:
        if deep:
            found, below = [one for some in obstore.list(store, prefix) for one in some], []
        else:
            result = obstore.list_with_delimiter(store, prefix)
            found, below = result["objects"], result["common_prefixes"]
        return {root / one["path"]: _facts(one) for one in found}, [root / one for one in below]
    raise failures.error


def put(uri: Uri, content: bytes | Path, *, new: bool = False) -> None:
    """Write an object, from memory or a local file; it appears when it is whole. Blocks, without the interpreter lock.

    A large one is sent in parts, which are tried again one by one.

    new: raise FileExistsError if there is one already

    Raises OSError.
    """
    obstore, (store, key) = _obstore(uri), Place(_store(uri, _PUT_RETRIES), uri.path)
    with _failures(uri) as failures:
        obstore.put(store, key, content, mode="create" if new else "overwrite", use_multipart=False if new else None)
        return
    raise failures.error


def delete(uris: Sequence[Uri]) -> None:
    """Remove objects of one store; those that are not there are ignored. Blocks; raises OSError."""
    if not uris:
        return
    obstore = _obstore(uris[0])
    with _failures(uris[0]) as failures:
        with contextlib.suppress(FileNotFoundError):
            obstore.delete(_store(uris[0], _PUT_RETRIES), [uri.path for uri in uris])
        return
    raise failures.error


def memory_store() -> Any:
    """The store of `memory://`, which is that of this process: for tests."""
    return _store(Uri("memory://"))


def _failures(uri: Uri) -> failures_of:
    return failures_of(uri, STALL_S, _MOST_STALLS * STALL_S)


def _is_strong(identity: str) -> bool:
    return not identity.startswith(("W/", "modified "))


def _facts(meta: Any) -> Facts:
    size, tag, modified = int(meta["size"]), meta["e_tag"], meta["last_modified"]
    assert isinstance(modified, datetime)
    return Facts(size, str(tag) if tag else f"modified {modified.timestamp():.0f} size {size}")


def place_of(uri: Uri) -> Place:
    """Where requests for an object go. Blocks only where credentials have to be fetched first.

    Looks at the environment, which costs as much as a tenth of a request; so who reads one object often keeps it.
    """
    _obstore(uri)
    if uri.scheme == "hf":
        return Place(_store(uri), hub.HubPath.of(uri).key)
    return Place(_store(uri), uri.name if uri.query else uri.path)


def _store(uri: Uri, retries: int = 0) -> Any:
    scheme, server, query = uri.scheme, uri.server, uri.query
    key = (scheme, server, query, uri.parent.path if query else "", STALL_S, retries, *_environment(scheme))
    with _lock:
        if scheme == "memory":
            key = (scheme,)
        if key not in _stores:
            _stores[key] = _made(uri, retries)
        return _stores[key]


def _made(uri: Uri, retries: int) -> Any:
    from obstore.exceptions import BaseError

    if not uri.server and uri.scheme != "memory":
        what = "host" if uri.scheme in WEB else "bucket"
        raise ConfigError(f"{uri}: expected a {what} after {uri.scheme}://, such as {uri.scheme}://{what}/tokens.bin")
    try:
        return _make_store(uri, retries)
    except ProfileError as error:
        raise ConfigError(f"{uri}: {error}") from None
    except (BaseError, ValueError) as error:
        reason = re.sub(r"\S+://\S+", "ADDRESS", str(error).partition("\n")[0])[:200]
    needed = CREDENTIALS.get(VARIABLES.get(uri.scheme, "AZURE_"))
    advice = "Correct the address." if uri.scheme in WEB or needed is None else f"Set {needed} in the environment."
    raise ConfigError(f"{uri}: this store cannot be set up: {reason}. {advice}")


def _environment(scheme: str) -> tuple[str, ...]:
    """What decides how a store is reached: a test, or a notebook, may change it."""
    prefix = VARIABLES.get(scheme, "AZURE_" if scheme not in WEB else "")
    return tuple(f"{name}={os.environ[name]}" for name in sorted(os.environ) if prefix and name.startswith(prefix))


def _make_store(uri: Uri, retries: int) -> Any:
    from obstore import store as stores

    make: Any = stores  # the types of settings are those of each kind of store
    scheme, server = uri.scheme, uri.server
    client: dict[str, Any] = {
        "read_timeout": f"{STALL_S:g}s",
        "timeout": f"{_MOST_STALLS * STALL_S:g}s",
        "connect_timeout": f"{_CONNECT_S:g}s",
    }
    retry: dict[str, Any] = {"max_retries": retries}
    if scheme == "memory":
        return make.MemoryStore()
    if scheme == "hf":
        client |= {"allow_http": True, "default_headers": hub.headers()}
        return make.HTTPStore.from_url(hub.endpoint(), client_options=client, retry_config=retry)
    if scheme in WEB:
        user, at, host = server.rpartition("@")
        if at:
            client["default_headers"] = {"authorization": f"Basic {base64.b64encode(unquote(user).encode()).decode()}"}
        folder = f"/{uri.parent._split()[1]}?{uri.query}" if uri.query else ""
        client["allow_http"] = scheme == "http"
        return make.HTTPStore.from_url(f"{scheme}://{host}{folder}", client_options=client, retry_config=retry)
    if os.environ.get(f"{VARIABLES.get(scheme, 'AZURE_')}ALLOW_HTTP", "").lower() in ("1", "true"):
        client["allow_http"] = True
    known, more = {"gcs": "gs"}.get(scheme, scheme), {}
    profile = find_profile(f"to read {uri}") if scheme in ("s3", "s3a") else None
    if profile is not None:
        more = {"credential_provider": profile.credentials, "config": profile.settings}
    return make.from_url(f"{known}://{server}", client_options=client, retry_config=retry, **more)


def _obstore(uri: Uri) -> Any:
    if _lost:  # a request would wait forever
        raise StoreError(
            errno.ENOTSUP,
            "this process was forked from one that had read remote data; start it with the 'spawn' method, or do not "
            "read remote data before the fork",
        )
    with optional_package("obstore", "remote", purpose=f"to read {uri}"):
        import obstore
    return obstore
