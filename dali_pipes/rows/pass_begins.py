"""Where the passes of a source begin, counted in rows from its first pass on, where passes differ in length.

    pass          0   1   2   3
    begins at     0  41  83 124                 row 90 ever is row 7 of pass 2

A resumed run goes on from a saved beginning, (2, 83), and does not count the passes before it.
"""

from array import array
from bisect import bisect_right
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class PassBegin(NamedTuple):
    """A pass, and the rows of all passes before it."""

    number: int
    rows_before: int


class PassBegins:
    """The beginnings of consecutive passes from `first` on. Only ever appended to; any thread may read meanwhile."""

    def __init__(self, first: PassBegin) -> None:
        self.first = first
        self._begins = array("q", [first.rows_before])

    def of(self, row: int) -> tuple[PassBegin, bool]:
        """The last known pass that begins at `row` or before it, and whether the beginning of the next is known."""
        number = bisect_right(self._begins, row) - 1
        return PassBegin(self.first.number + number, self._begins[number]), number < len(self._begins) - 1

    def split(self, rows: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Passes and places of rows (R,), R > 0, whose passes are known."""
        lowest = bisect_right(self._begins, int(rows.min())) - 1
        begins = np.array(self._begins[lowest : bisect_right(self._begins, int(rows.max()))], np.int64)
        numbers = np.searchsorted(begins, rows, "right") - 1
        return numbers + (self.first.number + lowest), rows - begins[numbers]

    def begins_with(self, begin: PassBegin) -> bool | None:
        """Whether a pass begins where `begin` says; None: not known."""
        number = begin.number - self.first.number
        return self._begins[number] == begin.rows_before if 0 <= number < len(self._begins) else None

    def note(self, begin: PassBegin) -> None:
        """Add a beginning where it is the next one. For one thread at a time."""
        if begin.number == self.first.number + len(self._begins):
            self._begins.append(begin.rows_before)
