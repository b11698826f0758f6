"""The arrays of a block of batches, filled from its tokens: the one place where outputs are assembled, on any device.

rows that are runs of tokens      kernel `rows`       input_ids, labels
rows that are made from pieces    kernel `segments`   the same and what tells documents apart
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dali_pipes.config.outputs import OUTPUTS, made_by_kernels, on_host
from dali_pipes.documents import Pieces
from dali_pipes.operators import rows, segments
from dali_pipes.operators.segments import work_size

Array = Any  # NumPy's or CuPy's


@dataclass(frozen=True)
class Outputs:
    """Which fields a batch has, and how they are made from its tokens.

    names:    fields in their order, arrays and numbers
    batch_size: rows of a batch; None: batches differ, and each is one part of a block
    in_pieces: whether rows are put together from pieces
    index_dtype, mask_dtype: of arrays with a value for each position
    """

    names: tuple[str, ...]
    batch_size: int | None
    seq_len: int
    in_pieces: bool
    label_shift: bool = True
    pad_id: int = 0
    mtp: int = 0
    mask_boundaries: bool = True
    index_dtype: np.dtype[Any] = np.dtype(np.int64)  # noqa: RUF009 - immutable
    mask_dtype: np.dtype[Any] = np.dtype(np.int64)  # noqa: RUF009

    @property
    def from_tokens(self) -> tuple[str, ...]:
        """Arrays that a kernel fills. Runs of tokens give both inputs and labels, whether both are asked for or not."""
        return made_by_kernels(self.names) if self.in_pieces else ("input_ids", "labels")

    def dtype(self, name: str) -> np.dtype[Any]:
        """Of one array."""
        spec = OUTPUTS[name]
        return spec.dtype or (self.mask_dtype if spec.is_mask else self.index_dtype)

    def shape(self, name: str, rows: int, width: int | None = None) -> tuple[int, ...]:
        """Shape of one array of some rows of `width` positions (`seq_len`); the last batch may be partial."""
        batch_size = max(1, rows) if self.batch_size is None else self.batch_size
        return OUTPUTS[name].shape(rows, self.seq_len if width is None else width, batch_size, self.mtp)

    def most_rows(self, rows: int) -> int:
        """Rows in the positions of `rows` whole ones, if batches differ in width; a row has one position at least."""
        return rows * self.seq_len if self.batch_size is None else rows

    def num_bytes(self, name: str, rows: int, width: int | None = None) -> int:
        """Bytes of one array of some rows, as `shape`."""
        return math.prod(self.shape(name, rows, width)) * self.dtype(name).itemsize

    def size(self, name: str, parts: Sequence[tuple[int, int]]) -> int:
        """Elements of one array of some parts of a block: rows and width of each."""
        return sum(math.prod(self.shape(name, *part)) for part in parts)

    def unfolded(self, name: str, line: Array, parts: Sequence[tuple[int, int]]) -> list[Array]:
        """Views of one array of some parts of a block, rows and width of each, that lie in `line` (N,) in a row."""
        shapes = [self.shape(name, *part) for part in parts]
        ends = itertools.accumulate(map(math.prod, shapes))
        return [line[end - math.prod(shape) : end].reshape(*shape) for shape, end in zip(shapes, ends, strict=True)]

    def fill(
        self,
        tokens: Array,
        pieces: Pieces | None,
        out: Mapping[str, Array],
        *,
        starts: Array = None,
        width: int | None = None,
        loss_mask: Array = None,
        vocab_size: int | None = None,
        bad: Array = None,
        work: Array = None,
    ) -> None:
        """Fill the arrays of a block of batches, the last of which may have fewer rows; without a batch_size, of one.

        On a GPU this queues one launch, or two with pieces, whatever the number of batches.

        tokens: (N,), rows one after another, unless `pieces` or `starts` say where they are
        pieces: by their places in `tokens`; None where rows are runs of tokens
        out:    arrays of the block's rows, as `shape` has them
        starts: (R,), where rows that are runs of tokens begin in `tokens`
        width:  positions of a row, `seq_len` if not given
        loss_mask: uint8 (N,), 0 for tokens that are not a label; None: all are
        bad, vocab_size, work: as the operators take them
        """
        seq_len = self.seq_len if width is None else width
        if pieces is None:
            inputs, labels = out["input_ids"], out["labels"]
            starts = range(0, len(tokens), seq_len + self.label_shift) if starts is None else starts
            check = {"vocab_size": vocab_size, "bad": bad}
            rows(tokens, starts, seq_len, label_shift=self.label_shift, out=(inputs, labels), **check)
            return
        segments(
            tokens,
            *pieces,
            seq_len,
            outputs=tuple(out),
            pad_id=self.pad_id,
            mtp=self.mtp,
            mask_boundaries=self.mask_boundaries,
            loss_mask=loss_mask,
            batch_rows=max(1, len(pieces.row_offsets) - 1) if self.batch_size is None else self.batch_size,
            out=out,
            index_dtype=self.index_dtype,
            mask_dtype=self.mask_dtype,
            vocab_size=vocab_size,
            bad=bad,
            work=work,
        )

    def work_size(self, max_rows: int) -> int:
        """Elements of int64 memory that `fill` needs on a GPU for up to `max_rows` rows."""
        return work_size(max_rows * self.seq_len, self.most_rows(max_rows), self.batch_size) if self.in_pieces else 0

    def host_values(self, pieces: Pieces | None, sizes: Sequence[int], widths: Sequence[int]) -> list[dict[str, int]]:
        """The numbers of each batch of a block. The padding of a row is its last segment.

        sizes, widths: rows of each batch, 1 or more, and the positions of each of its rows
        """
        if pieces is None or not any(map(on_host, self.names)):
            return [{}] * len(sizes)
        counts = np.array(sizes, np.int64)
        ends = counts.cumsum()
        firsts = ends - counts
        totals = np.concatenate(([0], pieces.lengths.cumsum()))[pieces.row_offsets]
        padding = np.repeat(widths, counts) - (totals[1:] - totals[:-1])
        first_pieces = pieces.row_offsets[firsts]
        num_pieces = pieces.row_offsets[ends] - first_pieces
        # Of a batch without pieces, `reduceat` returns the length at its place, which belongs to another.
        longest = np.maximum.reduceat(np.append(pieces.lengths, 0), first_pieces) * (num_pieces > 0)
        longest = np.maximum(longest, np.maximum.reduceat(padding, firsts))
        segments = num_pieces + np.add.reduceat(padding > 0, firsts, dtype=np.int64)
        columns = longest.tolist(), segments.tolist()
        return [{"max_seqlen": most, "num_segments": count} for most, count in zip(*columns, strict=True)]
