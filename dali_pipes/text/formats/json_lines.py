"""Documents of JSON Lines files: one JSON object per line.

Lines end at `\\n` only: U+2028, U+0085 and `\\r` may be inside strings. `\\r\\n`, blank lines, a byte order mark at the
start and a missing last `\\n` are accepted. Lines are bytes until they are decoded as strict UTF-8 and parsed.
"""

import codecs
from collections.abc import Iterator

from dali_pipes.text.documents import Document, looks_like_text
from dali_pipes.text.formats.lines import split_lines
from dali_pipes.text.formats.record_text import text_of
from dali_pipes.text.formats.text_format import FileStart, TextFile, TextFormat
from dali_pipes.text.json_values import decode_utf8, parse_object
from dali_pipes.text.streams import ByteMeter
from dali_pipes.uris import FilePath

_SUFFIXES = (".jsonl", ".ndjson", ".json", ".jl")


def read_json_lines(path: FilePath, chunks: Iterator[bytes], key: str | None) -> Iterator[Document]:
    """The text under `key` of each line, "" for null; the whole objects if `key` is None.

    Raises CorpusFormatError, naming file and line, for invalid UTF-8 or JSON, and for a line that is not an object with
    a string under `key`.
    """
    for number, line in enumerate(split_lines(chunks), 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line.strip():
            continue
        place = f"{path}: line {number}"
        record = parse_object(decode_utf8(line, place), place)
        yield Document(record if key is None else text_of(record, key, place), path, "line", number)


def _read(file: TextFile, key: str | None, _: str | None, meter: ByteMeter) -> Iterator[Document]:
    return read_json_lines(file.path, file.chunks(meter), key)


def _begins_an_object(start: FileStart) -> bool:
    return looks_like_text(start.head) and start.head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"{"


JSON_LINES = TextFormat(
    "JSON Lines (.jsonl)", lambda start: start.suffix in _SUFFIXES, _read, looks_like=_begins_an_object
)
