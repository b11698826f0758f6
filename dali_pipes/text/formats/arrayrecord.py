"""Documents of ArrayRecord files. `record_documents` finds out what the records are."""

from collections.abc import Iterator

from dali_pipes.corpus.formats.arrayrecord import ArrayRecords, refuse_uri
from dali_pipes.corpus.formats.marks import ARRAYRECORD_MAGIC
from dali_pipes.storage.byte_file import file_size
from dali_pipes.text.documents import Document
from dali_pipes.text.formats.record_documents import documents_of, hold_tokens
from dali_pipes.text.formats.text_format import FileStart, TextFile, TextFormat
from dali_pipes.text.streams import ByteMeter, Compression
from dali_pipes.uris import FilePath, Uri

_RECORDS_AT_ONCE = 256


def _records(path: FilePath, size: int, meter: ByteMeter) -> Iterator[bytes]:
    """All records. Blocks. size: bytes of the file, spread evenly over its records for the meter."""
    if isinstance(path, Uri):
        raise refuse_uri(path)
    records, before = ArrayRecords(path, size), meter.done
    count = len(records)
    for first in range(0, count, _RECORDS_AT_ONCE):
        for number, record in enumerate(records.read(first, min(first + _RECORDS_AT_ONCE, count)), first + 1):
            yield record
            meter.done = before + size * number // count
    meter.done = before + size


def _read(file: TextFile, key: str | None, _: str | None, meter: ByteMeter) -> Iterator[Document]:
    return documents_of(file.path, _records(file.path, file.size, meter), key)


def _holds_tokens(path: FilePath, compression: Compression, has_dtype: bool) -> bool:
    return hold_tokens(path, _records(path, file_size(path) or 0, ByteMeter()), has_dtype)


def _is_array_record(start: FileStart) -> bool:
    return start.head.startswith(ARRAYRECORD_MAGIC) and not start.compression


ARRAY_RECORD = TextFormat("ArrayRecord", _is_array_record, _read, holds_tokens=_holds_tokens)
