"""The distribution of document lengths in a corpus.

lengths    0 1 2 3 3 5 9          buckets    0: 1    1: 1    2 to 3: 3    4 to 7: 1    8 to 15: 1
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus import Corpus
from dali_pipes.documents import Documents

Int64Array = npt.NDArray[np.int64]

MANY_EMPTY = 0.01
"""Share of empty documents above which two or more of them are reported."""


class Bucket(NamedTuple):
    """Documents of `shortest` to `longest` tokens."""

    shortest: int
    longest: int
    documents: int


@dataclass(frozen=True)
class LengthReport:
    """Lengths in tokens, including the id that ends or begins a document."""

    documents: int
    empty: int
    """Documents that contain at most the id that ends or begins them."""
    shortest: int
    median: float
    mean: float
    longest: int
    buckets: tuple[Bucket, ...]
    """0, then 2^k to 2^(k + 1) - 1, from the first to the last that has a document."""

    @property
    def has_many_empty(self) -> bool:
        return self.empty > max(1, MANY_EMPTY * self.documents)


def measure_lengths(corpus: Corpus, documents: Documents) -> LengthReport | None:
    """None for an index without documents. Reads at most two tokens; takes 16 bytes of memory per document."""
    lengths = np.diff(documents.offsets)
    if not len(lengths):
        return None
    buckets = buckets_of(lengths)
    return LengthReport(
        documents=len(lengths),
        empty=_count_empty(corpus, documents, lengths),
        shortest=int(lengths.min()),
        longest=int(lengths.max()),
        mean=float(lengths.mean()),
        median=float(np.median(lengths, overwrite_input=True)),
        buckets=buckets,
    )


def _count_empty(corpus: Corpus, documents: Documents, lengths: Int64Array) -> int:
    if documents.source == "index":
        return int(np.count_nonzero(lengths == 0))
    kind, _, token_id = documents.source.rpartition(" id ")
    count = int(np.count_nonzero(lengths == 1))
    outer, position = (-1, corpus.num_tokens - 1) if kind == "end" else (0, 0)
    if lengths[outer] == 1 and int(corpus.tokens(position, 1)[0]) != int(token_id):
        count -= 1  # one token that is not the id
    return count


def buckets_of(lengths: Int64Array) -> tuple[Bucket, ...]:
    """How many of some lengths, at least one, lie between powers of two."""
    powers = np.int64(1) << np.arange(63)
    counts = np.zeros(64, np.int64)
    for begin in range(0, len(lengths), 1 << 20):
        numbers = np.searchsorted(powers, lengths[begin : begin + (1 << 20)], side="right")
        counts += np.bincount(numbers, minlength=64)
    used = np.flatnonzero(counts)
    return tuple(
        Bucket((1 << number) >> 1, (1 << number) - 1, int(counts[number]))
        for number in range(int(used[0]), int(used[-1]) + 1)
    )
