"""shuffled_rows: rows of an epoch in shuffled order, from the tokens: `permute`, `rows`, and padding in one pass.

    tokens (9,)   10 11 12 13 14 15 16 17 18      seq_len T = 2, stride 2, origin 0: windows 0 to 3 start at 0 2 4 6

    num_rows = 4, key = 2: rows 0 1 2 3 contain windows 3 1 0 2
    first = 1, count = 3, row_step = 2: rows 1, 3, and one past the end, which is padding and contains row 0

    row_ids (3,)   1   inputs (3, T)   12 13   labels (3, T)     13   14
                   3                   14 15                     15   16
                  -1                   16 17                   -100 -100

This is what one of several ranks gets in a block of steps when the whole corpus is in device memory: the rank is
first % row_step, and row_step is the number of ranks.

With `slots`, the windows lie in slots, a block of neighboring ones in each, and not one stride after another:

    slots of 3 windows and 8 tokens, of which slot 0 is one window short; stride 2, 5 windows
    window           0  1   2  3  4
    slot, window     0  0   1  1  1
      inside         0  1   0  1  2
    starts at        0  2   8 10 12      token `origin` + slot * 8 + window inside * 2
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dali_pipes.operators import _row
from dali_pipes.operators._array import require_inside
from dali_pipes.operators.permute import bijection, permute
from dali_pipes.operators.rows import rows

if TYPE_CHECKING:
    import cupy

    from dali_pipes.operators._array import Array

IGNORE_INDEX = -100
"""Label that loss functions ignore, as in padding rows."""

PADDING = -1
"""Row id of a padding row."""


class Slots(NamedTuple):
    """Where windows are that do not lie one stride after another: `rows` neighboring ones in each slot."""

    rows: int
    tokens: int
    """Tokens from a slot to the next."""
    short_end: int
    """Windows up to the end of the slot that is short of `missing`; all, without one."""
    missing: int


def shuffled_rows(
    tokens: Array,
    first: int,
    count: int,
    *,
    row_step: int,
    num_rows: int,
    key: int | None,
    origin: int,
    stride: int,
    seq_len: int,
    label_shift: bool = True,
    begin: int = 0,
    slots: Slots | None = None,
    dtype: np.dtype[Any] | None = None,
    out: tuple[Array, Array] | None = None,
    row_ids: Array | None = None,
    vocab_size: int | None = None,
    bad: Array | None = None,
) -> tuple[Array, Array]:
    """Inputs and labels of rows first, first + row_step, ... (R = `count` of them) of `num_rows` rows in an order.

    tokens: (N,), any integer dtype, contiguous, NumPy or CuPy.
    begin: number of the first of the `num_rows` rows, 0 for those of a whole epoch; no row is before it.
    key: of the order: row i contains window permute(i - begin, num_rows, key), or window i - begin if key is None.
    origin, stride: window w starts at token origin + w * stride and has T + label_shift tokens, T = `seq_len`.
    slots: where windows are if they lie in slots, the first of which starts at token `origin`.
    row_ids: int64 (R,), filled with the numbers of the rows.
    dtype, out, vocab_size, bad: as in `rows`; tokens of padding rows are checked like others.

    A row number of begin + num_rows or more is padding: the row contains the tokens of row `begin`, its labels are
    -100, and its row id is -1. With padding, the results need a signed dtype of at least 16 bits.

    Returns (inputs, labels), both (R, T), contiguous, of the same kind as `tokens`. All checks run on the host. CuPy
    launches one kernel on the current stream, does not allocate other arrays, and does not block.
    """
    first, count, seq_len = operator.index(first), operator.index(count), operator.index(seq_len)
    row_step, num_rows = operator.index(row_step), operator.index(num_rows)
    origin, stride, begin = operator.index(origin), operator.index(stride), operator.index(begin)
    on_device = _row.require_tokens("shuffled_rows", tokens, seq_len)
    require_inside("shuffled_rows", 0, 63, begin=begin, count=count, origin=origin)
    require_inside("shuffled_rows", begin, 63, first=first)
    require_inside("shuffled_rows", 1, 63, row_step=row_step, num_rows=num_rows, stride=stride)
    if key is not None:
        key = operator.index(key)
        require_inside("shuffled_rows", 0, 64, key=key)
    last_row = max(first, first + (count - 1) * row_step)
    numbers = range(first, first + count * row_step, row_step)
    windows = range(origin, origin + num_rows * stride, stride)
    require_inside("shuffled_rows", 0, 63, last_row=last_row)
    width = seq_len + bool(label_shift)
    last = windows[-1] if slots is None else _last_start(slots, windows)
    if last + width > tokens.size:
        raise ValueError(
            f"shuffled_rows: the last window, {num_rows - 1:,}, reads tokens {last:,} to {last + width:,}, "
            f"expected windows inside the {tokens.size:,} tokens"
        )
    limit = _row.id_limit("shuffled_rows", tokens.dtype, vocab_size, bad, on_device)
    if row_ids is not None:
        _row.require_array("shuffled_rows", "row_ids", row_ids, (count,), np.dtype(np.int64), on_device)
    inputs, labels = _row.results("shuffled_rows", (count, seq_len), tokens.dtype, dtype, out, on_device)
    if count > 0 and last_row >= begin + num_rows and not np.can_cast(np.int16, labels.dtype):
        raise TypeError(
            f"shuffled_rows: dtype is {labels.dtype}, but row {last_row:,} of {begin + num_rows:,} is padding with "
            f"labels of {IGNORE_INDEX}; use a signed dtype of at least 16 bits"
        )
    if count > 0:
        run = _shuffled_rows_cupy if on_device else _shuffled_rows_numpy
        run(tokens, numbers, begin, windows, slots, key, inputs, labels, width - seq_len, row_ids, limit, bad)
    return inputs, labels


def _last_start(slots: Slots, windows: range) -> int:
    """The highest token that a window may start at, wherever the slot is that is short."""
    require_inside("shuffled_rows", 1, 63, slot_rows=slots.rows)
    require_inside("shuffled_rows", 0, 63, slot_tokens=slots.tokens, short_end=slots.short_end, missing=slots.missing)
    slot, row = divmod(len(windows) - 1 + slots.missing, slots.rows)
    row = slots.rows - 1 if slot else row
    return windows.start + slot * slots.tokens + row * windows.step


def _shuffled_rows_numpy(
    tokens: NDArray[Any],
    numbers: range,
    begin: int,
    windows: range,
    slots: Slots | None,
    key: int | None,
    inputs: NDArray[Any],
    labels: NDArray[Any],
    label_shift: int,
    row_ids: NDArray[np.int64] | None,
    limit: int | None,
    bad: NDArray[np.int64] | None,
) -> None:
    count, seq_len = inputs.shape
    ids = numbers.start + numbers.step * np.arange(count)
    padding = ids - begin >= len(windows)
    inside = np.where(padding, 0, ids - begin)
    if key is not None:
        inside = permute(inside, len(windows), key)
    starts = np.full(count, windows.start)
    if slots is not None:
        inside = inside + slots.missing * (inside >= slots.short_end)
        starts += inside // slots.rows * slots.tokens
        inside = inside % slots.rows
    rows(
        tokens,
        starts + inside * windows.step,
        seq_len,
        label_shift=bool(label_shift),
        out=(inputs, labels),
        vocab_size=limit,
        bad=bad if limit is not None else None,
    )
    if padding.any():
        labels[padding] = IGNORE_INDEX
    if row_ids is not None:
        row_ids[:] = np.where(padding, PADDING, ids)


def _shuffled_rows_cupy(
    tokens: cupy.ndarray,
    numbers: range,
    begin: int,
    windows: range,
    slots: Slots | None,
    key: int | None,
    inputs: cupy.ndarray,
    labels: cupy.ndarray,
    label_shift: int,
    row_ids: cupy.ndarray | None,
    limit: int | None,
    bad: cupy.ndarray | None,
) -> None:
    scalars = map(np.int64, (numbers.start, numbers.step, begin, windows.start, windows.step))
    in_slots = map(np.int64, (0, 0, 0, 0) if slots is None else slots)
    ids = np.uint64(0) if row_ids is None else row_ids
    order = bijection(len(windows), key)
    _row.launch("shuffled_rows", tokens, label_shift, inputs, labels, limit, bad, order, *scalars, *in_slots, ids)
