"""Positioned reads of files that may vanish, shrink, or be too many to keep open.

Data is never mapped into memory: a page of a truncated map is a SIGBUS, a short `preadv` is an error with a message.

A descriptor is owned by an `OpenFile` and closed when the last reference to that object goes. The pool holds one
reference to each file it keeps, a reading thread holds its own while it reads. So a file can be evicted at any time:

    pool  ── file 7 ──▶ OpenFile(descriptor 12) ◀── thread A reads
    pool evicts 7; the descriptor stays 12 until A lets go. Closing it at once would let the kernel give number 12
    to another file, and A would read that file's bytes.
"""

import errno
import os
import resource
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from dali_pipes.errors import CorpusError, CorpusReadError
from dali_pipes.storage.retries import LOST_HANDLES, ReadRetries, current_retries

_MOST_DESCRIPTORS = 2048
_FEWEST_DESCRIPTORS = 4


class OpenFile:
    """One file open for reading. `descriptor` is closed by `close()`, or when the last reference goes.

    Safe to read from several threads at once: every read names its own offset. Reads block and release the GIL.
    """

    __slots__ = ("_retries", "descriptor", "modified_ns", "path", "size")

    def __init__(self, path: Path, retries: ReadRetries | None = None) -> None:
        """`retries`: of errors that may pass; by default those in use. Raises CorpusReadError."""
        self.descriptor = -1
        self.path = path
        self._retries = current_retries() if retries is None else retries
        tries = 0
        while self.descriptor < 0:
            try:
                self.descriptor, self.size, self.modified_ns = _open(path)
            except OSError as error:
                tries += 1
                if not self._retries.wait(error, tries):
                    reason = _reason(error, tries)
                    raise CorpusReadError(f"{path}: cannot be opened for reading: {reason}") from error
            except ValueError as error:  # a zero byte, or half of a surrogate pair
                raise CorpusReadError(f"{str(path)!r} is no name that a file can have: {error}") from error

    def read_into(
        self, buffer: memoryview, offset: int, done: int = 0, failure: OSError | None = None, pause: bool = True
    ) -> None:
        """Fill `buffer` (bytes) from byte `offset` of the file on; the first `done` bytes of it are already there.

        failure: what a first try that the caller made ended with
        pause:   whether to wait before that is tried again

        Raises CorpusReadError if the file ends before that, or cannot be read.
        """
        wanted, tries = len(buffer), 0
        while done < wanted:
            try:
                if failure is not None and not tries:
                    raise failure
                if failure is not None and failure.errno in LOST_HANDLES:
                    self._open_again()
                # A read may come back short for other reasons than the end: a signal, or the kernel's limit near 2 GiB.
                got = os.preadv(self.descriptor, [buffer[done:]], offset + done)
            except CorpusReadError:
                raise
            except OSError as error:
                tries += 1
                if not self._retries.wait(error, tries, pause or tries > 1):
                    failure = None  # or the error, whose traceback holds this frame, would hold itself
                    raise CorpusReadError(
                        f"{self.path}: reading {wanted - done} bytes at byte {offset + done} failed: "
                        f"{_reason(error, tries)}"
                    ) from error
                failure = error
                continue
            if got == 0:
                raise CorpusReadError(
                    f"{self.path}: ends early: wanted {wanted} bytes at byte {offset}, got {done}. The file had "
                    f"{self.size} bytes when it was opened; was it truncated or replaced meanwhile?"
                )
            done += got

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from byte `offset` on, which the caller knows to lie inside the file (or CorpusReadError)."""
        data = bytearray(count)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def close(self) -> None:
        """Close now; only for an owner who knows that nobody else holds this object. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _open_again(self) -> None:
        """Give the descriptor, under its number, to the file opened anew; others may be reading with it. OSError."""
        descriptor, size, modified_ns = _open(self.path)
        try:
            if (size, modified_ns) != (self.size, self.modified_ns):
                raise CorpusReadError(
                    f"{self.path}: changed since it was opened: {self.size} bytes then, {size} now, or at another time "
                    f"by its time of modification. Open the corpus again."
                )
            os.dup2(descriptor, self.descriptor, inheritable=False)
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "descriptor"):  # else opening it failed, or was interrupted
            self.close()


class DescriptorPool:
    """Files opened when first read, the least recently used given up beyond `limit`. Thread-safe.

    `paths`, `sizes` (bytes) and `times` (ns, of the last change; None is not compared): what the files were when the
    corpus was opened. `limit` defaults to a quarter of the
    process's descriptor limit, at most 2048: the trainer needs descriptors too.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        sizes: Sequence[int],
        limit: int | None = None,
        times: Sequence[int | None] | None = None,
        retries: ReadRetries | None = None,
    ) -> None:
        self._paths = paths
        self._sizes = sizes
        self._times = times if times is not None else [None] * len(paths)
        self._retries = retries
        self.limit = _default_limit() if limit is None else limit
        self._lock = threading.Lock()
        self._open: OrderedDict[int, OpenFile] | None = OrderedDict()

    def acquire(self, index: int) -> OpenFile:
        """The open file number `index`. Hold the object for as long as its descriptor is used. May block to open it."""
        with self._lock:
            if self._open is None:
                raise _closed()
            known = self._open.get(index)
            if known is not None:
                self._open.move_to_end(index)
                return known
        # Outside the lock: opening may take milliseconds on a network file system, and others want to read meanwhile.
        return self._keep(index, self._reopen(index))

    def close(self) -> None:
        """Let every file go. A read that is under way finishes first; a later `acquire` raises. Idempotent."""
        with self._lock:
            released, self._open = self._open, None
        del released

    def _keep(self, index: int, fresh: OpenFile) -> OpenFile:
        evicted: list[OpenFile] = []  # closed after the lock is released
        with self._lock:
            if self._open is None:
                raise _closed()
            kept = self._open.setdefault(index, fresh)
            while len(self._open) > self.limit:
                evicted.append(self._open.popitem(last=False)[1])
        return kept

    def _reopen(self, index: int) -> OpenFile:
        while True:
            try:
                file = OpenFile(self._paths[index], self._retries)
            except CorpusReadError as error:
                if not (out_of_descriptors(error) and self._evict_one()):
                    raise
                continue
            if file.size != self._sizes[index]:
                raise CorpusReadError(
                    f"{file.path}: changed since the corpus was opened: {self._sizes[index]} bytes then, {file.size} "
                    f"now. Open the corpus again."
                )
            _compare_times(file.path, file.modified_ns, self._times[index])
            return file

    def _evict_one(self) -> bool:
        with self._lock:
            evicted = self._open.popitem(last=False) if self._open else None
        return evicted is not None


def modified_ns(path: Path) -> int:
    """Time of the last change of the file at `path`. Blocks for a look-up. Raises CorpusReadError."""
    retries, tries = current_retries(), 0
    while True:
        try:
            return os.stat(path).st_mtime_ns
        except OSError as error:
            tries += 1
            if not retries.wait(error, tries):
                raise CorpusReadError(f"{path}: cannot be looked up: {_reason(error, tries)}") from error


def check_unchanged(path: Path, opened_ns: int | None) -> None:
    """Raise CorpusReadError for a file that was changed since `opened_ns`, also to another of the same size.

    None: not known, nothing is compared.
    """
    if opened_ns is not None:
        _compare_times(path, modified_ns(path), opened_ns)


def _compare_times(path: Path, found: int, expected: int | None) -> None:
    if expected is not None and found != expected:
        raise CorpusReadError(
            f"{path}: changed since the corpus was opened, at {expected / 1e9:.6f} s and again at {found / 1e9:.6f} "
            f"s by its time of modification. Open the corpus again."
        )


def _open(path: Path) -> tuple[int, int, int]:
    """A descriptor, and size and time of modification of the file. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        about = os.fstat(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, about.st_size, about.st_mtime_ns


def _default_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_DESCRIPTORS
    return max(_FEWEST_DESCRIPTORS, min(_MOST_DESCRIPTORS, soft // 4))


def out_of_descriptors(error: CorpusReadError) -> bool:
    """Whether a file could not be opened because too many are open."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)


def _closed() -> CorpusError:
    return CorpusError("the corpus was closed: open it again to read from it")


def _reason(error: OSError, tries: int) -> str:
    reason = error.strerror or str(error)
    return f"{reason} (tried {tries} times)" if tries > 1 else reason
