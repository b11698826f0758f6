"""Ids by what they stand for, from a `tokenizer.json`: for settings that name an id by its text."""

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def id_of(token: str, tokenizer: str | None) -> int:
    """The id of a string of the vocabulary, or of an added token. Blocks to read the file, once.

    ValueError for a string that is not there, and for a file that is not a `tokenizer.json`, or None.
    """
    if tokenizer is None:
        raise ValueError(f"{token!r} needs a tokenizer: set tokenizer to a tokenizer.json, or use the id")
    file = Path(tokenizer)
    try:
        ids = _vocabulary(file, file.stat().st_mtime_ns)
    except OSError as error:
        raise ValueError(f"tokenizer = {tokenizer!r}: cannot read the file: {error.strerror}") from error
    if token not in ids:
        raise ValueError(f"{token!r} is not in the vocabulary of {tokenizer}; use one of its strings, or an id")
    return ids[token]


@functools.lru_cache(8)
def _vocabulary(file: Path, changed_ns: int) -> dict[str, int]:
    try:
        tokenizer = json.loads(file.read_bytes())
        ids, added = vocabulary_of(tokenizer)
    except ValueError as error:
        raise ValueError(f"tokenizer = {str(file)!r}: not a tokenizer.json: {error}") from error
    return {**ids, **added}


def vocabulary_of(tokenizer: Any) -> tuple[dict[str, int], dict[str, int]]:
    """The ids of the pieces of words, and of the added tokens, by text. ValueError without a vocabulary.

    tokenizer: the content of a `tokenizer.json`
    """
    model = tokenizer.get("model") if isinstance(tokenizer, Mapping) else None
    pieces = model.get("vocab") if isinstance(model, Mapping) else None
    if isinstance(pieces, list):  # of a Unigram model: pieces and their scores
        pieces = {piece: number for number, (piece, _) in enumerate(pieces)}
    if not isinstance(pieces, Mapping) or not pieces:
        raise ValueError("it does not contain model.vocab")
    added = {str(entry["content"]): int(entry["id"]) for entry in tokenizer.get("added_tokens", ())}
    return {str(text): int(number) for text, number in pieces.items()}, added
