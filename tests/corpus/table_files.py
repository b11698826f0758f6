"""Tables with a column of ids for tests, by pyarrow's own writers: every kind of list, however it is laid out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

Rows = Sequence[Sequence[int | None] | None]
"""Rows of ids; None is a null row, and as an id a null value."""

INTEGERS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
LISTS = ("list", "large_list", "fixed", "list_view", "large_list_view")
JUNK = 99
"""Stands where no row may lead: in null rows, before and behind a slice."""


def list_array(
    rows: Rows, element: str = "int32", kind: str = "list", encoding: str = "", sliced: bool = False
) -> pa.Array:
    """A list array of `rows`. Null rows have junk in them, where their kind has room for it.

    kind:     one of LISTS; fixed takes its size from the first row that is there
    encoding: "values" or "rows" are dictionary-encoded, else neither
    sliced:   whether it is a slice of a longer array
    """
    if encoding == "rows":
        different = list({None if row is None else tuple(row): row for row in rows if row is not None}.values()) or [[]]
        known = {tuple(row): number for number, row in enumerate(different)}
        indices = pa.array(
            [None if row is None else known.get(tuple(row), 0) for row in _padded(rows, sliced)], pa.int16()
        )
        array = pa.DictionaryArray.from_arrays(indices, list_array(different, element, kind))
        return array.slice(2, len(rows)) if sliced else array
    padded = _padded(rows, sliced)
    size = next((len(row) for row in rows if row is not None), 1)
    if kind == "fixed":
        padded = [[JUNK] * size if row is not None and len(row) != size else row for row in padded]
    stored = [([JUNK] * (size if kind == "fixed" else 2) if row is None else list(row)) for row in padded]
    values = pa.array([value for row in stored for value in row], getattr(pa, element)())
    if encoding == "values":
        values = values.dictionary_encode()
    mask = pa.array([row is None for row in padded], pa.bool_())
    lengths = [len(row) for row in stored]
    ends = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64 if kind.startswith("large") else np.int32)
    if kind == "fixed":
        array = pa.FixedSizeListArray.from_arrays(values, size, mask=mask)
    elif kind.endswith("view"):
        view = pa.LargeListViewArray if kind.startswith("large") else pa.ListViewArray
        array = view.from_arrays(pa.array(ends[:-1]), pa.array(np.array(lengths, ends.dtype)), values, mask=mask)
    else:
        plain = pa.LargeListArray if kind.startswith("large") else pa.ListArray
        array = plain.from_arrays(pa.array(ends), values, mask=mask)
    return array.slice(2, len(rows)) if sliced else array


def table_of(chunks: Sequence[pa.Array], name: str = "input_ids", **others: Any) -> pa.Table:
    """A table of the chunks, with columns before and behind that hold no ids."""
    rows = sum(map(len, chunks))
    columns = {
        "text": pa.array(["word " * (row % 3) for row in range(rows)]),
        name: pa.chunked_array(chunks),
        "token_type_ids": pa.array([[1]] * rows, pa.list_(pa.int64())),
        **others,
    }
    return pa.table(columns)


def write_parquet(path: Path, table: pa.Table, **options: Any) -> Path:
    pa.parquet.write_table(table, path, **options)
    return path


def write_arrow(path: Path, table: pa.Table, compression: str | None = None, stream: bool = False) -> Path:
    """An Arrow file, or stream, a batch for each chunk of the table."""
    options = pa.ipc.IpcWriteOptions(compression=compression, emit_dictionary_deltas=stream)
    writer = (pa.ipc.new_stream if stream else pa.ipc.new_file)(path, table.schema, options=options)
    with writer:
        writer.write_table(table)
    return path


def _padded(rows: Rows, sliced: bool) -> list[Sequence[int | None] | None]:
    junk: Sequence[int | None] = next((row for row in rows if row is not None), [JUNK])
    return [junk, None, *rows, junk] if sliced else list(rows)
