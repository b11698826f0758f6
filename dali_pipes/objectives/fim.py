"""Fill in the middle: which documents are rearranged, and where they are cut. Integers only, decided before packing.

    a document            t0 t1 t2 t3 t4 t5 E        the end id E stays at the end; cut before t2 and before t5
    prefix first (PSM)    PRE t0 t1 SUF t5 MID t2 t3 t4 E
    suffix first (SPM)    PRE SUF t5 MID t0 t1 t2 t3 t4 E

As Megatron-LM's `GPTFIMDataset` does it (the second variant of SPM of M. Bavarian et al., "Efficient Training of
Language Models to Fill in the Middle", 2022, arXiv:2207.14255), but on ids instead of characters, and with draws that
depend on the seed, the source, the pass and the document alone. A rearranged document is planned with its three
sentinels, so that rows have room for all of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.operators.permute import splitmix64

Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

SENTINELS = 3
FEWEST_TOKENS = 3
"""Tokens between a document's start id and its end id; shorter documents are left as they are."""

AS_IT_IS, _PREFIX_FIRST, _SUFFIX_FIRST = range(3)
_MOST_TOKENS = 2**32 - 2
"""A cut is a product of 32-bit numbers; longer documents are left as they are."""


class FimPieces(NamedTuple):
    """How the pieces of rows come about, beside `Pieces`: each is a part of a unit, which is a document or a piece."""

    borders: Int64Array
    """(P, 6): positions in the corpus that cut the unit in five: start id, prefix, middle, suffix, and end id. Of a
    unit that is left as it is, the first part is all of it."""
    orders: Int64Array
    """(P,): 0 as it is, 1 prefix first, 2 suffix first."""
    offsets: Int64Array
    """(P,): where the piece begins in its unit as rearranged."""
    sentinels: Int64Array
    """(P, 3): ids that come before the prefix, the middle and the suffix."""

    def moved_by(self, base: int) -> "FimPieces":
        """The same in a corpus whose positions begin at `base`."""
        return self._replace(borders=self.borders + base)

    def chosen(self, pieces: Int64Array | slice) -> "FimPieces":
        """Those of some pieces."""
        return FimPieces(*(column[pieces] for column in self))


class Runs(NamedTuple):
    """Consecutive tokens of the corpus, and sentinels, in the order of rows."""

    pieces: Int64Array
    """(Q,): the piece of each."""
    starts: Int64Array
    """(Q,): position of the first token; -1 - id of a sentinel."""
    lengths: Int64Array
    """(Q,): 1 or more; 1 of a sentinel."""
    begins: Int64Array
    """(Q,): first token in the piece."""


ORDER_NAME = "fim-splitmix64-v1"
"""Added to the name of the order: with other draws, rows are others."""


@dataclass(frozen=True)
class FillInMiddle:
    """What is rearranged, how often, and with which ids.

    rate, spm:      thresholds in [0, 2**32]: of units that are rearranged, and of those with the suffix first
    prefix, middle, suffix: ids of the sentinels
    by_piece:       whether a unit is a piece; else it is a document, also where it is split over rows
    keeps_first, keeps_last: tokens, 0 or 1, that stay at the begin and at the end of a document
    repeats:        whether every pass has the draws of the first
    stages:         (tokens of all passes, rate, spm), rising: what holds from there on
    """

    rate: int
    spm: int
    prefix: int
    middle: int
    suffix: int
    by_piece: bool = True
    keeps_first: int = 0
    keeps_last: int = 0
    repeats: bool = False
    stages: tuple[tuple[int, int, int], ...] = ()

    def at(self, tokens: int) -> "FillInMiddle":
        """The rates after a number of tokens of the run."""
        later = [stage for stage in self.stages if stage[0] <= tokens]
        return replace(self, rate=later[-1][1], spm=later[-1][2], stages=()) if later else self

    def moved(
        self, key: int, documents: Int64Array, begins: Int64Array | int, lengths: Int64Array, seq_len: int
    ) -> BoolArray:
        """(P,): which units are rearranged.

        documents, lengths: (P,), number and tokens of the document of each; begins: first token of a unit in it
        seq_len: positions of a row, `FEWEST_FIM_POSITIONS` or more

        A document that is not longer than a row, but would be with its sentinels, is left as it is.
        """
        tokens = self._tokens(begins, lengths, seq_len)
        body = tokens - self._first(begins) - self._last(begins, tokens, lengths)
        fits = (tokens + SENTINELS <= seq_len) | (lengths > seq_len)
        drawn = _words(key, documents, begins, 0) >> np.uint64(32) < np.uint64(self.rate)
        is_moved: BoolArray = drawn & fits & (body >= FEWEST_TOKENS) & (body <= _MOST_TOKENS)
        return is_moved

    def pieces(
        self,
        key: int,
        documents: Int64Array,
        begins: Int64Array,
        planned: Int64Array,
        offsets: tuple[Int64Array, Int64Array],
        seq_len: int,
    ) -> FimPieces:
        """How planned pieces come about.

        documents: (P,), number of the document of each
        begins:    (P,), where it begins in that: in its tokens if units are pieces, else in the rearranged document
        planned:   (P,), its positions
        offsets:   (P,) each, first token of the document in the corpus, and the one after its last
        """
        firsts, ends = offsets
        starts: Int64Array | int = begins if self.by_piece else 0
        is_moved = self.moved(key, documents, starts, ends - firsts, seq_len)
        begin = firsts + starts
        end = begin + planned - SENTINELS * is_moved if self.by_piece else ends
        head = begin + self._first(starts)
        tail = end - self._last(starts, end - begin, ends - firsts)
        words = _words(key, documents, starts, 0), _words(key, documents, starts, 1)
        cuts = np.stack([words[1] >> np.uint64(32), words[1] & np.uint64(2**32 - 1)])
        places = np.maximum(tail - head + 1, 0).astype(np.uint64)
        cuts = np.sort((cuts * places >> np.uint64(32)).astype(np.int64), axis=0)
        first, second = head + cuts
        whole = np.where(is_moved, np.stack([head, first, second, tail]), end)
        suffix_first = words[0] & np.uint64(2**32 - 1) < np.uint64(self.spm)
        return FimPieces(
            np.stack([begin, *whole, end], axis=1),
            np.where(is_moved, np.where(suffix_first, _SUFFIX_FIRST, _PREFIX_FIRST), AS_IT_IS),
            np.zeros_like(planned) if self.by_piece else begins,
            np.broadcast_to(np.array([self.prefix, self.middle, self.suffix]), (len(planned), 3)),
        )

    def _tokens(self, begins: Int64Array | int, lengths: Int64Array, seq_len: int) -> Int64Array:
        """Of each unit."""
        if not self.by_piece:
            return lengths
        return np.where(lengths > seq_len, np.minimum(lengths - begins, seq_len - SENTINELS), lengths)

    def _first(self, begins: Int64Array | int) -> Int64Array | int:
        return self.keeps_first * (begins == 0)

    def _last(self, begins: Int64Array | int, tokens: Int64Array, lengths: Int64Array) -> Int64Array:
        last: Int64Array = self.keeps_last * (begins + tokens == lengths)
        return last


def as_they_are(starts: Int64Array, lengths: Int64Array) -> FimPieces:
    """Pieces (P,) of a source that rearranges none."""
    ends = starts + lengths
    count = len(starts)
    return FimPieces(
        np.stack([starts, *[ends] * 5], axis=1),
        np.zeros(count, np.int64),
        np.zeros(count, np.int64),
        np.zeros((count, SENTINELS), np.int64),
    )


def runs_of(pieces: FimPieces, lengths: Int64Array) -> Runs:
    """What rearranged pieces consist of, piece after piece. lengths: (P,), positions of each."""
    first, head, cut, next_cut, tail, end = pieces.borders.T
    prefix_first, suffix_first = pieces.orders == _PREFIX_FIRST, pieces.orders == _SUFFIX_FIRST
    prefix, middle, suffix = -1 - pieces.sentinels.T

    def either(psm: Int64Array, spm: Int64Array) -> Int64Array:
        return np.where(suffix_first, spm, psm)

    starts = np.stack(
        [
            first,
            prefix,
            either(head, suffix),
            either(suffix, next_cut),
            either(next_cut, middle),
            either(middle, head),
            cut,
            tail,
        ],
        axis=1,
    )
    sizes = np.stack(
        [
            head - first,
            prefix_first | suffix_first,
            either(cut - head, suffix_first),
            either(prefix_first, tail - next_cut),
            either(tail - next_cut, suffix_first),
            either(prefix_first, next_cut - head),
            either(next_cut - cut, np.zeros_like(cut)),
            end - tail,
        ],
        axis=1,
    )
    ends = np.cumsum(sizes, axis=1)
    begins = np.maximum(ends - sizes, pieces.offsets[:, None])
    counts = np.minimum(ends, (pieces.offsets + lengths)[:, None]) - begins
    starts += np.where(starts >= 0, begins - (ends - sizes), 0)
    begins -= pieces.offsets[:, None]
    shown = counts > 0
    return Runs(np.nonzero(shown)[0], starts[shown], counts[shown], begins[shown])


def first_tokens(pieces: FimPieces, lengths: Int64Array) -> Int64Array:
    """(P,): positions of the first token that each piece has of the corpus; of sentinels alone, that of its unit."""
    runs, starts = runs_of(pieces, lengths), pieces.borders[:, 0].copy()
    is_token = runs.starts >= 0
    whose, firsts = np.unique(runs.pieces[is_token], return_index=True)
    starts[whose] = runs.starts[is_token][firsts]
    return starts


def joined(parts: Sequence[FimPieces]) -> FimPieces:
    """Pieces of several parts, one after another."""
    if not parts:
        empty = np.zeros(0, np.int64)
        return as_they_are(empty, empty)
    return FimPieces(*map(np.concatenate, zip(*parts, strict=True)))


def _words(key: int, documents: Int64Array, begins: Int64Array | int, number: int) -> npt.NDArray[np.uint64]:
    """A 64-bit word of a unit for a key: splitmix64 of the document, and of that its first token."""
    seeds = splitmix64(np.array([key], np.uint64), documents.astype(np.uint64) + np.uint64(1))
    numbers = np.atleast_1d(begins).astype(np.uint64) * np.uint64(2) + np.uint64(number + 1)
    return splitmix64(seeds, numbers)
