"""An interleave: which source each place of an epoch takes its row from.

    place         0  1  2  3  4  5 ...
    one source    its rows, in its order: an epoch is a pass

So a row source is an interleave already, the one of itself alone (`of_one_source`). A mixture is another one: it turns
a place into a source and a count, and the source turns the count into a pass and a place. The schedule asks for nothing
but what stands here, and never how many sources there are.
"""

from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from dali_pipes.rows.base import KeyedRange, Parts, Rows, RowSource

if TYPE_CHECKING:
    from dali_pipes.rows.packing import LeftOut
    from dali_pipes.rows.token_batches import TokenBatches
    from dali_pipes.rows.window_counts import WindowMark

Int64Array = npt.NDArray[np.int64]


class Counted(Protocol):
    """Rows of an epoch, over all ranks, whatever they hold: steps depend on nothing else."""

    @property
    def is_uniform(self) -> bool:
        """Whether every epoch has the same number of rows, known without planning."""

    def count(self, epoch: int, at_least: int | None = None, /) -> int:
        """Rows of an epoch that are known, at least `at_least` of them if it has that many. May plan documents."""


class Interleave(Counted, Protocol):
    """Rows of tokens of an epoch. Members are those of `RowSource`, with an epoch in the place of a pass."""

    seq_len: int
    row_tokens: int
    stride: int
    num_tokens: int
    order_name: str
    most_planned: int | None

    @property
    def token_batches(self) -> "TokenBatches | None":
        """As of `RowSource`."""

    def count_by_now(self, epoch: int, /) -> tuple[int, bool]:
        """Rows of an epoch by what has been counted, and whether that is exact. Does not wait."""

    def is_counted(self, epoch: int, /) -> bool:
        """Whether all rows of an epoch have been counted. Plans nothing."""

    def estimate(self, epoch: int, /) -> int:
        """Rows of an epoch, as far as that can be said without planning all of it."""

    def left_out(self) -> "LeftOut | None":
        """What is in no row because documents are longer than one."""

    def plan(self, epoch: int, places: Int64Array, parts: Parts | None = None, /) -> Rows:
        """Rows by their places, rising; `PADDING` only at the end. May plan documents. `parts`: as for `RowSource`."""

    def plan_next(self, epoch: int, place: int, /) -> None:
        """Plan what comes after the part of the plan that holds a row. May block."""

    def formula(self, epoch: int, /) -> KeyedRange | None:
        """The epoch as a formula; None: rows have to be planned."""

    def widths(self, epoch: int, first: int, end: int, step_rows: int, /) -> Int64Array | None:
        """Positions of a row in each step of `step_rows` rows; None: `seq_len` in all."""

    def places_of(self, epoch: int, position: int, /) -> list[int] | None:
        """Places of the rows that read a token; None: see `RowSource`."""

    def mark(self, epoch: int, place: int, /) -> "WindowMark | None":
        """Where in the plan a run stands that has had the rows before `place`."""

    def seek(self, epoch: int, place: int, mark: "WindowMark", /) -> bool:
        """Count on from a saved mark. False if `place` cannot be there."""


def of_one_source(rows: RowSource) -> Interleave:
    """The interleave of one source: place i of epoch e is place i of its pass e."""
    return rows
