"""A small file whose bytes are all in memory, so that reading it piece by piece asks the system once."""

from collections.abc import Iterable
from typing import Self

from dali_pipes.errors import CorpusReadError
from dali_pipes.storage.byte_file import ByteFile, Range
from dali_pipes.uris import FilePath


class HeldFile:
    """A `ByteFile` with the `content` of another, as it was when this was made."""

    __slots__ = ("content", "identity", "path", "size")

    def __init__(self, file: ByteFile) -> None:
        """Read `file`, which may be closed afterward. Blocks. Raises CorpusReadError."""
        self.path: FilePath = file.path
        self.size: int = file.size
        self.identity: str = file.identity
        self.content = file.read(0, file.size)

    def read_ranges(self, ranges: Iterable[Range], out: memoryview) -> None:
        """As `ByteFile.read_ranges`. Does not block."""
        for offset, count, place in ranges:
            out[place : place + count] = self.read(offset, count)

    def read(self, offset: int, count: int) -> bytes:
        """As `ByteFile.read`. Does not block."""
        if offset + count > self.size:
            raise CorpusReadError(
                f"{self.path}: ends early: expected {count:,} bytes at byte {offset:,}, but the file has "
                f"{self.size:,} bytes"
            )
        return self.content[offset : offset + count]

    def close(self) -> None:
        """Do nothing: the memory goes with the object."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
