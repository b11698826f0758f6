"""What a format of text files is: how a file of it is recognized, and how its documents are read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dali_pipes.storage.byte_file import ByteFile
from dali_pipes.text.documents import Document
from dali_pipes.text.streams import ByteMeter, Compression, read_chunks
from dali_pipes.uris import FilePath, Uri


class FileStart(NamedTuple):
    """What a file is recognized by.

    file: open for reading. head: its first bytes, decompressed. suffix: of its name in lower case, without that of
    the compression.
    """

    file: ByteFile
    head: bytes
    suffix: str
    compression: Compression


@dataclass(frozen=True)
class TextFile:
    """An input file. It counts as changed when any field but the folder of its path differs.

    kind: name of its format in `registry`. size: bytes on disk. digest: of name, size and sampled bytes, 16 hex digits.
    identity: `ByteFile.identity`, which tells an edit that keeps the size and the sampled bytes.
    """

    path: FilePath
    kind: str
    compression: Compression
    size: int
    digest: str
    identity: str

    @property
    def version(self) -> dict[str, int | str]:
        """The identity as a run records it: of a local file its modification time in Unix nanoseconds."""
        return {"version": self.identity} if isinstance(self.path, Uri) else {"modified_ns": int(self.identity)}

    def chunks(self, meter: ByteMeter) -> Iterator[bytes]:
        """As `read_chunks`. An object that was replaced is an error."""
        return read_chunks(self.path, self.compression, meter, (self.size, self.identity))


def _never(*_: object) -> bool:
    return False


@dataclass(frozen=True)
class TextFormat:
    """One format of text files.

    description:   for messages.
    matches:       whether a file is of this format for certain, by its first bytes or its suffix.
    read:          the documents of a file: (file, key of the text or None for whole records, separator, meter).
    looks_like:    the same for a file that no format matches.
    holds_tokens:  (path, compression, whether the user set a dtype): whether the local file holds token ids, not text.
    has_records:   whether whole records can be read, such as conversations.
    data_suffixes: suffixes that mark side files of a token corpus, but data in this format.
    """

    description: str
    matches: Callable[[FileStart], bool]
    read: Callable[[TextFile, str | None, str | None, ByteMeter], Iterator[Document]]
    looks_like: Callable[[FileStart], bool] = _never
    holds_tokens: Callable[[FilePath, Compression, bool], bool] = _never
    has_records: bool = True
    data_suffixes: tuple[str, ...] = ()
