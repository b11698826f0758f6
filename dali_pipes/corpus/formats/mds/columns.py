"""The columns of an MDS set: which one holds the tokens, and how its values are encoded.

ndarray:uint16:4,5     20 ids, nothing else                                                       fixed size
ndarray:uint16         [ndim << 2 | w] [ndim dimensions of 2^w bytes] ids                         size per sample
ndarray                [type code] and then as above; the type may change from sample to sample   size per sample
bytes                  ids of a type that the set does not state                                  size per sample
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from dali_pipes import fields
from dali_pipes.corpus.columns.token_columns import FOR_TEXT, NAMES
from dali_pipes.corpus.formats.shard_index import MOST_SHARD_BYTES, Entry
from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.uris import FilePath

TYPE_CODES: dict[int, np.dtype[Any]] = {
    8: np.dtype("<u1"),
    9: np.dtype("<i1"),
    16: np.dtype("<u2"),
    17: np.dtype("<i2"),
    32: np.dtype("<u4"),
    33: np.dtype("<i4"),
    64: np.dtype("<u8"),
    65: np.dtype("<i8"),
}
"""Of integers: the first byte of bare `ndarray` values."""
_INTEGERS = {stored.name: stored for stored in TYPE_CODES.values()}
_Written: TypeAlias = tuple[np.dtype[Any] | None, bool, int | None]
"""Stored type, whether each value starts with its shape, ids in each value."""


@dataclass(frozen=True)
class Column:
    """The column that is read, among the others of a shard.

    stored:          integer type of the ids; None if each value states its own
    has_shape:       whether a value begins with its shape
    fixed_ids:       ids in every value, None if that differs
    variable_before: numbers of the columns before it, among those with a size per sample
    fixed_before:    bytes of the fixed-size columns before it
    fixed_bytes:     bytes of all fixed-size columns
    num_variable:    columns with a size per sample
    own_variable:    its number among these, None if its size is fixed
    """

    name: str
    stored: np.dtype[Any] | None
    has_shape: bool
    fixed_ids: int | None
    variable_before: int
    fixed_before: int
    fixed_bytes: int
    num_variable: int
    own_variable: int | None


def choose_column(shard: Entry, index: FilePath, wanted: str | None) -> str:
    """Name of the column of tokens in a shard: `wanted`, or the usual names, or the only one of integer arrays.

    Raises ConfigError without such a column, or with several.
    """
    encodings = encodings_of(shard)
    listed = ", ".join(f"{name} ({encoding})" for name, encoding in encodings.items())
    if wanted is not None:
        if wanted not in encodings:
            raise ConfigError(f"{index}: does not have the column token_column = {wanted!r}; its columns are {listed}")
        return wanted
    for name in NAMES:
        if name in encodings:
            return name
    for kind in ("ndarray", "bytes"):
        found = [
            name for name, encoding in encodings.items() if _is_array(encoding, kind) and name not in fields.NOT_IDS
        ]
        if len(found) == 1:
            return found[0]
        if found:
            break
    advice = f"; {FOR_TEXT}" if "str" in encodings.values() else ""
    raise ConfigError(
        f"{index}: cannot tell which column holds the token ids; set token_column to one of {listed}{advice}"
    )


def encodings_of(shard: Entry) -> dict[str, object]:
    """Encoding of each column, by name."""
    return dict(zip(_names(shard), shard.items("column_encodings"), strict=False))


def parse_column(shard: Entry, name: str, id_type: np.dtype[Any] | None) -> Column:
    """How column `name` of a shard is encoded. `id_type` is that of the ids of a column of `bytes`.

    Raises CorpusFormatError for a column that is missing or holds other than integers.
    """
    return _parse(shard, name, lambda where, encoding: _parse_encoding(where, encoding, id_type))


def parse_bytes_column(shard: Entry, name: str) -> Column:
    """How a column of texts (`str`, `json`, `bytes`) is encoded: as one of one-byte ids.

    Raises CorpusFormatError for a column that is missing or whose values have a fixed size.
    """
    return _parse(shard, name, lambda where, encoding: (np.dtype(np.uint8), False, None))


def _parse(shard: Entry, name: str, parse_encoding: Callable[[str, object], _Written]) -> Column:
    names, encodings, sizes = _names(shard), shard.items("column_encodings"), shard.items("column_sizes")
    if not len(names) == len(encodings) == len(sizes):
        raise CorpusFormatError(
            f"{shard.where}: has {len(names)} column names, {len(encodings)} encodings and {len(sizes)} sizes, "
            "expected as many of each: the index is damaged. Copy or recreate the set."
        )
    if name not in names:
        raise CorpusFormatError(f"{shard.where}: does not have the column {name!r}; its columns are {', '.join(names)}")
    for size in sizes:
        if size is not None and (type(size) is not int or not 0 <= size <= MOST_SHARD_BYTES):
            raise CorpusFormatError(f"{shard.where}: has the column size {size!r}, expected bytes or null")
    at = names.index(name)
    where = f"{shard.where}: column {name!r}"
    stored, has_shape, fixed_ids = parse_encoding(where, encodings[at])
    expected = None if fixed_ids is None or stored is None else fixed_ids * stored.itemsize
    if sizes[at] != expected:
        raise CorpusFormatError(
            f"{where}: has size {sizes[at]}, but encoding {encodings[at]} needs "
            f"{'null (a size per sample)' if expected is None else expected}: the index is damaged"
        )
    variable_before = sum(size is None for size in sizes[:at])
    return Column(
        name=name,
        stored=stored,
        has_shape=has_shape,
        fixed_ids=fixed_ids,
        variable_before=variable_before,
        fixed_before=sum(size for size in sizes[:at] if size is not None),
        fixed_bytes=sum(size for size in sizes if size is not None),
        num_variable=sum(size is None for size in sizes),
        own_variable=variable_before if sizes[at] is None else None,
    )


def _names(shard: Entry) -> list[str]:
    names = shard.items("column_names")
    if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise CorpusFormatError(f"{shard.where}.column_names is {names!r}, expected distinct strings")
    return names


def _is_array(encoding: object, kind: str) -> bool:
    parts = encoding.split(":") if isinstance(encoding, str) else [""]
    return parts[0] == kind and (len(parts) == 1 or parts[1] in _INTEGERS)


def _parse_encoding(where: str, encoding: object, id_type: np.dtype[Any] | None) -> _Written:
    parts = encoding.split(":") if isinstance(encoding, str) else [""]
    if parts == ["bytes"]:
        if id_type is None:
            raise CorpusFormatError(
                f"{where} holds bytes of an unknown integer type. Set dtype: 'int64' for sets that LLM Foundry "
                "concatenated, otherwise the type of your writer ('uint16', 'uint32', 'int32'). If the bytes are text, "
                "set tokenizer and text_key."
            )
        if not id_type.isnative:
            raise CorpusFormatError(f"{where}: dtype = {id_type.str!r} is big-endian, but ids in MDS are little-endian")
        return id_type, False, None
    if parts[0] != "ndarray" or len(parts) > 3:
        reason = {"pkl": " (a pickle, which is never loaded)", "str": f" ({FOR_TEXT})"}.get(parts[0], "")
        raise CorpusFormatError(f"{where} has encoding {encoding!r}{reason}; expected an ndarray of integers, or bytes")
    if len(parts) == 1:
        return None, True, None
    stored = _INTEGERS.get(parts[1])
    if stored is None:
        raise CorpusFormatError(f"{where} holds arrays of {parts[1]!r}; expected one of {', '.join(_INTEGERS)}")
    if len(parts) == 2:
        return stored, True, None
    dimensions = parts[2].split(",")
    if not all(dimension.isdecimal() and dimension.isascii() and len(dimension) < 11 for dimension in dimensions):
        raise CorpusFormatError(f"{where}: encoding {encoding!r} has an invalid shape, expected integers")
    return stored, False, math.prod(map(int, dimensions))
