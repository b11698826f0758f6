"""Documents of JSONL files (one object a line) and of plain text files (one document, unless a separator is named).

Lines end at `\\n` alone: U+2028, U+0085 and `\\r` may lie inside of strings. `\\r\\n`, blank lines, a byte order mark
at the start and a missing last `\\n` are accepted. Lines are bytes until they are decoded as strict UTF-8 and parsed.
"""

import codecs
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dali_pipes.errors import CorpusFormatError
from dali_pipes.fields import CHAT_FORMS
from dali_pipes.text.documents import Document

_BOM = codecs.BOM_UTF8
_MOST_SHOWN = 60
_MOST_KEYS_SHOWN = 20


def read_jsonl(path: Path, chunks: Iterator[bytes], key: str | None) -> Iterator[Document]:
    """The text under `key` of each line, "" for null; the whole objects if `key` is None.

    Raises CorpusFormatError, naming file and line, for what is not UTF-8, not JSON, or no object with a text there.
    """
    for number, line in enumerate(split_lines(chunks), 1):
        if number == 1:
            line = line.removeprefix(_BOM)
        if not line.strip():
            continue
        record = _parse(path, number, line)
        if key is not None:
            yield Document(text_of(record, key, f"{path}: line {number}"), path, "line", number)
        else:
            yield Document(record, path, "line", number)


def read_plain(path: Path, chunks: Iterator[bytes], separator: str | None) -> Iterator[Document]:
    """The file as one document, newlines as they are; with `separator`, what lies between its places.

    Nothing behind the last separator is no document; nothing between two of them is an empty one.
    """
    if separator is None:
        text = "".join(_decoded(path, chunks))
        yield Document(text, path, "document", 1)
        return
    number, overlap = 1, len(separator) - 1
    pending: list[str] = []  # of a document that goes on, without its tail, which may begin a separator
    tail = ""
    for piece in _decoded(path, chunks):
        first, *others = (tail + piece).split(separator)
        for other in others:
            yield Document("".join([*pending, first]), path, "document", number)
            pending, first, number = [], other, number + 1
        kept = max(0, len(first) - overlap)
        pending.append(first[:kept])
        tail = first[kept:]
    rest = "".join([*pending, tail])
    if rest:
        yield Document(rest, path, "document", number)


def text_of(record: Mapping[str, Any], key: str, place: str) -> str:
    """The text under `key`, "" for null. CorpusFormatError names the keys there are."""
    try:
        text = record[key]
    except KeyError:
        raise CorpusFormatError(f"{place}: {missing_key(key, list(record))}") from None
    if text is None:
        return ""
    if not isinstance(text, str):
        advice = _as_chat([key])
        raise CorpusFormatError(
            f"{place}: {key!r} holds {_shown(text)}, a {type(text).__name__}; a string is expected"
            + (f". {advice}" if advice else "")
        )
    return text


def missing_key(key: str, keys: list[str]) -> str:
    """What is wrong and what to do, for a record that lacks `key`."""
    names = ", ".join(map(repr, keys[:_MOST_KEYS_SHOWN])) + (", ..." if len(keys) > _MOST_KEYS_SHOWN else "")
    chat = _as_chat(keys)
    advice = chat or "Name the one that holds the text: text_key (--text-key)."
    return f"no key {key!r}; the keys are {names or '(none)'}. {advice}"


def missing_column(key: str, names: list[str]) -> str:
    """The same for a table or a set that lacks column `key`."""
    return missing_key(key, names).replace("no key", "no column").replace("the keys", "the columns")


def _as_chat(keys: Sequence[str]) -> str:
    """What to do with records of these keys if they are those of conversations, else nothing."""
    if not any(set(kind) <= set(keys) for kind in CHAT_FORMS):
        return ""
    return (
        "These are conversations: make ids and loss masks of them with `dali-pipes tokenize --chat`, and name the "
        "folder it makes as the corpus."
    )


def split_lines(chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Lines without their `\\n`; an empty rest behind the last one is no line."""
    pending: list[bytes] = []  # of a line that goes on: joined once, however many chunks it spans
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        pending.append(first)
        if others:
            yield b"".join(pending)
            yield from others[:-1]
            pending = [others[-1]]
    last = b"".join(pending)
    if last:
        yield last


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise CorpusFormatError(
            f"{path}: line {number}: byte {error.start} of the line, 0x{line[error.start]:02x}, is not UTF-8 "
            f"({error.reason})"
        ) from None
    except json.JSONDecodeError as error:
        raise CorpusFormatError(
            f"{path}: line {number}: not valid JSON: {error.msg} at character {error.pos + 1}, found "
            f"{_shown(error.doc[max(0, error.pos - 20) : error.pos + 20])}; one object a line is expected"
        ) from None
    except (ValueError, RecursionError) as error:  # a number of thousands of digits; thousands of brackets
        raise CorpusFormatError(f"{path}: line {number}: cannot be parsed as JSON: {error}") from None
    if not isinstance(record, dict):
        raise CorpusFormatError(
            f"{path}: line {number}: a JSON {type(record).__name__}, {_shown(record)}; one object a line is expected, "
            'such as {"text": "..."}'
        )
    return record


def _decoded(path: Path, chunks: Iterator[bytes]) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")()
    before = 0
    is_start = True
    for chunk, is_last in _with_last(chunks):
        held = len(decoder.getstate()[0])
        try:
            text = decoder.decode(chunk, is_last)
        except UnicodeDecodeError as error:
            raise CorpusFormatError(
                f"{path}: byte {before - held + error.start} of the text is not UTF-8 ({error.reason})"
            ) from None
        before += len(chunk)
        if is_start and text:
            text, is_start = text.removeprefix("\ufeff"), False
        yield text


def _with_last(chunks: Iterator[bytes]) -> Iterator[tuple[bytes, bool]]:
    for chunk in chunks:
        yield chunk, False
    yield b"", True


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else text[:_MOST_SHOWN] + "..."
