"""Lengths and masks of the rows of a file, found by reading it once, in a form that can be cached.

rows         [5 6 7 8 | 9]  [1 2 0]  [3]          of two chunks; | ends a document within a row, 0 is padding
counts       7, 1                                 ids of each chunk, without padding
offsets      0 4 5 7 8                            ids before each document, and all
kept         [removed, unlearned, counts ..., offsets ...]
"""

import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from dali_pipes.corpus.columns.row_columns import DOCUMENTS, LEARNED, PADDING, Numbering, Rows, names_in
from dali_pipes.corpus.columns.token_columns import LOSS_MASK
from dali_pipes.corpus.data_file import Int64Array, UsedColumns
from dali_pipes.runtime import offset_cache

KEPT_VERSION = 1
"""Of all that is cached about rows; another one wherever the same bytes would give other facts."""


class RowTotals(NamedTuple):
    """counts: ids of each chunk, int64 (C,). documents: their number. removed, unlearned: as in RowFacts."""

    counts: Int64Array
    documents: int
    removed: int = 0
    unlearned: int = 0


class RowFacts(NamedTuple):
    """counts: ids of each chunk, (C,). offsets: ids before each document, and all of them, (D + 1,). Both int64.

    removed:   ids of padding, which are in neither
    unlearned: ids that are there, but are not learned
    numbering: to check what was read; not cached
    """

    counts: Int64Array
    offsets: Int64Array
    removed: int = 0
    unlearned: int = 0
    numbering: Mapping[str, Numbering] = MappingProxyType({})

    @classmethod
    def of(cls, rows: Rows) -> "RowFacts":
        """The facts of some rows, as one chunk."""
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(rows.documents)])
        removed = 0 if rows.kept is None else int(np.count_nonzero(~rows.kept))
        unlearned = 0 if rows.learned is None else int(np.count_nonzero(~rows.learned))
        return cls(offsets[-1:], offsets, removed, unlearned, rows.numbering)

    @property
    def totals(self) -> RowTotals:
        """The facts without the documents themselves."""
        return RowTotals(self.counts, len(self.offsets) - 1, self.removed, self.unlearned)

    def pack(self) -> Int64Array:
        """All of it in one array."""
        return np.concatenate([np.array([self.removed, self.unlearned], np.int64), self.counts, self.offsets])

    @classmethod
    def unpack(cls, packed: Int64Array, num_chunks: int) -> "RowFacts":
        """The facts of `num_chunks` chunks that were packed; views of the array."""
        return cls(packed[2 : 2 + num_chunks], packed[2 + num_chunks :], int(packed[0]), int(packed[1]))

    @classmethod
    def may_be_packed(cls, packed: Int64Array, num_chunks: int) -> bool:
        """Whether an array may be packed facts."""
        if len(packed) < num_chunks + 3:
            return False
        facts = cls.unpack(packed, num_chunks)
        return (
            min(facts.removed, facts.unlearned, facts.counts.min(initial=0)) >= 0
            and facts.unlearned <= facts.offsets[-1] == facts.counts.sum()
            and offset_cache.may_be_offsets(facts.offsets, strictly=False)
        )


def facts_of_offsets(offsets: Int64Array, first_rows: Int64Array) -> RowFacts:
    """The facts of rows, each of them a document. first_rows: rows before each chunk, and all of them."""
    return RowFacts(np.diff(offsets[first_rows]), offsets)


def join_facts(parts: Sequence[RowFacts], *, one_chunk: bool = False) -> RowFacts:
    """The facts of several chunks, one after another; or of several parts of `one_chunk`."""
    if len(parts) == 1 and (len(parts[0].counts) == 1 or not one_chunk):
        return parts[0]
    numbering: dict[str, Numbering] = {}
    for part in parts:
        numbering |= {name: one.join(numbering.get(name, one)) for name, one in part.numbering.items()}
    none = np.zeros(0, np.int64)
    counts = np.concatenate([none, *(part.counts for part in parts)])
    offsets = np.concatenate([np.zeros(1, np.int64), *(np.diff(part.offsets) for part in parts)])
    np.cumsum(offsets, out=offsets)
    return RowFacts(
        np.array([counts.sum()]) if one_chunk else counts,
        offsets,
        sum(part.removed for part in parts),
        sum(part.unlearned for part in parts),
        numbering,
    )


def used_columns(beside: Sequence[str], facts: RowTotals | None, rows: int, unused: tuple[str, ...]) -> UsedColumns:
    """Which of the columns next to the ids make a difference. facts: None without such columns."""
    if facts is None:
        return UsedColumns(unused=unused)
    masks = names_in(LEARNED, beside)
    is_packed = facts.documents != rows
    return UsedColumns(
        padding=names_in(PADDING, beside) if facts.removed else (),
        removed=facts.removed,
        packing=(names_in(DOCUMENTS[:-1], beside) or names_in(DOCUMENTS, beside)) if is_packed else (),
        rows=rows,
        # A column of that name is a mask even if it holds only ones; labels may just be a copy.
        masks=masks if facts.unlearned or LOSS_MASK in masks else (),
        unlearned=None if set(beside) <= {LOSS_MASK} else facts.unlearned,
        unused=unused,
    )


def with_names(digest: bytes, names: Sequence[str]) -> bytes:
    """The digest of a file in which the columns `names` are used as well; unchanged without any."""
    return hashlib.sha256(digest + b" with " + "/".join(names).encode()).digest() if names else digest
