"""rows: copy rows of tokens, widen them, and build the shifted labels, in one pass.

    tokens (N,)          10 11 12 13 14 15 16 17 18        starts (R,) = 0, 4    seq_len T = 4

    inputs (R, T)        10 11 12 13        labels (R, T)        11 12 13 14
                         14 15 16 17                             15 16 17 18

With `label_shift=False` the labels equal the inputs, for models that shift labels themselves, and a row reads T tokens
instead of T + 1.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dali_pipes.operators import _row
from dali_pipes.operators._array import require_same_kind

if TYPE_CHECKING:
    import cupy

    from dali_pipes.operators._array import Array


def rows(
    tokens: Array,
    starts: Array | range,
    seq_len: int,
    *,
    label_shift: bool = True,
    dtype: np.dtype[Any] | None = None,
    out: tuple[Array, Array] | None = None,
    vocab_size: int | None = None,
    bad: Array | None = None,
) -> tuple[Array, Array]:
    """Inputs and labels of R rows of T = `seq_len` tokens.

    tokens: (N,), any integer dtype, contiguous, NumPy or CuPy.
    starts: int64 (R,), the first token of each row, of the same kind as `tokens`; or a `range`, for evenly spaced rows.
        Row r reads tokens[starts[r] : starts[r] + T + label_shift]; rows may overlap.
    dtype: of both results: int64 (default), int32, or that of the tokens (without widening). Values keep their low
        bits, so ids of 2**31 or more do not fit int32.
    out: two contiguous arrays (R, T) to fill and return, which must not overlap `tokens`; `dtype` is then optional.
    bad: int64 (2,), of the same kind as `tokens`: receives the ids outside [0, vocab_size), or [0, 2**63) without
        vocab_size, found in the same pass. bad[0] grows by their number; bad[1] becomes the position of the first if
        that is smaller. Position p is token p % (T + label_shift) of row p // (T + label_shift); a token in several
        rows counts once per row. Start with (0, 2**63 - 1). Without `bad`, ids are not checked.

    Returns (inputs, labels), both (R, T) and contiguous, labels[r, t] = tokens[starts[r] + t + label_shift].

    NumPy checks every start. A `range` costs two strided copies, which release the GIL; an array of starts costs one
    more copy of the rows, and `bad` a scan of them unless the dtype of the tokens rules out bad ids. CuPy launches one
    kernel on the current stream and does not block. It checks a range on the host, but not starts on the device: a
    start outside [0, N - T - label_shift] reads out of bounds. Stores are 16 bytes wide if both results are aligned to
    16 bytes and rows are a multiple of 16 bytes long.
    """
    seq_len = operator.index(seq_len)
    on_device = _row.require_tokens("rows", tokens, seq_len)
    width = seq_len + bool(label_shift)
    if isinstance(starts, range):
        _check_starts(starts, width, tokens.size)
    else:
        require_same_kind("rows", on_device, starts=starts)
        if starts.dtype != np.int64:
            raise TypeError(f"rows: starts have dtype {starts.dtype}, expected int64")
        if starts.ndim != 1:
            raise ValueError(f"rows: starts have shape {starts.shape}, expected one axis")
        if not on_device:
            _check_starts(starts, width, tokens.size)
    limit = _row.id_limit("rows", tokens.dtype, vocab_size, bad, on_device)
    inputs, labels = _row.results("rows", (len(starts), seq_len), tokens.dtype, dtype, out, on_device)
    if len(starts) > 0:
        run = _rows_cupy if on_device else _rows_numpy
        run(tokens, starts, inputs, labels, width - seq_len, limit, bad)
    return inputs, labels


def _rows_numpy(
    tokens: NDArray[Any],
    starts: NDArray[np.int64] | range,
    inputs: NDArray[Any],
    labels: NDArray[Any],
    label_shift: int,
    limit: int | None,
    bad: NDArray[np.int64] | None,
) -> None:
    count, seq_len = inputs.shape
    width, item = seq_len + label_shift, tokens.itemsize
    if isinstance(starts, range):
        # The constructor checks that the view stays inside the buffer, at a tenth of the cost of `as_strided`.
        source = np.ndarray(
            (count, width), tokens.dtype, tokens, offset=starts.start * item, strides=(starts.step * item, item)
        )
    else:
        source = np.lib.stride_tricks.sliding_window_view(tokens, width)[starts]
    widen_rows(source, inputs, labels, label_shift)
    if limit is not None and bad is not None:
        _row.count_bad(source, limit, bad)


def widen_rows(source: NDArray[Any], inputs: NDArray[Any], labels: NDArray[Any], label_shift: int) -> None:
    """Fill inputs and labels (R, T) from the rows of `source` (R, T + label_shift), all NumPy. Releases the GIL.

    What `rows` does without its checks.
    """
    np.copyto(inputs, source[:, : inputs.shape[1]])
    np.copyto(labels, source[:, label_shift:])


def _rows_cupy(
    tokens: cupy.ndarray,
    starts: cupy.ndarray | range,
    inputs: cupy.ndarray,
    labels: cupy.ndarray,
    label_shift: int,
    limit: int | None,
    bad: cupy.ndarray | None,
) -> None:
    import cupy

    if isinstance(starts, range):
        places = np.uint64(0), np.int64(starts.start), np.int64(starts.step)
    else:
        places = cupy.ascontiguousarray(starts), np.int64(0), np.int64(0)
    _row.launch("rows", tokens, label_shift, inputs, labels, limit, bad, *places)


def _check_starts(starts: NDArray[np.int64] | range, width: int, num_tokens: int) -> None:
    if len(starts) == 0:
        return
    if isinstance(starts, range):
        lowest, highest = sorted((starts[0], starts[-1]))
    else:
        lowest, highest = int(starts.min()), int(starts.max())
    if lowest < 0 or highest > num_tokens - width:
        wrong = lowest if lowest < 0 else highest
        row = starts.index(wrong) if isinstance(starts, range) else int(np.argmax(starts == wrong))
        raise ValueError(
            f"rows: row {row:,} reads tokens {wrong:,} to {wrong + width:,}, expected rows inside the {num_tokens:,} "
            "tokens"
        )
