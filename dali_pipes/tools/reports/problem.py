"""Problems of a corpus, and a limit on how many of each kind are listed."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from dali_pipes.corpus import Corpus
from dali_pipes.uris import FilePath

MOST_LISTED = 20
"""Problems of one kind that are listed; further ones are only counted."""


@dataclass(frozen=True)
class Problem:
    """One problem; fields that do not apply are None.

    kind: "checksum", "document_end", "dtype", "empty_documents", "empty_file", "format", "id_range", "index",
          "loss_mask", "missing_file", "no_end_id", "no_start_id", "unreadable" or "zeros"
    """

    kind: str
    message: str
    """Names the file, the position, the value found, and what was expected."""
    file: FilePath | None = None
    offset: int | None = None
    """Token in the file, from 0, as in `Corpus.locate`."""
    position: int | None = None
    """Token in the corpus as one stream."""
    document: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**vars(self), "file": None if self.file is None else str(self.file)}


@dataclass
class Problems:
    """The first `MOST_LISTED` problems of each kind, and how many there are of each."""

    listed: list[Problem] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, problem: Problem) -> None:
        """List a problem, or only count it once enough of its kind are listed."""
        if self.counts[problem.kind] < MOST_LISTED:
            self.listed.append(problem)
        self.counts[problem.kind] += 1

    def count_more(self, kind: str, count: int) -> None:
        """Count problems that are not listed."""
        if count:
            self.counts[kind] += count


def problem_at(corpus: Corpus, kind: str, position: int, what: str, document: int | None = None) -> Problem:
    """A problem with the token at `position`; `what` completes the sentence "token n ..."."""
    place = corpus.locate(position)
    message = f"{place.file}: token {place.offset:,} (corpus position {position:,}) {what}"
    return Problem(kind, message, place.file, place.offset, position, document)
