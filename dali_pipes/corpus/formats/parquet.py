"""Parquet files with a list column of ids, read with pyarrow one row group at a time.

    PAR1  row group 0  row group 1  ...  footer  i32 footer length  PAR1

A chunk is a row group: pyarrow decodes part of one only from its start. Only the column of ids is read, in one
positioned read; nothing is memory-mapped. The footer is read each time and compared with the one at opening, so that a
replaced file is an error and the metadata of many files need not be kept.
(Format: https://parquet.apache.org/docs/file-format/)
"""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dali_pipes.corpus.columns.row_chunks import RowReader, damage_named, make_data_file
from dali_pipes.corpus.columns.token_columns import choose_columns, digest_of_names, import_pyarrow
from dali_pipes.corpus.data_file import DataFile
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.corpus.formats.token_run import check_stated_type
from dali_pipes.errors import CorpusFormatError, CorpusReadError
from dali_pipes.storage.byte_file import ByteFile, open_file
from dali_pipes.storage.fingerprint import digest_file, read_samples

MAGIC = b"PAR1"
ENCRYPTED_MAGIC = b"PARE"
BATCH_BYTES = 1 << 21
"""Approximate encoded bytes of a row group that are decoded in one step: a million two-byte ids."""
_MOST_BATCH_ROWS = 1 << 14


class ParquetChunks:
    """The row groups of a Parquet file; a `RowChunks`. Holds no descriptor."""

    def __init__(self, file: ByteFile, footer: bytes, metadata: Any) -> None:
        self.path = file.path
        # Columns are left alone: with damaged metadata pyarrow may crash the process when asked about them.
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        self.rows = [int(group.num_rows) for group in groups]
        self.sizes = [max(0, int(group.total_byte_size)) for group in groups]
        self._file_size, self._footer_crc = file.size, zlib.crc32(footer)
        if min(self.rows, default=0) < 0 or sum(self.rows) != metadata.num_rows:
            raise CorpusFormatError(
                f"{file.path}: its row groups have {sum(self.rows):,} rows, but the footer records "
                f"{metadata.num_rows:,}: it is damaged. Copy or recreate it."
            )

    def batches(self, chunk: int, names: Sequence[str]) -> Iterator[list[Any]]:
        """As `RowChunks.batches`."""
        with open_file(self.path) as file:
            if file.size != self._file_size or zlib.crc32(_read_footer(file)) != self._footer_crc:
                raise CorpusReadError(
                    f"{self.path}: changed after the corpus was opened ({self._file_size:,} bytes then, "
                    f"{file.size:,} now). Open the corpus again."
                )
            with damage_named(self.path, f"row group {chunk}"):
                yield from _read_group(file, chunk, names)


def recognize(file: ByteFile, head: bytes) -> bool:
    """Whether a file starts as these do."""
    return head.startswith(MAGIC)


def is_whole(file: ByteFile) -> bool:
    """Whether it ends as these do."""
    return file.read(max(0, file.size - len(MAGIC)), min(file.size, len(MAGIC))) == MAGIC


def inspect(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    """As `Format.inspect`. Blocks; reads the whole column if its rows have not been measured before."""
    path = file.path
    import_pyarrow(path)
    footer = _read_footer(file)
    with damage_named(path, "footer"):
        parquet = _parquet_file(file)
        columns = choose_columns(path, parquet.schema_arrow, options.token_column, use_masks=options.use_masks)
        chunks = ParquetChunks(file, footer, parquet.metadata)
    check_stated_type(path, "parquet", columns.stored, options.id_type)
    header = footer + digest_of_names(columns, parquet.schema_arrow)
    digest = digest_file(path, file.size, columns.stored, header, read_samples(file))
    return [make_data_file(RowReader(chunks, columns, digest, file.identity), "parquet", file.size, options.scans)]


def _read_group(file: ByteFile, group: int, names: Sequence[str]) -> Iterator[list[Any]]:
    parquet = _parquet_file(file)
    about = parquet.metadata.row_group(group)
    rows = int(np.clip(BATCH_BYTES * about.num_rows // max(1, about.total_byte_size), 1, _MOST_BATCH_ROWS))
    for batch in parquet.iter_batches(rows, row_groups=[group], columns=list(names), use_threads=False):
        yield [batch.column(name) for name in names]


def _parquet_file(file: ByteFile) -> Any:
    import pyarrow
    from pyarrow import parquet

    # Without pre_buffer and threads everything runs in the calling thread, so that a fork loses none.
    source = pyarrow.PythonFile(_ReadOnly(file), mode="r")
    return parquet.ParquetFile(source, pre_buffer=False, page_checksum_verification=True)


def _read_footer(file: ByteFile) -> bytes:
    path, size = file.path, file.size
    tail = file.read(max(0, size - 8), min(8, size))
    if ENCRYPTED_MAGIC in (tail[4:], file.read(0, min(4, size))):
        raise CorpusFormatError(
            f"{path}: has an encrypted Parquet footer, which is not supported. Write it unencrypted."
        )
    length = struct.unpack_from("<I", tail)[0] if len(tail) == 8 else 0
    if tail[4:] != MAGIC or not 0 < length <= size - 12:
        raise CorpusFormatError(
            f"{path}: does not end with the footer of a Parquet file (last bytes {tail!r} of {size:,}): it is "
            "truncated or damaged. Copy or recreate it."
        )
    return file.read(size - 8 - length, length)


class _ReadOnly:
    """A Python file for pyarrow, over a `ByteFile`; for one thread."""

    closed = False

    def __init__(self, file: ByteFile) -> None:
        self._file, self._at = file, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytearray:
        left = max(0, self._file.size - self._at)
        data = bytearray(left if count < 0 else min(count, left))
        self._file.read_ranges([(self._at, len(data), 0)], memoryview(data))
        self._at += len(data)
        return data

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing: the owner of the file closes it."""
