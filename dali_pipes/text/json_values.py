"""UTF-8 and JSON in records and files: decoded, or refused with an error that names the place."""

import json
from typing import Any

from dali_pipes.errors import CorpusFormatError
from dali_pipes.fields import holds_nothing

_MOST_SHOWN = 60
_CHARACTERS_AROUND_ERROR = 20


def decode_utf8(data: bytes, place: str) -> str:
    """Bytes as text. Raises CorpusFormatError, naming `place` and the first invalid byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CorpusFormatError(
            f"{place}: byte {error.start:,} (0x{data[error.start]:02x}) is not valid UTF-8 ({error.reason}); "
            "save the text as UTF-8"
        ) from None


def parse_json(text: str, place: str) -> Any:
    """The value of a JSON text. Raises CorpusFormatError, naming `place` and the position of the error."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        near = text[max(0, error.pos - _CHARACTERS_AROUND_ERROR) : error.pos + _CHARACTERS_AROUND_ERROR]
        raise CorpusFormatError(
            f"{place}: invalid JSON: {error.msg} at character {error.pos + 1:,}, near {shown(near)}"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of brackets
        raise CorpusFormatError(f"{place}: the JSON cannot be parsed: {error}") from None


def parse_object(text: str, place: str) -> dict[str, Any]:
    """The same for a JSON object; other JSON values are refused, too."""
    found = parse_json(text, place)
    if not isinstance(found, dict):
        raise CorpusFormatError(f"{place}: found {shown(found)}; expected a JSON object")
    return found


def parse_if_text(value: Any, place: str) -> Any:
    """The value of a JSON text, None for a blank one; any other value unchanged. Raises CorpusFormatError."""
    if not isinstance(value, str):
        return value
    return parse_json(value, place) if value.strip() else None


def parse_list(value: Any, place: str, expected: str) -> list[Any]:
    """A list, its JSON text, or a list of JSON texts, as a list of values; empty if it holds nothing.

    Raises CorpusFormatError, naming what was `expected`, for anything else.
    """
    value = parse_if_text(value, place)
    if holds_nothing(value):
        return []
    if not isinstance(value, list):
        raise CorpusFormatError(f"{place}: found {shown(value)}; expected {expected}")
    return [parse_if_text(one, f"{place}[{number}]") for number, one in enumerate(value)]


def check_surrogates(text: str, place: str) -> None:
    """Raise CorpusFormatError for half of a surrogate pair, which UTF-8 cannot hold."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        before = text[max(0, error.start - _CHARACTERS_AROUND_ERROR) : error.start]
        raise CorpusFormatError(
            f"{place}: character {error.start:,} ({text[error.start]!a}, after {before!a}) is half of a surrogate "
            "pair, which UTF-8 cannot encode; correct or remove the record"
        ) from None


def shown(value: Any) -> str:
    """The beginning of a value, for messages; what is not a text is followed by its type."""
    text = repr(value)
    short = text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."
    return short if isinstance(value, str) else f"{short} ({type(value).__name__})"
