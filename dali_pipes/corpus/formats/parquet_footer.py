"""The row groups in a Parquet footer, read without pyarrow: opening thousands of files mostly parses their footers.

    head                        rows            row groups          tail
    1: version   2: schema      3: rows         4: [{...} {...}]    5: key-value metadata   6: written by ...

The files of a corpus usually share head and tail byte for byte. So pyarrow interprets those once, without row groups in
between, and here only counts are read. Whatever is not as expected is left to pyarrow, which then finds the error.
(Format: https://github.com/apache/parquet-format/blob/master/src/main/thrift/parquet.thrift, in Thrift's compact
protocol: https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md)
"""

from collections.abc import Callable
from typing import Any, NamedTuple

MOST_BYTES = 1 << 15
"""Parsing a footer of that size takes about 4 ms; pyarrow would be faster, but damaged metadata may end the process."""
_EMPTY_GROUPS = b"\x16\x00\x19\x0c"  # field 3, an integer: 0; field 4, a list of structures: none
_VERSION, _SCHEMA, _ROWS, _GROUPS = 1, 2, 3, 4
_MOST_VARINT_BITS = 63
_I16, _I64 = 4, 6

_Fields = dict[int, Any]


class Leaf(NamedTuple):
    """A column of a row group. nulls: empty and null lists among its values; None: not recorded."""

    values: int
    nulls: int | None


class Group(NamedTuple):
    """A row group: its number of rows, its bytes before compression, its columns."""

    rows: int
    size: int
    leaves: list[Leaf]


class Footer(NamedTuple):
    """head, tail: the bytes before and after the rows and row groups."""

    head: bytes
    tail: bytes
    rows: int
    groups: list[Group]

    @property
    def without_groups(self) -> bytes:
        """A footer of the same schema and metadata for a file without rows."""
        return self.head + _EMPTY_GROUPS + self.tail


def read_footer(footer: bytes) -> Footer | None:
    """What is in a footer; None if it is large, damaged, or has a part that is not expected."""
    if len(footer) > MOST_BYTES:
        return None
    try:
        begin = _value(footer, *_value(footer, 0, 0, _VERSION)[1:], _SCHEMA)[1]
        rows, at, _ = _value(footer, begin, _SCHEMA, _ROWS)
        groups, at, _ = _value(footer, at, _ROWS, _GROUPS)
        return Footer(footer[:begin], footer[at:], _count(rows), [_group(group) for group in groups])
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
        return None


def _group(fields: _Fields) -> Group:
    return Group(_count(fields[3]), _count(fields[2]), [_leaf(column) for column in fields[1]])


def _leaf(column: _Fields) -> Leaf:
    _require(column.keys() <= {2, 3, 4, 5, 6, 7} and 2 in column)  # not in another file, not encrypted
    about = column[3]
    _require(about.keys() >= {1, 2, 3, 4, 5, 6, 7, 9})
    nulls = about[12].get(3) if 12 in about else None
    return Leaf(_count(about[5]), None if nulls is None else _count(nulls))


def _count(value: Any) -> int:
    _require(type(value) is int and value >= 0)
    return int(value)


def _require(is_expected: bool) -> None:
    if not is_expected:
        raise ValueError


def _value(data: bytes, at: int, before: int, expected: int) -> tuple[Any, int, int]:
    """The value of field `expected`, which comes after field `before`, where it ends, and its number."""
    byte = data[at]
    number, at = (before + (byte >> 4), at + 1) if byte >> 4 else _integer(data, at + 1)
    _require(number == expected)
    return (*_VALUES[byte & 15](data, at), number)


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = data[at]
    at += 1
    if value < 128:
        return value, at
    value &= 127
    for shift in range(7, _MOST_VARINT_BITS + 1, 7):
        byte = data[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
    raise ValueError


def _integer(data: bytes, at: int) -> tuple[int, int]:
    value, at = _varint(data, at)
    return (value >> 1) ^ -(value & 1), at


def _struct(data: bytes, at: int) -> tuple[_Fields, int]:
    fields: _Fields = {}
    number = 0
    while byte := data[at]:
        at += 1
        number, at = (number + (byte >> 4), at) if byte >> 4 else _integer(data, at)
        kind = byte & 15
        if _I16 <= kind <= _I64 and (short := data[at]) < 128:  # most of it, so without two calls
            fields[number] = (short >> 1) ^ -(short & 1)
            at += 1
        else:
            fields[number], at = _VALUES[kind](data, at)
    return fields, at + 1


def _binary(data: bytes, at: int) -> tuple[bytes, int]:
    count, at = _varint(data, at)
    _require(at + count <= len(data))
    return data[at : at + count], at + count


def _list(data: bytes, at: int) -> tuple[list[Any], int]:
    byte = data[at]
    at += 1
    count = byte >> 4
    if count == 15:
        count, at = _varint(data, at)
    read = _byte if byte & 15 <= 2 else _VALUES[byte & 15]  # a boolean outside of a field takes a byte
    values = []
    for _ in range(count):
        value, at = read(data, at)
        values.append(value)
    return values, at


def _byte(data: bytes, at: int) -> tuple[int, int]:
    return data[at], at + 1


def _double(data: bytes, at: int) -> tuple[bytes, int]:
    _require(at + 8 <= len(data))
    return data[at : at + 8], at + 8


_VALUES: dict[int, Callable[[bytes, int], tuple[Any, int]]] = {
    1: lambda data, at: (True, at),
    2: lambda data, at: (False, at),
    3: _byte,
    **dict.fromkeys(range(_I16, _I64 + 1), _integer),
    7: _double,
    8: _binary,
    9: _list,
    10: _list,
    12: _struct,
}
"""By the kind of a field, what reads its value, and says where it ends."""
