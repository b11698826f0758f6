"""Documents of Parquet and Arrow IPC files (file and stream format): one per row, in the order of the rows.

A text column is string, large_string, string_view or UTF-8 binary, also dictionary-encoded. A null is an empty
document. Files are read in batches of rows: memory holds a batch and the row group or record batch it comes from.
"""

import contextlib
import os
from collections.abc import Callable, Generator, Iterator
from io import BufferedReader
from typing import Any

from dali_pipes.corpus.columns.token_columns import NAMES, choose_columns, import_pyarrow
from dali_pipes.corpus.formats.marks import is_arrow_stream
from dali_pipes.errors import CorpusFormatError, CorpusReadError
from dali_pipes.fields import without_nulls
from dali_pipes.storage.byte_file import open_file
from dali_pipes.storage.readable_file import ReadableFile
from dali_pipes.text.documents import Document
from dali_pipes.text.formats.record_text import missing_column
from dali_pipes.text.formats.text_format import FileStart, TextFile, TextFormat
from dali_pipes.text.json_values import decode_utf8
from dali_pipes.text.streams import ByteMeter, Compression
from dali_pipes.uris import FilePath, Uri

_BATCH_ROWS = 1024
_ARROW_READ_BYTES = 8 << 20
_PARQUET_MAGIC, _ARROW_MAGIC = b"PAR1", b"ARROW1\0\0"


def read_table(file: TextFile, key: str | None, meter: ByteMeter) -> Iterator[Document]:
    """The texts of column `key`; the whole rows as dicts if `key` is None, without nulls at any depth: every row has
    the fields of all rows, so a null says no more than a missing key.

    meter: counts the bytes of the file evenly over its rows.
    Raises CorpusFormatError for a column that is missing or not text, and for damaged files.
    """
    path, number, before = file.path, 1, meter.done
    with _table_errors(path), contextlib.closing(_batches(file, key)) as batches:
        for batch, share in batches:
            contents = _records(batch) if key is None else _texts(path, batch.column(0), number)
            for content in contents:
                yield Document(content, path, "row", number)
                number += 1
            meter.done = before + int(file.size * share)
    meter.done = before + file.size


def _holds_tokens(path: FilePath, kind: str) -> bool:
    """Whether the table holds token ids: in a column with one of the usual names, or in one without text next to it."""
    with _table_errors(path):
        if kind == "parquet":
            import pyarrow.parquet

            with _source(path) as source, pyarrow.parquet.ParquetFile(source) as file:
                schema = file.schema_arrow
        else:
            with _open_arrow(path) as reader:
                schema = reader.schema
    try:
        column = choose_columns(path, schema, None).tokens
    except CorpusFormatError:
        return False
    return column in NAMES or not any(_is_text(field.type) for field in schema)


def _batches(file: TextFile, key: str | None) -> Generator[tuple[Any, float]]:
    """Record batches of limited size, with the share of the file that is done after each."""
    path, known = file.path, (file.size, file.identity)
    if file.kind == "parquet":
        import pyarrow.parquet

        with _source(path, known) as source, pyarrow.parquet.ParquetFile(source) as table:
            columns = None if key is None else [_text_column(path, table.schema_arrow, key)]
            done, total = 0, max(1, table.metadata.num_rows)
            for batch in table.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                done += batch.num_rows
                yield batch, done / total
        return
    with _open_arrow(path, known) as reader:
        column = None if key is None else _text_column(path, reader.schema, key)
        is_file = hasattr(reader, "num_record_batches")
        total = reader.num_record_batches if is_file else 0
        # A stream does not say how many batches it has: it counts as done when it ends.
        parts = (reader.get_batch(at) for at in range(total)) if is_file else reader
        for at, part in enumerate(parts, 1):
            chosen = part if column is None else part.select([column])
            for first in range(0, chosen.num_rows, _BATCH_ROWS):
                yield chosen.slice(first, _BATCH_ROWS), at / total if total else 0.0


@contextlib.contextmanager
def _open_arrow(path: FilePath, known: tuple[int, str] | None = None) -> Iterator[Any]:
    import pyarrow as pa

    with _source(path, known, _ARROW_READ_BYTES) as source:
        is_file = source.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC
        source.seek(0)
        with pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source) as reader:
            yield reader


def _source(path: FilePath, known: tuple[int, str] | None = None, buffer_bytes: int = 0) -> Any:
    """A file for pyarrow. Read, not memory-mapped: a file that shrinks meanwhile raises an error instead of SIGBUS.
    The name is bytes, since names need not be UTF-8.

    known, buffer_bytes: of an object: size and identity; how many bytes small reads ask for together
    """
    import pyarrow as pa

    if isinstance(path, Uri):
        source: Any = ReadableFile(open_file(path, known=known))
        return pa.PythonFile(BufferedReader(source, buffer_bytes) if buffer_bytes else source, mode="r")
    return pa.OSFile(os.fsencode(path), "rb")


@contextlib.contextmanager
def _table_errors(path: FilePath) -> Iterator[None]:
    pa = import_pyarrow(path)
    try:
        yield
    except pa.ArrowException as error:
        raise CorpusFormatError(f"{path}: cannot be read as a table: {_first_line(error)}") from error
    except UnicodeDecodeError as error:
        raise CorpusFormatError(f"{path}: a string is not valid UTF-8: {error}") from error
    except OSError as error:
        if isinstance(error, CorpusReadError):
            raise
        if error.errno is None:  # pyarrow's way to report a truncated file
            raise CorpusFormatError(f"{path}: cannot be read as a table: {_first_line(error)}") from error
        raise CorpusReadError(f"{path}: cannot be read: {_first_line(error)}") from error


def _text_column(path: FilePath, schema: Any, key: str) -> str:
    import pyarrow as pa

    indices = schema.get_all_field_indices(key)
    if len(indices) != 1:
        problem = (
            missing_column(key, schema.names)
            if not indices
            else f"{len(indices)} columns are named {key!r}; rename one"
        )
        raise CorpusFormatError(f"{path}: {problem}")
    found = schema.field(indices[0]).type
    if not (_is_text(found) or pa.types.is_null(found)):
        raise CorpusFormatError(f"{path}: column {key!r} is of type {found}; expected strings")
    return key


def _is_text(column: Any) -> bool:
    import pyarrow as pa

    plain = column.value_type if pa.types.is_dictionary(column) else column
    kinds = pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary
    return any(check(plain) for check in (*kinds, pa.types.is_large_binary))


def _texts(path: FilePath, column: Any, number: int) -> list[str]:
    texts = []
    for row, value in enumerate(column.to_pylist(), number):
        text = decode_utf8(value, f"{path}: row {row}") if isinstance(value, bytes) else value
        texts.append("" if text is None else text)
    return texts


def _records(batch: Any) -> list[Any]:
    return [without_nulls(_plain(row)) for row in batch.to_pylist()]


def _plain(value: Any) -> Any:
    """The value with its maps, which pyarrow returns as lists of pairs, as dicts."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    if value and all(isinstance(item, tuple) for item in value):
        return {key: _plain(item) for key, item in value}
    return [_plain(item) for item in value]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _is_arrow(start: FileStart) -> bool:
    is_marked = start.head.startswith(_ARROW_MAGIC) or is_arrow_stream(start.file, start.head)
    return is_marked and not start.compression


def _is_parquet(start: FileStart) -> bool:
    return start.head.startswith(_PARQUET_MAGIC) and not start.compression


def _format(description: str, kind: str, matches: Callable[[FileStart], bool]) -> TextFormat:
    def read(file: TextFile, key: str | None, _: str | None, meter: ByteMeter) -> Iterator[Document]:
        return read_table(file, key, meter)

    def holds_tokens(path: FilePath, compression: Compression, has_dtype: bool) -> bool:
        return _holds_tokens(path, kind)

    return TextFormat(description, matches, read, holds_tokens=holds_tokens)


ARROW = _format("Arrow", "arrow", _is_arrow)
PARQUET = _format("Parquet", "parquet", _is_parquet)
