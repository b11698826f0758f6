"""keyed_draws: a random number for each position of each row, which depends only on the row's key.

    keys (R,)   7            draws (R, T)   2247841145  584409960 1118609002
                8                           3515457374 3692084747  780630283        seq_len T = 3, stream 0

Stream s has the key of output 2**63 + s of splitmix64 seeded with the row's key; the draw at position t is the upper
half of output t + 1 of splitmix64 seeded with that. splitmix64: G. Steele, D. Lea, C. Flood, "Fast Splittable
Pseudorandom Number Generators", 2014. A draw is below floor(share * 2**32) with the chance `share`, on every device.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dali_pipes.operators import _kernel, _row
from dali_pipes.operators._array import is_cupy, require_inside
from dali_pipes.operators.permute import splitmix64

if TYPE_CHECKING:
    import cupy

    from dali_pipes.operators._array import Array

_FIRST_STREAM = 2**63


def keyed_draws(keys: Array, seq_len: int, stream: int = 0) -> Array:
    """A new uint32 (R, T) of uniform numbers.

    keys: int64 (R,), whose 64 bits are the keys; NumPy or CuPy. T = seq_len >= 1.
    stream: 0 <= stream < 2**32; the draws of different streams are independent.

    CuPy launches one kernel on the current stream and does not block.
    """
    seq_len, stream = operator.index(seq_len), operator.index(stream)
    require_inside("keyed_draws", 1, 63, seq_len=seq_len)
    require_inside("keyed_draws", 0, 32, stream=stream)
    on_device = is_cupy("keyed_draws", "keys", keys)
    if keys.dtype != np.int64 or keys.ndim != 1:
        raise TypeError(f"keyed_draws: keys are {keys.dtype} with {keys.ndim} axes, expected int64 with one")
    return _keyed_draws_cupy(keys, seq_len, stream) if on_device else _keyed_draws_numpy(keys, seq_len, stream)


def _keyed_draws_numpy(keys: NDArray[np.int64], seq_len: int, stream: int) -> NDArray[np.uint32]:
    seeds = splitmix64(keys.astype(np.uint64), np.array(_FIRST_STREAM + stream, np.uint64))
    words = splitmix64(seeds[:, None], np.arange(1, seq_len + 1, dtype=np.uint64))
    return (words >> np.uint64(32)).astype(np.uint32)


def _keyed_draws_cupy(keys: cupy.ndarray, seq_len: int, stream: int) -> cupy.ndarray:
    import cupy

    draws = cupy.empty((keys.size, seq_len), np.uint32)
    if keys.size:
        key_step = np.int64(keys.strides[0] // 8)  # keys may be a column of a table
        sizes = key_step, np.int64(keys.size), np.int64(seq_len), np.uint64(_FIRST_STREAM + stream)
        _kernel.load("keyed_draws", "keyed_draws")(*_row.launch_shape(keys.size, seq_len), (keys, *sizes, draws))
    return draws
