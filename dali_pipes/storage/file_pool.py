"""The files of a corpus, opened when they are first read, and closed again when there are too many.

A reading thread holds its own reference to a file, so that the pool can let it go at any time:

    pool  ── file 7 ──▶ LocalFile(descriptor 12) ◀── thread A reads
    the pool evicts 7; the descriptor stays 12 until A lets go. Closing it immediately would let the kernel give number
    12 to another file, and A would read that file's bytes.
"""

import errno
import resource
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from dali_pipes.errors import CorpusError, CorpusReadError
from dali_pipes.storage.byte_file import ByteFile, check_unchanged, open_file
from dali_pipes.storage.retries import ReadRetries
from dali_pipes.uris import FilePath

_MOST_DESCRIPTORS = 2048
_FEWEST_DESCRIPTORS = 4


class FilePool:
    """Files opened when first read, the least recently used given up beyond `limit`. Thread-safe.

    paths, sizes (bytes), identities: what the files were when the corpus was opened; an identity of None is not
    compared. limit: by default a quarter of the process's limit of descriptors, at most 2,048: the trainer needs
    descriptors too.
    """

    def __init__(
        self,
        paths: Sequence[FilePath],
        sizes: Sequence[int],
        limit: int | None = None,
        identities: Sequence[str | None] | None = None,
        retries: ReadRetries | None = None,
    ) -> None:
        self._paths = paths
        self._sizes = sizes
        self._identities = identities if identities is not None else [None] * len(paths)
        self._retries = retries
        self.limit = _default_limit() if limit is None else limit
        self._lock = threading.Lock()
        self._open: OrderedDict[int, ByteFile] | None = OrderedDict()

    @property
    def is_local(self) -> bool:
        """Whether all files are on disks and mounted file systems."""
        return all(isinstance(path, Path) for path in self._paths)

    def acquire(self, index: int) -> ByteFile:
        """The open file number `index`. Hold the object for as long as you read from it. May block to open it."""
        with self._lock:
            if self._open is None:
                raise _closed()
            known = self._open.get(index)
            if known is not None:
                self._open.move_to_end(index)
                return known
        # Outside the lock: opening may take milliseconds on a network file system, and others want to read meanwhile.
        return self._keep(index, self._reopen(index))

    def acquire_all(self, indices: Sequence[int]) -> list[ByteFile]:
        """The open files of these numbers, as `acquire`; those that are open take the lock once."""
        with self._lock:
            if self._open is None:
                raise _closed()
            files = [self._open.get(index) for index in indices]
            for index, file in zip(indices, files, strict=True):
                if file is not None:
                    self._open.move_to_end(index)
        return [self.acquire(index) if file is None else file for index, file in zip(indices, files, strict=True)]

    def close(self) -> None:
        """Let every file go. A read that is under way finishes first; a later `acquire` raises. Idempotent."""
        with self._lock:
            released, self._open = self._open, None
        del released

    def _keep(self, index: int, fresh: ByteFile) -> ByteFile:
        evicted: list[ByteFile] = []  # closed after the lock is released
        with self._lock:
            if self._open is None:
                raise _closed()
            kept = self._open.setdefault(index, fresh)
            while len(self._open) > self.limit:
                evicted.append(self._open.popitem(last=False)[1])
        return kept

    def _reopen(self, index: int) -> ByteFile:
        identity = self._identities[index]
        known = None if identity is None else (self._sizes[index], identity)
        while True:
            try:
                file = open_file(self._paths[index], self._retries, known)
            except CorpusReadError as error:
                if not (out_of_descriptors(error) and self._evict_one()):
                    raise
                continue
            if file.size != self._sizes[index]:
                raise CorpusReadError(
                    f"{file.path}: was replaced or modified after the corpus was opened ({self._sizes[index]:,} bytes "
                    f"then, {file.size:,} now). Open the corpus again."
                )
            check_unchanged(file.path, identity, file.identity)
            return file

    def _evict_one(self) -> bool:
        with self._lock:
            evicted = self._open.popitem(last=False) if self._open else None
        return evicted is not None


def out_of_descriptors(error: CorpusReadError) -> bool:
    """Whether a file could not be opened because too many are open."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE)


def _default_limit() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return _MOST_DESCRIPTORS
    return max(_FEWEST_DESCRIPTORS, min(_MOST_DESCRIPTORS, soft // 4))


def _closed() -> CorpusError:
    return CorpusError("the corpus is closed; open it again to read from it")
