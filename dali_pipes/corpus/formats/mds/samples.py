"""Where the token ids of each sample are in one MDS shard: a file, or its decompressed content.

    byte 0   4             4 (N + 2)                 off[0]             off[1]                      off[N] = size
    u32 N    u32 off[0 ... N]   columns, JSON text   sample 0           sample 1   ...
                                                     |
                                                     u32 size of each variable-size column, then the values, by column

Offsets count from the start of the shard. They have 32 bits, so those of a shard over 4 GiB overflow.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, NoReturn, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.data_file import Int64Array
from dali_pipes.corpus.formats.mds.columns import TYPE_CODES, Column
from dali_pipes.errors import CorpusFormatError
from dali_pipes.storage.byte_file import Range
from dali_pipes.uris import FilePath

Bytes: TypeAlias = npt.NDArray[np.uint8]

_SAMPLES_AT_ONCE = 1 << 15
_SPAN_BYTES = 8 << 20
_SPARSE_BYTES = 16 << 10  # a read of as many bytes costs about as much as one of a few


_WIDTHS = np.array([TYPE_CODES[code].itemsize if code in TYPE_CODES else 0 for code in range(256)])
_FIRST_BYTES = np.array([2**8 - 1, 2**16 - 1, 2**32 - 1, 2**64 - 1], np.uint64)


class Source(Protocol):
    """The bytes of a shard: a `ByteFile`, or `Content`."""

    @property
    def path(self) -> FilePath: ...

    @property
    def size(self) -> int: ...

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from byte `offset`, all of them inside."""

    def read_ranges(self, ranges: Iterable[Range], out: memoryview) -> None:
        """As `ByteFile.read_ranges`."""


class Content:
    """A shard in memory, from the file at `path`."""

    def __init__(self, path: FilePath, data: bytes) -> None:
        self.path, self.data, self.size = path, data, len(data)

    def read(self, offset: int, count: int) -> bytes:
        """As `Source.read`."""
        return self.data[offset : offset + count]

    def read_ranges(self, ranges: Iterable[Range], out: memoryview) -> None:
        """As `Source.read_ranges`."""
        for offset, count, place in ranges:
            out[place : place + count] = self.data[offset : offset + count]


class Samples(NamedTuple):
    """The ids of each sample: first byte in the shard and number, int64 (N,), and code of their type, uint8 (N,).

    The codes are 0 where the column states the type.
    """

    starts: Int64Array
    counts: Int64Array
    codes: Bytes


def read_offsets(source: Source, num_samples: int) -> Int64Array:
    """The offset table, int64 (num_samples + 1,), after a check with the shard's size. One read; blocks.

    Raises CorpusFormatError naming shard and sample.
    """
    header_bytes = 4 * (num_samples + 2)
    if header_bytes > source.size:
        _refuse(
            source,
            f"has {source.size:,} bytes, but the {num_samples:,} samples of the index need a header of "
            f"{header_bytes:,}",
        )
    header = np.frombuffer(source.read(0, header_bytes), "<u4").astype(np.int64)
    if header[0] != num_samples:
        _refuse(source, f"the index claims {num_samples:,} samples, but the shard {header[0]:,}")
    offsets = header[1:]
    if offsets[0] < header_bytes:
        _refuse(source, f"sample 0 starts at byte {offsets[0]:,}, inside the header of {header_bytes:,} bytes")
    falls = np.flatnonzero(offsets[1:] < offsets[:-1])
    if len(falls):
        at = int(falls[0])
        _refuse(
            source,
            f"sample {at:,} starts at byte {offsets[at]:,} but ends before that, at byte {offsets[at + 1]:,}: 32-bit "
            "offsets overflow in shards over 4 GiB",
        )
    if offsets[-1] != source.size:
        _refuse(source, f"the samples end at byte {offsets[-1]:,}, but the shard has {source.size:,} bytes")
    return offsets


def locate_samples(source: Source, offsets: Int64Array, column: Column) -> Samples:
    """Where the ids of `column` are. Blocks to read the sizes in each sample, where the column needs that.

    Raises CorpusFormatError naming shard and sample.
    """
    count = len(offsets) - 1
    found = Samples(np.empty(count, np.int64), np.empty(count, np.int64), np.zeros(count, np.uint8))
    for first, last in _blocks(offsets):
        part = _locate_block(source, first, offsets[first : last + 1], column)
        found.starts[first:last], found.counts[first:last], found.codes[first:last] = part
    return found


def needs_reading(column: Column) -> bool:
    """Whether `locate_samples` has to look into every sample; otherwise the offsets suffice."""
    return column.has_shape or column.num_variable > 1


def _blocks(offsets: Int64Array) -> Iterator[tuple[int, int]]:
    """Runs of samples that are looked at together: first, and last + 1."""
    first = 0
    while first < len(offsets) - 1:
        span = int(np.searchsorted(offsets, offsets[first] + _SPAN_BYTES, side="right")) - 1
        last = min(max(span, first + 1), first + _SAMPLES_AT_ONCE, len(offsets) - 1)
        yield first, last
        first = last


def _locate_block(source: Source, first: int, offsets: Int64Array, column: Column) -> Samples:
    sizes, values = _value_places(source, first, offsets, column)
    if column.has_shape:
        return _parse_shapes(source, first, values, sizes, column.stored)
    assert column.stored is not None
    width = column.stored.itemsize
    _check(
        source,
        first,
        sizes % width != 0,
        lambda at: f"{sizes[at]:,} bytes are not a multiple of {width}, the width of {column.stored}",
    )
    return Samples(values, sizes // width, np.zeros(len(sizes), np.uint8))


def _value_places(source: Source, first: int, offsets: Int64Array, column: Column) -> tuple[Int64Array, Int64Array]:
    """Bytes of each value of the column, and where it starts."""
    starts, lengths = offsets[:-1], np.diff(offsets)
    values = starts + 4 * column.num_variable + column.fixed_before
    rest = lengths - 4 * column.num_variable - column.fixed_bytes  # what the variable-size columns share
    _check(source, first, rest < 0, lambda at: f"{lengths[at]:,} bytes are too few for its columns")
    if not needs_reading(column):
        if column.num_variable == 0:
            _check(
                source,
                first,
                rest != 0,
                lambda at: f"has {lengths[at]:,} bytes, but its columns take {column.fixed_bytes:,}",
            )
        if column.own_variable is not None:
            return rest, values
        return _fixed_sizes(column, len(starts)), values + (rest if column.variable_before else 0)
    stated = _gather(source, starts, 4 * column.num_variable).view("<u4").astype(np.int64)
    stated = stated.reshape(len(starts), column.num_variable)
    totals = stated.sum(axis=1)
    _check(
        source,
        first,
        totals != rest,
        lambda at: f"its columns claim {totals[at]:,} bytes, but the offsets leave {rest[at]:,} for them",
    )
    values += stated[:, : column.variable_before].sum(axis=1)
    if column.own_variable is None:
        return _fixed_sizes(column, len(starts)), values
    return stated[:, column.own_variable], values


def _fixed_sizes(column: Column, count: int) -> Int64Array:
    assert column.fixed_ids is not None
    assert column.stored is not None
    return np.full(count, column.fixed_ids * column.stored.itemsize)


def _parse_shapes(
    source: Source, first: int, values: Int64Array, sizes: Int64Array, stored: np.dtype[Any] | None
) -> Samples:
    """Values that start with a shape, after a type code if `stored` does not state the type."""
    shape_at = 1 if stored is None else 0
    heads = _gather(source, values, shape_at + 9)
    if stored is None:
        codes = heads[:, 0].copy()
        widths = _WIDTHS[codes]
        expected = ", ".join(map(str, TYPE_CODES))
        _check(source, first, widths == 0, lambda at: f"type code {codes[at]}, expected one of integers ({expected})")
    else:
        codes = np.zeros(len(values), np.uint8)
        widths = np.full(len(values), stored.itemsize)
    axes = (heads[:, shape_at] >> 2).astype(np.int64)
    powers = heads[:, shape_at] & 3
    ids_at = shape_at + 1 + (axes << powers)
    _check(source, first, ids_at > sizes, lambda at: f"a value of {sizes[at]:,} bytes ends inside its shape")
    counts = (sizes - ids_at) // widths
    stated = np.ascontiguousarray(heads[:, shape_at + 1 :]).view("<u8")[:, 0] & _FIRST_BYTES[powers]
    for at in np.flatnonzero(axes != 1):
        width = 1 << int(powers[at])
        shape = source.read(int(values[at]) + shape_at + 1, int(axes[at]) * width)
        stated[at] = min(math.prod(np.frombuffer(shape, f"<u{width}").tolist()), 2**64 - 1)
    differs = (stated != counts.astype(np.uint64)) | (counts * widths != sizes - ids_at)
    _check(
        source,
        first,
        differs,
        lambda at: (
            f"its shape is {stated[at]:,} ids of {widths[at]} bytes, but {sizes[at] - ids_at[at]:,} bytes follow"
        ),
    )
    return Samples(values + ids_at, counts, codes)


def _gather(source: Source, starts: Int64Array, width: int) -> Bytes:
    """`width` bytes from each of increasing `starts`: (N, width), zeros after the end of the shard."""
    begin = int(starts[0])
    end = min(int(starts[-1]) + width, source.size)
    if (end - begin) // len(starts) < _SPARSE_BYTES:
        data = np.zeros(int(starts[-1]) + width - begin, np.uint8)
        data[: end - begin] = np.frombuffer(source.read(begin, end - begin), np.uint8)
        rows: Bytes = data[(starts - begin)[:, None] + np.arange(width)]
        return rows
    found = np.zeros((len(starts), width), np.uint8)
    ranges = [(start, min(width, source.size - start), at * width) for at, start in enumerate(starts.tolist())]
    source.read_ranges(ranges, found.reshape(-1).data)
    return found


def _check(source: Source, first: int, is_wrong: npt.NDArray[np.bool_], tell: Any) -> None:
    """Refuse the first sample that is wrong; `tell` gives the reason for its number in the block."""
    if is_wrong.any():
        at = int(np.argmax(is_wrong))
        _refuse(source, f"sample {first + at:,}: {tell(at)}")


def _refuse(source: Source, reason: str) -> NoReturn:
    raise CorpusFormatError(
        f"{source.path}: {reason}. The shard is truncated, damaged or belongs to another index; copy or recreate it."
    )
