"""What is wrong with a corpus, one thing at a time, and how many of each kind are listed."""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dali_pipes.corpus import Corpus

MOST_LISTED = 20
"""Problems of one kind that are listed; the others are counted."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong; None is what it has no use for.

    kind: "checksum", "document_end", "dtype", "empty_documents", "empty_file", "format", "id_range", "index",
          "loss_mask", "missing_file", "no_end_id", "no_start_id", "unreadable" or "zeros"
    """

    kind: str
    message: str
    """Names file, place and value, and what was expected."""
    file: Path | None = None
    offset: int | None = None
    """Token in the file, from 0, as `Corpus.locate` counts."""
    position: int | None = None
    """Token in the corpus seen as one stream."""
    document: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**vars(self), "file": None if self.file is None else str(self.file)}


@dataclass
class Problems:
    """A list that stays short: the first `MOST_LISTED` of each kind, and how many there are."""

    listed: list[Problem] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, problem: Problem) -> None:
        """List a problem, or count it if there are enough of its kind."""
        if self.counts[problem.kind] < MOST_LISTED:
            self.listed.append(problem)
        self.counts[problem.kind] += 1

    def count_more(self, kind: str, count: int) -> None:
        """Count problems that are not listed."""
        if count:
            self.counts[kind] += count


def problem_at(corpus: Corpus, kind: str, position: int, what: str, document: int | None = None) -> Problem:
    """A problem with the token at `position`: `what` says what it is and what was expected."""
    place = corpus.locate(position)
    message = f"{place.file}: token {place.offset} (corpus position {position}) {what}"
    return Problem(kind, message, place.file, place.offset, position, document)
