"""A `ByteFile` as a Python file, for libraries that read from one."""

import os

from dali_pipes.storage.byte_file import ByteFile


class ReadableFile:
    """For one thread. Reads block; CorpusReadError."""

    closed = False

    def __init__(self, file: ByteFile) -> None:
        self._file, self._at = file, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytearray:
        left = max(0, self._file.size - self._at)
        data = bytearray(left if count < 0 else min(count, left))
        self._file.read_ranges([(self._at, len(data), 0)], memoryview(data))
        self._at += len(data)
        return data

    def readinto(self, out: memoryview) -> int:
        count = max(0, min(len(out), self._file.size - self._at))
        self._file.read_ranges([(self._at, count, 0)], out[:count])
        self._at += count
        return count

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def flush(self) -> None:
        """Nothing, as for any file that is read."""

    def close(self) -> None:
        """Nothing: the owner of the file closes it."""
