"""ArrayRecord files, read with the array_record package. `record_content` finds out what the records are."""

import os
import threading
import weakref
from collections import deque
from pathlib import Path
from typing import Any

from dali_pipes.corpus.data_file import DataFile
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.corpus.formats.records import inspect_records
from dali_pipes.errors import CorpusFormatError, CorpusReadError
from dali_pipes.runtime.optional import optional_package
from dali_pipes.storage.byte_file import ByteFile, file_size
from dali_pipes.uris import Uri

_MOST_OPEN = 32
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"  # for random reads
_FAILURES = (ValueError, RuntimeError, IndexError, OSError)  # what the package raises


class ArrayRecords:
    """The records of one file. Its reader is opened when first needed, and closed when many others are in use."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self._reader: Any = None

    def __len__(self) -> int:
        return int(self._acquire().num_records())

    def read(self, first: int, last: int) -> list[bytes]:
        """As `Records.read`."""
        if first == last:
            return []
        try:
            records: list[bytes] = self._acquire().read(first, last)
        except _FAILURES as error:
            raise CorpusReadError(f"{self.path}: cannot read records {first:,} to {last - 1:,}: {error}") from error
        if len(records) != last - first:
            raise CorpusReadError(
                f"{self.path}: expected {last - first:,} records at record {first:,}, got {len(records):,}: it is "
                "damaged"
            )
        return records

    def place(self, number: int) -> str:
        """As `Records.place`."""
        return f"{self.path}: record {number:,}"

    def _acquire(self) -> Any:
        reader = self._reader  # a reference that keeps it open while it is in use
        if reader is not None:
            return reader
        found = file_size(self.path)
        if found != self.size:
            now = "missing" if found is None else f"{found:,}"
            raise CorpusReadError(
                f"{self.path}: was replaced or modified after the corpus was opened ({self.size:,} bytes then, {now} "
                "now). Open the corpus again."
            )
        reader = _open_reader(self.path)
        with _open_lock:
            self._reader = reader
            _open.append(weakref.ref(self))
            while len(_open) > _MOST_OPEN:
                oldest = _open.popleft()()
                if oldest is not None:
                    oldest._reader = None
        return reader


_open_lock = threading.Lock()
_open: deque[weakref.ref[ArrayRecords]] = deque()


def inspect(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    """As `inspect_records`. The package that reads records opens files by their names."""
    if isinstance(file.path, Uri):
        raise refuse_uri(file.path)
    return inspect_records(file, ArrayRecords(file.path, file.size), "arrayrecord", options)


def refuse_uri(uri: Uri) -> CorpusFormatError:
    """The error for an object."""
    return CorpusFormatError(
        f"{uri}: the array_record package reads local files only. Copy the data with `dali-pipes copy`, or convert it "
        "to another format."
    )


def _open_reader(path: Path) -> Any:
    with optional_package("array-record", "arrayrecord", purpose=f"to read {path}"):
        from array_record.python import array_record_module
    try:
        reader = array_record_module.ArrayRecordReader(os.fsencode(path), _OPTIONS)  # names may be other than UTF-8
        is_good = reader.ok()
    except _FAILURES as error:
        raise CorpusFormatError(f"{path}: cannot be opened as an ArrayRecord file: {error}") from error
    if not is_good:
        raise CorpusFormatError(
            f"{path}: the index at the end of this ArrayRecord file cannot be read: it is truncated, damaged or "
            "another kind of Riegeli file. Copy or recreate it."
        )
    return reader
