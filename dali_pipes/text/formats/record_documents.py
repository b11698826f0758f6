"""Documents of files of records: one per record. The file does not state what its records are, so the first record that
is not empty decides:

    tf.train.Example    the text is in a feature
    a JSON object       the text is under a key
    UTF-8               the record is the text; the first one has no control characters, unlike other messages
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from dali_pipes.corpus.columns.token_columns import NAMES
from dali_pipes.corpus.formats.record_content import choose_feature
from dali_pipes.corpus.formats.tf_example import Feature, NotAnExample, parse_example
from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.text.documents import CONTROL_BYTES, Document
from dali_pipes.text.formats.record_text import text_of
from dali_pipes.text.json_values import decode_utf8, parse_object
from dali_pipes.uris import FilePath

DEFAULT_KEY = "text"
"""The key unless the user sets one. Records that are plain texts do not have keys."""


def documents_of(path: FilePath, records: Iterable[bytes], key: str | None) -> Iterator[Document]:
    """The text of each record; whole records as dicts if `key` is None. An empty record is an empty text.

    Raises CorpusFormatError for records unlike the first one or without text under `key`, ConfigError for whole records
    of a file of plain texts.
    """
    kind = ""
    for number, record in enumerate(records, 1):
        if not kind and record:
            kind = _kind_of(record)
            if kind == "text":
                _check_bare_text(path, number, record, key)
        place = f"{path}: record {number}"
        content: Any = _parse(place, kind, record, key) if record else {} if key is None else ""
        if isinstance(content, dict) and key is not None:
            content = text_of(content, key, place)
        yield Document(content, path, "record", number)


def hold_tokens(path: FilePath, records: Iterable[bytes], has_dtype: bool) -> bool:
    """Whether the records are Examples with token ids: in a feature with one of the usual names, or in one without text
    next to it (a length or a label is a list of integers, too). Records of unknown content are ids if there is a dtype.
    """
    if has_dtype:
        return True
    first = next((record for record in records if record), b"")
    try:
        features = parse_example(first)
        feature = choose_feature(path, [features], None)
    except (NotAnExample, ConfigError):
        return False
    return feature in NAMES or not any(isinstance(value, list) for value in features.values())


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


def _check_bare_text(path: FilePath, number: int, record: bytes, key: str | None) -> None:
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
