"""The text in a record: found under its key, or an error that names the keys there are."""

from collections.abc import Mapping, Sequence
from typing import Any

from dali_pipes.errors import CorpusFormatError
from dali_pipes.fields import CHAT_FORMS
from dali_pipes.text.json_values import shown

_MOST_KEYS_SHOWN = 20


def text_of(record: Mapping[str, Any], key: str, place: str) -> str:
    """The text under `key`, "" for null. Raises CorpusFormatError for a missing key, and for what is not a string."""
    try:
        text = record[key]
    except KeyError:
        raise CorpusFormatError(f"{place}: {missing_key(key, list(record))}") from None
    if text is None:
        return ""
    if not isinstance(text, str):
        raise CorpusFormatError(f"{place}: {key!r} is {shown(text)}; expected a string. {_advice([key])}")
    return text


def missing_key(key: str, keys: Sequence[str], what: str = "key") -> str:
    """What was found and what to do, for a record without `key`, or a table without this column."""
    names = ", ".join(map(repr, keys[:_MOST_KEYS_SHOWN])) + (", ..." if len(keys) > _MOST_KEYS_SHOWN else "")
    return f"{what} {key!r} is missing; the {what}s are {names or '(none)'}. {_advice(keys)}"


def missing_column(key: str, names: Sequence[str]) -> str:
    """The same for a table or a set of shards."""
    return missing_key(key, names, "column")


def _advice(keys: Sequence[str]) -> str:
    if any(set(form) <= set(keys) for form in CHAT_FORMS):
        return (
            "These are conversations: tokenize them with `dali-pipes tokenize --chat`, which also writes loss masks, "
            "and open the output folder."
        )
    return "Set text_key (--text-key) to the one that holds the text."
