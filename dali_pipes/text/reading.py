"""The documents of several files, one after another, in batches of about equal size."""

from collections.abc import Generator, Iterator, Sequence
from typing import NamedTuple

from dali_pipes.errors import ConfigError, CorpusReadError
from dali_pipes.text.arrayrecord import read_arrayrecord
from dali_pipes.text.delimited import read_delimited
from dali_pipes.text.documents import Document
from dali_pipes.text.inputs import TextFile
from dali_pipes.text.lines import read_jsonl, read_plain
from dali_pipes.text.mds import read_mds
from dali_pipes.text.streams import ByteMeter, read_chunks
from dali_pipes.text.tables import read_table
from dali_pipes.text.webdataset import read_webdataset

_RECORD_CHARACTERS = 1024  # what a whole record counts for; its real size is known only when it is encoded


class Batch(NamedTuple):
    """Documents to encode at once. read_bytes: of the files, on the disk, up to the end of the batch."""

    documents: list[Document]
    read_bytes: int


def read_documents(file: TextFile, key: str | None, separator: str | None, meter: ByteMeter) -> Iterator[Document]:
    """The documents of one file. key: of the text in a record; None for whole records, as dicts.

    Raises CorpusFormatError and CorpusReadError, naming file and place, BackendError for a missing library, ConfigError
    for whole records of a file that has none.
    """
    if file.kind in ("parquet", "arrow"):
        return read_table(file.path, file.kind, file.size, key, meter)
    if file.kind == "arrayrecord":
        return read_arrayrecord(file.path, file.size, key, meter)
    chunks = read_chunks(file.path, file.compression, meter)
    if file.kind == "jsonl":
        return read_jsonl(file.path, chunks, key)
    if file.kind in ("csv", "tsv"):
        return read_delimited(file.path, chunks, "," if file.kind == "csv" else "\t", key)
    if file.kind == "mds":
        return read_mds(file.path, chunks, key)
    if key is None:
        raise ConfigError(
            f"{file.path}: holds plain texts; expected conversations, which are records of .jsonl, .csv, Parquet, "
            "Arrow, MDS or ArrayRecord files"
        )
    if file.kind == "plain":
        return read_plain(file.path, chunks, separator)
    return read_webdataset(file.path, chunks, key)


def read_batches(
    files: Sequence[TextFile], key: str | None, separator: str | None, skip: int, batch_characters: int
) -> Generator[Batch]:
    """All documents behind the first `skip`, in batches that end once they have `batch_characters`. Blocks.

    The memory is that of a batch and its last document. What is skipped is read and parsed, but that is all.
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
                f"{file.path}: had {file.size} bytes when it was found and {meter.done - before} when it was read: it "
                "was changed meanwhile. Begin anew."
            )
        if _modified_ns(file) != file.modified_ns:
            raise CorpusReadError(f"{file.path}: was changed between being found and being read. Begin anew.")
    yield Batch(documents, meter.done)


def _modified_ns(file: TextFile) -> int:
    try:
        return file.path.stat().st_mtime_ns
    except OSError as error:
        raise CorpusReadError(f"{file.path}: cannot be read: {error.strerror or error}") from error
