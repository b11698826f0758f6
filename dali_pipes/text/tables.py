"""Documents of Parquet and Arrow IPC files, both kinds: one a row, in the order of the rows.

A text column is string, large_string, string_view or UTF-8 binary, also dictionary-encoded. A null is an empty
document. Read batch by batch: the memory is that of a batch and of the row group or record batch it comes from.
"""

import contextlib
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from dali_pipes.corpus.columns.token_columns import NAMES, choose_columns, import_pyarrow
from dali_pipes.errors import CorpusFormatError, CorpusReadError
from dali_pipes.fields import without_nulls
from dali_pipes.text.documents import Document
from dali_pipes.text.lines import missing_column
from dali_pipes.text.streams import ByteMeter

_BATCH_ROWS = 1024


def read_table(path: Path, kind: str, size: int, key: str | None, meter: ByteMeter) -> Iterator[Document]:
    """The texts of column `key`; the whole rows as dicts if `key` is None, without what is null at any depth: every
    row has the fields of all rows, so that a null says no more than a key that is not there.

    kind: "parquet" or "arrow". size: bytes of the file, spread evenly over its rows for the meter.
    Raises CorpusFormatError for a column that is not there or holds no text, and for damaged files.
    """
    number, before = 1, meter.done
    with _table_errors(path), contextlib.closing(_batches(path, kind, key)) as batches:
        for batch, share in batches:
            contents = _records(batch) if key is None else _texts(path, batch.column(0), number)
            for content in contents:
                yield Document(content, path, "row", number)
                number += 1
            meter.done = before + int(size * share)
    meter.done = before + size


def holds_tokens(path: Path, kind: str) -> bool:
    """Whether the table holds tokens: a column of ids with one of the usual names, or one and no text beside it.

    Raises as `read_table`.
    """
    with _table_errors(path):
        if kind == "parquet":
            import pyarrow.parquet

            with _os_file(path) as source, pyarrow.parquet.ParquetFile(source) as file:
                schema = file.schema_arrow
        else:
            with _open_arrow(path) as reader:
                schema = reader.schema
    try:
        column = choose_columns(path, schema, None).tokens
    except CorpusFormatError:
        return False
    return column in NAMES or not any(_is_text(field.type) for field in schema)


def _batches(path: Path, kind: str, key: str | None) -> Generator[tuple[Any, float]]:
    """Record batches of at most some rows, with the share of the file that is done behind each."""
    if kind == "parquet":
        import pyarrow.parquet

        with _os_file(path) as source, pyarrow.parquet.ParquetFile(source) as file:
            columns = None if key is None else [_text_column(path, file.schema_arrow, key)]
            done, total = 0, max(1, file.metadata.num_rows)
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns):
                done += batch.num_rows
                yield batch, done / total
        return
    with _open_arrow(path) as reader:
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
def _open_arrow(path: Path) -> Iterator[Any]:
    import pyarrow as pa

    with _os_file(path) as source:
        is_file = source.read(8) == b"ARROW1\0\0"
        source.seek(0)
        with pa.ipc.open_file(source) if is_file else pa.ipc.open_stream(source) as reader:
            yield reader


def _os_file(path: Path) -> Any:
    """A file of pyarrow. Read, not mapped: one that shrinks meanwhile is an error then, not a signal that ends the
    process. Named by bytes, since names may be other than UTF-8.
    """
    import pyarrow as pa

    return pa.OSFile(os.fsencode(path), "rb")


@contextlib.contextmanager
def _table_errors(path: Path) -> Iterator[None]:
    pa = import_pyarrow(path)
    try:
        yield
    except pa.ArrowException as error:
        raise CorpusFormatError(f"{path}: {_first_line(error)}") from error
    except UnicodeDecodeError as error:
        raise CorpusFormatError(f"{path}: a text is not UTF-8: {error}") from error
    except OSError as error:
        if isinstance(error, CorpusReadError):
            raise
        if error.errno is None:  # the library's word for a file that ends early
            raise CorpusFormatError(f"{path}: {_first_line(error)}") from error
        raise CorpusReadError(f"{path}: cannot be read: {_first_line(error)}") from error


def _text_column(path: Path, schema: Any, key: str) -> str:
    import pyarrow as pa

    indices = schema.get_all_field_indices(key)
    if len(indices) != 1:
        problem = missing_column(key, schema.names) if not indices else f"{len(indices)} columns are named {key!r}"
        raise CorpusFormatError(f"{path}: {problem}")
    found = schema.field(indices[0]).type
    if not (_is_text(found) or pa.types.is_null(found)):
        raise CorpusFormatError(f"{path}: column {key!r} is of type {found}; a column of strings is expected")
    return key


def _is_text(column: Any) -> bool:
    import pyarrow as pa

    plain = column.value_type if pa.types.is_dictionary(column) else column
    kinds = pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_binary
    return any(check(plain) for check in (*kinds, pa.types.is_large_binary))


def _texts(path: Path, column: Any, number: int) -> list[str]:
    texts = []
    for at, value in enumerate(column.to_pylist()):
        if isinstance(value, bytes):
            try:
                value = value.decode("utf-8")
            except UnicodeDecodeError as error:
                raise CorpusFormatError(f"{path}: row {number + at}: the text is not UTF-8: {error}") from None
        texts.append("" if value is None else value)
    return texts


def _records(batch: Any) -> list[Any]:
    return [without_nulls(_plain(row)) for row in batch.to_pylist()]


def _plain(value: Any) -> Any:
    """The value with maps, which come as lists of pairs, as dicts."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    if value and all(isinstance(item, tuple) for item in value):
        return {key: _plain(item) for key, item in value}
    return [_plain(item) for item in value]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
