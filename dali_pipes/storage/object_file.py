"""Objects in stores and files on web servers, read by ranges: many requests in flight, each exact or tried again.

    ranges     [0, 8192)  [8192, 16384)      [1 GiB, 1 GiB + 8192)
    requests   [0, 16384)                    [1 GiB, 1 GiB + 8192)      neighbors and near ones in one request

Each answer is compared with the identity that the object had when it was opened, so a row is never from another one.
"""

import contextlib
import errno
import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

from dali_pipes.errors import CorpusReadError
from dali_pipes.runtime.threads import ReaderThreads, Task, stop_with_process
from dali_pipes.storage import stores
from dali_pipes.storage.kept_answers import KeptAnswers, current_answers
from dali_pipes.storage.listings import current_listings
from dali_pipes.storage.retries import ReadRetries, StoreError, current_retries
from dali_pipes.storage.store_errors import ChangedError
from dali_pipes.storage.stores import Facts
from dali_pipes.uris import Uri

HEAD_BYTES = 4096
"""Read when an object is opened, which tells its size and identity too, and kept."""
_MOST_GAP = 4096
"""Bytes between two ranges that are read along in one request."""
_MOST_BYTES = 8 << 20
"""Of one request; longer ranges are several."""


class ObjectFile:
    """A `ByteFile` without a descriptor.

    identity: the entity tag of the object, else its time of modification and size
    """

    __slots__ = ("_head", "_place", "identity", "path", "retries", "size")

    def __init__(self, uri: Uri, retries: ReadRetries | None = None, known: tuple[int, str] | None = None) -> None:
        """known: size and identity; then nothing is asked, and each read compares. Raises CorpusReadError."""
        self.path = uri
        self.retries = current_retries() if retries is None else retries
        self._head = b""
        try:
            self._place = stores.place_of(uri)
        except StoreError as error:
            raise CorpusReadError(f"{uri}: cannot be opened: {error.strerror}") from error
        if known is None:
            facts, self._head = self._opened()
            current_listings().keep(uri, facts)
            known = facts
        self.size, self.identity = known

    def read_ranges(self, ranges: Iterable[tuple[int, int, int]], out: memoryview) -> None:
        """As `ByteFile.read_ranges`."""
        read_together([(self, list(ranges))], out)

    def read(self, offset: int, count: int) -> bytes:
        """As `ByteFile.read`."""
        data = bytearray(count)
        self.read_ranges([(offset, count, 0)], memoryview(data))
        return bytes(data)

    def request(self, first: int, last: int) -> memoryview:
        """Bytes `first` to `last - 1`, in one request and as many retries as it takes. Blocks. CorpusReadError."""
        if last <= len(self._head):
            return memoryview(self._head)[first:last]
        if last > self.size:
            raise CorpusReadError(
                f"{self.path}: ends early: expected {last - first:,} bytes at byte {first:,}, but the object has "
                f"{self.size:,} bytes"
            )
        tries = 0
        while True:
            try:
                answer = stores.get(self.path, first, last, self.identity, self._place)
                if (answer.first, len(answer.data)) == (first, last - first):
                    return answer.data
                failure: OSError = StoreError(errno.ECONNABORTED, f"the answer has {len(answer.data):,} bytes")
            except ChangedError:
                break
            except OSError as error:
                failure = error
            if failure.errno == errno.ERANGE:  # the object is shorter now
                break
            tries += 1
            if not self.retries.wait(failure, tries):
                times = f" (tried {tries} times)" if tries > 1 else ""
                raise CorpusReadError(
                    f"{self.path}: cannot read {last - first:,} bytes at byte {first:,}: {failure.strerror}{times}"
                ) from failure
        raise CorpusReadError(
            f"{self.path}: was replaced or modified after the corpus was opened ({self.size:,} bytes, version "
            f"{self.identity} then). Open the corpus again."
        )

    def close(self) -> None:
        """Do nothing: connections belong to the process."""

    def _opened(self) -> tuple[Facts, bytes]:
        kept, facts = current_answers(), current_listings().known_facts(self.path)
        if kept is not None and facts is not None:
            head = kept.find(self.path, facts.identity, 0, min(HEAD_BYTES, facts.size))
            if head is not None:
                return facts, head
        tries = 0
        while True:
            try:
                answer = stores.get(self.path, 0, HEAD_BYTES, place=self._place)
                if kept is not None:
                    kept.add(self.path, answer.facts.identity, 0, answer.data)
                return answer.facts, bytes(answer.data)
            except OSError as error:
                failure = error
            if failure.errno == errno.ERANGE:  # an empty object does not have a first byte
                facts = current_listings().facts(self.path)
                if facts is not None and facts.size == 0:
                    return facts, b""
            tries += 1
            if not self.retries.wait(failure, tries):
                times = f" (tried {tries} times)" if tries > 1 else ""
                raise CorpusReadError(f"{self.path}: cannot be opened: {failure.strerror}{times}") from failure

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Request(NamedTuple):
    """Bytes `first` to `last - 1` of a file, and the ranges in them."""

    file: ObjectFile
    first: int
    last: int
    ranges: Sequence[tuple[int, int, int]]


def read_together(wanted: Sequence[tuple[ObjectFile, list[tuple[int, int, int]]]], out: memoryview) -> None:
    """As `ByteFile.read_ranges` of each of the files, with as many requests in flight as their setting allows.

    Only this thread writes to `out`, so nothing is written there after an error or an interrupt.
    """
    requests = [request for file, ranges in wanted for request in _requests(file, ranges)]
    answers = current_answers()
    if answers is not None:
        requests = _without_known(requests, answers, out)
    if len(requests) < 2:
        for request in requests:
            data = request.file.request(request.first, request.last)
            _place(request, data, out)
            if answers is not None:
                answers.add(request.file.path, request.file.identity, request.first, data)
        return
    threads = _threads(requests[0].file.retries.requests)
    futures: list[Task[memoryview]] = []
    try:
        for request in requests:
            futures.append(threads.submit(request.file.request, request.first, request.last))
        for request, future in zip(requests, futures, strict=True):
            data = threads.result(future)
            _place(request, data, out)
            if answers is not None:
                answers.add(request.file.path, request.file.identity, request.first, data)
    finally:
        for future in futures:
            future.cancel()


def look_up_together(uris: Iterable[Uri]) -> None:
    """Look up objects that are asked for next, with many requests in flight; the listings in use keep the answers.

    Blocks. An error is left to whoever asks for that object.
    """
    listings, retries = current_listings(), current_retries()
    unknown = [uri for uri in dict.fromkeys(uris) if not listings.knows(uri)]
    if len(unknown) < 2:
        return
    threads = _threads(retries.requests)

    def look_up(uri: Uri) -> None:
        with retries.in_use(), contextlib.suppress(CorpusReadError):
            listings.facts(uri)

    futures = [threads.submit(look_up, uri) for uri in unknown]
    try:
        for future in futures:
            threads.result(future)
    finally:
        for future in futures:
            future.cancel()


def _requests(file: ObjectFile, ranges: Iterable[tuple[int, int, int]]) -> list[_Request]:
    """Few requests for the ranges, none of them too long."""
    parts = []
    for offset, count, place in ranges:
        for begin in range(0, count, _MOST_BYTES):
            parts.append((offset + begin, min(_MOST_BYTES, count - begin), place + begin))
    parts.sort()
    found: list[_Request] = []
    first = last = begin = 0
    for at, (offset, count, _) in enumerate(parts):
        if at and offset <= last + _MOST_GAP and offset + count - first <= _MOST_BYTES:
            last = max(last, offset + count)
            continue
        if at:
            found.append(_Request(file, first, last, parts[begin:at]))
        first, last, begin = offset, offset + count, at
    if parts:
        found.append(_Request(file, first, last, parts[begin:]))
    return found


def _without_known(requests: list[_Request], answers: KeptAnswers, out: memoryview) -> list[_Request]:
    """The requests that are left once kept answers are placed."""
    left = []
    for request in requests:
        known = answers.find(request.file.path, request.file.identity, request.first, request.last)
        if known is None:
            left.append(request)
        else:
            _place(request, memoryview(known), out)
    return left


def _place(request: _Request, data: memoryview, out: memoryview) -> None:
    for offset, count, place in request.ranges:
        start = offset - request.first
        out[place : place + count] = data[start : start + count]


class _Pools:
    """Threads that wait for answers, by their number: all corpora with one setting share them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[int, ReaderThreads] = {}
        stop_with_process(self)

    def threads(self, count: int) -> ReaderThreads:
        with self._lock:
            found = self._threads.get(count)
            if found is None or not found.are_alive:
                found = self._threads[count] = ReaderThreads(count)
            return found

    def stop(self) -> None:
        """In a fork, whose threads are gone."""
        self._lock, self._threads = threading.Lock(), {}


_pools = _Pools()


def _threads(count: int) -> ReaderThreads:
    return _pools.threads(count)
