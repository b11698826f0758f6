"""Rows that grow from packing window to packing window: a list as `seq_len` with `rows = "pack"`.

    tokens of the corpus     |  window 0  |  window 1  |  window 2  |  window 3  |
    seq_len = [[0, 64], ["150k", 256]]    64           64           256          256

A window has its share of the tokens of an epoch, whichever documents are in it, so that which length it has is
arithmetic. The first window that begins at or after a number of tokens has the new length.
"""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise

Lengths = list[tuple[int, int]]
"""(first window of an epoch, tokens of a row), rising, the first at window 0."""


def tokens_before(epoch: int, window: int, *, num_tokens: int, num_windows: int) -> int:
    """Tokens of the run before a window. num_tokens, num_windows: of an epoch."""
    return (epoch * num_windows + window) * num_tokens // num_windows


class WindowLengths:
    """Tokens of a row by epoch and window.

    stages: (tokens of the run, tokens of a row), rising, the first at 0
    num_tokens, num_windows: of an epoch
    """

    def __init__(self, stages: Sequence[tuple[int, int]], num_tokens: int, num_windows: int) -> None:
        self.stages = tuple(stages)
        self._firsts = [-(-tokens * num_windows // num_tokens) for tokens, _ in stages]
        self._values = [length for _, length in stages]
        self._num_windows, self._num_tokens = num_windows, num_tokens
        self.longest = max(self._values)
        self.run: dict[int, Lengths] = {}
        """Epochs in which a run was resumed: what it had before, and what the stages want from there on."""

    def of(self, epoch: int, window: int) -> int:
        """Tokens of a row of a window."""
        lengths = self.run.get(epoch)
        if lengths is None:
            return self._wanted(epoch, window)
        return lengths[bisect_right(lengths, window, key=lambda length: length[0]) - 1][1]

    def in_epoch(self, epoch: int) -> Lengths:
        """The lengths of all windows of an epoch."""
        lengths = self.run.get(epoch)
        return self._after(epoch, 0) if lengths is None else lengths

    def resumed(self, epoch: int, window: int, before: Lengths) -> dict[int, Lengths]:
        """The `run` of one that goes on at a window of an epoch, after windows with the lengths `before`."""
        kept = [length for length in before if length[0] < window]
        return {epoch: _merged([*kept, *self._after(epoch, window)]) or before}

    def tokens_before(self, epoch: int, window: int) -> int:
        """Tokens of the run before a window."""
        return tokens_before(epoch, window, num_tokens=self._num_tokens, num_windows=self._num_windows)

    def _wanted(self, epoch: int, window: int) -> int:
        return self._values[bisect_right(self._firsts, epoch * self._num_windows + window) - 1]

    def _after(self, epoch: int, window: int) -> Lengths:
        """What the stages want from a window of an epoch on."""
        begin = epoch * self._num_windows
        later = sorted({window, *(first - begin for first in self._firsts if first - begin > window)})
        return _merged([(first, self._wanted(epoch, first)) for first in later if first < self._num_windows])


def _merged(lengths: Lengths) -> Lengths:
    return lengths[:1] + [now for before, now in pairwise(lengths) if before[1] != now[1]]
