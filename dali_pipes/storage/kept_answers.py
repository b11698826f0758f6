"""Small answers that opening many objects takes, kept on the node: for its other ranks, and for the next start.

    dali_pipes answers 1      and the SHA-256 of the rest
    [["s3://bucket/a.bin", "\\"5f2c\\"", [[0, 4096], ...]], ...]      object, entity tag, ranges: one line
    bytes of the ranges, one after another

An answer belongs to an object with one entity tag, which a listing or look-up tells before it is used, so a replaced
object is read anew. While one process opens objects that are not kept, others of the node wait for its answers.
"""

import contextlib
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from pathlib import Path

from dali_pipes.runtime import user_cache
from dali_pipes.runtime.locks import lock, unlock
from dali_pipes.uris import Uri

LEAST_OBJECTS = 16
"""Fewer are opened anew at each start."""

_MAGIC = b"dali_pipes answers 1\n"
_HASH_BYTES = 32
_MOST_BYTES = 1 << 16  # of one answer
_MOST_ALL_BYTES = 1 << 29


class KeptAnswers:
    """Answers by object, entity tag and range. For several threads: each line is one operation of a dict."""

    def __init__(self, known: dict[tuple[str, str, int, int], bytes]) -> None:
        self._known = known
        self._used: dict[tuple[str, str, int, int], bytes] = {}
        self._has_new = False

    def find(self, uri: Uri, tag: str, first: int, last: int) -> bytes | None:
        """The bytes of this range, None if they are not known."""
        key = (uri, tag, first, last)
        found = self._known.get(key)
        if found is not None:
            self._used[key] = found
        return found

    def add(self, uri: Uri, tag: str, first: int, data: bytes | memoryview) -> None:
        """Keep an answer, if it is small and the tag tells one content from another in every process."""
        if tag.startswith('"') and uri.scheme != "memory" and len(data) <= _MOST_BYTES:
            self._used[uri, tag, first, first + len(data)] = bytes(data)
            self._has_new = True


@contextlib.contextmanager
def answers_kept(uris: Sequence[Uri]) -> Iterator[None]:
    """Inside, this thread and those with its context use and keep answers of these objects.

    Blocks while another process opens the same ones. A cache that fails never fails a run.
    """
    folder = user_cache.cache_folder(uris)[0] if len(uris) >= LEAST_OBJECTS else None
    if folder is None:
        yield
        return
    path = folder / user_cache.kept_name("answers", "\n".join(uris).encode("utf-8", "surrogatepass"))
    known, held = _load(path), None
    try:
        if not known:
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
            held, _ = lock(path.with_suffix(".lock"))
            known = _load(path)
        if known and held is not None:
            unlock(held)
            held = None
        answers = KeptAnswers(known)
        token = _current.set(answers)
        try:
            yield
        finally:
            _current.reset(token)
        if answers._has_new:
            _store(path, answers._used)
    finally:
        if held is not None:
            unlock(held)


def current_answers() -> KeptAnswers | None:
    """Those in use in this thread."""
    return _current.get()


def _store(path: Path, answers: dict[tuple[str, str, int, int], bytes]) -> None:
    if sum(map(len, answers.values())) > _MOST_ALL_BYTES:
        return
    objects: dict[tuple[str, str], list[list[int]]] = {}
    for uri, tag, first, last in sorted(answers):
        objects.setdefault((uri, tag), []).append([first, last])
    head = json.dumps([[uri, tag, ranges] for (uri, tag), ranges in objects.items()]).encode() + b"\n"
    data = b"".join(answers[key] for key in sorted(answers))
    digest = hashlib.sha256(head)
    digest.update(data)
    with contextlib.suppress(OSError):
        user_cache.replace_whole(path, _MAGIC + digest.digest(), head, data)


def _load(path: Path) -> dict[tuple[str, str, int, int], bytes]:
    """The kept answers; empty without a file, or if it is damaged."""
    try:
        whole = path.read_bytes()
    except OSError:
        return {}
    start, content = len(_MAGIC) + _HASH_BYTES, memoryview(whole)
    if content[:start] != _MAGIC + hashlib.sha256(content[start:]).digest():
        return {}
    at = whole.index(b"\n", start) + 1
    found = {}
    for uri, tag, ranges in json.loads(whole[start:at]):
        for first, last in ranges:
            found[uri, tag, first, last] = bytes(content[at : at + last - first])
            at += last - first
    return found


_current: ContextVar[KeptAnswers | None] = ContextVar("kept_answers", default=None)
