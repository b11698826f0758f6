"""Tokens and documents of each row of a step, by arithmetic on its plan. Reads no tokens.

row        9 2 6 6 5 | 1 4 4 . .          tokens 8 of 10, documents 2
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.loader.batch_origin import RowCutters
from dali_pipes.schedule import PADDING
from dali_pipes.schedule.plans import Plan
from dali_pipes.tools.reports.step_report import spans_of

Int64Array = npt.NDArray[np.int64]


class RowFigures(NamedTuple):
    """Of the rows of one or more steps, padding rows included."""

    tokens: Int64Array
    """(R,), 0 for a padding row."""
    widths: Int64Array
    """(R,): positions."""
    documents: Int64Array | None
    """(R,): documents with a token in the row; None where those of a source in it are not known."""

    @property
    def fill(self) -> npt.NDArray[np.float64]:
        """(R,): share of the positions that hold tokens."""
        shares: npt.NDArray[np.float64] = self.tokens / self.widths
        return shares


def figures_of(plan: Plan, cutters: RowCutters) -> RowFigures:
    """The figures of the rows of a plan."""
    width, count = plan.width(cutters.seq_len), len(plan.row_ids)
    widths = np.full(count, width) if plan.widths is None else plan.widths
    if plan.pieces is None:
        rows = np.flatnonzero(plan.row_ids != PADDING)
        starts, lengths = spans_of(plan, width)
    else:
        rows = np.repeat(np.arange(count), np.diff(plan.pieces.row_offsets))
        starts, lengths = plan.pieces.starts, plan.pieces.lengths
    tokens: Int64Array = np.bincount(rows, lengths, count).astype(np.int64)
    # A rearranged piece is of one document, whose parts are not where the piece begins.
    is_planned = plan.rows.fim is not None
    documents = np.ones(len(rows), np.int64) if is_planned else _documents(cutters, starts, lengths)
    by_row = None if documents is None else np.bincount(rows, documents, count).astype(np.int64)
    return RowFigures(tokens, widths, by_row)


def joined(parts: list[RowFigures]) -> RowFigures:
    """The figures of several plans as one."""
    known = [part.documents for part in parts if part.documents is not None]
    return RowFigures(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([part.widths for part in parts]),
        np.concatenate(known) if len(known) == len(parts) else None,
    )


def _documents(cutters: RowCutters, starts: Int64Array, lengths: Int64Array) -> Int64Array | None:
    """(S,): documents with a token in each span; one that goes on in the next span counts in both."""
    whose = np.searchsorted(cutters.bases[: len(cutters.corpora)], starts, side="right") - 1
    counts = np.zeros(len(starts), np.int64)
    for number in np.unique(whose).tolist():
        offsets, own = cutters.offsets[number], whose == number
        if offsets is None:
            return None
        begins = starts[own] - cutters.bases[number]
        firsts = np.searchsorted(offsets, begins, side="right")
        lasts = np.searchsorted(offsets, begins + lengths[own], side="left")
        counts[own] = lasts - firsts + 1 - _empty_within(offsets, firsts, lasts)
    return counts


def _empty_within(offsets: Int64Array, firsts: Int64Array, lasts: Int64Array) -> Int64Array:
    """(S,): empty documents d with firsts <= d < lasts, which have no token in a span."""
    counts = lasts - firsts
    spans = np.repeat(np.arange(len(counts)), counts)
    documents = np.arange(counts.sum()) + np.repeat(firsts - np.cumsum(counts) + counts, counts)
    empty: Int64Array = np.bincount(spans, offsets[documents] == offsets[documents + 1], len(counts)).astype(np.int64)
    return empty
