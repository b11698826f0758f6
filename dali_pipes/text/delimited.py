"""Documents of .csv and .tsv files: one a row, the first row being the names of the columns.

    id,text
    17,"Hello, ""world""          a quoted field may hold the delimiter, quotes (doubled) and line ends
    of two lines"
    18,Bye

Lines may end in `\\n` or `\\r\\n`; a byte order mark at the start and blank lines are accepted. Every row has as many
fields as the first one.
"""

import codecs
import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dali_pipes.errors import CorpusFormatError
from dali_pipes.text.documents import Document
from dali_pipes.text.lines import missing_column, split_lines

_LARGEST_FIELD = 2**31 - 1  # characters, the most that a C long holds anywhere


def read_delimited(path: Path, chunks: Iterator[bytes], delimiter: str, key: str | None) -> Iterator[Document]:
    """The texts of column `key`; the whole rows as dicts of strings if `key` is None.

    Raises CorpusFormatError, naming file and line, for a column that is not there, a row with more or fewer fields than
    the first, quotes that do not match, and what is not UTF-8.
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
                f"{path}: line {first_line}: {len(row)} fields, but line 1 names {len(names)} columns; put fields "
                "that contain the delimiter or a line break in double quotes"
            )
        content: Any = dict(zip(names, row, strict=True)) if key is None else row[column]
        yield Document(content, path, "line", first_line)


def _numbered(path: Path, rows: Any) -> Iterator[tuple[int, list[str]]]:
    """Each row that is not blank, with the line that it begins in."""
    first_line = 1
    try:
        for row in rows:
            if row:
                yield first_line, row
            first_line = rows.line_num + 1
    except csv.Error as error:
        raise CorpusFormatError(
            f"{path}: line {first_line}: cannot be parsed: {error} (found in line {rows.line_num}); double the quotes "
            "inside a quoted field"
        ) from None


def _column(path: Path, names: list[str], key: str | None) -> int:
    repeated = next((name for name in names if names.count(name) > 1 and key in (None, name)), None)
    if repeated is not None:
        raise CorpusFormatError(f"{path}: line 1: {names.count(repeated)} columns are named {repeated!r}; rename them")
    if key is None:
        return 0
    if key not in names:
        raise CorpusFormatError(f"{path}: line 1: {missing_column(key, names)}")
    return names.index(key)


def _decoded_lines(path: Path, chunks: Iterator[bytes]) -> Iterator[str]:
    for number, line in enumerate(split_lines(chunks), 1):
        if number == 1:
            line = line.removeprefix(codecs.BOM_UTF8)
        try:
            yield line.decode("utf-8") + "\n"
        except UnicodeDecodeError as error:
            raise CorpusFormatError(
                f"{path}: line {number}: byte {error.start} of the line, 0x{line[error.start]:02x}, is not UTF-8 "
                f"({error.reason}); save the file as UTF-8"
            ) from None
