"""Characters that a tokenizer cannot encode, since they are not in its vocabulary; the library does not report them.

A BPE model without an unknown token drops them; other models replace them by an unknown token, WordPiece and WordLevel
the whole word. Models that fall back to bytes, or work on bytes, do not lose any.

They are counted by a copy of the tokenizer with a new unknown token: the text it covers was lost, and other text cannot
be mistaken for it.

    vocabulary a, b, c     "abéc"  ->  a b c   or   a b <unk> c         copy: a b X c,  X covers "é"
"""

import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_UNKNOWN = "\U000b0020"
"""A code point of a plane without characters."""
_BEYOND = 1 << 30
"""An id above those of added tokens."""
_WORD_MODELS = ("WordPiece", "WordLevel")
_MOST_SHOWN = 20


class Lost(NamedTuple):
    """characters: number of lost characters of a text. pieces: counts of them (of words, for models of words)."""

    characters: int
    pieces: Counter[str]


def can_lose_characters(settings: Mapping[str, Any]) -> bool:
    """Whether there may be text that the tokenizer of this `tokenizer.json` cannot encode."""
    model = settings["model"]
    entries = model.get("vocab") or ()
    names = set(entries if isinstance(entries, dict) else (entry[0] for entry in entries))
    if model.get("type") not in ("BPE", "Unigram"):
        return True
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in names for byte in range(256)):
        return False
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return True
    is_of_bytes = _has_byte_level(settings.get("pre_tokenizer")) or _has_byte_level(settings.get("normalizer"))
    return not (is_of_bytes and names >= _byte_letters())


class LostCharacters:
    """Counts the characters that a tokenizer loses. Thread-safe.

    special_is_text: whether it takes the text of special tokens as ordinary text.
    """

    def __init__(self, tokenizer: "Tokenizer", *, special_is_text: bool) -> None:
        from tokenizers import Tokenizer

        settings = json.loads(tokenizer.to_str()) | {"truncation": None, "padding": None, "post_processor": None}
        model = settings["model"]
        self._of_words = model["type"] in _WORD_MODELS
        self._unknown_id = _unknown_id(model)
        if model["type"] == "Unigram":
            best = max(
                (score for _, score in model["vocab"]), default=0.0
            )  # the model derives the score of unknown text from the lowest
            model["unk_id"] = self._new_id = len(model["vocab"])
            model["vocab"].append([_UNKNOWN, best])
        else:
            model["unk_token"], self._new_id = _UNKNOWN, _BEYOND
            model["vocab"][_UNKNOWN] = _BEYOND
        if model["type"] == "BPE":
            model["fuse_unk"] = False
        self._twin = Tokenizer.from_str(json.dumps(settings))
        self._twin.encode_special_tokens = special_is_text

    def find(self, texts: Sequence[str], ids: Sequence[Any] | None = None) -> list[Lost | None]:
        """What each text lost, None if nothing. Uses all cores.

        ids: the encoded texts, if known: without the unknown token among them, nothing is lost.
        """
        chosen = range(len(texts))
        if ids is not None and self._unknown_id is not None:
            chosen = [number for number in chosen if self._unknown_id in ids[number]]  # type: ignore[assignment]
        found: list[Lost | None] = [None] * len(texts)
        encodings = self._twin.encode_batch([texts[number] for number in chosen], add_special_tokens=False)
        for number, encoding in zip(chosen, encodings, strict=True):
            spans = {span for id, span in zip(encoding.ids, encoding.offsets, strict=True) if id == self._new_id}
            places = {place for start, end in spans for place in range(start, end)}
            if places:
                text = texts[number]
                words = [text[start:end][:_MOST_SHOWN] for start, end in spans]
                found[number] = Lost(len(places), Counter(words if self._of_words else [text[p] for p in places]))
        return found


def _unknown_id(model: Mapping[str, Any]) -> int | None:
    if model["type"] == "Unigram":
        id: int | None = model.get("unk_id")
    else:
        id = model["vocab"].get(model.get("unk_token"))
    return id


def _has_byte_level(part: Mapping[str, Any] | None) -> bool:
    if part is None:
        return False
    inner = part.get("pretokenizers") or part.get("normalizers") or ()
    return part.get("type") == "ByteLevel" or any(map(_has_byte_level, inner))


@functools.cache
def _byte_letters() -> frozenset[str]:
    from tokenizers import pre_tokenizers

    return frozenset(pre_tokenizers.ByteLevel.alphabet())
