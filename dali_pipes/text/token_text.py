"""Ids as text, decoded with a `tokenizer.json` of the tokenizers library."""

import os
from collections.abc import Sequence
from itertools import groupby

from dali_pipes.text.tokenizer import load_tokenizer

_MOST_PARTS = 8
"""Ids that one character may take: more bytes than any has in UTF-8, doubled for tokenizers with longer ones."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenText:
    """Decodes ids. `path`: a `tokenizer.json` or its folder.

    Raises `BackendError` without the library, `ConfigError` for a file that cannot be loaded.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._tokenizer = load_tokenizer(path).library
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, about in added.items() if about.special)
        """Ids of special tokens, such as the one that ends a document."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, including special tokens; an id that the tokenizer does not know becomes `<id 70000>`."""
        parts = []
        for is_known, run in groupby(ids, key=self._knows):
            if is_known:
                parts.append(self._tokenizer.decode(list(run), skip_special_tokens=False))
            else:
                parts += [f"<id {token}>" for token in run]
        return "".join(parts)

    def each(self, ids: Sequence[int]) -> list[str]:
        """The text of each id. Of several ids that are one character together, the first has it and the others "".

        What an id adds to the text of the ids before it, for many tokenizers write a space only between two of them.
        """
        texts: list[str] = []
        before = 0  # where the ids of the text before begin
        while len(texts) < len(ids):
            begin, taken = len(texts), 1
            context = self.decode(ids[before:begin])
            text = self._added(context, ids, before, begin, begin + 1)
            if _REPLACEMENT in text:
                for more in range(2, 1 + min(_MOST_PARTS, len(ids) - begin)):
                    joined = self._added(context, ids, before, begin, begin + more)
                    if _REPLACEMENT not in joined:
                        text, taken = joined, more
                        break
            texts += [text, *[""] * (taken - 1)]
            before = begin
        return texts

    def _added(self, context: str, ids: Sequence[int], before: int, begin: int, end: int) -> str:
        """What ids begin ... end - 1 add to `context`, the text of those from `before` on."""
        text = self.decode(ids[before:end])
        return text[len(context) :] if text.startswith(context) else self.decode(ids[begin:end])

    def _knows(self, token: int) -> bool:
        return 0 <= token < 1 << 32 and self._tokenizer.id_to_token(token) is not None
