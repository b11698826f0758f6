"""Length buckets: rows of one document each are padded to a length they nearly have, not to the longest there may be.

    bounds 4 8 16     a batch is as wide as the smallest bound that holds its longest row, on all ranks together

    lengths           3 9 7 2 4 8 16 1            rows of a window
    buckets           4 16 8 4 4 8 16 4
    runs of two       4 4 | 4 4 | 8 8 | 16 16     rows shuffled in each bucket, cut into runs, then the runs shuffled:
    order             8 7 | 1 3 | 9 16 | 2 4      neighbours share a bucket

The order depends on lengths, bounds and keys alone, never on batch size or ranks, so a run may go on with others.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dali_pipes.operators import permute

Int64Array = npt.NDArray[np.int64]

RUN_ROWS = 1024
"""Rows of one bucket that follow one another. Part of the order of the data: a change needs a new name for it."""


@dataclass(frozen=True, eq=False)
class LengthBuckets:
    """`bounds`: int64, rising; the last one is seq_len, so every row has a bucket."""

    bounds: Int64Array

    def widths(self, lengths: npt.NDArray[np.integer]) -> Int64Array:
        """The smallest bound that holds each of `lengths`, which are 1 to the last bound."""
        return self.bounds[np.searchsorted(self.bounds, lengths)]

    def order(self, lengths: npt.NDArray[np.integer], key: Callable[..., int]) -> Int64Array:
        """The order of a window's rows, a permutation of 0 ... n - 1, for their `lengths` (n,).

        key: a 64-bit number for each bucket's number, and for "runs".
        """
        buckets = np.searchsorted(self.bounds, lengths)
        # NumPy sorts numbers of up to 16 bits by radix, many times as fast.
        by_bucket = np.argsort(buckets.astype(np.min_scalar_type(len(self.bounds))), kind="stable")
        runs: list[Int64Array] = []
        begin = 0
        for bucket, count in enumerate(np.bincount(buckets).tolist()):
            members = by_bucket[begin : begin + count]
            begin += count
            if count:
                members = members[permute(np.arange(count), count, key(bucket))]
                runs += [members[at : at + RUN_ROWS] for at in range(0, count, RUN_ROWS)]
        if not runs:
            return by_bucket
        return np.concatenate([runs[run] for run in permute(np.arange(len(runs)), len(runs), key("runs")).tolist()])
