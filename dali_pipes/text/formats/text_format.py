"""What a format of text files is: how a file of it is recognized, and how its documents are read."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dali_pipes.storage.local import LocalFile
from dali_pipes.text.documents import Document
from dali_pipes.text.streams import ByteMeter, Compression


class FileStart(NamedTuple):
    """What a file is recognized by.

    file: open for reading. head: its first bytes, decompressed. suffix: of its name in lower case, without that of
    the compression.
    """

    file: LocalFile
    head: bytes
    suffix: str
    compression: Compression


@dataclass(frozen=True)
class TextFile:
    """An input file. It counts as changed when any field but the folder of its path differs.

    kind: name of its format in `registry`. size: bytes on disk. digest: of name, size and sampled bytes, 16 hex digits.
    modified_ns: modification time, Unix nanoseconds: it tells an edit that keeps the size and the sampled bytes.
    """

    path: Path
    kind: str
    compression: Compression
    size: int
    digest: str
    modified_ns: int


def _never(*_: object) -> bool:
    return False


@dataclass(frozen=True)
class TextFormat:
    """One format of text files.

    description:   for messages.
    matches:       whether a file is of this format for certain, by its first bytes or its suffix.
    read:          the documents of a file: (file, key of the text or None for whole records, separator, meter).
    looks_like:    the same for a file that no format matches.
    holds_tokens:  (path, compression, whether the user set a dtype): whether the file holds token ids rather than text.
    has_records:   whether whole records can be read, such as conversations.
    data_suffixes: suffixes that mark side files of a token corpus, but data in this format.
    """

    description: str
    matches: Callable[[FileStart], bool]
    read: Callable[[TextFile, str | None, str | None, ByteMeter], Iterator[Document]]
    looks_like: Callable[[FileStart], bool] = _never
    holds_tokens: Callable[[Path, Compression, bool], bool] = _never
    has_records: bool = True
    data_suffixes: tuple[str, ...] = ()
