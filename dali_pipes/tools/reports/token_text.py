"""Ids as text, decoded with a `tokenizer.json` of the tokenizers library."""

import os
from collections.abc import Sequence
from itertools import groupby

from dali_pipes.text import load_tokenizer


class TokenText:
    """Decodes ids. `path`: a `tokenizer.json` or its folder.

    Raises `BackendError` without the library, `ConfigError` for a file that cannot be loaded.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._tokenizer = load_tokenizer(path).library

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, including special tokens; an id that the tokenizer does not know becomes `<id 70000>`."""
        parts = []
        for is_known, run in groupby(ids, key=self._knows):
            if is_known:
                parts.append(self._tokenizer.decode(list(run), skip_special_tokens=False))
            else:
                parts += [f"<id {token}>" for token in run]
        return "".join(parts)

    def _knows(self, token: int) -> bool:
        return 0 <= token < 1 << 32 and self._tokenizer.id_to_token(token) is not None
