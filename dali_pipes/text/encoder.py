"""From documents to token ids, batch by batch: the seam between reading and writing.

Encoders are thread-safe. The ids of a document depend only on the document, never on its batch, so that a run that was
interrupted and continued gives the same output as an uninterrupted one.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.text.documents import Document
from dali_pipes.text.json_values import check_surrogates
from dali_pipes.text.lost_characters import LostCharacters
from dali_pipes.text.notes import Notes
from dali_pipes.text.tokenizer import LoadedTokenizer


class Encoded(NamedTuple):
    """One document as it is stored. ids: integers (n,). mask: loss mask, uint8 (n,): 1 for an id that is learned.

    is_empty: without ids except those that end a document. notes: what to report of it at the end of the run.
    """

    ids: npt.NDArray[Any]
    mask: npt.NDArray[np.uint8] | None = None
    is_empty: bool = False
    notes: Notes | None = None


class Encoder(Protocol):
    """Turns documents into ids, including the one that ends a document."""

    @property
    def record_key(self) -> str | None:
        """The key of the text that `Document.content` contains; None for whole records."""

    @property
    def largest_id(self) -> int:
        """The upper bound of ids, which decides their width in the files."""

    @property
    def has_mask(self) -> bool:
        """Whether every document has a loss mask."""

    @property
    def settings(self) -> Mapping[str, str | int | None]:
        """What the ids depend on besides the documents. An interrupted run continues only with the same settings."""

    def encode(self, documents: Sequence[Document]) -> list[Encoded | None]:
        """The ids of each document, None for one that is dropped. Blocks; may use all cores."""


class TextEncoder:
    """Encodes documents as ordinary text, with `eos_id` after each; after an empty one only if `ends_empty`."""

    has_mask = False

    def __init__(
        self, tokenizer: LoadedTokenizer, eos_id: int | None, *, ends_empty: bool, text_key: str = "text"
    ) -> None:
        if eos_id is not None and tokenizer.library.id_to_token(eos_id) is None:
            raise ConfigError(
                f"eos_id = {eos_id} is not a token of {tokenizer.path}, whose largest id is {tokenizer.largest_id:,}"
            )
        self._tokenizer = tokenizer.library
        self._eos = [] if eos_id is None else [eos_id]
        self._ends_empty = ends_empty
        self._lost = LostCharacters(tokenizer.library, special_is_text=True) if tokenizer.can_lose_characters else None
        self.record_key = text_key
        self.largest_id = tokenizer.largest_id
        self.settings: Mapping[str, str | int | None] = {
            "tokenizer": tokenizer.sha256,
            "vocabulary": tokenizer.vocabulary,
            "eos_id": eos_id,
            "text_key": text_key,
        }

    def encode(self, documents: Sequence[Document]) -> list[Encoded | None]:
        """Raises CorpusFormatError for a text with half of a surrogate pair, and for one that the tokenizer cannot
        encode.
        """
        texts = [document.content for document in documents]
        try:
            # Without offsets into the text, which are not needed: 10% faster.
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception:  # its class differs between releases of tokenizers
            for document in documents:
                check_surrogates(document.content, document.place)
            self._refuse_unknown(documents)
            raise
        found: list[Encoded | None] = []
        for encoding in encodings:
            ids = array("I", encoding.ids)
            is_empty = not ids
            if not is_empty or self._ends_empty:
                ids.extend(self._eos)
            found.append(Encoded(np.array(ids, np.uintc), is_empty=is_empty))
        return found if self._lost is None else self._with_notes(self._lost, texts, encodings, found)

    def _with_notes(
        self, lost: LostCharacters, texts: Sequence[str], encodings: Sequence[Any], found: Sequence[Encoded | None]
    ) -> list[Encoded | None]:
        noted: list[Encoded | None] = []
        ids = [encoding.ids for encoding in encodings]
        for text, encoded, of_text in zip(texts, found, lost.find(texts, ids), strict=True):
            notes = Notes()
            notes.count(text, of_text)
            noted.append(None if encoded is None else encoded._replace(notes=notes))
        return noted

    def _refuse_unknown(self, documents: Sequence[Document]) -> None:
        """Raise CorpusFormatError for a document that requires an unknown token, which the model does not have."""
        lost = [] if self._lost is None else self._lost.find([document.content for document in documents])
        for document, found in zip(documents, lost, strict=False):
            if found is not None:
                raise CorpusFormatError(
                    f"{document.place}: {next(iter(found.pieces))!r} is not in the vocabulary of the tokenizer, which "
                    "does not have an unknown token; use a tokenizer that can encode any text"
                )
