"""Parquet files with a list column of ids, read with pyarrow, a row group at a time.

    PAR1  row group 0  row group 1  ...  footer  i32 footer length  PAR1

A chunk is a row group: pyarrow can decode a part of one only from its start on. Of a row group only the column of ids
is read, in one positioned read; nothing is mapped. The footer is read again each time, and compared with the one at
opening, so that a file that was replaced is an error and metadata of many files need not be held.
(Format: https://parquet.apache.org/docs/file-format/)
"""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dali_pipes.corpus.columns.row_chunks import RowReader, damage_named, make_data_file
from dali_pipes.corpus.columns.scans import ColumnScans
from dali_pipes.corpus.columns.token_columns import choose_columns, digest_of_names, import_pyarrow
from dali_pipes.corpus.data_file import DataFile
from dali_pipes.errors import CorpusFormatError, CorpusReadError
from dali_pipes.storage.fingerprint import digest_file, read_samples
from dali_pipes.storage.local import OpenFile

MAGIC = b"PAR1"
ENCRYPTED_MAGIC = b"PARE"
BATCH_BYTES = 1 << 21
"""About how many bytes, encoded, of a row group are decoded at once: a million ids of two bytes."""
_MOST_BATCH_ROWS = 1 << 14


class ParquetChunks:
    """The row groups of a Parquet file; a `RowChunks`. Holds no descriptor."""

    def __init__(self, file: OpenFile, footer: bytes, metadata: Any) -> None:
        self.path = file.path
        # Nothing is asked of columns: for damaged metadata pyarrow's answer to that may be the end of the process.
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        self.rows = [int(group.num_rows) for group in groups]
        self.sizes = [max(0, int(group.total_byte_size)) for group in groups]
        self._file_size, self._footer_crc = file.size, zlib.crc32(footer)
        if min(self.rows, default=0) < 0 or sum(self.rows) != metadata.num_rows:
            raise CorpusFormatError(
                f"{file.path}: its row groups have {self.rows[:5]} ... rows, but the footer says {metadata.num_rows} "
                f"in all: it is damaged"
            )

    def batches(self, chunk: int, names: Sequence[str]) -> Iterator[list[Any]]:
        """As `RowChunks.batches`."""
        with OpenFile(self.path) as file:
            if file.size != self._file_size or zlib.crc32(_read_footer(file)) != self._footer_crc:
                raise CorpusReadError(
                    f"{self.path}: changed since the corpus was opened ({self._file_size} bytes then, {file.size} "
                    f"now). Open the corpus again."
                )
            with damage_named(self.path, f"row group {chunk}"):
                yield from _read_group(file, chunk, names)


def open_parquet(path: Path, token_column: str | None, scans: ColumnScans, *, use_masks: bool = True) -> DataFile:
    """Open and check a Parquet file; reads the whole column if its rows have not been measured before. Blocks.

    use_masks: whether columns that say which ids are learned are used

    Raises BackendError without pyarrow, ConfigError for a column that is not there, CorpusReadError, CorpusFormatError.
    """
    import_pyarrow(path)
    with OpenFile(path) as file:
        footer = _read_footer(file)
        with damage_named(path, "footer"):
            parquet = _parquet_file(file)
            columns = choose_columns(path, parquet.schema_arrow, token_column, use_masks=use_masks)
            chunks = ParquetChunks(file, footer, parquet.metadata)
        header = footer + digest_of_names(columns, parquet.schema_arrow)
        digest = digest_file(path, file.size, columns.stored, header, read_samples(file))
    return make_data_file(RowReader(chunks, columns, digest, file.modified_ns), "parquet", file.size, scans)


def _read_group(file: OpenFile, group: int, names: Sequence[str]) -> Iterator[list[Any]]:
    parquet = _parquet_file(file)
    about = parquet.metadata.row_group(group)
    rows = int(np.clip(BATCH_BYTES * about.num_rows // max(1, about.total_byte_size), 1, _MOST_BATCH_ROWS))
    for batch in parquet.iter_batches(rows, row_groups=[group], columns=list(names), use_threads=False):
        yield [batch.column(name) for name in names]


def _parquet_file(file: OpenFile) -> Any:
    import pyarrow
    from pyarrow import parquet

    # Without pre_buffer and threads all is done in the thread that asks: none is left in a forked child.
    source = pyarrow.PythonFile(_ReadOnly(file), mode="r")
    return parquet.ParquetFile(source, pre_buffer=False, page_checksum_verification=True)


def _read_footer(file: OpenFile) -> bytes:
    path, size = file.path, file.size
    tail = file.read(max(0, size - 8), min(8, size))
    if ENCRYPTED_MAGIC in (tail[4:], file.read(0, min(4, size))):
        raise CorpusFormatError(f"{path}: is a Parquet file with an encrypted footer, which cannot be read")
    length = struct.unpack_from("<I", tail)[0] if len(tail) == 8 else 0
    if tail[4:] != MAGIC or not 0 < length <= size - 12:
        raise CorpusFormatError(
            f"{path}: a Parquet file ends with a footer, its length and PAR1, but the last bytes are {tail!r} of "
            f"{size}: it is truncated or damaged. Make or copy it again."
        )
    return file.read(size - 8 - length, length)


class _ReadOnly:
    """What pyarrow asks of a Python file: positioned reads, by one thread."""

    closed = False

    def __init__(self, file: OpenFile) -> None:
        self._file, self._at = file, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, count: int = -1) -> bytearray:
        left = max(0, self._file.size - self._at)
        data = bytearray(left if count < 0 else min(count, left))
        self._file.read_into(memoryview(data), self._at)
        self._at += len(data)
        return data

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def writable(self) -> bool:
        return False

    def close(self) -> None:
        """The descriptor is its owner's to close."""
