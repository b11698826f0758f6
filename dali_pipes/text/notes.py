"""What a run reports at its end: fields that it did not use, and characters that the tokenizer lost.

Encoders add notes to documents, and the receipt of each shard keeps those of its documents, so that the report covers
the whole run, even if it was interrupted, or several processes did it.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dali_pipes.fields import UnusedFields
from dali_pipes.text.lost_characters import Lost

_MOST_KEPT, _MOST_PIECES = 10_000, 100
_MOST_SHOWN = 8


@dataclass
class Notes:
    """unused: fields, with counts. characters: in documents that were searched for lost ones. lost: number of lost
    characters. pieces: the most frequent ones.
    """

    unused: UnusedFields = field(default_factory=UnusedFields)
    characters: int = 0
    lost: int = 0
    pieces: Counter[str] = field(default_factory=Counter)

    def count(self, text: str, lost: Lost | None) -> None:
        """Count a text that was searched for lost characters."""
        self.characters += len(text)
        if lost is not None:
            self.lost += lost.characters
            self._take(lost.pieces)

    def add(self, other: "Notes") -> None:
        """Add the notes of the documents that follow."""
        for kind, name, first, count in other.unused.entries():
            self.unused.add(kind, [name], first, count)
        self.characters += other.characters
        self.lost += other.lost
        self._take(other.pieces)

    def _take(self, pieces: Counter[str]) -> None:
        self.pieces.update(pieces)
        if len(self.pieces) > _MOST_KEPT:  # a model of words may lose any number of words
            self.pieces = Counter(dict(self.pieces.most_common(_MOST_KEPT // 2)))

    def as_json(self) -> dict[str, Any]:
        """What `from_json` takes; empty without notes."""
        found: dict[str, Any] = {}
        if unused := self.unused.entries():
            found["unused"] = [list(entry) for entry in unused]
        if self.characters:
            found |= {"characters": self.characters, "lost": self.lost}
            found["pieces"] = dict(self.pieces.most_common(_MOST_PIECES))
        return found

    @classmethod
    def from_json(cls, found: Any) -> "Notes":
        """Raises ValueError for anything but the result of `as_json`."""
        notes = cls()
        try:
            for kind, name, first, count in found.get("unused", ()):
                if not (type(kind) is type(name) is type(first) is str and type(count) is int):
                    raise TypeError("an entry is not three strings and a number")
                notes.unused.add(kind, [name], first, count)
            pieces: Mapping[str, int] = found.get("pieces", {})
            numbers = [found.get("characters", 0), found.get("lost", 0), *pieces.values()]
            if not all(type(number) is int and number >= 0 for number in numbers):
                raise TypeError("a count is not a whole number")
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"the notes are damaged: {error}") from None
        notes.characters, notes.lost, notes.pieces = numbers[0], numbers[1], Counter(pieces)
        return notes

    def lines(self) -> list[str]:
        """The report: one or two sentences per note."""
        found = self.unused.lines()
        if self.lost:
            most = self.pieces.most_common(_MOST_SHOWN)
            shown = ", ".join(f"{piece!r} {count:,} time{'s' * (count > 1)}" for piece, count in most)
            found.append(
                f"{self.lost:,} of {self.characters:,} characters ({self.lost / self.characters:.3%}) are not in the "
                f"vocabulary of the tokenizer and were dropped or replaced by its unknown token ({shown}"
                f"{', ...' if len(self.pieces) > len(most) else ''}). Use a tokenizer that can encode any text, or "
                "replace these characters"
            )
        return found
