"""What is known of objects while a corpus is being opened: each is looked up once, and folders are listed once.

    listed     s3://bucket/data/      a.bin  b.bin  manifest.json
    asked      s3://bucket/data/a.idx       not there: no request

A corpus asks for files next to each of its files: masks, indexes, manifests.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Self, TypeVar

from dali_pipes.errors import CorpusReadError
from dali_pipes.storage import stores
from dali_pipes.storage.retries import tried_again
from dali_pipes.storage.stores import Facts
from dali_pipes.uris import WEB, Uri

Found = TypeVar("Found")


class Listings:
    """Objects and folders that were looked up. Thread-safe.

    facts:   of each object that was looked up or listed; None: there is no such object
    objects: of each folder whose objects are all known
    folders: in each of these
    found:   folders that have something in them
    """

    def __init__(
        self,
        facts: dict[Uri, Facts | None] | None = None,
        objects: dict[Uri, list[Uri]] | None = None,
        folders: dict[Uri, list[Uri]] | None = None,
        found: set[Uri] | None = None,
    ) -> None:
        self._lock = threading.Lock()
        self._facts, self._objects, self._folders = facts or {}, objects or {}, folders or {}
        self._found = found or set()
        self._asking: dict[Uri, threading.Lock] = {}

    def content(self) -> tuple[dict[Uri, Facts | None], dict[Uri, list[Uri]], dict[Uri, list[Uri]], list[Uri]]:
        """What the constructor takes."""
        with self._lock:
            return {**self._facts}, {**self._objects}, {**self._folders}, [*self._found]

    def facts(self, uri: Uri) -> Facts | None:
        """Of the object, None if there is none. Blocks for a request unless it is known. CorpusReadError."""
        with self._lock:
            if self._knows(uri):
                return self._facts.get(uri)
            asking = self._asking.setdefault(uri, threading.Lock())
        with asking:  # threads that open files of one folder ask for the same ones next to them
            if not self.knows(uri):
                self.keep(uri, _asked(uri, "accessed", lambda: stores.look_up(uri)))
        return self.known_facts(uri)

    def known_facts(self, uri: Uri) -> Facts | None:
        """As `facts`, None also if it is not known. Does not block."""
        with self._lock:
            return self._facts.get(uri)

    def knows(self, uri: Uri) -> bool:
        """Whether `facts` would ask nothing."""
        with self._lock:
            return self._knows(uri)

    def _knows(self, uri: Uri) -> bool:
        return uri in self._facts or uri.parent in self._objects

    def keep(self, uri: Uri, facts: Facts | None) -> None:
        """Remember what was found otherwise."""
        with self._lock:
            self._facts[uri] = facts

    def folder(self, uri: Uri) -> tuple[list[Uri], list[Uri]]:
        """The objects in a folder, and the folders in it. Blocks for a listing unless it is known."""
        with self._lock:
            known = self._objects.get(uri)
            if known is not None:
                return known, self._folders.get(uri, [])
        objects, folders = _asked(uri, "listed", lambda: stores.list_below(uri, deep=False))
        with self._lock:
            self._facts.update(objects)
            self._objects[uri], self._folders[uri] = [*objects], folders
            self._found |= {uri, *folders} if objects or folders else set()
        return [*objects], folders

    def is_folder(self, uri: Uri) -> bool:
        """Whether a listing has shown that it is one. Does not block."""
        with self._lock:
            return uri in self._found

    def below(self, uri: Uri) -> list[Uri]:
        """All objects below a folder. Blocks for a listing."""
        objects, _ = _asked(uri, "listed", lambda: stores.list_below(uri, deep=True))
        here: dict[Uri, list[Uri]] = {uri: []}
        folders: dict[Uri, list[Uri]] = {}
        for one in objects:
            folder = one.parent
            new = folder not in here
            here.setdefault(folder, []).append(one)
            while new:  # up to a folder that is known, at last the one that was listed
                above = folder.parent
                folders.setdefault(above, []).append(folder)
                new = above not in here and len(above) > len(uri)
                here.setdefault(above, [])
                folder = above
        with self._lock:
            self._facts.update(objects)
            self._objects |= here
            self._folders |= folders
            self._found |= {*here} if objects else set()
        return list(objects)

    @contextlib.contextmanager
    def in_use(self) -> Iterator[Self]:
        """Inside, this thread asks here first."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)


@contextlib.contextmanager
def expecting(uri: Uri, facts: Facts) -> Iterator[None]:
    """Inside, this thread opens the object without a request: each read compares it with these facts."""
    token = _expected.set((uri, facts))
    try:
        yield
    finally:
        _expected.reset(token)


def expected_facts(uri: Uri) -> Facts | None:
    """What `expecting` says of the object; None: nothing."""
    found = _expected.get()
    return found[1] if found is not None and found[0] == uri else None


def current_listings() -> Listings:
    """Those in use in this thread, else new ones, which do not know anything."""
    return _current.get() or Listings()


def can_list(uri: Uri) -> bool:
    """Whether its server has listings."""
    return uri.scheme not in WEB


def _asked(uri: Uri, what: str, call: Callable[[], Found]) -> Found:
    try:
        return tried_again(call)
    except OSError as error:
        failure = error
    raise CorpusReadError(f"{uri}: cannot be {what}: {failure.strerror}") from failure


_expected: ContextVar[tuple[Uri, Facts] | None] = ContextVar("expected_object", default=None)
_current: ContextVar[Listings | None] = ContextVar("listings", default=None)
