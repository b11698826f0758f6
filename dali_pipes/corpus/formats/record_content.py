"""What the records of a file contain, in any format. The file does not state it, so the first records decide:

ids of a type that is not stated        `dtype` gives it
a tf.train.Example                      one of its int64 lists holds the ids; recognized automatically
text                                    refused: it has to be tokenized (`text.formats.record_documents` reads it)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from dali_pipes import fields
from dali_pipes.corpus.columns.row_columns import LEARNED
from dali_pipes.corpus.columns.token_columns import FOR_TEXT, NAMES, names_beside
from dali_pipes.corpus.formats.foreign import text_kind
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.corpus.formats.tf_example import Feature, NotAnExample, list_kind, parse_example
from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.uris import FilePath

Ids: TypeAlias = npt.NDArray[Any]

SEQUENCE_NAMES = ("inputs", "targets")
"""Features with ids in Examples for sequence models, where only one of them is there."""
_FIRST_RECORDS = 16  # read to find out what records hold


class Records(Protocol):
    """The records of one file."""

    @property
    def path(self) -> FilePath: ...

    def __len__(self) -> int: ...

    def read(self, first: int, last: int) -> list[bytes]:
        """Records `first` to `last - 1`. Blocks; safe for several threads.

        Raises CorpusReadError, and CorpusFormatError for damaged ones.
        """

    def place(self, number: int) -> str:
        """Where a record is, for a message: file, number, and byte if it is known."""


@dataclass(frozen=True)
class RecordContent:
    """What records hold: ids of `id_type`, or Examples with the ids in feature `column`.

    beside: features that describe the ids
    unused: features that may, but are unknown
    known:  the ids, and all features whose meaning is known, including those that are not used
    """

    id_type: np.dtype[Any]
    column: str | None
    beside: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    known: tuple[str, ...] = ()

    @property
    def stored(self) -> np.dtype[Any]:
        """Type of the decoded ids."""
        return self.id_type.newbyteorder("=")

    def values(self, place: str, record: bytes, names: Sequence[str | None]) -> list[Ids]:
        """The values of those features in the record at `place`; None: its ids, for records that are not Examples."""
        if self.column is None:
            if len(record) % self.id_type.itemsize:
                raise CorpusFormatError(
                    f"{place} has {len(record):,} bytes, expected a multiple of {self.id_type.itemsize}, the width of "
                    f"{self.id_type.name}. Set dtype to the type of the ids."
                )
            return [np.frombuffer(record, self.id_type).astype(self.stored, copy=False)]
        try:
            features = parse_example(record)
        except NotAnExample as error:
            raise CorpusFormatError(
                f"{place} is not a tf.train.Example ({error}), but the first records are. Write all records as "
                "Examples."
            ) from error
        late = [name for name in fields.BESIDE_IDS if name in features and name not in self.known]
        if late:
            raise CorpusFormatError(
                f"{place} has a feature {late[0]!r}, but the first records do not. Write it to all records or to none."
            )
        found = []
        for name in names:
            values = features.get(str(name), None if name == self.column and features else np.zeros(0, np.int64))
            if not isinstance(values, np.ndarray):
                what = (
                    f"is missing (found {', '.join(features)})" if values is None else f"is a {list_kind(values)} list"
                )
                raise CorpusFormatError(
                    f"{place}: feature {name!r} {what}, expected an int64 list. Set token_column to the feature with "
                    "the ids, or correct the record."
                )
            found.append(values)
        return found


def find_content(records: Records, options: OpenOptions) -> RecordContent:
    """What all records hold, by the first ones that are not empty. Blocks. Raises CorpusFormatError, ConfigError."""
    path, id_type, count = records.path, options.id_type, len(records)
    first = records.read(0, min(count, _FIRST_RECORDS))
    for start in range(_FIRST_RECORDS, count, _FIRST_RECORDS):  # empty ones say nothing
        if any(first):
            break
        first = records.read(start, min(count, start + _FIRST_RECORDS))
    filled = [record for record in first if record]
    try:
        examples = [parse_example(record) for record in filled]
    except NotAnExample:
        examples = []
    if any(examples):
        if id_type is not None and id_type.newbyteorder("=") != np.int64:
            raise CorpusFormatError(
                f"{path}: its records are tf.train.Example messages, whose ids are int64, but dtype = {id_type.name!r} "
                "is set. Remove dtype."
            )
        column = choose_feature(path, examples, options.token_column)
        there = list(dict.fromkeys(name for example in examples for name in example))
        known, foreign = names_beside(column, there)
        beside = tuple(name for name in known if options.use_masks or name not in LEARNED)
        unused = (*_unused_features(examples, column), *foreign)
        return RecordContent(np.dtype(np.int64), column, beside, unused, (column, *known, *foreign))
    if id_type is None or id_type.itemsize > 1:
        kind = next((kind for record in filled if (kind := text_kind(record)) is not None), None)
        if kind is not None:
            raise CorpusFormatError(f"{path}: its records are {kind}, not token ids; {FOR_TEXT}")
    if id_type is None:
        if not filled:
            return RecordContent(np.dtype(np.int64), None)
        raise CorpusFormatError(
            f"{path}: its records are not tf.train.Example messages. If each record holds the raw ids of a document, "
            "set dtype to their type, such as 'uint16', 'uint32' or 'int32'; the file does not store it."
        )
    return RecordContent(id_type, None)


def _unused_features(examples: list[dict[str, Feature]], column: str) -> tuple[str, ...]:
    """Features of unknown meaning that have a number for each id, or floating-point numbers."""
    found: dict[str, None] = {}
    for example in examples:
        ids = example.get(column)
        for name, feature in example.items():
            if isinstance(feature, np.ndarray):
                is_as_long = isinstance(ids, np.ndarray) and len(feature) == len(ids) > 1
            else:
                is_as_long = isinstance(feature, str)  # "float"
            if is_as_long:
                found[name] = None
    return fields.unused_columns(found, (column, *NAMES))


def choose_feature(path: FilePath, examples: list[dict[str, Feature]], wanted: str | None) -> str:
    """The feature that holds the ids: `wanted`, a usual name, or the only list of integers. Raises ConfigError."""
    kinds = {name: list_kind(feature) for example in examples for name, feature in example.items()}
    listed = ", ".join(f"{name} ({kind})" for name, kind in kinds.items())
    if wanted is not None:
        if wanted not in kinds:
            raise ConfigError(f"{path}: does not have the feature token_column = {wanted!r}; its features are {listed}")
        return wanted
    integers = [name for name, kind in kinds.items() if kind == "int64" and name not in fields.NOT_IDS]
    usual = [name for name in NAMES if name in integers]
    of_sequences = [name for name in SEQUENCE_NAMES if name in integers]
    for candidates in (usual[:1], of_sequences, integers):
        if len(candidates) == 1:
            return candidates[0]
    if not integers:
        raise ConfigError(f"{path}: none of its features is a list of token ids ({listed}); {FOR_TEXT}")
    raise ConfigError(f"{path}: cannot tell which feature holds the token ids; set token_column to one of {listed}")
