"""Random numbers of samples: keyed by seed, epoch and row, so that they depend on nothing else.

    seed 0, epoch 2    row 0   0.6042496   0.78988504  ...       draw 0, draw 1, ...
                       row 7   0.45315993  0.80065185  ...       the same in every batch that holds row 7

A row is a position in the epoch's order, counted over all ranks. Its numbers are the same on any rank, with any batch
size and after any resume. They are computed without those of earlier rows, in memory that does not grow with the epoch.

    key of the epoch        the first 8 bytes of SHA-256 over seed and epoch, as for every order of this package
    key of row r            output r + 1 of splitmix64 seeded with the key of the epoch
    number of draw d        the upper 24 bits of output d + 1 of splitmix64 seeded with the key of the row, / 2**24

splitmix64: G. Steele, D. Lea, C. Flood, "Fast Splittable Pseudorandom Number Generators", 2014. 24 bits are what a
float32 in [0, 1) holds without rounding, so every number is exact and 1.0 never occurs.

The numbers are fixed, so that a run resumes with those that it began with. NUMBERS_NAME names them: a change of any of
them needs another name, which saved states then have to contain.
"""

import numpy as np
import numpy.typing as npt

from dali_pipes.operators.permute import splitmix64
from dali_pipes.rows.base import order_key

NUMBERS_NAME = "splitmix24-v1"

_FLOAT_BITS = 24


def uniform(seed: int, epoch: int, rows: npt.NDArray[np.int64], num_draws: int) -> npt.NDArray[np.float32]:
    """Uniform numbers in [0, 1) for each of these rows of an epoch.

    seed, epoch: any integers, such as those of a loader
    rows: int64 (R,), positions in the epoch's order, counted over all ranks; >= 0, in any order, repeats allowed
    num_draws: >= 0, numbers per row; more draws do not change the first ones

    Returns a new float32 array (R, num_draws) of multiples of 2**-24. Raises TypeError or ValueError for other rows.
    """
    if rows.dtype != np.int64 or rows.ndim != 1:
        raise TypeError(f"rows are {rows.dtype} of shape {rows.shape}, expected int64 with one axis")
    if rows.size and rows.min() < 0:
        position = int(np.argmin(rows))
        raise ValueError(f"rows[{position}] is {rows[position]:,}, expected a row of the epoch, 0 or more")
    epoch_key = np.array(order_key("sample numbers", seed, epoch), np.uint64)
    row_keys = splitmix64(epoch_key, rows.astype(np.uint64) + np.uint64(1))
    words = splitmix64(row_keys[:, None], np.arange(1, num_draws + 1, dtype=np.uint64))
    return (words >> np.uint64(64 - _FLOAT_BITS)).astype(np.float32) * np.float32(2.0**-_FLOAT_BITS)
