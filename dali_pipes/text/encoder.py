"""From documents to token ids, batch by batch: the seam between reading and writing.

An encoder may be called from several threads at once. What it gives for a document depends on that document alone,
never on the batch it came in: only so is a run that was broken off and started again the same as an unbroken one.
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.text.documents import Document
from dali_pipes.text.lost_characters import LostCharacters
from dali_pipes.text.notes import Notes
from dali_pipes.text.tokenizer import LoadedTokenizer


class Encoded(NamedTuple):
    """One document as it is stored: ids, integers (n,), and which of them to learn, uint8 (n,) of 0 and 1, if known.

    is_empty: it has no id but those that end a document. notes: what the run has to say of it at its end, if anything
    """

    ids: npt.NDArray[Any]
    mask: npt.NDArray[np.uint8] | None = None
    is_empty: bool = False
    notes: Notes | None = None


class Encoder(Protocol):
    """Turns documents into ids; what ends a document is part of them."""

    @property
    def record_key(self) -> str | None:
        """What `Document.content` is: the text under this key, or the whole record for None."""

    @property
    def largest_id(self) -> int:
        """No id is above it; it decides the width of the ids in the files."""

    @property
    def has_mask(self) -> bool:
        """Whether every document comes with a mask."""

    @property
    def settings(self) -> Mapping[str, str | int | None]:
        """What the ids depend on besides the documents: a run that was broken off goes on only with the same."""

    def encode(self, documents: Sequence[Document]) -> list[Encoded | None]:
        """For each document its ids, or None for one that is dropped. Blocks; may use all cores."""


class TextEncoder:
    """Documents as ordinary text, `eos_id` behind each; behind an empty one only if `ends_empty`."""

    has_mask = False

    def __init__(
        self, tokenizer: LoadedTokenizer, eos_id: int | None, *, ends_empty: bool, text_key: str = "text"
    ) -> None:
        if eos_id is not None and tokenizer.library.id_to_token(eos_id) is None:
            raise ConfigError(
                f"eos_id {eos_id}: {tokenizer.path} has no token of this id; its largest is {tokenizer.largest_id}"
            )
        self._tokenizer = tokenizer.library
        self._eos = [] if eos_id is None else [eos_id]
        self._ends_empty = ends_empty
        self._lost = LostCharacters(tokenizer.library, special_is_text=True) if tokenizer.can_lose_characters else None
        self.record_key = text_key
        self.largest_id = tokenizer.largest_id
        self.settings: Mapping[str, str | int | None] = {
            "tokenizer": tokenizer.sha256,
            "eos_id": eos_id,
            "text_key": text_key,
        }

    def encode(self, documents: Sequence[Document]) -> list[Encoded | None]:
        """Raises CorpusFormatError for a text with half of a surrogate pair, which UTF-8 cannot hold, and for one that
        the tokenizer cannot encode.
        """
        texts = [document.content for document in documents]
        try:
            # Without offsets into the text, which nobody asks for: a tenth faster.
            encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        except Exception:  # of a kind that differs between releases of the library
            for document in documents:
                _check_unicode(document)
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
        """Of a model that has no unknown token, but needs one."""
        lost = [] if self._lost is None else self._lost.find([document.content for document in documents])
        for document, found in zip(documents, lost, strict=False):
            if found is not None:
                raise CorpusFormatError(
                    f"{document.place}: {next(iter(found.pieces))!r} is not in the vocabulary of the tokenizer, and "
                    "the tokenizer does not have an unknown token. Use a tokenizer that can encode any text"
                )


def _check_unicode(document: Document) -> None:
    try:
        document.content.encode("utf-8")
    except UnicodeEncodeError as error:
        raise CorpusFormatError(
            f"{document.place}: character {error.start} is {document.content[error.start]!a}, half of a surrogate "
            "pair, which is no text. Mend or remove the document."
        ) from None
