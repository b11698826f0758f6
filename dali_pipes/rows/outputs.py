"""The outputs of rows that are put together from pieces of documents, a block of batches at a time, on either array."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dali_pipes.documents import Pieces
from dali_pipes.operators import segments

Array = Any

HOST_OUTPUTS = ("max_seqlen", "num_segments")
"""Whole numbers that a trainer needs before it queues work, so they are known without asking the device."""


@dataclass(frozen=True)
class RowOutputs:
    """Which outputs a batch has, and how they are made of its tokens. `outputs` are arrays, without row_ids."""

    outputs: tuple[str, ...]
    batch_size: int
    seq_len: int
    pad_id: int = 0
    mtp: int = 0
    mask_boundaries: bool = True

    def shape(self, name: str, rows: int, width: int | None = None) -> tuple[int, ...]:
        """Shape of one output of some rows of `width` positions (seq_len), in batches that are whole but for the last.

        `cu_seqlens` has a row for each batch, the others have one for each row. It is as long for a batch of fewer rows
        as for a whole one, batch_size * width + 1, and repeats its last entry, the positions that the batch has.
        """
        width = self.seq_len if width is None else width
        if name == "cu_seqlens":
            return -(-rows // self.batch_size), self.batch_size * width + 1
        return (rows, width, self.mtp) if name == "labels" and self.mtp else (rows, width)

    def dtype(self, name: str) -> type[np.generic]:
        """Type of one output."""
        return np.int32 if name == "cu_seqlens" else np.int64

    def size(self, name: str, parts: Sequence[tuple[int, int]]) -> int:
        """Values of one output of some parts of a block: rows and width of each."""
        return sum(math.prod(self.shape(name, *part)) for part in parts)

    def unfolded(self, name: str, line: Array, parts: Sequence[tuple[int, int]]) -> list[Array]:
        """Views of one output of some parts of a block, rows and width of each, that lie in `line` (N,) in a row."""
        shapes = [self.shape(name, *part) for part in parts]
        ends = itertools.accumulate(map(math.prod, shapes))
        return [line[end - math.prod(shape) : end].reshape(*shape) for shape, end in zip(shapes, ends, strict=True)]

    def build(
        self,
        tokens: Array,
        pieces: Pieces,
        out: dict[str, Array],
        *,
        width: int | None = None,
        learn: Array = None,
        vocab_size: int | None = None,
        bad: Array = None,
        work: Array = None,
    ) -> None:
        """Fill the arrays of a block of batches: rows of `tokens` (N,) by the places of `pieces` in it.

        On a GPU this queues two launches, whatever the number of batches. The last batch may have fewer rows.

        out: arrays of the block's rows, as `shape` has them; `cu_seqlens` has a row for each batch.
        width: positions of a row, seq_len if not given.
        learn: uint8 (N,), 0 for tokens that are no label; None: all are.
        """
        segments(
            tokens,
            *pieces,
            self.seq_len if width is None else width,
            outputs=tuple(out),
            pad_id=self.pad_id,
            mtp=self.mtp,
            mask_boundaries=self.mask_boundaries,
            loss_mask=learn,
            batch_rows=self.batch_size,
            out=out,
            vocab_size=vocab_size,
            bad=bad,
            work=work,
        )

    def host_values(self, pieces: Pieces, width: int) -> dict[str, int]:
        """`HOST_OUTPUTS` of one batch of `width` positions a row, whose padding is its last segment."""
        tokens = np.concatenate(([0], pieces.lengths.cumsum()))[pieces.row_offsets]
        padding = width - (tokens[1:] - tokens[:-1])
        longest = max(int(pieces.lengths.max(initial=0)), int(padding.max(initial=0)))
        return {"max_seqlen": longest, "num_segments": len(pieces.lengths) + int(np.count_nonzero(padding))}
