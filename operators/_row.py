"""Shared by `rows` and `shuffled_rows`: checks of arguments, counts of bad ids, and the launch of `row.cuh`."""

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

_LARGEST_ID_LIMIT = 2**63
_STORE_BYTES = 16
_THREADS = 128
BLOCKS_WANTED = 1024  # about 8 per multiprocessor of a large GPU
_GRID_SECOND_AXIS_MAXIMUM = 65535  # a limit of CUDA
_GRID_FIRST_AXIS_MAXIMUM = 2**31 - 1


def require_tokens(name: str, tokens: Array, seq_len: int) -> bool:
    """Check the tokens of operator `name`. Returns whether they are on a device."""
    if seq_len < 1:
        raise ValueError(f"{name}: seq_len is {seq_len}, expected at least 1")
    on_device = is_cupy(name, "tokens", tokens)
    if tokens.dtype.kind not in "iu":
        raise TypeError(f"{name}: tokens have dtype {tokens.dtype}, expected an integer dtype such as uint16")
    if tokens.ndim != 1 or not tokens.flags.c_contiguous:
        raise ValueError(
            f"{name}: tokens have shape {tokens.shape} and strides {tokens.strides}, expected one contiguous axis"
        )
    return on_device


def results(
    name: str,
    shape: tuple[int, int],
    token_dtype: np.dtype[Any],
    dtype: np.dtype[Any] | None,
    out: tuple[Array, Array] | None,
    on_device: bool,
) -> tuple[Array, Array]:
    """The two arrays to fill: those of `out` after a check, or new ones."""
    if dtype is None:
        dtype = np.dtype(np.int64) if out is None else out[0].dtype
    dtype = np.dtype(dtype)
    if dtype not in (np.int64, np.int32, token_dtype):
        allowed = ", ".join(dict.fromkeys(("int64", "int32", token_dtype.name)))
        raise TypeError(f"{name}: dtype is {dtype}, expected one of {allowed}")
    if out is not None:
        for index, array in enumerate(out):
            require_array(name, f"out[{index}]", array, shape, dtype, on_device)
        return out
    if on_device:
        import cupy

        return cupy.empty(shape, dtype), cupy.empty(shape, dtype)
    return np.empty(shape, dtype), np.empty(shape, dtype)


def require_array(
    name: str, argument: str, array: Array, shape: tuple[int, ...], dtype: np.dtype[Any], on_device: bool
) -> None:
    """Raise unless `array` is a contiguous one of this shape, dtype and kind."""
    if on_device or not isinstance(array, np.ndarray):
        require_same_kind(name, on_device, **{argument: array})
    if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
        raise ValueError(
            f"{name}: {argument} has shape {array.shape}, dtype {array.dtype}, strides {array.strides}; "
            f"expected a contiguous array of shape {shape}, dtype {dtype}"
        )


def id_limit(name: str, dtype: np.dtype[Any], vocab_size: int | None, bad: Array | None, on_device: bool) -> int | None:
    """The limit to check ids against; None without `bad`, or if `dtype` cannot hold a bad id."""
    if bad is None:
        if vocab_size is not None:
            raise ValueError(f"{name}: vocab_size is set without bad, the array that receives the result of the check")
        return None
    require_array(name, "bad", bad, (2,), np.dtype(np.int64), on_device)
    limit = _LARGEST_ID_LIMIT if vocab_size is None else operator.index(vocab_size)
    if not 1 <= limit <= _LARGEST_ID_LIMIT:
        raise ValueError(f"{name}: vocab_size is {limit}, expected 1 <= vocab_size <= 2**63")
    possible = np.iinfo(dtype)
    return limit if possible.min < 0 or possible.max >= limit else None


def count_bad(source: NDArray[Any], limit: int, bad: NDArray[np.int64]) -> None:
    """Count the ids of `source` (R, T + label_shift) outside [0, limit). Allocates 9 bytes per token if any."""
    if int(source.max()) < limit and int(source.min()) >= 0:
        return
    # As an unsigned number a negative id is huge, so one comparison finds both kinds in every dtype.
    outside = (source.astype(np.int64).view(np.uint64) >= np.uint64(limit)).reshape(-1)
    bad[0] += np.count_nonzero(outside)
    bad[1] = min(int(bad[1]), int(outside.argmax()))


def launch(
    name: str,
    tokens: cupy.ndarray,
    label_shift: int,
    inputs: cupy.ndarray,
    labels: cupy.ndarray,
    limit: int | None,
    bad: cupy.ndarray | None,
    *places: Any,
) -> None:
    """Run the kernel `name`; `places` are the arguments that locate its rows."""
    count, seq_len = inputs.shape
    check = (np.uint64(0), np.uint64(0)) if limit is None else (np.uint64(limit), bad)
    sizes = np.int64(count), np.int64(seq_len), np.int64(label_shift)
    width = _STORE_BYTES // inputs.dtype.itemsize
    grid, block = launch_shape(count, seq_len // width if seq_len % width == 0 else seq_len)
    kernel = _kernel.load(name, _kernel.expression(name, tokens.dtype, inputs.dtype))
    kernel(grid, block, (tokens, *sizes, inputs, labels, *check, *places))


def launch_shape(count: int, places: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Grid (rows, parts of a row) and block (along a row, rows) for `count` >= 1 rows, one thread per place in a row.

    Short rows share a block. A long row is split only if there are too few rows to fill the GPU, because each part
    costs `shuffled_rows` a permutation and `segments` a search.
    """
    along = min(1 << (places - 1).bit_length(), _THREADS)
    row_blocks = -(-count // (_THREADS // along))
    pieces = max(1, min(BLOCKS_WANTED // row_blocks, -(-places // along), _GRID_SECOND_AXIS_MAXIMUM))
    return (min(row_blocks, _GRID_FIRST_AXIS_MAXIMUM), pieces), (along, _THREADS // along)
