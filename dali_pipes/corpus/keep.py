"""How often each document of a corpus is read: what a quality filter or a deduplication run says.

    keep.npy    1 0 3 1        document 0 once, document 1 never, document 2 three times, document 3 once

One number for each document, in the order of the corpus and over all of its files: a `.npy` array of bool or integers,
or text with one integer a line. The fingerprint of the corpus depends on the numbers, not on how they are stored.
"""

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.formats import npy
from dali_pipes.errors import CorpusFormatError, CorpusReadError
from dali_pipes.runtime.messages import counted
from dali_pipes.storage.byte_file import ByteFile, open_file
from dali_pipes.uris import FilePath, entry_text, named_path

Copies = npt.NDArray[np.uint8]

MOST_COPIES = 255
"""Of one document. More is most likely a file of scores or of document numbers."""

_ENTRIES_A_READ = 1 << 20


@dataclass(frozen=True, eq=False)
class Keep:
    """The numbers of all documents. Immutable."""

    path: FilePath
    copies: Copies
    """(D,), read-only: 0 for a document that is dropped."""
    digest: bytes
    """SHA-256 of the numbers."""

    @property
    def kept(self) -> int:
        """Documents that are read at least once."""
        return int(np.count_nonzero(self.copies))

    @property
    def dropped(self) -> int:
        """Documents that are never read."""
        return len(self.copies) - self.kept

    @property
    def extra_copies(self) -> int:
        """Copies after the first of each document."""
        return int(self.copies.sum(dtype=np.int64)) - self.kept

    @property
    def note(self) -> str:
        """What it does, as a note on the corpus."""
        return (
            f"keep = {self.path}: {self.kept:,} of {counted(len(self.copies), 'document')} kept, {self.dropped:,} "
            f"dropped; copies added: {self.extra_copies:,}"
        )

    def as_dict(self) -> dict[str, int]:
        """The counts, JSON-able."""
        return {"kept": self.kept, "dropped": self.dropped, "extra_copies": self.extra_copies}

    def check_length(self, num_documents: int) -> None:
        """Raise `CorpusFormatError` unless there is a number for each document of the corpus."""
        if len(self.copies) != num_documents:
            raise CorpusFormatError(
                f"keep: {self.path} has {counted(len(self.copies), 'number')}, but the corpus has "
                f"{counted(num_documents, 'document')}; write one number for each document, including empty documents"
            )


def read_keep(path: str | os.PathLike[str]) -> Keep:
    """The numbers in a file. Blocks to read all of it.

    Raises CorpusReadError for an unreadable file, CorpusFormatError for one that is neither an array of integers nor
    text with an integer a line, or that holds a number below 0 or above `MOST_COPIES`.
    """
    place = named_path(entry_text(path))
    if isinstance(place, Path) and place.is_dir():
        raise CorpusReadError(f"keep: {place} is a folder; name the file in it with a number for each document")
    with open_file(place) as file:
        is_array = file.size >= len(npy.MAGIC) and file.read(0, len(npy.MAGIC)) == npy.MAGIC
        copies = _of_array(file) if is_array else _of_text(file)
        path = file.path
    copies.flags.writeable = False
    return Keep(path, copies, hashlib.sha256(copies.data).digest())


def _of_array(file: ByteFile) -> Copies:
    layout = npy.parse_npy_counts(file)
    copies, width = np.empty(layout.num_tokens, np.uint8), layout.stored.itemsize
    for first in range(0, layout.num_tokens, _ENTRIES_A_READ):
        count = min(_ENTRIES_A_READ, layout.num_tokens - first)
        data = file.read(layout.data_offset + first * width, count * width)
        copies[first : first + count] = _checked(file, np.frombuffer(data, layout.stored), first, "entry")
    return copies


def _of_text(file: ByteFile) -> Copies:
    lines = file.read(0, file.size).removesuffix(b"\n").split(b"\n") if file.size else []
    numbers = np.empty(len(lines), np.int64)
    for line, text in enumerate(lines):
        try:
            numbers[line] = int(text)
        except (ValueError, OverflowError):
            shown = text[:40].decode("utf-8", "replace")
            raise CorpusFormatError(
                f"keep: line {line + 1:,} of {file.path} is {shown!r}; expected one integer per line, or a .npy "
                "file of integers"
            ) from None
    return _checked(file, numbers, 1, "line").astype(np.uint8)


def _checked(file: ByteFile, numbers: npt.NDArray[Any], first: int, what: str) -> npt.NDArray[Any]:
    wrong = (numbers < 0) | (numbers > MOST_COPIES)
    if wrong.any():
        at = int(np.argmax(wrong))
        raise CorpusFormatError(
            f"keep: {what} {first + at:,} of {file.path} is {int(numbers[at]):,}; expected the number of times to read "
            f"the document, 0 (drop it) to {MOST_COPIES}"
        )
    return numbers
