"""Where the ids of a column are in an Arrow file that is neither compressed nor dictionary-encoded.

    batch in the file    [head][... validity | offsets | ... values ...]
    for pyarrow          [head][ memory that is never touched ........]

pyarrow turns the head of a batch into arrays whose buffers point into the memory after it. That memory stays empty:
only the distance of each buffer from the head is needed, which is the same in the file.
"""

import mmap
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.columns.list_arrays import refuse_nulls, runs_of
from dali_pipes.corpus.columns.row_chunks import damage_named
from dali_pipes.corpus.data_file import Int64Array
from dali_pipes.corpus.formats.arrow.messages import Message, Messages
from dali_pipes.errors import CorpusFormatError
from dali_pipes.storage.byte_file import ByteFile

_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # named from Python 3.13 on


class Place(NamedTuple):
    """Bytes of a file."""

    start: int
    size: int


class ListLayout(NamedTuple):
    """The lists of a column in one batch. `offsets` and `sizes` as the type of list has them.

    first_row:  row of the file that is row 0 of the batch
    num_values: values there are in `values`; `values_validity` is None where none of them is null
    """

    first_row: int
    rows: int
    num_values: int
    validity: Place | None
    offsets: Place | None
    sizes: Place | None
    values_validity: Place | None
    values: Place | None


def can_be_plain(messages: Messages, column: Any) -> bool:
    """Whether a column of this `pyarrow.DataType`, a list of integers, can be read without decoding."""
    from pyarrow import types

    is_encoded = types.is_dictionary(column) or types.is_dictionary(column.value_type)
    return messages.is_little_endian and not is_encoded and not any(one.is_compressed for one in messages.batches)


def extents_of(file: ByteFile, messages: Messages, schema: Any, column: str, itemsize: int) -> Int64Array:
    """Extents of the ids, as in DataFile. Blocks for one or two reads a batch, and to read the offsets of null rows.

    Raises CorpusFormatError for null ids, and for a buffer outside of its batch.
    """
    found = [np.zeros((0, 2), np.int64)]
    for layout in _layouts(file, messages, schema, column):
        if layout.validity is None and layout.values_validity is None and layout.sizes is None:
            starts, lengths = _span(file, layout, schema.field(column).type)
        else:
            starts, lengths = _rows(file, layout, schema.field(column).type)
        _check_inside(file, layout, column, starts, lengths, itemsize)
        if layout.values_validity is not None:
            nulls = np.flatnonzero(~_bits(file, layout.values_validity, layout.num_values))
            refuse_nulls(nulls, starts, lengths, file.path, column, layout.first_row)
        runs = runs_of(starts, lengths)
        if layout.values is not None:
            runs[:, 0] = layout.values.start + runs[:, 0] * itemsize
        found.append(runs)
    return np.concatenate(found)


def row_lengths(file: ByteFile, messages: Messages, schema: Any, column: str, itemsize: int) -> Int64Array:
    """Ids of each row: int64 (rows,). Blocks to read the offsets of all lists."""
    found = [np.zeros(0, np.int64)]
    for layout in _layouts(file, messages, schema, column):
        starts, lengths = _rows(file, layout, schema.field(column).type)
        _check_inside(file, layout, column, starts, lengths, itemsize)
        found.append(lengths)
    return np.concatenate(found)


def _layouts(file: ByteFile, messages: Messages, schema: Any, column: str) -> Iterator[ListLayout]:
    import pyarrow

    if not messages.batches:
        return
    size = max(one.head_size + one.body_size for one in messages.batches)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    buffer = pyarrow.py_buffer(memory)
    first_row = 0
    for number, one in enumerate(messages.batches):
        memory[: one.head_size] = file.read(one.start, one.head_size)
        with damage_named(file.path, f"batch {number}"):
            batch = pyarrow.ipc.read_record_batch(pyarrow.ipc.read_message(buffer), schema)
            layout = _layout(batch.column(schema.get_field_index(column)), one, buffer.address, first_row)
        if layout.rows != one.rows or batch.num_rows != one.rows:
            raise CorpusFormatError(
                f"{file.path}: batch {number} has {one.rows:,} rows, but its column {column} has {layout.rows:,}: the "
                "file is damaged. Copy or recreate it."
            )
        yield layout
        first_row += one.rows


def _layout(array: Any, message: Message, address: int, first_row: int) -> ListLayout:
    import pyarrow

    places: list[Place | None] = []
    for buffer in array.buffers():
        is_empty = buffer is None or buffer.size == 0  # and then may be anywhere
        place = None if is_empty else Place(message.start + buffer.address - address, buffer.size)
        end = message.start + message.head_size + message.body_size
        if place is not None and not message.start + message.head_size <= place.start <= end - place.size:
            raise ValueError(f"a buffer of {place.size:,} bytes is outside its batch")
        places.append(place)
    is_fixed = isinstance(array, pyarrow.FixedSizeListArray)
    validity, *lists, values_validity, values = places
    offsets = None if is_fixed else lists[0]
    sizes = lists[1] if len(lists) > 1 else None
    # The counts come from the head; counted here, in empty memory, every value would be null.
    return ListLayout(
        first_row,
        len(array),
        len(array.values),
        validity if array.null_count else None,
        offsets,
        sizes,
        values_validity if array.values.null_count else None,
        values,
    )


def _span(file: ByteFile, layout: ListLayout, column: Any) -> tuple[Int64Array, Int64Array]:
    """One [start, length] for all rows of a batch without nulls, whose values follow on one another."""
    from pyarrow import types

    if types.is_fixed_size_list(column):
        return np.zeros(1, np.int64), np.array([layout.rows * column.list_size])
    ends = np.zeros(2, np.int64)
    if layout.rows:
        dtype = _offset_type(column)
        place = _needed(file, layout.offsets, (layout.rows + 1) * dtype.itemsize)
        for at, entry in enumerate((0, layout.rows)):
            ends[at] = np.frombuffer(file.read(place.start + entry * dtype.itemsize, dtype.itemsize), dtype)[0]
    return ends[:1], np.diff(ends)


def _rows(file: ByteFile, layout: ListLayout, column: Any) -> tuple[Int64Array, Int64Array]:
    """Start and length in values of each row of a batch."""
    from pyarrow import types

    if types.is_fixed_size_list(column):
        starts = np.arange(layout.rows) * column.list_size
        lengths = np.full(layout.rows, column.list_size)
    elif layout.rows == 0:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    elif layout.sizes is not None:
        starts = _integers(file, layout.offsets, layout.rows, _offset_type(column))
        lengths = _integers(file, layout.sizes, layout.rows, _offset_type(column))
    else:
        offsets = _integers(file, layout.offsets, layout.rows + 1, _offset_type(column))
        starts, lengths = offsets[:-1], np.diff(offsets)
    if layout.validity is not None:
        is_there = _bits(file, layout.validity, layout.rows)
        starts, lengths = np.where(is_there, starts, 0), np.where(is_there, lengths, 0)
    return starts, lengths


def _check_inside(
    file: ByteFile, layout: ListLayout, column: str, starts: Int64Array, lengths: Int64Array, itemsize: int
) -> None:
    there = 0 if layout.values is None else layout.values.size // itemsize
    wrong = (starts < 0) | (lengths < 0) | (starts > there) | (lengths > there - np.clip(starts, 0, there))
    if wrong.any() or layout.num_values > there:
        row = int(np.argmax(wrong))
        raise CorpusFormatError(
            f"{file.path}: column {column}, row {layout.first_row + row:,} or a later one: {lengths[row]:,} ids at "
            f"value {starts[row]:,}, but the batch has {there:,} values: the file is damaged. Copy or recreate it."
        )


def _offset_type(column: Any) -> np.dtype[Any]:
    return np.dtype("<i8" if str(column).startswith("large_") else "<i4")


def _integers(file: ByteFile, place: Place | None, count: int, dtype: np.dtype[Any]) -> Int64Array:
    start = _needed(file, place, count * dtype.itemsize).start
    return np.frombuffer(file.read(start, count * dtype.itemsize), dtype).astype(np.int64)


def _bits(file: ByteFile, place: Place, count: int) -> npt.NDArray[np.bool_]:
    start = _needed(file, place, -(-count // 8)).start
    data = np.frombuffer(file.read(start, -(-count // 8)), np.uint8)
    return np.unpackbits(data, count=count, bitorder="little").astype(np.bool_)


def _needed(file: ByteFile, place: Place | None, size: int) -> Place:
    if place is None or place.size < size:
        raise CorpusFormatError(
            f"{file.path}: a buffer of its lists has {0 if place is None else place.size:,} bytes, expected {size:,}: "
            "the file is damaged. Copy or recreate it."
        )
    return place
