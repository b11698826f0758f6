"""goldfish: drop labels by a hash of the tokens before them in their document.

    tokens (N,)   5 7 9 7 9 8 | 4 7 9       documents of 6 and 3 tokens, h = 2
    dropped       . . . . # . | . . #       the token after 7 9 is dropped everywhere, if the hash says so;
                                            the first h tokens of a document never are

So each copy of a text loses the same labels, and a model cannot recite it: Hans et al., "Be like a Goldfish, Don't
Memorize!", 2024. The hash of token n is m(the sum over i = 1 ... h of m(token n - i) * B**i modulo 2**64), where m(x)
is output 1 of splitmix64 seeded with x. Its upper half is compared with 2**32 / k.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dali_pipes.operators import _kernel, _row
from dali_pipes.operators._array import require_inside
from dali_pipes.operators.permute import splitmix64

if TYPE_CHECKING:
    import cupy

    from dali_pipes.operators._array import Array

BEFORE, INSIDE, WRITTEN = range(3)
"""Columns of `lookback`."""

_BASE = 0x9E3779B97F4A7C15
_PART = 1 << 14  # tokens of the reference that are worked on together, which stay in the cache


def goldfish(
    tokens: Array, piece_starts: Array, lookback: Array, out: Array, *, h: int, k: int, loss_mask: Array | None = None
) -> None:
    """Write `out`, uint8 (N,): 0 for tokens that are not labels, else 1. All arrays are contiguous, NumPy or CuPy.

    tokens: (N,), any integer dtype, NumPy or CuPy.
    piece_starts: int64 (P,): first token of each piece.
    lookback: int64 (P, 3): tokens before the piece that are in its document, and in `tokens`; tokens from its start on
        that are in its document, of those that may be labels; and all that may be labels, for which `out` is written.
    h: number of tokens to hash, 1 to 256; k: one token in k is dropped.
    loss_mask: uint8 (N,), not the same array as `out`: 0 for tokens that are not labels anyway.

    NumPy writes all of `out`: 1, or the loss mask, outside the pieces. CuPy launches one kernel on the current stream,
    does not block, and writes what the pieces may have as labels.
    """
    require_inside("goldfish", 1, 9, h=h)
    require_inside("goldfish", 2, 31, k=k)
    on_device = _row.require_tokens("goldfish", tokens, 1)
    pieces = len(piece_starts)
    for name, table, shape in (("piece_starts", piece_starts, (pieces,)), ("lookback", lookback, (pieces, 3))):
        _row.require_array("goldfish", name, table, shape, np.dtype(np.int64), on_device)
    for name, array in {"out": out, "loss_mask": loss_mask}.items():
        if array is not None:
            _row.require_array("goldfish", name, array, tokens.shape, np.dtype(np.uint8), on_device)
    run = _goldfish_cupy if on_device else _goldfish_numpy
    run(tokens, piece_starts, lookback, out, h, 2**32 // k, loss_mask)


def _goldfish_numpy(
    tokens: NDArray[Any],
    starts: NDArray[np.int64],
    lookback: NDArray[np.int64],
    out: NDArray[np.uint8],
    h: int,
    threshold: int,
    loss_mask: NDArray[np.uint8] | None,
) -> None:
    first = starts + np.maximum(h - lookback[:, BEFORE], 0)
    end = np.maximum(starts + lookback[:, INSIDE], first)
    steps = np.zeros(len(tokens) + 1, np.int32)  # how many pieces may drop a token
    np.add.at(steps, first.clip(max=len(tokens)), 1)
    np.add.at(steps, end.clip(max=len(tokens)), -1)
    may_be_dropped = np.add.accumulate(steps[:-1]) > 0
    powers = np.multiply.accumulate(np.full(min(len(tokens), _PART) + h + 1, _BASE, np.uint64))
    inverse = np.multiply.accumulate(np.full(len(powers), pow(_BASE, -1, 2**64), np.uint64))
    one = np.array(1, np.uint64)
    out[...] = 1 if loss_mask is None else loss_mask
    for begin in range(0, len(tokens), _PART):
        part = slice(begin, min(begin + _PART, len(tokens)))
        if not may_be_dropped[part].any():
            continue
        # From h tokens before the part on, or as many zeros: sums[i] = sum of m(token j) / B**j over j < i.
        ids = np.zeros(part.stop - begin + h, np.int64)
        own = tokens[max(begin - h, 0) : part.stop]
        ids[len(ids) - len(own) :] = own
        sums = np.zeros(len(ids) + 1, np.uint64)
        np.add.accumulate(splitmix64(ids.view(np.uint64), one) * inverse[: len(ids)], out=sums[1:])
        windows = (sums[h:-1] - sums[: -h - 1]) * powers[h : len(ids)]
        is_dropped = splitmix64(windows, one) < np.uint64(threshold << 32)  # of the upper half
        is_dropped &= may_be_dropped[part]
        out[part][is_dropped] = 0


def _goldfish_cupy(
    tokens: cupy.ndarray,
    starts: cupy.ndarray,
    lookback: cupy.ndarray,
    out: cupy.ndarray,
    h: int,
    threshold: int,
    loss_mask: cupy.ndarray | None,
) -> None:
    if not len(starts):
        return
    kernel = _kernel.load("goldfish", _kernel.expression("goldfish", tokens.dtype))
    mask = np.uint64(0) if loss_mask is None else loss_mask
    sizes = np.int64(len(starts)), np.int64(h), np.uint64(threshold)
    kernel(*_row.launch_shape(len(starts), _PART), (tokens, starts, lookback, *sizes, mask, out))
