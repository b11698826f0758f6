"""Is a delivered batch made of windows of the corpus, shifted by one, and none twice?

The checker knows nothing of a loader's order. It keeps one 64-bit key a window, made of the window's first tokens,
and finds a row by its own key; then every token is compared, so a clash of keys costs time and never a wrong verdict.

    corpus 7 7 8 9 7 7 8 9 5, T = 4      window 0 = window 1 in the first four tokens, so both have one key;
                                         the fifth token, 7 or 5, tells them apart
"""

import functools
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from comparison.work import Work

_KEY_TOKENS = 8
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)

Tokens = np.ndarray[Any, np.dtype[Any]]


class CheckError(Exception):
    """A loader delivered something that is not in the corpus, is not shifted right, or came twice in an epoch."""


def problems_as_results(run: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Wraps what carries out a task: problems come back as `failed` with the reason."""

    @functools.wraps(run)
    def runs(task: dict[str, Any]) -> dict[str, Any]:
        try:
            return run(task)
        except CheckError as error:
            return {"failed": f"wrong data: {error}"}
        except Exception:
            return {"failed": traceback.format_exc(limit=-4)}

    return runs


class Checker:
    """Checks the batches of one epoch against the corpus.

    Memory: 17 bytes a window. `anywhere=True` is for loaders that draw random windows: then `positions` (the first
    token of each row) must be given with each batch, and nothing is said about repeats.
    """

    def __init__(self, work: Work, *, anywhere: bool = False) -> None:
        self._work = work
        self._corpus = work.view()
        self._anywhere = anywhere
        self.rows = 0
        self.batches = 0
        if not anywhere:
            self._windows = work.window_view()
            keys = _keys(self._windows[:, : min(_KEY_TOKENS, work.seq_len)])
            self._order = np.argsort(keys, kind="stable")
            self._keys = keys[self._order]
            self._seen = np.zeros(work.windows, dtype=bool)

    def restart(self) -> None:
        """Forget what was seen: an epoch begins."""
        self.rows = self.batches = 0
        if not self._anywhere:
            self._seen[:] = False

    def check(self, input_ids: torch.Tensor, labels: torch.Tensor, positions: Tokens | None = None) -> None:
        """Raise `CheckError` unless the batch is right; rows count as seen from then on."""
        inputs = self._array("input_ids", input_ids)
        targets = self._array("labels", labels)
        where = f"batch {self.batches}"
        if not np.array_equal(inputs[:, 1:], targets[:, :-1]):
            row, column = (int(value) for value in np.argwhere(inputs[:, 1:] != targets[:, :-1])[0])
            raise CheckError(
                f"{where}, row {row}: labels[{column}] is {targets[row, column]}, but the next input is "
                f"{inputs[row, column + 1]}; labels must be the tokens after the inputs"
            )
        if self._anywhere:
            self._check_positions(where, inputs, targets, positions)
        else:
            self._check_windows(where, inputs, targets)
        self.rows += len(inputs)
        self.batches += 1

    def _array(self, name: str, tensor: torch.Tensor) -> Tokens:
        expected = (self._work.batch_size, self._work.seq_len)
        found = (tuple(tensor.shape), tensor.dtype, tensor.device.type, tensor.is_contiguous())
        if found != (expected, torch.int64, "cpu", True):
            raise CheckError(
                f"batch {self.batches}: {name} is {found[0]} {found[1]} on {found[2]}, contiguous={found[3]}; "
                f"expected {expected} torch.int64 on cpu, contiguous"
            )
        return tensor.numpy()

    def _check_windows(self, where: str, inputs: Tokens, targets: Tokens) -> None:
        keys = _keys(inputs[:, : min(_KEY_TOKENS, self._work.seq_len)])
        first = np.searchsorted(self._keys, keys, side="left")
        last = np.searchsorted(self._keys, keys, side="right")
        windows = self._order[np.minimum(first, len(self._order) - 1)]
        expected = self._windows[windows]
        whole = np.array_equal(expected[:, :-1], inputs) and np.array_equal(expected[:, -1], targets[:, -1])
        if whole and not self._seen[windows].any() and len(set(windows.tolist())) == len(windows):
            self._seen[windows] = True  # all rows together; what follows is for equal windows, and for the message
            return
        for row, (low, high) in enumerate(zip(first.tolist(), last.tolist(), strict=True)):
            equal = [
                window
                for window in self._order[low:high].tolist()
                if np.array_equal(self._windows[window, :-1], inputs[row])
                and self._windows[window, -1] == targets[row, -1]
            ]
            if not equal:
                raise CheckError(
                    f"{where}, row {row}: no window of the corpus at a multiple of {self._work.seq_len} holds its "
                    f"{self._work.seq_len + 1} tokens (it begins {inputs[row, :4].tolist()})"
                )
            unseen = next((window for window in equal if not self._seen[window]), None)
            if unseen is None:
                raise CheckError(f"{where}, row {row}: window {equal[0]} was already delivered in this epoch")
            self._seen[unseen] = True

    def _check_positions(self, where: str, inputs: Tokens, targets: Tokens, positions: Tokens | None) -> None:
        if positions is None or len(positions) != len(inputs):
            raise CheckError(f"{where}: the loader did not report where its {len(inputs)} rows begin")
        for row, start in enumerate(np.asarray(positions).tolist()):
            expected = self._corpus[start : start + self._work.seq_len + 1]
            if not (np.array_equal(expected[:-1], inputs[row]) and expected[-1] == targets[row, -1]):
                raise CheckError(f"{where}, row {row}: it does not equal the corpus's tokens from {start} on")


def _keys(heads: Tokens) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    """One key a row of `heads`, integers `(rows, tokens)`: a polynomial in the tokens, mod 2^64."""
    powers = np.cumprod(np.full(heads.shape[1], _MULTIPLIER))
    keys: np.ndarray[Any, np.dtype[np.uint64]] = (heads.astype(np.uint64) * powers).sum(axis=1, dtype=np.uint64)
    return keys
