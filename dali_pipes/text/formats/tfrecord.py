"""Documents of TFRecord files, also compressed with gzip. `record_documents` finds out what the records are."""

from collections.abc import Iterator

from dali_pipes.corpus.formats import marks, tfrecord
from dali_pipes.text.documents import Document
from dali_pipes.text.formats.record_documents import documents_of, hold_tokens
from dali_pipes.text.formats.text_format import FileStart, TextFile, TextFormat
from dali_pipes.text.streams import ByteMeter, ChunkReader, Compression, read_chunks
from dali_pipes.uris import FilePath


def _records(path: FilePath, chunks: Iterator[bytes]) -> Iterator[bytes]:
    return tfrecord.stream_records(path, ChunkReader(chunks).read)


def _read(file: TextFile, key: str | None, _: str | None, meter: ByteMeter) -> Iterator[Document]:
    return documents_of(file.path, _records(file.path, file.chunks(meter)), key)


def _holds_tokens(path: FilePath, compression: Compression, has_dtype: bool) -> bool:
    return hold_tokens(path, _records(path, read_chunks(path, compression, ByteMeter())), has_dtype)


def _is_tfrecord(start: FileStart) -> bool:
    return marks.has_tfrecord_frame(start.head) or marks.is_named_tfrecord(start.file)


TFRECORD = TextFormat("TFRecord", _is_tfrecord, _read, holds_tokens=_holds_tokens)
