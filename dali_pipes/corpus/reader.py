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

_MOST_DESCRIPTORS = 2048
_FEWEST_DESCRIPTORS = 4


class OpenFile:
    """One file open for reading. `descriptor` is closed by `close()`, or when the last reference goes.

    Safe to read from several threads at once: every read names its own offset. Reads block and release the GIL.
    """

    __slots__ = ("descriptor", "path", "size")

    def __init__(self, path: Path) -> None:
        self.descriptor = -1
        self.path = path
        try:
            self.descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.size = os.fstat(self.descriptor).st_size
        except OSError as error:
            raise CorpusReadError(f"{path}: cannot be opened for reading: {_reason(error)}") from error

    def read_into(self, buffer: memoryview, offset: int, done: int = 0) -> None:
        """Fill `buffer` (bytes) from byte `offset` of the file on; the first `done` bytes of it are already there.

        Raises CorpusReadError if the file ends before that, or cannot be read.
        """
        wanted = len(buffer)
        while done < wanted:
            try:
                # A read may come back short for other reasons than the end: a signal, or the kernel's limit near 2 GiB.
                got = os.preadv(self.descriptor, [buffer[done:]], offset + done)
            except OSError as error:
                raise self.failed(error, offset + done, wanted - done) from error
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

    def failed(self, error: OSError, offset: int, wanted: int) -> CorpusReadError:
        """The error to raise for an OSError of a read that wanted `wanted` bytes at byte `offset`."""
        return CorpusReadError(f"{self.path}: reading {wanted} bytes at byte {offset} failed: {_reason(error)}")

    def close(self) -> None:
        """Close now; only for an owner who knows that nobody else holds this object. Idempotent."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
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
    ) -> None:
        self._paths = paths
        self._sizes = sizes
        self._times = times if times is not None else [None] * len(paths)
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
                file = OpenFile(self._paths[index])
            except CorpusReadError as error:
                if not (_out_of_descriptors(error) and self._evict_one()):
                    raise
                continue
            if file.size != self._sizes[index]:
                raise CorpusReadError(
                    f"{file.path}: changed since the corpus was opened: {self._sizes[index]} bytes then, {file.size} "
                    f"now. Open the corpus again."
                )
            check_unchanged(file.path, self._times[index])
            return file

    def _evict_one(self) -> bool:
        with self._lock:
            evicted = self._open.popitem(last=False) if self._open else None
        return evicted is not None


def check_unchanged(path: Path, modified_ns: int | None) -> None:
    """Raise CorpusReadError for a file that was changed since `modified_ns`, also to another of the same size.

    None: not known, nothing is compared.
    """
    if modified_ns is None:
        return
    try:
        found = os.stat(path).st_mtime_ns
    except OSError as error:
        raise CorpusReadError(f"{path}: cannot be looked up: {_reason(error)}") from error
    if found != modified_ns:
        raise CorpusReadError(
            f"{path}: changed since the corpus was opened, at {modified_ns / 1e9:.6f} s and again at {found / 1e9:.6f} "
            f"s by its time of modification. Open the corpus again."
        )


def _default_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_DESCRIPTORS
    return max(_FEWEST_DESCRIPTORS, min(_MOST_DESCRIPTORS, soft // 4))


def _out_of_descriptors(error: CorpusReadError) -> bool:
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)


def _closed() -> CorpusError:
    return CorpusError("the corpus was closed: open it again to read from it")


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
