"""The rows of planned batches, where a place of the order is a batch: see `token_batches`.

planned     place 4: pieces a b c      place 5: pieces d e        place -1
rows        4 4 4                      5 5                        -1            one piece each, or none
sizes       3                          2                          1
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.documents import Pieces
from dali_pipes.objectives.fim import first_tokens
from dali_pipes.rows.base import PADDING, Rows
from dali_pipes.rows.token_batches import TokenBatches

Int64Array = npt.NDArray[np.int64]


class BatchRows(NamedTuple):
    """The R rows of K batches, batch after batch."""

    row_ids: Int64Array
    """(R,): place of the row's batch; `PADDING` for a row without tokens."""
    rows: Rows
    sizes: Int64Array
    """(K,): rows of each batch."""
    widths: Int64Array
    """(K,): positions of each of its rows."""


def rows_of_batches(batches: TokenBatches, places: Int64Array, planned: Rows) -> BatchRows:
    """The rows of batches at places (K,), which were planned as rows of several pieces; `PADDING` has none."""
    pieces = planned.pieces
    assert pieces is not None, "batches are made of documents"
    counts = np.diff(pieces.row_offsets)
    longest = np.zeros(len(counts), np.int64)
    if counts.any():
        longest[counts > 0] = np.maximum.reduceat(pieces.lengths, pieces.row_offsets[:-1][counts > 0])
    sizes, widths = batches.shapes_of(counts, longest)
    batch = np.repeat(np.arange(len(sizes)), sizes)
    within = np.arange(len(batch)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    has_tokens = within < counts[batch]
    starts = np.full(len(batch), -1)
    starts[has_tokens] = pieces.starts if planned.fim is None else first_tokens(planned.fim, pieces.lengths)
    offsets = np.concatenate(([0], np.cumsum(has_tokens)))
    row_ids = np.where(has_tokens, places[batch], PADDING)
    return BatchRows(row_ids, Rows(starts, Pieces(offsets, *pieces[1:]), fim=planned.fim), sizes, widths)
