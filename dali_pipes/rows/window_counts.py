"""Rows counted so far, window by window, of epochs whose windows make as many rows as their documents happen to.

    from the first window on    7  6  9  .                          rows before window 3 are known
    from a saved mark on                       41  8  7  7  .       those before window 5 by the mark, then counted on

A resumed run counts from its mark, so resuming does not plan the earlier windows. Rows before the mark are counted
separately when they are needed: by `len()`, and by the next epoch where `repeat` counts all epochs as one.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

_COUNTS_KEPT = 4
"""Counts kept of one epoch: from its beginning, and from the marks of the last states."""
_FEWEST_EPOCHS, _MOST_EPOCHS = 3, 512
"""Epochs kept. The maximum exceeds the epochs that are read ahead, even if each is a single block."""
_MOST_WINDOWS = 1 << 16
"""Windows kept in all epochs together, about 3 MB; exceeded only by the minimum number of epochs."""


class WindowMark(NamedTuple):
    """A window of an epoch's plan, and the rows of the windows before it."""

    window: int
    rows_before: int


@dataclass
class WindowCount:
    """`ends[i]` rows are in the windows up to first.window + i. Only ever appended to."""

    first: WindowMark
    first_row: int
    """From this row on, marks equal those of a count from the beginning. Earlier, at the border of two windows, that
    count may return the window before `first` if that window has no rows."""
    ends: list[int] = field(default_factory=list)

    @property
    def known(self) -> int:
        """Rows of the epoch that are counted, and those before the first window."""
        return self.ends[-1] if self.ends else self.first.rows_before

    @property
    def next_window(self) -> int:
        """The first window that is not counted."""
        return self.first.window + len(self.ends)

    def mark(self, number: int) -> WindowMark:
        """The window `number` places after the first one."""
        return WindowMark(self.first.window + number, self.ends[number - 1] if number else self.first.rows_before)

    def passes(self, mark: WindowMark) -> bool:
        """Whether the rows before a window have been counted, and are as many as the mark says."""
        number = mark.window - self.first.window
        return 0 <= number <= len(self.ends) and self.mark(number) == mark


class WindowCounts:
    """The counts of the epochs used last. For one thread at a time, but for `known` and `by_now`."""

    def __init__(self) -> None:
        self._epochs: OrderedDict[int, tuple[WindowCount, ...]] = OrderedDict()

    def known(self, epoch: int, row: int) -> WindowCount | None:
        """A count that tells the window of `row`. From any thread: what it looks at is replaced, or appended to."""
        for counted in self._epochs.get(epoch, ()):
            if counted.first_row <= row <= counted.known:
                return counted
        return None

    def by_now(self, epoch: int) -> WindowCount | None:
        """The count of an epoch that has come furthest, if there is one. From any thread, as `known`."""
        return max(self._epochs.get(epoch, ()), key=lambda counted: counted.next_window, default=None)

    def furthest(self, epoch: int, row: int | None = None) -> WindowCount:
        """Of the counts that tell of `row` (None: of any), the one that has come furthest; maybe a new one."""
        furthest: WindowCount | None = None
        for counted in self.of(epoch):
            if (row is None or counted.first_row <= row) and (
                furthest is None or counted.next_window > furthest.next_window
            ):
                furthest = counted
        return self._begin(epoch, WindowCount(WindowMark(0, 0), 0)) if furthest is None else furthest

    def of(self, epoch: int) -> tuple[WindowCount, ...]:
        """All counts of an epoch."""
        with contextlib.suppress(KeyError):
            self._epochs.move_to_end(epoch)
        return self._epochs.get(epoch, ())

    def begin(self, epoch: int, mark: WindowMark, row: int) -> None:
        """Count from the mark of a row on, unless that is done already."""
        if not any(counted.first_row <= row and counted.passes(mark) for counted in self.of(epoch)):
            self._begin(epoch, WindowCount(mark, min(row, mark.rows_before + 1)))

    def note(self, epoch: int, window: int, num_rows: int) -> None:
        """Count the rows of a window where it is the next one."""
        self.furthest(epoch, 0)
        for counted in self.of(epoch):
            number = window - counted.first.window
            if number == len(counted.ends):
                counted.ends.append(counted.mark(number).rows_before + num_rows)

    def _begin(self, epoch: int, counted: WindowCount) -> WindowCount:
        self._epochs[epoch] = (*self.of(epoch), counted)[-_COUNTS_KEPT:]
        for oldest in list(self._too_many()):
            self._epochs.pop(oldest, None)
        return counted

    def _too_many(self) -> Iterator[int]:
        """The epochs used longest ago that are not to be kept."""
        windows = {epoch: sum(len(count.ends) for count in counts) for epoch, counts in list(self._epochs.items())}
        left, counted = len(windows), sum(windows.values())
        for epoch, count in windows.items():
            if left <= _FEWEST_EPOCHS or (left <= _MOST_EPOCHS and counted <= _MOST_WINDOWS):
                return
            yield epoch
            left, counted = left - 1, counted - count
