"""From a list array of pyarrow, in any layout, to where each row's values are.

    values    7 7 5 6 7 9 9 4              a row is a run of values: [start, length]
    rows      [5 6 7] null [4]             [2, 3] [0, 0] [7, 1]

Lists may be sliced, share values, or leave some out. A null row is an empty one; a null value inside of a row is an
error, and ignored elsewhere.
"""

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.columns.row_columns import Cells
from dali_pipes.corpus.data_file import Int64Array
from dali_pipes.errors import CorpusFormatError
from dali_pipes.uris import FilePath


class ListRows(NamedTuple):
    """starts, lengths: int64 (R,), of each row in `values`, a `pyarrow.Array` of integers or booleans."""

    starts: Int64Array
    lengths: Int64Array
    values: Any


def rows_of(array: Any, path: FilePath, column: str, first_row: int) -> ListRows:
    """The rows of a list array; its row 0 is row `first_row` of the file. Raises CorpusFormatError for a null value."""
    starts, lengths, values = _layout(array)
    used = lengths > 0
    low = int(starts[used].min()) if used.any() else 0
    high = int((starts + lengths)[used].max()) if used.any() else 0
    values, starts = values.slice(low, high - low), np.where(used, starts - low, 0)
    if values.null_count or getattr(values, "dictionary", None) is not None:
        values = _decoded(values)
    if values.null_count:
        is_null = values.is_null().to_numpy(zero_copy_only=False)
        refuse_nulls(np.flatnonzero(is_null), starts, lengths, path, column, first_row)
        values = values.fill_null(False if str(values.type) == "bool" else 0)
    return ListRows(starts, lengths, values)


def refuse_nulls(
    nulls: Int64Array, starts: Int64Array, lengths: Int64Array, path: FilePath, column: str, first_row: int
) -> None:
    """Raise CorpusFormatError if a row holds one of the values at the rising places `nulls`."""
    held = np.searchsorted(nulls, starts + lengths) > np.searchsorted(nulls, starts)
    if held.any():
        row = int(np.argmax(held))
        place = int(nulls[np.searchsorted(nulls, starts[row])] - starts[row])
        raise CorpusFormatError(
            f"{path}: row {first_row + row:,}: column {column} holds null at token {place:,} of {lengths[row]:,}; "
            "expected an integer. Remove the row, or replace the null."
        )


def copy_rows(rows: ListRows, out: npt.NDArray[Any]) -> None:
    """Put the values of all rows one after another into `out`, which has as many places as they have values."""
    values = rows.values.to_numpy(zero_copy_only=False)
    done = 0
    for start, count in runs_of(rows.starts, rows.lengths).tolist():
        out[done : done + count] = values[start : start + count]
        done += count


def cells_of(rows: ListRows) -> Cells:
    """The rows as one column of plain values."""
    values = rows.values.to_numpy(zero_copy_only=False)
    runs = runs_of(rows.starts, rows.lengths).tolist()
    parts = [values[start : start + count] for start, count in runs]
    return Cells(rows.lengths, parts[0] if len(parts) == 1 else np.concatenate([values[:0], *parts]))


def runs_of(starts: Int64Array, lengths: Int64Array) -> Int64Array:
    """int64 (N, 2), [start, length] of the rows that are not empty, adjacent ones joined."""
    used = np.flatnonzero(lengths)
    if len(used) == 0:
        return np.zeros((0, 2), np.int64)
    starts, lengths = starts[used], lengths[used]
    ends = starts + lengths
    heads = np.flatnonzero(np.concatenate(([True], starts[1:] != ends[:-1])))
    return np.stack([starts[heads], np.add.reduceat(lengths, heads)], axis=1)


def _layout(array: Any) -> ListRows:
    import pyarrow

    if isinstance(array, pyarrow.DictionaryArray):
        kept = _layout(array.dictionary)
        is_there = array.indices.is_valid().to_numpy(zero_copy_only=False)
        entries = array.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)[is_there]
        starts, lengths = np.zeros((2, len(array)), np.int64)
        starts[is_there], lengths[is_there] = kept.starts[entries], kept.lengths[entries]
        return ListRows(starts, lengths, kept.values)
    if isinstance(array, pyarrow.FixedSizeListArray):
        size = array.type.list_size
        starts = (array.offset + np.arange(len(array))) * size
        lengths = np.full(len(array), size)
    elif hasattr(array, "sizes"):  # a list view
        starts, lengths = (part.to_numpy().astype(np.int64) for part in (array.offsets, array.sizes))
    else:
        offsets = array.offsets.to_numpy().astype(np.int64)
        starts, lengths = offsets[:-1], np.diff(offsets)
    if array.null_count:
        lengths = np.where(array.is_null().to_numpy(zero_copy_only=False), 0, lengths)
    return ListRows(starts, lengths, array.values)


def _decoded(values: Any) -> Any:
    return values.dictionary_decode() if getattr(values, "dictionary", None) is not None else values
