"""Documents of .csv and .tsv files: one per row; the first row names the columns.

    id,text
    17,"Hello, ""world""          a quoted field may hold the delimiter, quotes (doubled) and line ends
    of two lines"
    18,Bye

Lines end in `\\n` or `\\r\\n`; a byte order mark at the start and blank lines are accepted. Every row has the same
number of fields.
"""

import codecs
import csv
from collections.abc import Iterator
from typing import Any

from dali_pipes.errors import CorpusFormatError
from dali_pipes.text.documents import Document
from dali_pipes.text.formats.lines import split_lines
from dali_pipes.text.formats.record_text import missing_column
from dali_pipes.text.formats.text_format import TextFile, TextFormat
from dali_pipes.text.json_values import decode_utf8
from dali_pipes.text.streams import ByteMeter
from dali_pipes.uris import FilePath

_LARGEST_FIELD = 2**31 - 1  # characters: the most that fits a C long on every platform


def read_delimited(path: FilePath, chunks: Iterator[bytes], delimiter: str, key: str | None) -> Iterator[Document]:
    """The texts of column `key`; the whole rows as dicts of strings if `key` is None.

    Raises CorpusFormatError, naming file and line, for a missing column, a row with more or fewer fields than the
    first, unbalanced quotes, and invalid UTF-8.
    """
    csv.field_size_limit(max(_LARGEST_FIELD, csv.field_size_limit()))  # a text is often longer than 128 KiB
    rows = csv.reader(_decoded_lines(path, chunks), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    column = 0
    for first_line, row in _numbered(path, rows):
        if names is None:
            names, column = row, _column(path, row, key)
            continue
        if len(row) != len(names):
            raise CorpusFormatError(
                f"{path}: line {first_line}: found {len(row)} fields, but line 1 names {len(names)} columns; put "
                "fields that contain the delimiter or a line break in double quotes"
            )
        content: Any = dict(zip(names, row, strict=True)) if key is None else row[column]
        yield Document(content, path, "line", first_line)


def _numbered(path: FilePath, rows: Any) -> Iterator[tuple[int, list[str]]]:
    """Each row that is not blank, with the line where it begins."""
    first_line = 1
    try:
        for row in rows:
            if row:
                yield first_line, row
            first_line = rows.line_num + 1
    except csv.Error as error:
        raise CorpusFormatError(
            f"{path}: line {first_line}: the row cannot be parsed: {error} (in line {rows.line_num}); double each "
            "quote inside a quoted field"
        ) from None


def _column(path: FilePath, names: list[str], key: str | None) -> int:
    repeated = next((name for name in names if names.count(name) > 1 and key in (None, name)), None)
    if repeated is not None:
        raise CorpusFormatError(f"{path}: line 1: {names.count(repeated)} columns are named {repeated!r}; rename one")
    if key is None:
        return 0
    if key not in names:
        raise CorpusFormatError(f"{path}: line 1: {missing_column(key, names)}")
    return names.index(key)


def _decoded_lines(path: FilePath, chunks: Iterator[bytes]) -> Iterator[str]:
    for number, line in enumerate(split_lines(chunks), 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        yield decode_utf8(line, f"{path}: line {number}") + "\n"


def _format(description: str, suffix: str, delimiter: str) -> TextFormat:
    def read(file: TextFile, key: str | None, _: str | None, meter: ByteMeter) -> Iterator[Document]:
        return read_delimited(file.path, file.chunks(meter), delimiter, key)

    return TextFormat(description, lambda start: start.suffix == suffix, read, data_suffixes=(suffix,))


CSV = _format("CSV (.csv)", ".csv", ",")
TSV = _format("TSV (.tsv)", ".tsv", "\t")
