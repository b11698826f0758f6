"""Parquet files with a list column of ids, read with pyarrow one row group at a time.

    PAR1  row group 0  row group 1  ...  footer  i32 footer length  PAR1

A chunk is a row group: pyarrow decodes part of one only from its start. Only the column of ids is read, in one
positioned read; nothing is memory-mapped. The footer is read each time and compared with the one at opening, so that a
replaced file is an error and the metadata of many files need not be kept.

The footer counts the values of a column, an empty or null list among them as one. Its statistics count those, if a
writer is known to do so (`_COUNTS_NULLS`): where there are none, opening reads the footer alone, and the lengths of
rows are read when documents are needed. Otherwise, and of a small object, opening reads the column.
(Format: https://parquet.apache.org/docs/file-format/)
"""

import contextlib
import functools
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dali_pipes.corpus.columns.kept_tables import KeptTable
from dali_pipes.corpus.columns.row_chunks import RowReader, damage_named, make_data_file
from dali_pipes.corpus.columns.row_facts import RowTotals
from dali_pipes.corpus.columns.token_columns import TokenColumns, choose_columns, import_pyarrow
from dali_pipes.corpus.data_file import DataFile
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.corpus.formats.marks import PARQUET_MAGIC
from dali_pipes.corpus.formats.parquet_footer import read_footer
from dali_pipes.corpus.formats.token_run import check_stated_type
from dali_pipes.errors import CorpusFormatError, CorpusReadError, DaliPipesError
from dali_pipes.storage.byte_file import ByteFile, open_file
from dali_pipes.storage.fingerprint import digest_file, read_samples
from dali_pipes.storage.held_file import HeldFile
from dali_pipes.storage.readable_file import ReadableFile
from dali_pipes.uris import FilePath, Uri

ENCRYPTED_MAGIC = b"PARE"
BATCH_BYTES = 1 << 21
"""Approximate encoded bytes of a row group that are decoded in one step: a million two-byte ids."""
_MOST_BATCH_ROWS = 1 << 14
_HELD_BYTES = 1 << 16  # a file of at most this size is read whole, once, to open it
_PARSED_BYTES = 1 << 10  # a footer of at most this size is parsed in less time than looking it up takes
_COUNTS_NULLS = re.compile(r"parquet-cpp-arrow version (\d{2,})\.")  # from 10 on; before 6 it left out empty lists


class _Shape(NamedTuple):
    """What the footers of alike files have in common. leaf: number of the ids among the `leaves` of a row group."""

    columns: TokenColumns
    leaf: int
    leaves: int


class _Opened(NamedTuple):
    """What a footer says. totals: None if the column has to be read for them."""

    columns: TokenColumns
    rows: list[int]
    sizes: list[int]
    totals: RowTotals | None


class ParquetChunks:
    """The row groups of a Parquet file; a `RowChunks`. Holds no descriptor.

    Of an object it keeps the footer, which would take three requests for each row group; each read of an object
    compares its identity.

    rows, sizes: of each row group
    """

    def __init__(self, file: ByteFile, footer: bytes, rows: list[int], sizes: list[int]) -> None:
        self.path, self.rows, self.sizes = file.path, rows, sizes
        self._file_size, self._identity, self._footer_crc = file.size, file.identity, zlib.crc32(footer)
        self._footer = footer if isinstance(file.path, Uri) else None
        self._opened: Any = None

    @contextlib.contextmanager
    def opened_as(self, parquet: Any) -> Iterator[None]:
        """Inside, `batches` reads this `ParquetFile` for one thread, instead of opening the file each time."""
        self._opened = parquet
        try:
            yield
        finally:
            self._opened = None

    def batches(self, chunk: int, names: Sequence[str]) -> Iterator[list[Any]]:
        """As `RowChunks.batches`."""
        with contextlib.ExitStack() as stack:
            parquet = self._opened
            if parquet is None and self._footer is not None:
                file = open_file(self.path, known=(self._file_size, self._identity))
                parquet = _parquet_file(file, self._footer)
            elif parquet is None:
                file = stack.enter_context(open_file(self.path))
                if file.size != self._file_size or zlib.crc32(_read_footer(file)) != self._footer_crc:
                    raise CorpusReadError(
                        f"{self.path}: changed after the corpus was opened ({self._file_size:,} bytes then, "
                        f"{file.size:,} now). Open the corpus again."
                    )
            with damage_named(self.path, f"row group {chunk}"):
                yield from _read_group(_parquet_file(file) if parquet is None else parquet, chunk, names)


def inspect(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    """As `Format.inspect`. Blocks; reads the whole column if its rows have not been measured before."""
    path = file.path
    import_pyarrow(path)
    place = options.tables.place(file)
    if file.size <= _HELD_BYTES:
        file = HeldFile(file)
    footer, samples = _read_footer(file), read_samples(file)
    # The column of an object that was read whole costs nothing now, but several requests later.
    by_footer = not (isinstance(path, Uri) and isinstance(file, HeldFile))
    parsed = _parse(footer, options) if by_footer and len(footer) <= _PARSED_BYTES else None
    kept = place.find(footer, samples) if parsed is None else None
    parquet = None
    found = parsed if kept is None else _Opened(kept.columns, kept.rows, kept.sizes, kept.totals)
    if found is None and by_footer and len(footer) > _PARSED_BYTES:
        found = _parse(footer, options)
    if found is None:
        with damage_named(path, "footer"):
            parquet = _parquet_file(file)
            columns = choose_columns(path, parquet.schema_arrow, options.token_column, use_masks=options.use_masks)
            found = _Opened(columns, *_row_groups(path, parquet.metadata), None)
    columns = found.columns
    check_stated_type(path, "parquet", columns.stored, options.id_type)
    digest = digest_file(path, file.size, columns.stored, footer + columns.header, samples)
    chunks = ParquetChunks(file, footer, found.rows, found.sizes)
    reader = RowReader(chunks, columns, digest, file.identity, None if kept is None else kept.facts, found.totals)
    # Chunks of small tables are read one after another, in this thread.
    with chunks.opened_as(parquet if isinstance(file, HeldFile) and reader.is_small else None):
        data_file = make_data_file(reader, "parquet", file.size, options.scans)
    if kept is None and parsed is None:
        totals, facts = reader.totals(options.scans), reader.known_facts if reader.is_small else None
        place.keep(KeptTable(columns, found.rows, found.sizes, totals, facts))
    return [data_file]


def _parse(footer: bytes, options: OpenOptions) -> _Opened | None:
    """What a footer says, if that is all that opening needs to know; else None."""
    parts = read_footer(footer)
    shape = None if parts is None else _shape(parts.without_groups, options.token_column, options.use_masks)
    if parts is None or shape is None:
        return None
    rows = [group.rows for group in parts.groups]
    leaves = [group.leaves[shape.leaf] if len(group.leaves) == shape.leaves else None for group in parts.groups]
    if sum(rows) != parts.rows or any(leaf is None or leaf.nulls != 0 for leaf in leaves):
        return None
    counts = np.array([leaf.values for leaf in leaves if leaf is not None], np.int64)
    totals = RowTotals(counts, parts.rows)
    return _Opened(shape.columns, rows, [group.size for group in parts.groups], totals)


@functools.lru_cache(maxsize=16)
def _shape(footer: bytes, token_column: str | None, use_masks: bool) -> _Shape | None:
    """What pyarrow finds in a footer without row groups; None if statistics do not count the ids, or columns next to
    them have to be read, or something is wrong, which reading the whole footer will tell."""
    whole = b"".join((PARQUET_MAGIC, footer, struct.pack("<I", len(footer)), PARQUET_MAGIC))
    try:
        with damage_named(Path(), "footer"):
            import pyarrow
            from pyarrow import parquet

            opened = parquet.ParquetFile(pyarrow.BufferReader(whole))
            columns = choose_columns(Path(), opened.schema_arrow, token_column, use_masks=use_masks)
            counts_nulls = _COUNTS_NULLS.match(opened.metadata.created_by) is not None
            leaves = [opened.schema.column(number) for number in range(len(opened.schema))]
            own = [number for number, leaf in enumerate(leaves) if leaf.path.startswith(f"{columns.tokens}.")]
    except DaliPipesError:
        return None
    if columns.beside or not counts_nulls or len(own) != 1 or leaves[own[0]].max_repetition_level != 1:
        return None
    return _Shape(columns, own[0], len(leaves))


def _row_groups(path: FilePath, metadata: Any) -> tuple[list[int], list[int]]:
    """Rows, and approximate bytes, of each row group."""
    # Columns are left alone: with damaged metadata pyarrow may crash the process when asked about them.
    groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
    rows = [int(group.num_rows) for group in groups]
    sizes = [max(0, int(group.total_byte_size)) for group in groups]
    if min(rows, default=0) < 0 or sum(rows) != metadata.num_rows:
        raise CorpusFormatError(
            f"{path}: its row groups have {sum(rows):,} rows, but the footer records {metadata.num_rows:,}: it is "
            "damaged. Copy or recreate it."
        )
    return rows, sizes


def _read_group(parquet: Any, group: int, names: Sequence[str]) -> Iterator[list[Any]]:
    about = parquet.metadata.row_group(group)
    rows = int(min(max(BATCH_BYTES * about.num_rows // max(1, about.total_byte_size), 1), _MOST_BATCH_ROWS))
    for batch in parquet.iter_batches(rows, row_groups=[group], columns=list(names), use_threads=False):
        yield [batch.column(name) for name in names]


def _parquet_file(file: ByteFile, footer: bytes | None = None) -> Any:
    """`footer`: if it is known."""
    import pyarrow
    from pyarrow import parquet

    metadata = None
    if footer is not None:
        whole = b"".join((PARQUET_MAGIC, footer, struct.pack("<I", len(footer)), PARQUET_MAGIC))
        metadata = parquet.read_metadata(pyarrow.BufferReader(whole))

    # Without pre_buffer and threads everything runs in the calling thread, so that a fork loses none.
    source = (
        pyarrow.BufferReader(file.content)
        if isinstance(file, HeldFile)
        else pyarrow.PythonFile(ReadableFile(file), mode="r")
    )
    return parquet.ParquetFile(source, metadata=metadata, pre_buffer=False, page_checksum_verification=True)


def _read_footer(file: ByteFile) -> bytes:
    path, size = file.path, file.size
    tail = file.read(max(0, size - 8), min(8, size))
    if ENCRYPTED_MAGIC in (tail[4:], file.read(0, min(4, size))):
        raise CorpusFormatError(
            f"{path}: has an encrypted Parquet footer, which is not supported. Write it unencrypted."
        )
    length = struct.unpack_from("<I", tail)[0] if len(tail) == 8 else 0
    if tail[4:] != PARQUET_MAGIC or not 0 < length <= size - 12:
        raise CorpusFormatError(
            f"{path}: does not end with the footer of a Parquet file (last bytes {tail!r} of {size:,}): it is "
            "truncated or damaged. Copy or recreate it."
        )
    return file.read(size - 8 - length, length)
