"""One output shard: ids, their Megatron index and a loss mask, written under temporary names and renamed when finished.

tokens-00003-0001.bin         ids: uint16 up to 65,535, else uint32, or int32 for Megatron, which does not know uint32
tokens-00003-0001.idx         Megatron's index: one sequence per document, none for a document without ids
tokens-00003-0001.bin.loss    one byte per id, 1 if it is learned
"""

import contextlib
import hashlib
import os
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Literal, TypeAlias

import numpy as np

from dali_pipes.errors import CorpusWriteError, TokenRangeError
from dali_pipes.text.encoder import Encoded

Format: TypeAlias = Literal["megatron", "flat"]

UNFINISHED = ".tmp"
_INDEX_MAGIC = b"MMIDIDX\0\0"
_INDEX_CODES = {"<u2": 8, "<i4": 4}
_LONGEST_SEQUENCE = 2**31 - 1


def id_type(format: Format, largest_id: int) -> np.dtype[Any]:
    """The type of stored ids. Raises TokenRangeError for an id that does not fit any."""
    if largest_id <= 0xFFFF:
        return np.dtype("<u2")
    wide = np.dtype("<i4" if format == "megatron" else "<u4")
    if largest_id > np.iinfo(wide).max:
        raise TokenRangeError(f"id {largest_id} does not fit {wide.name}, the widest type of {format} files")
    return wide


class ShardWriter:
    """Writes one shard into `folder`: `add` documents, then `finish` or `discard`. Raises CorpusWriteError."""

    def __init__(self, folder: Path, name: str, stored: np.dtype[Any], format: Format, *, has_mask: bool) -> None:
        self.num_documents = 0
        self.num_tokens = 0
        self._stored = stored
        self._folder = folder
        self._index_name = f"{name}.idx" if format == "megatron" else None
        self._lengths = array("i")  # of documents with ids
        self._sequences = array("q", [0])  # how many sequences end before each document, and after the last
        self._ids = _HashedFile(folder, f"{name}.bin")
        self._mask = _HashedFile(folder, f"{name}.bin.loss") if has_mask else None
        self._index: _HashedFile | None = None

    def add(self, documents: Sequence[Encoded]) -> None:
        """Append documents."""
        if not documents:
            return
        ids = np.concatenate([document.ids for document in documents])
        if len(ids):
            # A cast would silently turn ids that do not fit into other ids.
            smallest, largest = int(ids.min()), int(ids.max())
            if smallest < 0 or largest > np.iinfo(self._stored).max:
                bad = smallest if smallest < 0 else largest
                raise TokenRangeError(
                    f"id {bad} does not fit {self._stored.name}; the encoder returned an id outside its stated range"
                )
        self._ids.write(ids.astype(self._stored).tobytes())
        if self._mask is not None:
            mask = np.concatenate([_mask_of(document) for document in documents])
            self._mask.write(mask.tobytes())
        for document in documents:
            if len(document.ids) > _LONGEST_SEQUENCE:
                raise TokenRangeError(
                    f"a document has {len(document.ids):,} ids; expected at most 2^31 - 1, the limit of the index"
                )
            if len(document.ids):
                self._lengths.append(len(document.ids))
            self._sequences.append(len(self._lengths))
        self.num_documents += len(documents)
        self.num_tokens += len(ids)

    def finish(self) -> dict[str, dict[str, int | str]]:
        """Rename the files to their final names, synced to disk: {name: {"bytes", "sha256"}}. Blocks.

        A shard without ids, which other readers cannot open, is not written.
        """
        if not self.num_tokens:
            self.discard()
            return {}
        if self._index_name is not None:
            self._index = _HashedFile(self._folder, self._index_name)
            self._write_index(self._index.write)
        found = {file.name: file.finish() for file in (self._ids, self._mask, self._index) if file is not None}
        sync_folder(self._folder)
        return found

    def discard(self) -> None:
        """Remove the unfinished files."""
        for file in (self._ids, self._mask, self._index):
            if file is not None:
                file.discard()

    def _write_index(self, write: Callable[[bytes], None]) -> None:
        code = _INDEX_CODES[self._stored.str]
        write(_INDEX_MAGIC + struct.pack("<QBQQ", 1, code, len(self._lengths), len(self._sequences)))
        lengths = np.array(self._lengths)
        ends = np.cumsum(lengths, dtype=np.int64)
        write(lengths.astype("<i4").tobytes())
        write(((ends - lengths) * self._stored.itemsize).astype("<i8").tobytes())
        write(np.array(self._sequences).astype("<i8").tobytes())


class _HashedFile:
    """A file that is hashed while it is written."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._path = folder / name
        self._temporary = folder / f"{name}{UNFINISHED}"
        self._digest = hashlib.sha256()
        self._size = 0
        with writing(self._temporary):
            self._file: IO[bytes] = self._temporary.open("wb")

    def write(self, data: bytes) -> None:
        with writing(self._temporary):
            self._file.write(data)
        self._digest.update(data)
        self._size += len(data)

    def finish(self) -> dict[str, int | str]:
        with writing(self._temporary):
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._temporary.rename(self._path)
        return {"bytes": self._size, "sha256": self._digest.hexdigest()}

    def discard(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()
        with contextlib.suppress(OSError):
            self._temporary.unlink()


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError into a CorpusWriteError that names `path`, except FileNotFoundError, for a removed folder."""
    try:
        yield
    except (FileNotFoundError, CorpusWriteError):
        raise
    except OSError as error:
        raise CorpusWriteError(f"{path}: cannot write the file: {error.strerror or error}") from error


def write_whole(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically, synced to disk."""
    temporary = path.with_name(f"{path.name}{UNFINISHED}")
    with writing(path):
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
        sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` survive a power failure, if the file system can."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _mask_of(document: Encoded) -> Any:
    if document.mask is None or len(document.mask) != len(document.ids):
        found = (
            "without a loss mask" if document.mask is None else f"with a loss mask of {len(document.mask):,} entries"
        )
        raise ValueError(f"the encoder returned a document of {len(document.ids):,} ids {found}")
    return document.mask.astype(np.uint8)
