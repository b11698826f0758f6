"""Rows of about equal cost next to one another, so that the ranks of a step have about equal work.

A document of L tokens costs a L + b L^2: matrix products, and attention within the document. A row costs what its
documents do. With runs of 2 rows (digits: costs of the rows of a window, which begins at place 3 of the epoch):

    strata, rising      1 1 2 | 3 3 | 4 5 | 8 8 9         rows shuffled in each stratum; the last one has the outliers
    head and tail       from the middle: 3                so that runs begin at places that are multiples of 2
    order               3 | 4 5 | 1 1 | 8 9 | 2 3 | 8     the runs between them are shuffled

A step takes neighbors. If the length of a run is a multiple of the number of ranks, each row of a step costs nearly the
same on all ranks, whatever the batch size: a run that ends within a step does so after a row of the last rank. Windows
meet at rows of middling cost.

Costs of a run rise, so with several rows a step the last rank would have more than the first in each of them. Blocks of
a run are therefore reversed, and so are blocks of blocks (digits: rows of 8 by rising cost):

    places      0 1 2 3 4 5 6 7
    rows        0 1 3 2 7 6 4 5         two ranks: 0 + 3 + 7 + 4 to the first, 1 + 2 + 6 + 5 to the second

Neighbors stay together where ranks are a power of two, and nearly so for other numbers. It is the inverse Gray code.
Rank r has rows r and R - 1 - r of groups of R rows in the order of the Thue-Morse sequence, whose sums agree beyond
linear differences (E. Prouhet, 1851).

Costs are integers, and strata are the leading bits of their float64, to which every machine rounds alike. The order
depends on lengths, a, b, keys and the place of the window alone, never on batch size or ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dali_pipes.documents import numbers_of
from dali_pipes.operators import permute
from dali_pipes.rows.packing import Packing, narrow

Int64Array = npt.NDArray[np.int64]

BALANCE_NAME = "balance-v2"
"""Added to the name of the order. A change of any constant here needs another name."""

MOST_RUN_ROWS, FEWEST_RUN_ROWS = 3072, 1536
"""Rows of a run, if a window has 16 times as many. The number of ranks mostly divides it, be it 64, 48 or 1,024; else
few steps contain the end of a run."""

_REVERSED_ROWS = 128
"""Rows of the largest blocks that are mixed by reversing them, if the run has whole ones. With larger ones, steps of
256 ranks with several rows are more even, and those of 48 ranks less."""

FEWEST_ROWS_OF_A_RANK = 32
"""Rows of a window for each rank from which the cost of steps is mostly even; below, users are warned."""

_STRATA = 64
"""Strata from a cost to twice the cost: rows of one stratum differ by at most 1.6 %."""


@dataclass(frozen=True)
class CostBalance:
    """Costs of rows, and the order that they make. a, b: cost of a token, and of a pair of tokens of a document."""

    a: int
    b: int

    def costs(self, packing: Packing) -> Int64Array:
        """Cost of each row, (R,)."""
        lengths = packing.piece_lengths.astype(np.int64)
        of_pieces: Int64Array = lengths * (self.a + self.b * lengths)
        if packing.num_rows == len(of_pieces):
            return of_pieces
        return np.add.reduceat(of_pieces, packing.row_offsets[:-1])

    def by_cost(self, packing: Packing, key: Callable[..., int]) -> Packing:
        """The rows of a window by rising cost, those of a stratum shuffled."""
        if not packing.num_rows:
            return packing
        rows = permute(np.arange(packing.num_rows), packing.num_rows, key("rows"))
        fraction, exponent = np.frexp(self.costs(packing).astype(np.float64))
        strata = exponent * _STRATA + (fraction * (2 * _STRATA)).astype(np.int64) - _STRATA
        # NumPy sorts numbers of up to 16 bits by radix, many times as fast.
        return _rows_in_order(packing, rows[np.argsort(strata.astype(np.uint16)[rows], kind="stable")])


def run_rows(num_rows: int) -> int:
    """Rows of a run in a window of `num_rows`: 3 times a power of two, so that runs of windows of other sizes fit."""
    rows = min(MOST_RUN_ROWS, max(num_rows // 16, min(FEWEST_RUN_ROWS, num_rows // 4)))
    return 3 << (rows // 3).bit_length() - 1 if rows >= 3 else 1


def rows_at(places: Int64Array, num_rows: int, begin: int, key: int) -> Int64Array:
    """Which rows, by rising cost, are at places (P,) of a window whose first row is row `begin` of the epoch."""
    size = run_rows(num_rows)
    head = min(-begin % size, num_rows)
    num_runs, tail = divmod(num_rows - head, size)
    lower = min(max((num_rows // 2 - head + size // 2) // size, 0), num_runs)  # runs that are cheaper than the middle
    middle = lower * size
    rows = middle + head - 1 - places  # of the head, which falls as the tail does: where windows meet, costs do
    in_tail = places >= num_rows - tail
    rows[in_tail] = middle + head + num_rows - 1 - places[in_tail]
    in_runs = (places >= head) & ~in_tail
    if in_runs.any():
        run, within = np.divmod(places[in_runs] - head, size)
        run = permute(np.arange(num_runs), num_runs, key)[run]
        rows[in_runs] = run * size + _reversed(within, size) + np.where(run >= lower, head + tail, 0)
    return rows


def _reversed(places: Int64Array, run_rows: int) -> Int64Array:
    """Which rows of a run, by rising cost, are at places (P,) of it."""
    block = min(_REVERSED_ROWS, run_rows & -run_rows)
    code = places.copy()
    for shift in (1, 2, 4, 8):  # 16 bits are enough for a run
        code ^= code >> shift
    within: Int64Array = code & block - 1
    return within | places & -block


def _rows_in_order(packing: Packing, order: Int64Array) -> Packing:
    """The same rows in another order."""
    offsets, at = numbers_of(packing.row_offsets, order)
    return packing.chosen(narrow(offsets, int(offsets[-1])), at)
