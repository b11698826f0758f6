"""The bytes of one file, wherever it is: what formats read from, and the way from a path to it.

    ranges    (byte 4096, 8 bytes, to place 0)  (byte 0, 8 bytes, to place 8)
    out       [4096 ... 4103][0 ... 7]

`LocalFile` is the implementation for disks and mounted file systems, `ObjectFile` that for URIs. Another kind of
storage is another implementation and a line in each of the functions below.
"""

from collections.abc import Iterable
from typing import Protocol, Self, TypeAlias

from dali_pipes.errors import CorpusReadError
from dali_pipes.storage import local
from dali_pipes.storage.listings import current_listings, expected_facts
from dali_pipes.storage.object_file import ObjectFile, look_up_together
from dali_pipes.storage.retries import ReadRetries
from dali_pipes.uris import FilePath, Uri

Range: TypeAlias = tuple[int, int, int]
"""First byte in the file, number of bytes, and first byte in the memory that they go to."""


class ByteFile(Protocol):
    """One file that is open for reading. Safe for several threads: every read names its own place.

    path:     where it is, for messages and for the files next to it
    size:     bytes when it was opened
    identity: differs once the content has been replaced: a time of modification, an entity tag, a generation
    """

    @property
    def path(self) -> FilePath: ...

    @property
    def size(self) -> int: ...

    @property
    def identity(self) -> str: ...

    def read_ranges(self, ranges: Iterable[Range], out: memoryview) -> None:
        """Fill the places in `out` (bytes) with these ranges. Blocks, and releases the GIL while it waits.

        Raises CorpusReadError if a range cannot be read to its last byte; then others may be missing, too.
        """

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from byte `offset`. Blocks. Raises CorpusReadError if the file ends before that."""

    def close(self) -> None:
        """Close now; only for an owner that knows it is the only reader. Idempotent."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


def open_file(path: FilePath, retries: ReadRetries | None = None, known: tuple[int, str] | None = None) -> ByteFile:
    """The file at `path`. Blocks to open it. Raises CorpusReadError.

    retries: of errors that may pass; by default those in use in this thread
    known:   size and identity; an object with another one cannot be read, and nothing is asked before that
    """
    if isinstance(path, Uri):
        return ObjectFile(path, retries, known or expected_facts(path))
    return local.LocalFile(path, retries)


def file_identity(path: FilePath) -> str:
    """`ByteFile.identity` of the file at `path`, without opening it. Blocks for a look-up. Raises CorpusReadError."""
    if not isinstance(path, Uri):
        return local.file_identity(path)
    facts = current_listings().facts(path)
    if facts is None:
        raise CorpusReadError(f"{path}: does not exist any more. Open the corpus again.")
    return facts.identity


def file_size(path: FilePath) -> int | None:
    """Bytes of the file at `path`, None if there is none. Blocks for a look-up. Raises CorpusReadError."""
    if not isinstance(path, Uri):
        return local.file_size(path)
    facts = current_listings().facts(path)
    return None if facts is None else facts.size


def is_listed(path: FilePath) -> bool:
    """Whether something is at `path`; also a link to a missing file, which cannot be opened. Blocks for a look-up."""
    return file_size(path) is not None if isinstance(path, Uri) else local.is_listed(path)


def look_up_all(paths: Iterable[FilePath]) -> None:
    """Before each of these is asked for: look up those that are URIs, all together. Blocks."""
    look_up_together(path for path in paths if isinstance(path, Uri))


def check_unchanged(path: FilePath, expected: str | None, found: str | None = None) -> None:
    """Raise CorpusReadError for a file whose identity is not the `expected` one, even if its size is.

    expected: None: not known, nothing is compared
    found:    None: look it up, which blocks
    """
    if expected is None:
        return
    found = file_identity(path) if found is None else found
    if found != expected:
        raise CorpusReadError(
            f"{path}: was replaced or modified after the corpus was opened (version {expected} then, {found} now). "
            "Open the corpus again."
        )
