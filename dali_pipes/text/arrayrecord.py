"""Documents of ArrayRecord files: one a record. What a record is nothing in the file says; the first that is not empty
tells:

    tf.train.Example    the feature of that name holds the text
    a JSON object       so does the key
    UTF-8               the record is the text; the first has no control characters, as other messages have
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dali_pipes.corpus.columns.token_columns import NAMES
from dali_pipes.corpus.formats.arrayrecord import Records, choose_feature
from dali_pipes.corpus.formats.tf_example import Feature, NotAnExample, parse_example
from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.text.documents import CONTROL_BYTES, Document
from dali_pipes.text.lines import text_of
from dali_pipes.text.streams import ByteMeter

DEFAULT_KEY = "text"
"""Where nobody has said where the text is; records that are texts have no other."""
_RECORDS_AT_ONCE = 256


def read_arrayrecord(path: Path, size: int, key: str | None, meter: ByteMeter) -> Iterator[Document]:
    """The text of each record; whole records as dicts if `key` is None. An empty record is an empty text.

    size: bytes of the file, spread evenly over its records for the meter. Blocks.
    Raises CorpusFormatError for records that are not as the first one is or have no text under `key`, ConfigError for
    whole records of a file of texts, BackendError without the array_record package.
    """
    before, kind = meter.done, ""
    for number, record, share in _records(path, size):
        if not kind and record:
            kind = _kind_of(record)
            if kind == "text":
                _check_bare_text(path, number, record, key)
        place = f"{path}: record {number}"
        content: Any = _parse(place, kind, record, key) if record else {} if key is None else ""
        if isinstance(content, dict) and key is not None:
            content = text_of(content, key, place)
        yield Document(content, path, "record", number)
        meter.done = before + int(size * share)
    meter.done = before + size


def holds_tokens(path: Path) -> bool:
    """Whether the records are Examples with a list of ids of a usual name, or with one and no text beside it.

    A length or a label is a list of integers, too. Reads some; raises as `read_arrayrecord`.
    """
    first = next((record for _, record, _ in _records(path, path.stat().st_size) if record), b"")
    try:
        features = parse_example(first)
        feature = choose_feature(path, [features], None)
    except (NotAnExample, ConfigError):
        return False
    return feature in NAMES or not any(isinstance(value, list) for value in features.values())


def _records(path: Path, size: int) -> Iterator[tuple[int, bytes, float]]:
    """Number, from 1 on, content, and the share of the file that is done behind it."""
    records = Records(path, size)
    count = len(records)
    for first in range(0, count, _RECORDS_AT_ONCE):
        for number, record in enumerate(records.read(first, min(first + _RECORDS_AT_ONCE, count)), first + 1):
            yield number, record, number / count


def _kind_of(record: bytes) -> str:
    try:
        if parse_example(record):
            return "example"
    except NotAnExample:
        pass
    try:
        return "json" if isinstance(json.loads(record), dict) else "text"
    except (ValueError, RecursionError):
        return "text"


def _check_bare_text(path: Path, number: int, record: bytes, key: str | None) -> None:
    if not CONTROL_BYTES.isdisjoint(record):
        raise CorpusFormatError(
            f"{path}: record {number} is no tf.train.Example and no JSON, and has bytes that no text has: "
            f"{record[:40]!r}. If the records are ids, say their type with dtype=; other messages cannot be read"
        )
    if key is None:
        raise ConfigError(f"{path}: its records are texts; conversations are JSON objects or tf.train.Example")
    if key != DEFAULT_KEY:
        raise ConfigError(f"{path}: its records are texts, which have no {key!r}; leave text_key (--text-key) out")


def _parse(place: str, kind: str, record: bytes, key: str | None) -> str | dict[str, Any]:
    try:
        if kind == "text":
            return record.decode("utf-8")
        if kind == "example":
            wanted = parse_example(record).items()
            return {name: _value(feature) if key in (None, name) else None for name, feature in wanted}
        found = json.loads(record)
    except UnicodeDecodeError as error:
        raise CorpusFormatError(f"{place}: the text is not UTF-8: {error}") from None
    except NotAnExample as error:
        raise CorpusFormatError(f"{place}: is no tf.train.Example ({error}), but the first records are") from None
    except (ValueError, RecursionError) as error:
        raise CorpusFormatError(f"{place}: is no JSON ({error}), but the first records are") from None
    if not isinstance(found, dict):
        raise CorpusFormatError(f"{place}: a JSON {type(found).__name__}; an object is expected, as the first is")
    return found


def _value(feature: Feature) -> Any:
    """The text of a feature with one string, "" for one without any; else what it holds."""
    if isinstance(feature, np.ndarray):
        return feature.tolist() if len(feature) else ""
    if isinstance(feature, str):
        return []  # floats, which are no text
    texts = [value.decode("utf-8") for value in feature]
    return "".join(texts) if len(texts) < 2 else texts
