"""Tables in chunks that are decoded one at a time: row groups of Parquet, compressed batches of Arrow.

    chunk 0                   chunk 1              row offsets    0 3 3 5 | 6 9
    [1 2 3] [] [4 5]          [6] [7 8 9]          extents        [0, 5] [1, 4]

The number of ids in a chunk is known only after reading its column once: the file counts empty and null rows as values.
So at the first opening several threads read all chunks, and the lengths of the rows are kept in the user's cache
folder, together with padding and documents from the columns next to the ids (`row_columns`). Later only masks, and
columns that mark padding, are read.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dali_pipes import fields
from dali_pipes.corpus.columns.list_arrays import cells_of, copy_rows, rows_of
from dali_pipes.corpus.columns.row_columns import Cells, Place, check_numbering, find_kept, find_learned, read_rows
from dali_pipes.corpus.columns.row_facts import (
    KEPT_VERSION,
    RowFacts,
    RowTotals,
    facts_of_offsets,
    join_facts,
    used_columns,
    with_names,
)
from dali_pipes.corpus.columns.scans import ColumnScans
from dali_pipes.corpus.columns.token_columns import LOSS_MASK, TokenColumns
from dali_pipes.corpus.data_file import DataFile, Int64Array
from dali_pipes.errors import CorpusFormatError, DaliPipesError
from dali_pipes.runtime import offset_cache
from dali_pipes.storage.byte_file import check_unchanged
from dali_pipes.storage.fingerprint import digest_content
from dali_pipes.uris import FilePath, Uri

LEAST_KEPT_BYTES = 1 << 16
"""Columns of fewer bytes are read again, or kept together with those of other files (`kept_tables`)."""

_MASK = np.dtype(np.uint8)
_NO_IDS = np.zeros(0, np.int64)


class RowChunks(Protocol):
    """A file of rows in chunks.

    rows:  rows of each chunk
    sizes: approximate bytes of each chunk in the file
    """

    rows: list[int]
    sizes: list[int]

    @property
    def path(self) -> FilePath: ...

    def batches(self, chunk: int, names: Sequence[str]) -> Iterator[list[Any]]:
        """The list arrays of the named columns, in that order, batch by batch. Blocks, safe for several threads.

        Raises CorpusReadError for a file that changed after it was opened, CorpusFormatError for a damaged one.
        """


@contextlib.contextmanager
def damage_named(path: FilePath, where: str) -> Iterator[None]:
    """Turn what pyarrow raises for a file that it cannot read into CorpusFormatError."""
    import pyarrow

    try:
        yield
    except DaliPipesError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, TypeError, LookupError, ArithmeticError, SystemError) as error:
        # SystemError comes from an array that claims a negative length.
        text = " ".join(str(error).split()).rstrip(".")
        raise CorpusFormatError(
            f"{path}: cannot read its {where}: {text}. The file is damaged or uses an unsupported feature of the "
            "format."
        ) from error


@dataclass
class RowReader:
    """Reads a table in chunks: lengths of rows, ids, loss mask.

    digest, identity: as in DataFile
    known_facts, known_totals: of all rows, from an earlier start; None: not known
    read_row_offsets: for plain ids; otherwise the column of ids gives the lengths of rows
    """

    chunks: RowChunks
    columns: TokenColumns
    digest: bytes
    identity: str | None
    known_facts: RowFacts | None = None
    known_totals: RowTotals | None = None
    read_row_offsets: Callable[[], Int64Array] | None = field(default=None, init=False)

    @cached_property
    def first_rows(self) -> Int64Array:
        """Rows before each chunk, and all of them: int64 (chunks + 1,)."""
        return np.cumsum(np.array([0, *self.chunks.rows], np.int64))

    @property
    def is_small(self) -> bool:
        """Whether reading the columns costs less than a separate file in the cache."""
        return sum(self.chunks.sizes) < LEAST_KEPT_BYTES

    def totals(self, scans: ColumnScans) -> RowTotals:
        """The totals of all rows; as `facts`."""
        if self.known_totals is None:
            self.known_totals = self.facts(scans).totals
        return self.known_totals

    def facts(self, scans: ColumnScans | None = None) -> RowFacts:
        """The facts of all rows: from the cache, or by reading the whole columns. Blocks."""
        if self.known_facts is not None:
            return self.known_facts
        num_chunks = len(self.chunks.rows)
        if not sum(self.chunks.rows):
            return facts_of_offsets(np.zeros(1, np.int64), self.first_rows)
        with contextlib.ExitStack() as stack:
            scan = partial(self._scan, scans or stack.enter_context(ColumnScans("reading row lengths")))
            why: str | None
            if self.is_small:
                packed, why = scan(), "the file is small"
            else:
                key = digest_content(self.digest, [self.identity])
                about = f"dali_pipes rows {KEPT_VERSION} {key} {'/'.join(self._names)}".encode()
                packed, why = offset_cache.find_or_make([self.chunks.path], "rows", about, self._is_plausible, scan)
        facts = facts_of_offsets(packed, self.first_rows) if self._is_simple else RowFacts.unpack(packed, num_chunks)
        self._check_counts(facts.counts)
        # Kept in memory if it cannot be kept on disk, or is not to be read from there.
        if why is not None or offset_cache.are_made_anew():
            self.known_facts = facts
        return facts

    def document_offsets(self) -> Int64Array:
        """Ids before each document, and all of them: int64 (D + 1,). As `facts`."""
        return self.facts().offsets

    def decode(self, counts: dict[int, int], padding: Sequence[str], chunk: int) -> npt.NDArray[Any]:
        """The ids of a chunk: counts[chunk], or another number if the file was replaced. Blocks.

        padding: columns that mark padding; none without padding
        """
        tokens, stored = self.columns.tokens, self.columns.stored
        if padding:
            parts = [np.zeros(0, stored)]
            for first_row, cells in self._cells(chunk, (tokens, *padding)):
                kept = find_kept({name: cells[name] for name in padding}, self._place(first_row))
                values = cells[tokens].values
                parts.append(values if kept is None else values[kept])
            return np.concatenate(parts)
        count = counts[chunk]
        out = np.empty(count, stored)
        done, first_row = 0, int(self.first_rows[chunk])
        for (array,) in self.chunks.batches(chunk, [tokens]):
            rows = rows_of(array, self.chunks.path, tokens, first_row)
            first_row += len(rows.lengths)
            more = int(rows.lengths.sum())
            if done + more > count:
                return np.empty(done + more, stored)  # refused for its size
            copy_rows(rows, out[done : done + more])
            done += more
        return out[:done]

    def decode_mask(self, masks: Sequence[str], padding: Sequence[str], chunk: int) -> npt.NDArray[np.uint8]:
        """For each id of a chunk 1 if it is learned, else 0. Blocks. masks: columns that say so."""
        parts = [np.zeros(0, np.uint8)]
        for first_row, cells in self._cells(chunk, (*masks, *padding)):
            place = self._place(first_row)
            kept = find_kept({name: cells[name] for name in padding}, place)
            learned = find_learned({name: cells[name] for name in masks}, kept, place)
            assert learned is not None
            parts.append(learned.view(np.uint8))
        return np.concatenate(parts)

    def _check_counts(self, counts: Int64Array) -> None:
        """Raise CorpusFormatError if chunks hold other numbers of ids than is known."""
        if self.known_totals is None or np.array_equal(counts, self.known_totals.counts):
            return
        known = self.known_totals.counts
        chunk = int(np.argmax(counts != known))
        raise CorpusFormatError(
            f"{self.chunks.path}: chunk {chunk} has {counts[chunk]:,} ids, but the file records {known[chunk]:,}: it "
            "is damaged. Copy or recreate it."
        )

    @property
    def _names(self) -> tuple[str, ...]:
        return (self.columns.tokens, *self.columns.beside)

    @property
    def _is_simple(self) -> bool:
        """Whether each row is a document, so that offsets suffice."""
        return set(self.columns.beside) <= {LOSS_MASK}

    def _scan(self, scans: ColumnScans) -> Int64Array:
        if self.known_totals is not None and not isinstance(self.chunks.path, Uri):  # read later than it was opened
            check_unchanged(self.chunks.path, self.identity)
        offsets = None if fields.LABELS in self.columns.beside else self.read_row_offsets
        lengths = None if offsets is None else np.diff(offsets())
        facts = join_facts(scans.for_chunks(partial(self._measure, lengths), self.chunks.sizes))
        check_numbering(facts.numbering, self._place(0))
        packed = facts.offsets if self._is_simple else facts.pack()
        packed.flags.writeable = False
        return packed

    def _measure(self, lengths: Int64Array | None, chunk: int) -> RowFacts:
        """The facts of a chunk, after all checks of its content. lengths: of all rows, if they are known."""
        path, first_row = self.chunks.path, int(self.first_rows[chunk])
        tokens, row, parts = self.columns.tokens, first_row, []
        # Only labels are compared with the ids; for everything else the number of ids is enough.
        uncopied = None if fields.LABELS in self.columns.beside else tokens
        for row, cells in self._cells(chunk, self._names if lengths is None else self.columns.beside, uncopied):
            if lengths is None:
                ids = cells.pop(tokens)
            else:
                count = len(next(iter(cells.values())).lengths)
                ids = Cells(lengths[row : row + count], _NO_IDS)
            parts.append(RowFacts.of(read_rows(ids, cells, self._place(row))))
            row += len(ids.lengths)
        expected = self.chunks.rows[chunk]
        if row - first_row != expected:
            raise CorpusFormatError(
                f"{path}: chunk {chunk} has {row - first_row:,} rows, but the file records {expected:,}: it is "
                "damaged. Copy or recreate it."
            )
        return join_facts(parts, one_chunk=True)

    def _cells(
        self, chunk: int, names: Sequence[str], uncopied: str | None = None
    ) -> Iterator[tuple[int, dict[str, Cells]]]:
        """The first row and the columns of each batch of a chunk. uncopied: the column that comes without values."""
        row = int(self.first_rows[chunk])
        for arrays in self.chunks.batches(chunk, names):
            cells = {}
            for name, array in zip(names, arrays, strict=True):
                rows = rows_of(array, self.chunks.path, name, row)
                cells[name] = Cells(rows.lengths, _NO_IDS) if name == uncopied else cells_of(rows)
            yield row, cells
            row += len(arrays[0])

    def _place(self, first_row: int) -> Place:
        return Place(self.chunks.path, first_row, self.columns.tokens)

    def _is_plausible(self, packed: Int64Array) -> bool:
        if self._is_simple:
            return len(packed) == sum(self.chunks.rows) + 1 and offset_cache.may_be_offsets(packed, strictly=False)
        return RowFacts.may_be_packed(packed, len(self.chunks.rows))


class PlainIds(NamedTuple):
    """Ids that need no decoding: `extents` and `read_document_offsets` of a DataFile."""

    extents: Int64Array
    read_document_offsets: Callable[[], Int64Array]


def make_data_file(
    reader: RowReader, format: str, size: int, scans: ColumnScans, plain: PlainIds | None = None
) -> DataFile:
    """The file as a corpus takes it, decoded chunk by chunk unless its ids are `plain`. Blocks to measure the rows."""
    columns, chunks = reader.columns, reader.chunks
    counts_of: dict[int, int] = {}
    totals: RowTotals | None = None
    if plain is not None:
        reader.read_row_offsets = plain.read_document_offsets
    if plain is None or columns.beside:
        totals = reader.totals(scans)
        counts_of = {chunk: count for chunk, count in enumerate(totals.counts.tolist()) if count}
    decoded = np.array([*counts_of.items()], np.int64).reshape(-1, 2)
    used = used_columns(columns.beside, totals, sum(chunks.rows), columns.unused)
    if used.padding:
        plain = None
    digest = with_names(reader.digest, (*used.padding, *used.packing))
    file = DataFile(
        path=chunks.path,
        format=format,
        size=size,
        identity=reader.identity,
        stored=columns.stored,
        data_offset=None,
        extents=decoded if plain is None else plain.extents,
        digest=digest,
        num_documents=totals.documents if totals and used.packing else sum(chunks.rows),
        read_document_offsets=(
            plain.read_document_offsets if plain is not None and not used.packing else reader.document_offsets
        ),
        decode=partial(reader.decode, counts_of, used.padding) if plain is None else None,
        columns=used,
        measure_rows=reader.facts if totals is not None and reader.known_facts is None else None,
    )
    if not used.masks:
        return file
    mask = replace(
        file,
        stored=_MASK,
        extents=decoded,
        digest=with_names(digest, () if used.masks == (LOSS_MASK,) else used.masks),
        read_document_offsets=reader.document_offsets,
        decode=partial(reader.decode_mask, used.masks, used.padding),
    )
    return replace(file, loss_mask=mask)
