"""Documents of ArrayRecord files: one per record. The file does not say what a record is, so the first one that is not
empty decides:

    tf.train.Example    the text is in a feature
    a JSON object       the text is under a key
    UTF-8               the record is the text; the first one has no control characters, unlike other messages
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dali_pipes.corpus.columns.token_columns import NAMES
from dali_pipes.corpus.formats.arrayrecord import MAGIC as RIEGELI_MAGIC
from dali_pipes.corpus.formats.arrayrecord import Records, choose_feature
from dali_pipes.corpus.formats.tf_example import Feature, NotAnExample, parse_example
from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.text.documents import CONTROL_BYTES, Document
from dali_pipes.text.formats.record_text import text_of
from dali_pipes.text.formats.text_format import FileStart, TextFile, TextFormat
from dali_pipes.text.json_values import decode_utf8, parse_object
from dali_pipes.text.streams import ByteMeter, Compression

DEFAULT_KEY = "text"
"""The key unless the user sets one. Records that are plain texts do not have keys."""
_RECORDS_AT_ONCE = 256


def read_arrayrecord(path: Path, size: int, key: str | None, meter: ByteMeter) -> Iterator[Document]:
    """The text of each record; whole records as dicts if `key` is None. An empty record is an empty text.

    size: bytes of the file, spread evenly over its records for the meter. Blocks.
    Raises CorpusFormatError for records unlike the first one or without text under `key`, ConfigError for whole records
    of a file of plain texts, BackendError without the array_record package.
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


def _holds_tokens(path: Path, compression: Compression, has_dtype: bool) -> bool:
    """Whether the records are Examples with token ids: in a feature with one of the usual names, or in one without text
    next to it (a length or a label is a list of integers, too). Records of unknown content are ids if there is a dtype.
    """
    if has_dtype:
        return True
    first = next((record for _, record, _ in _records(path, path.stat().st_size) if record), b"")
    try:
        features = parse_example(first)
        feature = choose_feature(path, [features], None)
    except (NotAnExample, ConfigError):
        return False
    return feature in NAMES or not any(isinstance(value, list) for value in features.values())


def _records(path: Path, size: int) -> Iterator[tuple[int, bytes, float]]:
    """Number (from 1), content, and the share of the file that is done after it."""
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
            f"{path}: record {number} begins with {record[:40]!r}; expected a tf.train.Example, a JSON object or UTF-8 "
            "text. If the records are token ids, set dtype; other messages cannot be read"
        )
    if key is None:
        raise ConfigError(
            f"{path}: the records are plain texts; expected conversations as JSON objects or tf.train.Example"
        )
    if key != DEFAULT_KEY:
        raise ConfigError(f"{path}: the records are plain texts without a key {key!r}; omit text_key (--text-key)")


def _parse(place: str, kind: str, record: bytes, key: str | None) -> str | dict[str, Any]:
    if kind == "text":
        return decode_utf8(record, place)
    if kind == "json":
        return parse_object(decode_utf8(record, place), place)
    try:
        wanted = parse_example(record).items()
        return {name: _value(place, feature) if key in (None, name) else None for name, feature in wanted}
    except NotAnExample as error:
        raise CorpusFormatError(
            f"{place}: not a valid tf.train.Example ({error}), unlike the first records of the file"
        ) from None


def _value(place: str, feature: Feature) -> Any:
    """The text of a feature with one string, "" for an empty one; else its list of values."""
    if isinstance(feature, np.ndarray):
        return feature.tolist() if len(feature) else ""
    if isinstance(feature, str):
        return []  # floats, which are not text
    texts = [decode_utf8(value, place) for value in feature]
    return "".join(texts) if len(texts) < 2 else texts


def _read(file: TextFile, key: str | None, _: str | None, meter: ByteMeter) -> Iterator[Document]:
    return read_arrayrecord(file.path, file.size, key, meter)


def _is_array_record(start: FileStart) -> bool:
    return start.head.startswith(RIEGELI_MAGIC) and not start.compression


ARRAY_RECORD = TextFormat("ArrayRecord", _is_array_record, _read, holds_tokens=_holds_tokens)
