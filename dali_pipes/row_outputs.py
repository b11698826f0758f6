"""The outputs of rows that are put together from pieces of documents, a block of batches at a time, on either array."""

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

    def shape(self, name: str, num_batches: int) -> tuple[tuple[int, ...], type[np.generic]]:
        """Shape and dtype of one output of `num_batches` batches, batch behind batch in the first axis."""
        rows = num_batches * self.batch_size
        if name == "cu_seqlens":
            return (num_batches, self.batch_size * self.seq_len + 1), np.int32
        if name == "labels" and self.mtp:
            return (rows, self.seq_len, self.mtp), np.int64
        return (rows, self.seq_len), np.int64

    def build(
        self,
        tokens: Array,
        pieces: Pieces,
        out: dict[str, Array],
        *,
        learn: Array = None,
        vocab_size: int | None = None,
        bad: Array = None,
    ) -> None:
        """Fill the arrays of a block of batches: rows of `tokens` (N,) by the places of `pieces` in it.

        On a GPU this queues two launches, whatever the number of batches. The last batch may have fewer rows.

        out: arrays of the block's rows, as `shape` has them; `cu_seqlens` has a row for each batch.
        learn: uint8 (N,), 0 for tokens that are no label; None: all are.
        """
        segments(
            tokens,
            *pieces,
            self.seq_len,
            outputs=tuple(out),
            pad_id=self.pad_id,
            mtp=self.mtp,
            mask_boundaries=self.mask_boundaries,
            loss_mask=learn,
            batch_rows=self.batch_size,
            out=out,
            vocab_size=vocab_size,
            bad=bad,
        )

    def host_values(self, pieces: Pieces) -> dict[str, int]:
        """`HOST_OUTPUTS` of one batch. The padding of a row is a segment of its own, the last one."""
        tokens = np.concatenate(([0], pieces.lengths.cumsum()))[pieces.row_offsets]
        padding = self.seq_len - (tokens[1:] - tokens[:-1])
        longest = max(int(pieces.lengths.max(initial=0)), int(padding.max(initial=0)))
        return {"max_seqlen": longest, "num_segments": len(pieces.lengths) + int(np.count_nonzero(padding))}
