"""Parse a tf.train.Example from the bytes of the message, without TensorFlow or protobuf.

    Example { 1: Features { 1: map entry { 1: name, 2: Feature { 3: Int64List { 1: integers } } } ... } }

Instead of 3 a Feature may have 1, a BytesList of strings, or 2, a FloatList, whose values are ignored.

Integers are varints, packed into one field or one field each; negative ones take ten bytes. A Feature without a kind is
an empty list. Layout: https://github.com/tensorflow/tensorflow/blob/master/tensorflow/core/example/feature.proto
"""

from collections.abc import Iterator
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Int64Array: TypeAlias = npt.NDArray[np.int64]
Feature: TypeAlias = Int64Array | list[bytes] | Literal["float"]
"""Integers (n,), strings, or "float" for a list of those."""

_VARINT, _LENGTH = 0, 2
_BYTES_LIST, _FLOAT_LIST, _INT64_LIST = 1, 2, 3
_MOST_VARINT_BYTES = 10
_EMPTY: Int64Array = np.zeros(0, np.int64)


class NotAnExample(ValueError):
    """The bytes are not a tf.train.Example."""


def parse_example(record: bytes) -> dict[str, Feature]:
    """Features by name. Raises NotAnExample."""
    features: dict[str, Feature] = {}
    for field, value in _fields(memoryview(record)):
        for inner, entry in _fields(_expect(field, 1, value)):
            name, feature = "", memoryview(b"")
            for part, content in _fields(_expect(inner, 1, entry)):
                if part == 1:
                    name = _text(_expect(part, 1, content))
                else:
                    feature = _expect(part, 2, content)
            features[name] = _parse_feature(feature)
    return features


def list_kind(feature: Feature) -> str:
    """The name of its kind of list, as TensorFlow has it."""
    return feature if isinstance(feature, str) else "bytes" if isinstance(feature, list) else "int64"


def _parse_feature(feature: memoryview) -> Feature:
    parts: list[Int64Array] = []
    for kind, values in _fields(feature):
        if kind not in (_BYTES_LIST, _FLOAT_LIST, _INT64_LIST) or not isinstance(values, memoryview):
            raise NotAnExample(f"field {kind} of a Feature")
        if kind == _FLOAT_LIST:
            return "float"
        if kind == _BYTES_LIST:
            return [bytes(_expect(field, 1, content)) for field, content in _fields(values)]
        for field, content in _fields(values):
            if field != 1:
                raise NotAnExample(f"field {field} of an Int64List")
            parts.append(_packed(content) if isinstance(content, memoryview) else np.array([content]).view(np.int64))
    return parts[0] if len(parts) == 1 else np.concatenate([_EMPTY, *parts])


def _fields(message: memoryview) -> Iterator[tuple[int, memoryview | np.uint64]]:
    """Number and value of each field: bytes, or a varint. Other kinds do not occur in an Example."""
    at = 0
    while at < len(message):
        tag, at = _varint(message, at)
        value, at = _varint(message, at)
        if tag & 7 == _VARINT:
            yield tag >> 3, np.uint64(value)
        elif tag & 7 == _LENGTH:
            if value > len(message) - at:
                raise NotAnExample("a field is longer than the message")
            yield tag >> 3, message[at : at + value]
            at += value
        else:
            raise NotAnExample(f"wire type {tag & 7}")


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """The integer at byte `at`, and the byte after it."""
    value = 0
    for shift in range(0, 7 * _MOST_VARINT_BYTES, 7):
        if at >= len(message):
            raise NotAnExample("ends within an integer")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), at
    raise NotAnExample("an integer of more than ten bytes")


def _packed(content: memoryview) -> Int64Array:
    data = np.frombuffer(content, np.uint8)
    ends = np.flatnonzero(data < 0x80) + 1
    if (ends[-1] if len(ends) else 0) != len(data):
        raise NotAnExample("ends within an integer")
    if not len(ends):
        return _EMPTY
    lengths = np.diff(ends, prepend=0)
    if lengths.max() > _MOST_VARINT_BYTES:
        raise NotAnExample("an integer of more than ten bytes")
    places = np.arange(len(data)) - np.repeat(ends - lengths, lengths)
    bits = (data & 0x7F).astype(np.uint64) << (7 * places).astype(np.uint64)
    return np.bitwise_or.reduceat(bits, ends - lengths).view(np.int64)


def _expect(field: int, expected: int, value: memoryview | np.uint64) -> memoryview:
    if field != expected or not isinstance(value, memoryview):
        raise NotAnExample(f"field {field}, expected {expected}")
    return value


def _text(name: memoryview) -> str:
    try:
        return bytes(name).decode()
    except UnicodeDecodeError as error:
        raise NotAnExample("a name that is not UTF-8") from error
