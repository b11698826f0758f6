"""Files of rows in chunks that are decoded one at a time: row groups of Parquet, compressed batches of Arrow.

    chunk 0                   chunk 1              row offsets    0 3 3 5 | 6 9
    [1 2 3] [] [4 5]          [6] [7 8 9]          extents        [0, 5] [1, 4]

How many ids a chunk has is only known when its column has been read once: empty and null rows count as values in the
file's own figures. So at the first opening all chunks are read, by several threads, and the lengths of the rows are
kept in the user's cache folder.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dali_pipes import kept_files
from dali_pipes.corpus.column_scans import ColumnScans
from dali_pipes.corpus.datafile import DataFile, Int64Array
from dali_pipes.corpus.fingerprint import digest_content
from dali_pipes.corpus.list_rows import copy_rows, rows_of
from dali_pipes.corpus.token_columns import TokenColumns
from dali_pipes.errors import CorpusFormatError, DaliPipesError

LEAST_KEPT_BYTES = 1 << 16
"""Columns of fewer bytes are read again at each opening, which costs less than a file of their own."""

_KEPT_VERSION = 1
_MASK = np.dtype(np.uint8)


class RowChunks(Protocol):
    """A file of rows in chunks.

    rows:  rows of each chunk
    sizes: bytes of each chunk in the file, about
    """

    path: Path
    rows: list[int]
    sizes: list[int]

    def batches(self, chunk: int, names: Sequence[str]) -> Iterator[list[Any]]:
        """The list arrays of the named columns, in that order, batch by batch. Blocks, safe for several threads.

        Raises CorpusReadError for a file that is not the one that was opened, CorpusFormatError for a damaged one.
        """


@contextlib.contextmanager
def damage_named(path: Path, where: str) -> Iterator[None]:
    """Turn what pyarrow raises for a file that it cannot make sense of into CorpusFormatError."""
    import pyarrow

    try:
        yield
    except DaliPipesError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, LookupError, ArithmeticError, SystemError) as error:
        # The last is what Python makes of an array that says it has a negative length.
        text = " ".join(str(error).split())
        raise CorpusFormatError(
            f"{path}: {where}: {text}: the file is damaged, or of a kind that is not supported"
        ) from error


@dataclass
class RowReader:
    """What is asked of a file of rows in chunks: lengths of rows, ids, loss mask.

    digest, modified_ns: as in DataFile, the time as it was before the digest was taken
    """

    chunks: RowChunks
    columns: TokenColumns
    digest: bytes
    modified_ns: int
    first_rows: Int64Array = field(init=False)
    """Rows before each chunk, and all of them: int64 (chunks + 1,)."""

    _offsets: Int64Array | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.first_rows = np.cumsum(np.array([0, *self.chunks.rows], np.int64))

    def row_offsets(self, scans: ColumnScans | None = None) -> Int64Array:
        """Ids before each row, and all of them: int64 (rows + 1,). Kept, or read from the whole column; blocks."""
        if self._offsets is not None:
            return self._offsets
        if not sum(self.chunks.rows):
            return np.zeros(1, np.int64)
        with contextlib.ExitStack() as stack:
            scan = partial(self._scan, scans or stack.enter_context(ColumnScans("reading the lengths of rows")))
            why: str | None
            if sum(self.chunks.sizes) < LEAST_KEPT_BYTES:
                offsets, why = scan(), "the file is small"
            else:
                key = digest_content(self.digest, [self.modified_ns])
                about = f"dali_pipes rows {_KEPT_VERSION} {key} {'/'.join(self.columns.names)}".encode()
                offsets, why = kept_files.find_or_make([self.chunks.path], "rows", about, self._is_plausible, scan)
        # Nothing is lost but time: what cannot be kept on disk is kept here, and so is what is not asked of the disk.
        if why is not None or kept_files.are_made_anew():
            self._offsets = offsets
        return offsets

    def decode(self, counts: dict[int, int], column: str, stored: np.dtype[Any], chunk: int) -> npt.NDArray[Any]:
        """The values of a column in a chunk: counts[chunk], or more or fewer if the file is another one. Blocks."""
        count = counts[chunk]
        out = np.empty(count, stored)
        done, first_row = 0, int(self.first_rows[chunk])
        for (array,) in self.chunks.batches(chunk, [column]):
            rows = rows_of(array, self.chunks.path, column, first_row)
            first_row += len(rows.lengths)
            more = int(rows.lengths.sum())
            if done + more > count:
                return np.empty(done + more, stored)  # refused for its size
            copy_rows(rows, out[done : done + more])
            done += more
        return out[:done]

    def _scan(self, scans: ColumnScans) -> Int64Array:
        lengths = scans.for_chunks(self._lengths, self.chunks.sizes)
        offsets = np.concatenate([np.zeros(1, np.int64), *lengths])
        np.cumsum(offsets, out=offsets)
        offsets.flags.writeable = False
        return offsets

    def _lengths(self, chunk: int) -> Int64Array:
        """Lengths of the rows of a chunk, after all checks of what is in them."""
        path, names = self.chunks.path, self.columns.names
        first_row = row = int(self.first_rows[chunk])
        parts = [np.zeros(0, np.int64)]
        for arrays in self.chunks.batches(chunk, names):
            rows = rows_of(arrays[0], path, names[0], row)
            if len(arrays) > 1:
                self._check_mask(rows.lengths, arrays[1], row)
            parts.append(rows.lengths)
            row += len(rows.lengths)
        expected = self.chunks.rows[chunk]
        if row - first_row != expected:
            raise CorpusFormatError(
                f"{path}: chunk {chunk} holds {row - first_row} rows, but the file says {expected}: it is damaged"
            )
        return np.concatenate(parts)

    def _check_mask(self, lengths: Int64Array, mask: Any, first_row: int) -> None:
        path, name = self.chunks.path, self.columns.names[1]
        rows = rows_of(mask, path, name, first_row)
        if (rows.lengths != lengths).any():
            row = int(np.argmax(rows.lengths != lengths))
            raise CorpusFormatError(
                f"{path}: row {first_row + row}: column {name} has {rows.lengths[row]} values for {lengths[row]} ids; "
                f"a loss mask has one for each id"
            )
        values = np.empty(int(lengths.sum()), np.int64)
        copy_rows(rows, values)
        wrong = (values != 0) & (values != 1)
        if wrong.any():
            at = int(np.argmax(wrong))
            row = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
            raise CorpusFormatError(
                f"{path}: row {first_row + row}: column {name} holds {values[at]}; a loss mask holds 0 and 1"
            )

    def _is_plausible(self, offsets: Int64Array) -> bool:
        return len(offsets) == sum(self.chunks.rows) + 1 and kept_files.may_be_offsets(offsets, strictly=False)


class PlainIds(NamedTuple):
    """Ids that can be read as they lie: `extents` and `read_document_offsets` of a DataFile."""

    extents: Int64Array
    read_document_offsets: Callable[[], Int64Array]


def make_data_file(
    reader: RowReader, format: str, size: int, scans: ColumnScans, plain: PlainIds | None = None
) -> DataFile:
    """The file as a corpus takes it, decoded chunk by chunk unless its ids are `plain`. Blocks to measure the rows."""
    columns, chunks = reader.columns, reader.chunks
    decoded = np.zeros((0, 2), np.int64)
    if plain is None or columns.loss_mask is not None:
        counts = np.diff(reader.row_offsets(scans)[reader.first_rows])
        decoded = np.stack([np.arange(len(counts)), counts], axis=1)[counts > 0]
    counts_of = dict(zip(*decoded.T.tolist(), strict=True))

    def file_of(column: str, stored: np.dtype[Any], plain: PlainIds | None, mask: DataFile | None) -> DataFile:
        return DataFile(
            path=chunks.path,
            format=format,
            size=size,
            stored=stored,
            data_offset=None,
            extents=decoded if plain is None else plain.extents,
            digest=reader.digest,
            num_documents=sum(chunks.rows),
            read_document_offsets=reader.row_offsets if plain is None else plain.read_document_offsets,
            decode=partial(reader.decode, counts_of, column, stored) if plain is None else None,
            loss_mask=mask,
        )

    mask = None if columns.loss_mask is None else file_of(columns.loss_mask, _MASK, None, None)
    return file_of(columns.tokens, columns.stored, plain, mask)
