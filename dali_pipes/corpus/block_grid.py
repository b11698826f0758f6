"""Where the blocks of an order by blocks are in a corpus: runs of tokens, which are fetched and kept as one.

    rows, R = 3       [0 1 2 3|4][4 5 6 7|8][8 9 10 11|12][12 ...           | label of the last position
    blocks            [0 ......................... 12]
                                                    [12 .........             begin where the one before ends, but hold
                                                                             the labels of their last row as well

So every row is in one block, and a block is fetched for its own rows alone. Chunks of a fixed size would be cheaper to
name, but each block would need parts of two of its neighbors' chunks, mostly not at the same time.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class BlockGrid:
    """`count` blocks: block b holds tokens first + b * size to first + (b + 1) * size + lookahead - 1, up to `end`.

    first: below 0 if rows read tokens before their own: the first block then has fewer
    bounds: int64 (count + 1,), where blocks begin instead, and the end of the last, where they hold whole documents
    """

    first: int
    size: int
    count: int
    lookahead: int
    end: int
    bounds: Int64Array | None = None

    def blocks_of(self, positions: Int64Array) -> Int64Array:
        """The blocks whose rows begin at positions (P,): -1 before the first one, `count` after the last."""
        if self.bounds is None:
            return np.clip((positions - self.first) // self.size, -1, self.count)
        # Of equal bounds, which a block of empty documents has, the last one.
        return np.searchsorted(self.bounds, positions, side="right") - 1

    def spans(self, blocks: Int64Array) -> tuple[Int64Array, Int64Array]:
        """First tokens, and ends, of blocks (P,)."""
        if self.bounds is not None:
            return self.bounds[blocks], np.minimum(self.bounds[blocks + 1] + self.lookahead, self.end)
        begins = self.first + blocks * self.size
        return np.maximum(begins, 0), np.minimum(begins + self.size + self.lookahead, self.end)
