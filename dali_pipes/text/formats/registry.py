"""All formats of text files by name. A new format is a module and a line here.

The order decides: a file is of the first format that matches it, by its first bytes or its suffix, else of the first
one that it looks like.
"""

from dali_pipes.storage.byte_file import ByteFile, open_file
from dali_pipes.text.formats import arrayrecord, delimited, json_lines, mds, plain_text, tables, tfrecord, webdataset
from dali_pipes.text.formats.text_format import FileStart, TextFormat
from dali_pipes.text.streams import ByteMeter, Compression, compression_of, read_chunks, suffix_inside
from dali_pipes.uris import FilePath

TEXT_FORMATS: dict[str, TextFormat] = {
    "arrow": tables.ARROW,
    "parquet": tables.PARQUET,
    "arrayrecord": arrayrecord.ARRAY_RECORD,
    "tfrecord": tfrecord.TFRECORD,
    "mds": mds.MDS,
    "webdataset": webdataset.WEBDATASET,
    "jsonl": json_lines.JSON_LINES,
    "csv": delimited.CSV,
    "tsv": delimited.TSV,
    "plain": plain_text.PLAIN_TEXT,
}
DATA_SUFFIXES = tuple(suffix for found in TEXT_FORMATS.values() for suffix in found.data_suffixes)

_HEAD_BYTES = 4096


def recognize(path: FilePath) -> tuple[str, Compression] | None:
    """Name of a file's format, and its compression; None for a file that is not text. Reads its first bytes.

    A table need not have a column of text, though.
    """
    with open_file(path) as file:
        return recognize_file(file)


def recognize_file(file: ByteFile) -> tuple[str, Compression] | None:
    """The same for an open file."""
    head = file.read(0, min(file.size, _HEAD_BYTES))
    compression = compression_of(head)
    if compression:
        chunks = read_chunks(file.path, compression, ByteMeter(), (file.size, file.identity))
        head = next(chunks, b"")[:_HEAD_BYTES]
    start = FileStart(file, head, suffix_inside(file.path), compression)
    for name, found in TEXT_FORMATS.items():
        if found.matches(start):
            return name, compression
    for name, found in TEXT_FORMATS.items():
        if found.looks_like(start):
            return name, compression
    return None
