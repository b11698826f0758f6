"""rows: cut token rows, widen them and make the shifted labels, in one pass.

    tokens (N,)          10 11 12 13 14 15 16 17 18        starts (R,) = 0, 4    seq_len T = 4

    inputs (R, T)        10 11 12 13        labels (R, T)        11 12 13 14
                         14 15 16 17                             15 16 17 18

With `label_shift=False` the labels equal the inputs (for models that shift inside) and a row reads T tokens, not T + 1.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dali_pipes.operators import _kernel
from dali_pipes.operators._array import is_cupy, require_same_kind

if TYPE_CHECKING:
    import cupy

    from dali_pipes.operators._array import Array

_THREADS = 256
_GRID_ROWS_MAXIMUM = 65535  # a CUDA limit on the second axis of a grid


def rows(
    tokens: Array,
    starts: Array | range,
    seq_len: int,
    *,
    label_shift: bool = True,
    dtype: np.dtype[Any] | None = None,
    out: tuple[Array, Array] | None = None,
) -> tuple[Array, Array]:
    """Inputs and labels of R rows of T = `seq_len` tokens.

    tokens: (N,), any integer dtype, contiguous, NumPy or CuPy.
    starts: int64 (R,), the first token of each row, of the same kind as `tokens`; or a `range`, for rows at equal
        distances. Row r reads tokens[starts[r] : starts[r] + T + label_shift]; rows may overlap.
    dtype: of both results: int64 (default), int32, or that of the tokens (nothing is widened). Values keep their low
        bits, they are not checked: ids at or above 2**31 do not fit int32.
    out: two contiguous arrays (R, T) to fill and return, apart from `tokens` in memory; `dtype` may then be left out.

    Returns (inputs, labels), both (R, T) and contiguous, labels[r, t] = tokens[starts[r] + t + label_shift].

    NumPy checks every start. A `range` costs two strided copies, each without the GIL; an array of starts costs one
    more copy of its rows. CuPy launches one kernel on the current stream and does not block: a range is checked on the
    host, but starts on the device are not, and one outside of [0, N - T - label_shift] reads foreign memory.
    """
    seq_len = operator.index(seq_len)
    if seq_len < 1:
        raise ValueError(f"rows: seq_len is {seq_len}, expected at least 1")
    on_device = is_cupy("rows", "tokens", tokens)
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"rows: tokens have dtype {tokens.dtype}, expected an integer dtype such as uint16")
    if tokens.ndim != 1 or not tokens.flags.c_contiguous:
        raise ValueError(
            f"rows: tokens have shape {tokens.shape} and strides {tokens.strides}, expected one contiguous axis"
        )
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
    inputs, labels = _results((len(starts), seq_len), tokens.dtype, dtype, out, on_device)
    if len(starts) > 0:
        run = _rows_cupy if on_device else _rows_numpy
        run(tokens, starts, inputs, labels, width - seq_len)
    return inputs, labels


def _rows_numpy(
    tokens: NDArray[Any],
    starts: NDArray[np.int64] | range,
    inputs: NDArray[Any],
    labels: NDArray[Any],
    label_shift: int,
) -> None:
    count, seq_len = inputs.shape
    width, item = seq_len + label_shift, tokens.itemsize
    if isinstance(starts, range):
        # The constructor checks that the view stays inside the buffer, and costs a tenth of `as_strided`.
        source = np.ndarray(
            (count, width), tokens.dtype, tokens, offset=starts.start * item, strides=(starts.step * item, item)
        )
    else:
        source = np.lib.stride_tricks.sliding_window_view(tokens, width)[starts]
    np.copyto(inputs, source[:, :seq_len])
    np.copyto(labels, source[:, label_shift:])


def _rows_cupy(
    tokens: cupy.ndarray, starts: cupy.ndarray | range, inputs: cupy.ndarray, labels: cupy.ndarray, label_shift: int
) -> None:
    import cupy

    count, seq_len = inputs.shape
    if isinstance(starts, range):
        pointer, first, step = np.uint64(0), starts.start, starts.step
    else:
        pointer, first, step = cupy.ascontiguousarray(starts), 0, 0
    arguments = (
        tokens,
        pointer,
        np.int64(first),
        np.int64(step),
        np.int64(count),
        np.int64(seq_len),
        np.int64(label_shift),
        inputs,
        labels,
    )
    grid, block = _launch_shape(count, seq_len)
    _kernel.load("rows", _kernel.expression("rows", tokens.dtype, inputs.dtype))(grid, block, arguments)


def _launch_shape(count: int, seq_len: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Grid and block for `count` >= 1 rows: first axis along a row, second over rows, several a block if short."""
    along = min(1 << (seq_len - 1).bit_length(), _THREADS)
    across = _THREADS // along
    return (-(-seq_len // along), min(-(-count // across), _GRID_ROWS_MAXIMUM)), (along, across)


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
            f"rows: row {row} starts at token {wrong} and reads {width}, to {wrong + width}; expected rows inside "
            f"[0, {num_tokens}), the tokens given"
        )


def _results(
    shape: tuple[int, int],
    token_dtype: np.dtype[Any],
    dtype: np.dtype[Any] | None,
    out: tuple[Array, Array] | None,
    on_device: bool,
) -> tuple[Array, Array]:
    """The two arrays to fill: those of `out`, checked, or new ones."""
    if dtype is None:
        dtype = np.dtype(np.int64) if out is None else out[0].dtype
    dtype = np.dtype(dtype)
    if dtype not in (np.int64, np.int32, token_dtype):
        allowed = ", ".join(dict.fromkeys(("int64", "int32", token_dtype.name)))
        raise TypeError(f"rows: dtype is {dtype}, expected one of {allowed}")
    if out is not None:
        require_same_kind("rows", on_device, **{"out[0]": out[0], "out[1]": out[1]})
        for index, array in enumerate(out):
            if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
                raise ValueError(
                    f"rows: out[{index}] has shape {array.shape}, dtype {array.dtype}, strides {array.strides}; "
                    f"expected a contiguous array of shape {shape}, dtype {dtype}"
                )
        return out
    if on_device:
        import cupy

        return cupy.empty(shape, dtype), cupy.empty(shape, dtype)
    return np.empty(shape, dtype), np.empty(shape, dtype)
