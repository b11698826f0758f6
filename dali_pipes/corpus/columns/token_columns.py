"""Which column of a Parquet or Arrow table holds the ids. Each row is a document.

    id: string   input_ids: list<int32>   loss_mask: list<bool>          row 0 = ids 5 6 7, row 1 = no ids, ...

A column of ids is a list of integers of any width: `list`, `large_list`, `list_view`, or of fixed size. Either the
lists or the integers may be dictionary-encoded.
"""

import sys
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from dali_pipes import fields
from dali_pipes.corpus.columns.row_columns import LEARNED
from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.runtime.optional import optional_package
from dali_pipes.uris import FilePath

NAMES = ("input_ids", "tokens")
LOSS_MASK = fields.MASKS[0]
FOR_TEXT = "for text, set tokenizer = 'tokenizer.json', or convert it with `dali-pipes tokenize`"
"""What to do with a file of text; the end of a message."""
_EXPECTED = dict.fromkeys(fields.MASKS, "a loss mask")


@dataclass(frozen=True)
class TokenColumns:
    """The columns of a table that describe its ids.

    tokens: name of the column of ids
    stored: their native integer type
    beside: columns that say which ids are padding or learned, or where documents end; see `fields`
    unused: columns of numbers that may describe the ids, but are unknown
    has_mask: whether the table has a column `loss_mask` next to the ids, used or not
    """

    tokens: str
    stored: np.dtype[Any]
    beside: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    has_mask: bool = False

    @property
    def header(self) -> bytes:
        """What the columns add to the digest of a file: columns that make a difference come later (`row_facts`)."""
        return "\0".join([self.tokens, *([LOSS_MASK] if self.has_mask else [])]).encode()


def import_pyarrow(path: FilePath) -> Any:
    """The package `pyarrow` with its modules `parquet` and `ipc`. Raises BackendError if it is not installed."""
    known = sys.modules.get("pyarrow")
    if known is not None and {"pyarrow.parquet", "pyarrow.ipc"} <= sys.modules.keys():
        return known
    with optional_package("pyarrow", "parquet", purpose=f"to read {path}"):
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    return pyarrow


def choose_columns(path: FilePath, schema: Any, wanted: str | None, *, use_masks: bool = True) -> TokenColumns:
    """The column of ids: `wanted` if it is named, else `input_ids`, else `tokens`, else the only one it can be.

    schema:    a `pyarrow.Schema`
    use_masks: whether columns that say which ids are learned are used

    Raises ConfigError for a `wanted` column that is missing, CorpusFormatError for a column of other than lists of
    integers, and without a column to choose or with several; both name the columns of the table.
    """
    if wanted is not None:
        _field(path, schema, wanted)
        name = wanted
    else:
        candidates = [field.name for field in schema if integer_type(field.type) is not None]
        known = [name for name in NAMES if name in candidates]
        others = [name for name in candidates if name not in fields.NOT_IDS]
        if not known and len(others) != 1:
            found = f"{len(others)} columns are lists of integers" if others else "no column is a list of integers"
            advice = "set token_column to the one with the ids" if others else FOR_TEXT
            raise CorpusFormatError(
                f"{path}: expected a column named {' or '.join(NAMES)}, but {found}; {_there(schema)}; {advice}"
            )
        name = (known or others)[0]
    stored = integer_type(_field(path, schema, name).type)
    if stored is None:
        raise CorpusFormatError(
            f"{path}: column {name} has type {schema.field(name).type}, expected a list of integers; {_there(schema)}"
        )
    own, foreign = names_beside(name, schema.names)
    beside = tuple(one for one in own if (use_masks or one not in LEARNED) and _is_beside(path, schema, one))
    numbers = [field.name for field in schema if _is_list_of_numbers(field.type)]
    unused = (*fields.unused_columns(numbers, (name, *NAMES)), *foreign)
    return TokenColumns(name, stored, beside, unused, LOSS_MASK in schema.names and name != LOSS_MASK)


def names_beside(tokens: str, there: Collection[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Which of the columns that are `there` describe the ids in column `tokens`, and which describe other ids.

    If there is a column of one of the usual names as well, all but a loss mask describe that one.
    """
    found = tuple(name for name in fields.BESIDE_IDS if name != tokens and name in there)
    if tokens in NAMES or not any(name in there for name in NAMES):
        return found, ()
    return tuple(name for name in found if name == LOSS_MASK), tuple(name for name in found if name != LOSS_MASK)


def integer_type(column: Any) -> np.dtype[Any] | None:
    """The native type of the integers in a list column of this `pyarrow.DataType`, None for other columns."""
    element = _element(column)
    import pyarrow

    return np.dtype(element.to_pandas_dtype()) if element is not None and pyarrow.types.is_integer(element) else None


def _is_beside(path: FilePath, schema: Any, name: str) -> bool:
    """Whether the table has a column of that name that describes the ids.

    Raises CorpusFormatError for one of another type.
    """
    if name not in schema.names:
        return False
    from pyarrow import types

    column = _field(path, schema, name).type
    element = _element(column)
    if element is not None and (types.is_integer(element) or types.is_boolean(element)):
        return True
    # A label of a whole row, and the length of a row, do not describe single ids; nor does a column without values.
    is_number = element is not None and (types.is_floating(element) or _element(element) is not None)
    if types.is_null(column) or (name in (fields.LABELS, fields.LENGTHS, fields.ENDS) and not is_number):
        return False
    raise CorpusFormatError(
        f"{path}: column {name} is {column}; {_EXPECTED.get(name, 'it')} must be a list of integers or booleans, one "
        "for each id. Remove the column, or save it as such a list."
    )


def _is_list_of_numbers(column: Any) -> bool:
    from pyarrow import types

    element = _element(column)
    return element is not None and (
        types.is_integer(element) or types.is_boolean(element) or types.is_floating(element)
    )


def _element(column: Any) -> Any:
    """The type of the elements of a list type, without dictionaries around either; None for other types."""
    from pyarrow import types

    if types.is_dictionary(column):
        column = column.value_type
    views = [getattr(types, name, None) for name in ("is_list_view", "is_large_list_view")]  # pyarrow 16
    kinds = [types.is_list, types.is_large_list, types.is_fixed_size_list, *(view for view in views if view)]
    if not any(kind(column) for kind in kinds):
        return None
    element = column.value_type
    return element.value_type if types.is_dictionary(element) else element


def _field(path: FilePath, schema: Any, name: str) -> Any:
    numbers = schema.get_all_field_indices(name)
    if not numbers:
        raise ConfigError(f"{path}: does not have a column {name!r}; {_there(schema)}")
    if len(numbers) > 1:
        raise CorpusFormatError(f"{path}: has {len(numbers)} columns named {name!r}, expected one; {_there(schema)}")
    return schema.field(numbers[0])


def _there(schema: Any) -> str:
    if not len(schema):
        return "the table does not contain any columns"
    return f"its columns are {', '.join(f'{field.name}: {field.type}' for field in schema)}"
