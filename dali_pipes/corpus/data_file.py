"""What is known of one file of a corpus after it was opened and checked."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.columns.scans import ColumnScans
from dali_pipes.storage.byte_file import check_unchanged
from dali_pipes.storage.listings import expecting
from dali_pipes.storage.stores import Facts
from dali_pipes.uris import FilePath, Uri

Int64Array: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class UsedColumns:
    """Columns next to the ids of a file that make a difference.

    padding: columns that mark padding, `removed` ids of which were left out
    packing: columns that split its `rows` into more documents
    masks:   columns that say which ids are learned; `unlearned` ids are not, None: not counted
    unused:  columns of numbers whose meaning is not known
    """

    padding: tuple[str, ...] = ()
    removed: int = 0
    packing: tuple[str, ...] = ()
    rows: int = 0
    masks: tuple[str, ...] = ()
    unlearned: int | None = None
    unused: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False, repr=False)
class DataFile:
    """One file of ids. `read_document_offsets` blocks and reads the index; None without documents.

    size:        bytes when the corpus was opened
    identity:    `ByteFile.identity` when the corpus was opened
    stored:      integer dtype as stored, with byte order; native where chunks are decoded
    data_offset: byte of the first id, from which `Corpus.locate` counts; None where it counts in reading order, as
                 always where chunks are decoded
    extents:     int64 (E, 2): [first byte, number of ids] of each run of ids, in reading order, none empty; where
                 chunks are decoded [chunk number, number of ids]
    digest:      of name, size, header and sampled bytes
    decode:      None for ids that need no decoding; else a chunk's number in, its ids out: all of them, one axis,
                 contiguous, `stored`. Blocks, is safe for several threads, and raises CorpusReadError or
                 CorpusFormatError for a file that changed after the corpus was opened
    generate:    None, or what makes ids by a formula, which `path` names: for each piece its position, its length and
                 its place in an array, then that array, which it fills; safe for several threads
    measure_rows: None, or what has to find the lengths of rows before `read_document_offsets`, by reading the file or
                 from the cache; blocks, and is safe for several threads
    columns:     which other columns of a table are used
    zeros_last:  whether its last 4 KiB are ids of 0, as in a file that was allocated and never filled
    loss_mask:   None, or a file of as many bytes, 0 or 1, as this one has ids: whether each counts in the loss
    """

    path: FilePath
    format: str
    size: int
    stored: np.dtype[Any]
    data_offset: int | None
    extents: Int64Array
    digest: bytes
    num_documents: int | None = None
    read_document_offsets: Callable[[], Int64Array] | None = None
    decode: Callable[[int], npt.NDArray[Any]] | None = None
    generate: Callable[[Int64Array, Int64Array, Int64Array, npt.NDArray[Any]], None] | None = None
    measure_rows: Callable[[ColumnScans], object] | None = None
    loss_mask: "DataFile | None" = None
    identity: str | None = None
    columns: UsedColumns = UsedColumns()
    zeros_last: bool = False

    def decode_unchanged(self, chunk: int) -> npt.NDArray[Any]:
        """As `decode`, after a check that the file is still the one that was opened (CorpusReadError). Blocks."""
        assert self.decode is not None
        if isinstance(self.path, Uri) and self.identity is not None:
            with expecting(self.path, Facts(self.size, self.identity)):
                return self.decode(chunk)
        check_unchanged(self.path, self.identity)
        return self.decode(chunk)

    @property
    def num_tokens(self) -> int:
        """Ids in all extents."""
        return int(self.extents[:, 1].sum())
