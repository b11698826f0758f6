"""Batches of at most N padded tokens: a place of the order is a batch, and rows of similar length are in one batch.

    rows of a window      3 9 7 2 4 8 7 1                               N = 18
    by falling length     9 8 | 7 7 | 4 3 2 1
    batches               (2, 9)  (2, 7)  (4, 4)                        18, 14 and 16 padded tokens; then shuffled

With fixed shapes, (2, 9) and (4, 4) for example, a batch has the smallest shape that holds its longest row, and rows
without tokens where it has fewer rows. Without a shuffle, rows stay in their order, and a batch ends where the next row
would make it too large. The cut depends on lengths, N, shapes and keys alone, never on ranks.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dali_pipes.operators import permute
from dali_pipes.rows.packing import Packing, narrow

Int64Array = npt.NDArray[np.int64]

TOKEN_BATCHES_NAME = "token-batches-v1"
"""Added to the name of the order. A change of the cut needs another name."""


@dataclass(frozen=True)
class TokenBatches:
    """tokens: padded tokens of a batch (N). shapes: (rows, width), widths rising, the last one a whole row; () for any.

    seq_len: tokens of the longest rows.
    """

    tokens: int
    seq_len: int
    shapes: tuple[tuple[int, int], ...] = ()

    def most_rows(self, width: int) -> int:
        """Rows of a batch whose longest has `width` tokens."""
        return next((rows for rows, wide in self.shapes if wide >= width), self.tokens // width)

    def cut(self, rows: Packing, key: int | None) -> Packing:
        """The rows of a window, one piece each, as batches of several. key: of the shuffle; None: in their order."""
        lengths, count = rows.piece_lengths, rows.num_rows
        if key is None or not count:
            order, ends = np.arange(count), list(self._ends_in_order(lengths.tolist()))
        else:
            order = permute(np.arange(count), count, key)
            falling = self.seq_len - lengths[order]
            order = order[np.argsort(falling.astype(np.min_scalar_type(self.seq_len)), kind="stable")]
            ends = list(self._ends(lengths[order].tolist()))
        return rows.chosen(narrow(np.array([0, *ends], np.int64), count), order)

    def _ends(self, falling: list[int]) -> Iterator[int]:
        """Where batches of rows of falling length end."""
        end = 0
        while end < len(falling):
            end = min(len(falling), end + self.most_rows(falling[end]))
            yield end

    def _ends_in_order(self, lengths: list[int]) -> Iterator[int]:
        """The same of rows of any length, in their order."""
        begin = widest = 0
        for at, length in enumerate(lengths):
            if at > begin and at - begin >= self.most_rows(max(widest, length)):
                yield at
                begin, widest = at, 0
            widest = max(widest, length)
        if lengths:
            yield len(lengths)

    def shapes_of(self, counts: Int64Array, longest: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Rows and width of batches, (K,) each, for their rows with tokens and the longest of these.

        A batch without any, which a rank gets where the last batches of an epoch are too few for all, has one row.
        """
        if self.shapes:
            rows, widths = np.array(self.shapes, np.int64).T
            shape = np.searchsorted(widths, longest)
            return rows[shape], widths[shape]
        return np.maximum(counts, 1), np.where(counts, longest, self.seq_len)

    def padded_tokens(self, batches: Packing) -> int:
        """Positions of all rows of planned batches."""
        counts = np.diff(batches.row_offsets).astype(np.int64)
        longest = np.maximum.reduceat(batches.piece_lengths, batches.row_offsets[:-1]) if len(counts) else counts
        sizes, widths = self.shapes_of(counts, longest.astype(np.int64))
        return int((sizes * widths).sum())
