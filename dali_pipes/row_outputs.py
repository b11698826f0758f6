"""The outputs of rows that are put together from pieces of documents, batch by batch, on either kind of array."""

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
        """Fill the arrays of one batch: rows of `tokens` (N,) by the places of `pieces` in it. On a GPU: queue it.

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
            out=out,
            vocab_size=vocab_size,
            bad=bad,
        )

    def host_values(self, pieces: Pieces) -> dict[str, int]:
        """`HOST_OUTPUTS` of one batch. The padding of a row is a segment of its own, the last one."""
        counts = np.diff(pieces.row_offsets)
        used = np.zeros(len(counts), np.int64)
        np.add.at(used, np.repeat(np.arange(len(counts)), counts), pieces.lengths)
        padding = self.seq_len - used
        longest = max(int(pieces.lengths.max(initial=0)), int(padding.max(initial=0)))
        return {"max_seqlen": longest, "num_segments": len(pieces.lengths) + int(np.count_nonzero(padding))}
