"""gather_runs: copy runs of tokens, and single ids between them, to given places of a buffer.

tokens (N,)      10 11 12 13 14 15 16 17
starts (Q,)      -3  4  -4  0        a start below 0 is an id, -1 - id
lengths          1   3   1  2
targets          0   1   4  6

out              2  14 15 16  3  .  10 11        places without a run do not change
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dali_pipes.operators import _kernel, _row

if TYPE_CHECKING:
    import cupy

    from dali_pipes.operators._array import Array


def gather_runs(
    tokens: Array,
    starts: Array,
    lengths: Array,
    targets: Array,
    out: Array,
    *,
    longest: int,
    loss_mask: Array | None = None,
    out_mask: Array | None = None,
) -> None:
    """Copy Q runs of tokens, and ids that are not in `tokens`, to `out`.

    tokens: (N,), any integer dtype, contiguous, NumPy or CuPy; all other arrays are of the same kind.
    starts, lengths, targets: int64 (Q,). Run q is tokens[start : start + length] and goes to out[target :], where runs
        do not overlap. A start below 0 stands for the id -1 - start, which `out` can hold, and has length 1.
    out: (M,), of the dtype of the tokens, contiguous; does not overlap them.
    longest: no run is longer; the kernel's grid depends on it.
    loss_mask, out_mask: uint8 (N,) and (M,): the loss mask is copied with the tokens; other ids get 1.

    NumPy checks the tables. CuPy launches one kernel on the current stream and does not block; it does not check them:
    wrong tables read and write out of bounds.
    """
    on_device = _row.require_tokens("gather_runs", tokens, operator.index(longest))
    tables = {"starts": starts, "lengths": lengths, "targets": targets}
    arrays: dict[str, tuple[Any, int, Any]] = {"out": (out, len(out), tokens.dtype)}
    arrays |= {name: (table, len(starts), np.dtype(np.int64)) for name, table in tables.items()}
    if loss_mask is not None:
        of_mask = np.dtype(np.uint8)
        arrays |= {"loss_mask": (loss_mask, len(tokens), of_mask), "out_mask": (out_mask, len(out), of_mask)}
    for name, (array, size, dtype) in arrays.items():
        _row.require_array("gather_runs", name, array, (size,), dtype, on_device)
    if len(starts):
        run = _gather_runs_cupy if on_device else _gather_runs_numpy
        run(tokens, starts, lengths, targets, out, longest, loss_mask, out_mask)


def _gather_runs_numpy(
    tokens: NDArray[Any],
    starts: NDArray[np.int64],
    lengths: NDArray[np.int64],
    targets: NDArray[np.int64],
    out: NDArray[Any],
    longest: int,
    loss_mask: NDArray[np.uint8] | None,
    out_mask: NDArray[np.uint8] | None,
) -> None:
    wrong = (lengths < 1) | (lengths > longest) | (targets < 0) | (targets > len(out) - lengths)
    wrong |= np.where(starts < 0, lengths != 1, starts > len(tokens) - lengths)
    if wrong.any():
        run = int(wrong.argmax())
        raise ValueError(
            f"gather_runs: run {run:,} puts {lengths[run]:,} from {starts[run]:,} at {targets[run]:,}; expected 1 to "
            f"{longest:,} of the {len(tokens):,} tokens inside the {len(out):,} places, and 1 for a start below 0"
        )
    for start, length, target in zip(starts.tolist(), lengths.tolist(), targets.tolist(), strict=True):
        place = slice(target, target + length)
        out[place] = tokens[start : start + length] if start >= 0 else -1 - start
        if loss_mask is not None and out_mask is not None:
            out_mask[place] = loss_mask[start : start + length] if start >= 0 else 1


def _gather_runs_cupy(
    tokens: cupy.ndarray,
    starts: cupy.ndarray,
    lengths: cupy.ndarray,
    targets: cupy.ndarray,
    out: cupy.ndarray,
    longest: int,
    loss_mask: cupy.ndarray | None,
    out_mask: cupy.ndarray | None,
) -> None:
    null = np.uint64(0)
    masks = (null, null) if loss_mask is None else (loss_mask, out_mask)
    kernel = _kernel.load("gather_runs", _kernel.expression("gather_runs", tokens.dtype))
    shape = _row.launch_shape(len(starts), longest)
    kernel(*shape, (tokens, masks[0], np.int64(len(starts)), starts, lengths, targets, out, masks[1]))
