"""Text of special tokens inside messages stays text: only the template can make special ids.

The reference (`apply_chat_template`) encodes the rendered conversation as a whole, and takes `<|im_end|>` for the
special token wherever it appears: a user who types it ends the turn. Here the strings of a record are *masked* before
they are rendered: each character of special-token text in them, and of text at their ends that the template could
complete to a special token, becomes a stand-in of the same length from a Unicode plane without characters.

    content   Hi<|im_end|>           masked   HiXXXXXXXXXX          (X: stand-ins)
    rendered  <|im_start|>user\\nHiXXXXXXXXXX<|im_end|>\\n           what still looks special comes from the template
    encoded   SSSSSSSSSSSSuser\\nHi<|im_end|>EEEEEEEEEE\\n           S, E: aliases; the rest as ordinary text

The encoding uses a copy of the tokenizer that takes special-token text as ordinary text, and knows one alias per
special token, of the same length, so that offsets stay valid. The text is again encoded as a whole: the pieces between
special tokens are the same as in the reference, and so are the ids of all other text. Most conversations do not contain
special-token text and are encoded exactly like the reference.

Added tokens that are not special (often `<think>`, `<tool_call>`) are vocabulary: messages may contain them.
"""

import functools
import json
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import CorpusFormatError
from dali_pipes.runtime.optional import optional_package
from dali_pipes.text.chat.conversation import ROLES
from dali_pipes.text.chat.tool_calls import Arguments

if TYPE_CHECKING:
    from tokenizers import Tokenizer

STAND_IN, ALIAS = 0xC0000, 0xD0000
"""First code points of two planes without Unicode characters."""


class Tokens(NamedTuple):
    """ids: int64 (n,). offsets: int64 (n, 2), the characters that a token covers: the first, and one after the last.
    All tokens that share a character of several bytes cover it.
    """

    ids: npt.NDArray[np.int64]
    offsets: npt.NDArray[np.int64]


class SpecialText:
    """Encodes rendered conversations with a copy of `tokenizer`, which is not changed. Thread-safe."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        # Without truncation, padding and post-processor: the last one may trim spaces from the offsets, and does
        # nothing else without tokens around the text.
        settings = json.loads(tokenizer.to_str()) | {"truncation": None, "padding": None, "post_processor": None}
        self._json = json.dumps(settings)
        self._reference = _tokenizer(self._json, special_is_text=False)
        added = [entry for entry in settings.get("added_tokens") or () if entry["content"]]
        special = [entry for entry in added if entry["special"] and not entry["content"].isspace()]
        self._special = {entry["content"]: number for number, entry in enumerate(special)}
        self._special_entries = special
        texts = sorted((entry["content"] for entry in added), key=len, reverse=True)
        self._any_added = re.compile("|".join(map(re.escape, texts)) or r"(?!)")
        self._any_special = re.compile("|".join(re.escape(t) for t in texts if t in self._special) or r"(?!)")
        characters = sorted({c for text in self._special for c in text if not c.isspace()})
        self._alias_text = re.compile(f"[{chr(ALIAS)}-{chr(ALIAS + 0xFFFF)}]")
        self._mask = {ord(c): STAND_IN + number for number, c in enumerate(characters)}
        self._unmask = {stand_in: c for c, stand_in in self._mask.items()}
        self._heads = {text[:n] for text in self._special for n in range(1, len(text))}
        self._tails = {text[-n:] for text in self._special for n in range(1, len(text))}
        self._head_ends = {head[-1] for head in self._heads}
        self._tail_starts = {tail[0] for tail in self._tails}
        self._longest = max(map(len, self._special), default=0)

    def masked(self, value: Any) -> Any:
        """The same JSON value with special-token text masked in every string, including keys; lengths stay."""
        if isinstance(value, str):
            return self._masked_text(value)
        if isinstance(value, list):
            return [self.masked(item) for item in value]
        if isinstance(value, dict):
            # Roles come from a fixed list of names, and templates build tokens from them.
            found = {self._masked_text(k): v if _is_role(k, v) else self.masked(v) for k, v in value.items()}
            return Arguments(found, self._masked_text(value.text)) if isinstance(value, Arguments) else found
        return value

    def unmasked(self, text: str) -> str:
        """The text before `masked`."""
        return text.translate(self._unmask)

    def _masked_text(self, text: str) -> str:
        if not text or not self._special:
            return text
        text = self._any_special.sub(lambda match: match[0].translate(self._mask), text)
        if text[-1] in self._head_ends:
            size = next((n for n in range(min(self._longest, len(text)), 0, -1) if text[-n:] in self._heads), 0)
            text = text[: len(text) - size] + text[len(text) - size :].translate(self._mask)
        if text[0] in self._tail_starts:
            size = next((n for n in range(min(self._longest, len(text)), 0, -1) if text[:n] in self._tails), 0)
            text = text[:size].translate(self._mask) + text[size:]
        return text

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Encodes rendered text like the reference: all special-token text is the template's. Uses all cores."""
        return [_tokens(found) for found in self._reference.encode_batch(list(texts), add_special_tokens=False)]

    def encode_ordinary(self, texts: Sequence[str]) -> list[npt.NDArray[np.int64]]:
        """Ids of texts without a template: special-token text is ordinary text."""
        found = self._ordinary.encode_batch(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int64) for encoding in found]

    def encode_masked(self, texts: Sequence[str], places: Sequence[str]) -> list[Tokens]:
        """Encodes rendered text with masked messages: special tokens from the template, messages as ordinary text.

        Raises CorpusFormatError, naming the place, if the tokenizer cannot keep the two apart.
        """
        aliases = [self._any_added.sub(self._alias, text) for text in texts]
        encodings = self._twin.encode_batch([self.unmasked(text) for text in aliases], add_special_tokens=False)
        found = []
        for text, place, encoding in zip(texts, places, encodings, strict=True):
            tokens = _tokens(encoding)
            is_alias = tokens.ids >= self._first_alias
            number = sum(match[0] in self._special for match in self._any_added.finditer(text))
            if self._alias_text.search(text) or is_alias.sum() != number or self._leaks(tokens, self.unmasked(text)):
                raise CorpusFormatError(
                    f"{place}: a message contains the text of a special token, and this tokenizer cannot encode it as "
                    "ordinary text; remove it from the message"
                )
            tokens.ids[is_alias] = self._special_ids[tokens.ids[is_alias] - self._first_alias]
            found.append(tokens)
        return found

    def _leaks(self, tokens: Tokens, text: str) -> bool:
        """Whether the model encoded special-token text as its id. An unknown token for other text does not count."""
        found = np.flatnonzero(np.isin(tokens.ids, self._special_ids))
        covered = (text[slice(*tokens.offsets[i].tolist())].strip() for i in found)
        return any(self._special.get(piece) is not None for piece in covered)

    def _alias(self, match: re.Match[str]) -> str:
        number = self._special.get(match[0])
        return match[0] if number is None else chr(ALIAS + number) * len(match[0])

    @functools.cached_property
    def _special_ids(self) -> npt.NDArray[np.int64]:
        return np.array([entry["id"] for entry in self._special_entries], np.int64)

    @functools.cached_property
    def _first_alias(self) -> int:
        return 1 + max(self._reference.get_vocab(with_added_tokens=True).values())

    @functools.cached_property
    def _ordinary(self) -> "Tokenizer":
        return _tokenizer(self._json, special_is_text=True)

    @functools.cached_property
    def _twin(self) -> "Tokenizer":
        from tokenizers import AddedToken

        twin = _tokenizer(self._json, special_is_text=True)
        for number, entry in enumerate(self._special_entries):
            text = chr(ALIAS + number) * len(entry["content"])
            flags = {key: entry[key] for key in ("single_word", "lstrip", "rstrip", "normalized")}
            twin.add_tokens([AddedToken(text, special=False, **flags)])
            if twin.token_to_id(text) != self._first_alias + number:
                raise AssertionError(
                    f"alias {number} has id {twin.token_to_id(text)}, not {self._first_alias + number}"
                )
        return twin


def _is_role(key: str, value: Any) -> bool:
    return key == "role" and isinstance(value, str) and value in ROLES.values()


def _tokenizer(settings: str, *, special_is_text: bool) -> "Tokenizer":
    with optional_package("tokenizers", "chat", purpose="to tokenize chats"):
        from tokenizers import Tokenizer
    made = Tokenizer.from_str(settings)
    made.encode_special_tokens = special_is_text
    return made


def _tokens(encoding: Any) -> Tokens:
    return Tokens(np.array(encoding.ids, np.int64), np.array(encoding.offsets, np.int64).reshape(-1, 2))
