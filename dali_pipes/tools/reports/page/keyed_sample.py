"""A keyed sample of the ids of a corpus: runs at random places, one in each of 64 equal parts. Bounded for any size.

    corpus    |      ----   |  ----       | ----        |        ---- |        one run a part, keyed by its number

Used for what needs many ids and not all of them: which are frequent, and about how long documents are.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus import Corpus
from dali_pipes.errors import CorpusError
from dali_pipes.operators.permute import splitmix64

RUNS = 64
RUN_IDS = 8192
_SEED = 0x5EED


@dataclass(frozen=True)
class IdSample:
    """`runs` are the ids of consecutive tokens; `is_all`: they are the whole corpus, in one run."""

    runs: tuple[npt.NDArray[Any], ...]
    unreadable: int
    """Runs that could not be read."""
    is_all: bool

    @property
    def num_ids(self) -> int:
        return sum(map(len, self.runs))

    def most_frequent(self, most: int) -> list[tuple[int, int]]:
        """Ids and their counts, the most frequent first; of equally frequent ones, the lowest."""
        if not self.num_ids:
            return []
        ids, counts = np.unique(np.concatenate(self.runs), return_counts=True)
        order = np.lexsort((ids, -counts))[:most]
        return list(zip(ids[order].tolist(), counts[order].tolist(), strict=True))

    def lengths_of_documents(self, end_id: int | None, start_id: int | None) -> npt.NDArray[np.int64]:
        """Lengths of the documents that lie whole in a run."""
        found = [np.zeros(0, np.int64)]
        for ids in self.runs:
            marks: npt.NDArray[np.int64] = np.flatnonzero(ids == (start_id if start_id is not None else end_id))
            if self.is_all:  # the corpus begins and ends with a document
                marks = np.concatenate(([0], marks, [len(ids)]) if start_id is not None else ([-1], marks))
            found.append(np.diff(np.unique(marks)).astype(np.int64))
        return np.concatenate(found)

    def count(self, token_id: int) -> int:
        """How often an id occurs."""
        return sum(int(np.count_nonzero(ids == token_id)) for ids in self.runs)


def sample_ids(corpus: Corpus) -> IdSample:
    """Read the sample; all of a small corpus. Blocks. Runs that cannot be read are counted and left out."""
    if corpus.num_tokens <= RUNS * RUN_IDS:
        firsts, length = [0], corpus.num_tokens
    else:
        room = corpus.num_tokens // RUNS - RUN_IDS
        numbers = np.arange(RUNS, dtype=np.uint64)
        offsets = splitmix64(np.full(RUNS, _SEED, np.uint64), numbers) % np.uint64(room + 1)
        firsts = (np.arange(RUNS) * (corpus.num_tokens // RUNS) + offsets.astype(np.int64)).tolist()
        length = RUN_IDS
    out = np.empty((len(firsts), length), corpus.dtype)
    try:
        corpus.read_rows(firsts, out)
        return IdSample(tuple(out), 0, length == corpus.num_tokens)
    except CorpusError:
        pass
    runs = []
    for first in firsts:
        try:
            runs.append(corpus.tokens(first, length))
        except CorpusError:
            continue
    return IdSample(tuple(runs), len(firsts) - len(runs), False)
