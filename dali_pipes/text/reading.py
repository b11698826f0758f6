"""The documents of several files, one after another, in batches of about equal size."""

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

from dali_pipes.errors import ConfigError, CorpusReadError
from dali_pipes.storage.byte_file import file_identity
from dali_pipes.text.documents import Document
from dali_pipes.text.formats.registry import TEXT_FORMATS
from dali_pipes.text.formats.text_format import TextFile
from dali_pipes.text.streams import ByteMeter
from dali_pipes.uris import Uri

_RECORD_CHARACTERS = 1024  # counted for a whole record, whose size is known only once it is encoded


class Batch(NamedTuple):
    """Documents to encode together. read_bytes: bytes of the files, as they are on disk, up to the end of the batch."""

    documents: list[Document]
    read_bytes: int


def read_documents(file: TextFile, key: str | None, separator: str | None, meter: ByteMeter) -> Iterator[Document]:
    """The documents of one file. key: of the text in a record; None for whole records, as dicts.

    Raises CorpusFormatError and CorpusReadError, naming file and place, BackendError for a missing package, ConfigError
    for whole records of a format that has only texts.
    """
    format = TEXT_FORMATS[file.kind]
    if key is None and not format.has_records:
        others = ", ".join(other.description for other in TEXT_FORMATS.values() if other.has_records)
        raise ConfigError(f"{file.path}: {format.description} cannot hold conversations; expected {others}")
    return format.read(file, key, separator, meter)


def read_batches(
    files: Sequence[TextFile], key: str | None, separator: str | None, skip: int, batch_characters: int
) -> Generator[Batch]:
    """All documents after the first `skip`, in batches that end once they have `batch_characters`. Blocks.

    Memory holds a batch and its last document. Skipped documents are read and parsed, but not handed out.
    """
    meter = ByteMeter()
    documents: list[Document] = []
    characters = 0
    for file in files:
        before = meter.done
        for document in read_documents(file, key, separator, meter):
            if skip:
                skip -= 1
                continue
            documents.append(document)
            characters += len(document.content) if key is not None else _RECORD_CHARACTERS
            if characters >= batch_characters or len(documents) >= batch_characters // 64:
                yield Batch(documents, meter.done)
                documents, characters = [], 0
        if meter.done - before != file.size:
            raise CorpusReadError(
                f"{file.path}: was {file.size:,} bytes when it was found, but {meter.done - before:,} bytes when it "
                "was read; start again"
            )
        if not isinstance(file.path, Uri) and file_identity(file.path) != file.identity:  # reads of objects compare it
            raise CorpusReadError(f"{file.path}: was changed after it was found; start again")
    yield Batch(documents, meter.done)
