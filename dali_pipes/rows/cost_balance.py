"""Rows of about equal cost next to one another, so that the ranks of a step have about equal work.

A document of L tokens costs a L + b L^2: matrix products, and attention within the document. A row costs what its
documents do. With runs of 2 rows (digits: costs of the rows of a window, which begins at place 3 of the epoch):

    strata, rising      1 1 2 | 3 3 | 4 5 | 8 8 9         rows shuffled in each stratum; the last one has the outliers
    head and tail       from the middle: 3                so that runs begin at places that are multiples of 2
    order               3 | 4 5 | 1 1 | 8 9 | 2 3 | 8     the runs between them are shuffled

A step takes neighbors. If the length of a run is a multiple of the number of ranks, each row of a step costs nearly the
same on all ranks, whatever the batch size: a run that ends within a step does so after a row of the last rank. Windows
meet at rows of middling cost.

Costs are integers, and strata are the leading bits of their float64, to which every machine rounds alike. The order
depends on lengths, a, b, keys and the place of the window alone, never on batch size or ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.documents import numbers_of
from dali_pipes.operators import permute
from dali_pipes.rows.packing import Packing, narrow

Int64Array = npt.NDArray[np.int64]

BALANCE_NAME = "balance-v1"
"""Added to the name of the order. A change of any constant here needs another name."""

MOST_RUN_ROWS, FEWEST_RUN_ROWS = 4096, 1024
"""Rows of a run, if a window has 16 times as many. The number of ranks mostly divides it; else few steps contain the
end of a run."""

_STRATA = 64
"""Strata from a cost to twice the cost: rows of one stratum differ by at most 1.6 %."""

EVEN = 1.05
"""Cost of the rank that has most in a step, by the mean of all: what counts as even in reports."""


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
    """Rows of a run in a window of `num_rows`: a power of two, so that runs of windows of other sizes fit."""
    most = _power_of_two(num_rows // 16)
    fewest = min(FEWEST_RUN_ROWS, _power_of_two(num_rows // 4))
    return min(MOST_RUN_ROWS, max(most, fewest))


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
        rows[in_runs] = run * size + within + np.where(run >= lower, head + tail, 0)
    return rows


class StepCosts:
    """How evenly the ranks of each step share its cost: the cost of the rank that has most, by the mean of all.

    For rows in the order of the epoch, of steps of world_size x batch_size rows. A partial step at the end is left out.
    """

    def __init__(self, world_size: int, batch_size: int) -> None:
        self._shape = batch_size, world_size
        self._rest: npt.NDArray[Any] = np.zeros(0)
        self._most = self._mean = 0.0
        self._steps = self._even_steps = 0
        self.worst = 1.0

    def add(self, costs: Int64Array) -> None:
        """The costs of the next rows."""
        costs_left = np.concatenate((self._rest, costs))
        whole = len(costs_left) // int(np.prod(self._shape)) * int(np.prod(self._shape))
        self._rest = costs_left[whole:]
        of_ranks = costs_left[:whole].reshape(-1, *self._shape).sum(axis=1)
        if whole:
            most, mean = of_ranks.max(axis=1), of_ranks.mean(axis=1)
            self.worst = max(self.worst, float((most / mean).max()))
            self._steps += len(mean)
            self._even_steps += int(np.count_nonzero(most <= EVEN * mean))
            self._most, self._mean = self._most + float(most.sum()), self._mean + float(mean.sum())

    @property
    def ratio(self) -> float:
        """Of all steps together, each with its weight in cost; 1.0 without a whole step."""
        return self._most / self._mean if self._mean else 1.0

    @property
    def even_steps(self) -> float:
        """Share of the steps whose ratio is at most `EVEN`, 0 to 1."""
        return self._even_steps / self._steps if self._steps else 1.0


class BalanceReport:
    """`StepCosts` of the rows of an epoch, balanced and in a random order."""

    def __init__(self, balance: CostBalance, world_size: int, batch_size: int) -> None:
        self._balance = balance
        self._balanced, self._random = StepCosts(world_size, batch_size), StepCosts(world_size, batch_size)

    def add(self, packing: Packing, balanced: Int64Array, random: Int64Array) -> None:
        """The rows of the next window, and both orders of them, (R,)."""
        costs = self._balance.costs(packing)
        self._balanced.add(costs[balanced])
        self._random.add(costs[random])

    def figures(self) -> dict[str, Any]:
        """Fields of a `PlanReport`."""
        return {
            "cost_ratio": self._balanced.ratio,
            "worst_cost_ratio": self._balanced.worst,
            "even_steps": self._balanced.even_steps,
            "unbalanced_cost_ratio": self._random.ratio,
            "unbalanced_worst_cost_ratio": self._random.worst,
            "unbalanced_even_steps": self._random.even_steps,
        }


def _power_of_two(number: int) -> int:
    """The largest one up to `number`; 1 below 1."""
    return 1 << max(0, number.bit_length() - 1)


def _rows_in_order(packing: Packing, order: Int64Array) -> Packing:
    """The same rows in another order."""
    offsets, at = numbers_of(packing.row_offsets, order)
    return packing.chosen(narrow(offsets, int(offsets[-1])), at)
