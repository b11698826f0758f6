"""How evenly the ranks of each step share its cost: the cost of the rank that has most, by the mean of all.

    costs of rows, in the order of the epoch    9 8 7 8   2 1 3 2       2 ranks with 2 rows each
    ranks                                       16 16     5 3
    ratio                                       1.00      1.25          all steps: (16 + 5) / (16 + 4) = 1.05

What no order of the rows of a window can make even is the ratio in the best order for these ranks: `add_sorted`.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.rows.cost_balance import CostBalance
from dali_pipes.rows.packing import Packing

Int64Array = npt.NDArray[np.int64]

EVEN = 1.05
"""The ratio up to which a step counts as even."""

PERCENTILES = 101
"""Of the ratios of all steps: 0 to 100."""


class StepCosts:
    """The ratios of steps of world_size x batch_size rows. A partial step at the end is left out.

    Takes 4 bytes a step.
    """

    def __init__(self, world_size: int, batch_size: int) -> None:
        self._shape = batch_size, world_size
        self._rest: npt.NDArray[Any] = np.zeros(0)
        self._most = self._mean = 0.0
        self._ratios: list[npt.NDArray[np.float32]] = []
        self._even_steps = 0
        self.worst = 1.0

    def add(self, costs: Int64Array) -> None:
        """The costs of the next rows."""
        costs_left = np.concatenate((self._rest, costs))
        size = self._shape[0] * self._shape[1]
        whole = len(costs_left) // size * size
        self._rest = costs_left[whole:]
        self._add(costs_left[:whole].reshape(-1, *self._shape))

    def add_sorted(self, costs: Int64Array) -> None:
        """The costs of the rows of a window, put into the best order for these steps.

        Rows by falling cost are dealt to the ranks back and forth; the last ones, which fill no step, wait for the next
        window. With one row a rank, no other order of the rows loses less time.
        """
        falling = np.sort(np.concatenate((self._rest, costs)))[::-1]
        size = self._shape[0] * self._shape[1]
        whole = len(falling) // size * size
        self._rest = falling[whole:]
        steps = falling[:whole].reshape(-1, *self._shape)
        steps[:, 1::2] = steps[:, 1::2, ::-1].copy()
        self._add(steps)

    def _add(self, costs: npt.NDArray[Any]) -> None:
        """Steps of costs (steps, batch_size, ranks)."""
        if not len(costs):
            return
        of_ranks = costs.sum(axis=1)
        most, mean = of_ranks.max(axis=1), of_ranks.mean(axis=1)
        ratios = most / mean
        self.worst = max(self.worst, float(ratios.max()))
        self._even_steps += int(np.count_nonzero(most <= EVEN * mean))
        self._ratios.append(ratios.astype(np.float32))
        self._most, self._mean = self._most + float(most.sum()), self._mean + float(mean.sum())

    @property
    def ratio(self) -> float:
        """Of all steps together, each with its weight in cost; 1.0 without a whole step."""
        return self._most / self._mean if self._mean else 1.0

    @property
    def even_steps(self) -> float:
        """Share of the steps whose ratio is at most `EVEN`, 0 to 1."""
        steps = sum(map(len, self._ratios))
        return self._even_steps / steps if steps else 1.0

    @property
    def percentiles(self) -> tuple[float, ...]:
        """The ratios that 0%, 1%, ..., 100% of the steps do not exceed, to 4 decimal places; () without steps."""
        if not self._ratios:
            return ()
        found = np.percentile(np.concatenate(self._ratios), np.arange(PERCENTILES), method="inverted_cdf")
        return tuple(round(float(ratio), 4) for ratio in found)


class BalanceReport:
    """`StepCosts` of the rows of an epoch: balanced, in a random order, and in the best one for these ranks."""

    def __init__(self, balance: CostBalance, world_size: int, batch_size: int) -> None:
        self._balance = balance
        self._balanced, self._random, self._sorted = (StepCosts(world_size, batch_size) for _ in range(3))

    def add(self, packing: Packing, balanced: Int64Array, random: Int64Array) -> None:
        """The rows of the next window, and both orders of them, (R,)."""
        costs = self._balance.costs(packing)
        self._balanced.add(costs[balanced])
        self._random.add(costs[random])
        self._sorted.add_sorted(costs)

    def figures(self) -> dict[str, Any]:
        """Fields of a `PlanReport`."""
        return {
            "cost_ratio": self._balanced.ratio,
            "worst_cost_ratio": self._balanced.worst,
            "even_steps": self._balanced.even_steps,
            "unbalanced_cost_ratio": self._random.ratio,
            "unbalanced_worst_cost_ratio": self._random.worst,
            "unbalanced_even_steps": self._random.even_steps,
            "sorted_cost_ratio": self._sorted.ratio,
            "sorted_even_steps": self._sorted.even_steps,
            "cost_percentiles": self._balanced.percentiles,
            "unbalanced_cost_percentiles": self._random.percentiles,
        }
