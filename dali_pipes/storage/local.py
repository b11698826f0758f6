"""Files on disks and mounted file systems, read with `preadv`.

They are mapped into memory only where `reads = "mapped"` asks for it: a page of a truncated map is a SIGBUS, a short
`preadv` is an error with a message.
"""

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import CorpusReadError
from dali_pipes.storage.retries import LOST_HANDLES, ReadRetries, current_retries


class LocalFile:
    """A `ByteFile` with a descriptor, which `close()` closes, or else the end of the last reference.

    identity: the time of its last modification in nanoseconds; without the inode, which FUSE mounts may number anew
              each time they are asked
    """

    __slots__ = ("_map", "_retries", "descriptor", "identity", "path", "size")

    def __init__(self, path: Path, retries: ReadRetries | None = None) -> None:
        """`retries`: of errors that may pass; by default those in use. Raises CorpusReadError."""
        self.descriptor = -1
        self._map: npt.NDArray[np.uint8] | None = None
        self.path = path
        self._retries = current_retries() if retries is None else retries
        tries = 0
        while self.descriptor < 0:
            try:
                self.descriptor, self.size, self.identity = _open(path)
            except OSError as error:
                tries += 1
                if not self._retries.wait(error, tries):
                    raise CorpusReadError(f"{path}: cannot be opened: {_reason(error, tries)}") from error
            except ValueError as error:  # a zero byte, or half of a surrogate pair
                raise CorpusReadError(f"{str(path)!r} is not a valid file name: {error}") from error

    def read_ranges(self, ranges: Iterable[tuple[int, int, int]], out: memoryview) -> None:
        """As `ByteFile.read_ranges`: one `preadv` each."""
        preadv, descriptor = os.preadv, self.descriptor
        for offset, count, place in ranges:
            piece = out[place : place + count]
            try:
                got = preadv(descriptor, [piece], offset)
            except OSError as error:
                self.finish_read(piece, offset, failure=error)
                continue
            if got != count:
                self.finish_read(piece, offset, got)

    def mapped(self) -> npt.NDArray[np.uint8]:
        """All bytes as an array over a map of the file, which stays one if the file is closed. Does not read.

        Looks up each time whether the file still has its size. Raises CorpusReadError if not, or if it cannot be
        mapped.
        """
        try:
            now = os.fstat(self.descriptor).st_size
            if now == self.size and self._map is None:
                self._map = np.frombuffer(mmap.mmap(self.descriptor, self.size, prot=mmap.PROT_READ), np.uint8)
        except (OSError, ValueError) as error:
            raise CorpusReadError(f'{self.path}: cannot be mapped: {error}. Set reads = "calls".') from error
        if now != self.size or self._map is None:
            raise CorpusReadError(
                f"{self.path}: was truncated or replaced after it was opened ({self.size:,} bytes then, {now:,} now). "
                "Open the corpus again."
            )
        return self._map

    def read(self, offset: int, count: int) -> bytes:
        """As `ByteFile.read`."""
        data = bytearray(count)
        self.finish_read(memoryview(data), offset)
        return bytes(data)

    def finish_read(
        self, buffer: memoryview, offset: int, done: int = 0, failure: OSError | None = None, pause: bool = True
    ) -> None:
        """Fill `buffer` (bytes) from byte `offset` of the file; the first `done` bytes of it are already there.

        failure: the error of a first try that the caller made
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
                        f"{self.path}: cannot read {wanted - done:,} bytes at byte {offset + done:,}: "
                        f"{_reason(error, tries)}"
                    ) from error
                failure = error
                continue
            if got == 0:
                raise CorpusReadError(
                    f"{self.path}: ends early: expected {wanted:,} bytes at byte {offset:,}, got {done:,}. The file "
                    f"had {self.size:,} bytes when it was opened; check whether it was truncated or replaced."
                )
            done += got

    def close(self) -> None:
        """As `ByteFile.close`."""
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)

    def _open_again(self) -> None:
        """Give the descriptor, under its number, to the file opened anew; others may be reading with it. OSError."""
        descriptor, size, identity = _open(self.path)
        try:
            if (size, identity) != (self.size, self.identity):
                raise CorpusReadError(
                    f"{self.path}: was replaced or modified after it was opened ({self.size:,} bytes, version "
                    f"{self.identity} then; {size:,} bytes, version {identity} now). Open the corpus again."
                )
            os.dup2(descriptor, self.descriptor, inheritable=False)
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        # Without `os` the process ends, which closes it. Without a descriptor, opening failed or was interrupted.
        if os is not None and hasattr(self, "descriptor"):
            self.close()


def file_identity(path: Path) -> str:
    """As `byte_file.file_identity`."""
    retries, tries = current_retries(), 0
    while True:
        try:
            return _identity(os.stat(path))
        except OSError as error:
            tries += 1
            if not retries.wait(error, tries):
                raise CorpusReadError(f"{path}: cannot be accessed: {_reason(error, tries)}") from error


def file_size(path: Path) -> int | None:
    """As `byte_file.file_size`."""
    try:
        return path.stat().st_size if path.is_file() else None
    except OSError as error:
        raise CorpusReadError(f"{path}: cannot be accessed: {error.strerror}") from error


def is_listed(path: Path) -> bool:
    """As `byte_file.is_listed`."""
    return os.path.lexists(path)


def _open(path: Path) -> tuple[int, int, str]:
    """A descriptor, and size and identity of the file. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        about = os.fstat(descriptor)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, about.st_size, _identity(about)


def _identity(about: os.stat_result) -> str:
    return str(about.st_mtime_ns)


def _reason(error: OSError, tries: int) -> str:
    reason = error.strerror or str(error)
    return f"{reason} (tried {tries} times)" if tries > 1 else reason
