"""The arrays of a block of batches, filled from its tokens: the one place where outputs are assembled, on any device.

rows that are runs of tokens      kernel `rows`       input_ids, labels
rows that are made from pieces    kernel `segments`   the same and what tells documents apart
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from dali_pipes.config.outputs import OUTPUTS, ROW_TABLE, SPAN_TABLE, Axes, made_by_kernels, made_from_plans, on_host
from dali_pipes.config.span_counts import SpanWidths
from dali_pipes.documents import Pieces
from dali_pipes.operators import goldfish, rows, segments
from dali_pipes.operators._pieces import PieceLayout, PieceTables
from dali_pipes.operators.segments import LabelRule, fill_segments, work_size
from dali_pipes.rows.base import Rows

if TYPE_CHECKING:
    from dali_pipes.config.objectives import Goldfish
    from dali_pipes.objectives import RowDraws, Transforms

Array = Any  # NumPy's or CuPy's


@dataclass(frozen=True, eq=False, repr=False)
class Outputs:
    """Which fields a batch has, and how they are made from its tokens.

    names:    fields in their order, arrays and numbers
    batch_size: rows of a batch; None: batches differ, and each is one part of a block
    in_pieces: whether rows are put together from pieces
    index_dtype, mask_dtype: of arrays with a value for each position
    draws, transforms: what is drawn for each row, and done with it, where `objective` is set
    has_loss_mask: whether some ids are not learned
    goldfish: which labels are never learned, of the pieces that say so
    span_widths: room for corrupted rows, where `objective` is of kind "spans"
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
    draws: "RowDraws | None" = None
    transforms: "Transforms | None" = None
    has_loss_mask: bool = False
    goldfish: "Goldfish | None" = None
    span_widths: SpanWidths | None = None

    @cached_property
    def from_tokens(self) -> tuple[str, ...]:
        """Arrays that a kernel fills. Runs of tokens give both inputs and labels, whether both are asked for or not."""
        wanted = made_by_kernels(self.names)
        if self.in_pieces and self.transforms is None:
            return wanted
        made = tuple(name for name in wanted if self.in_pieces or OUTPUTS[name].needs_objective)
        return tuple(dict.fromkeys(("input_ids", "labels", *made)))

    @cached_property
    def from_plan(self) -> tuple[str, ...]:
        """Arrays that plans have, for batches and for kernels."""
        tables = (ROW_TABLE,) if self.transforms is not None else ()
        return made_from_plans(self.names) + tables + ((SPAN_TABLE,) if self.span_widths is not None else ())

    @cached_property
    def is_of_rows(self) -> bool:
        """Whether each field has an entry, or a row, for each row of a batch."""
        return all(OUTPUTS[name].axes in (Axes.POSITIONS, Axes.ROWS) for name in self.names)

    @property
    def scratch(self) -> tuple[str, ...]:
        """What objectives need beside the fields, of the `index_dtype` and (R, T): on a GPU it is given to `fill`."""
        transforms = self.transforms
        if transforms is None:
            return ()
        learn = ("learn",) if self.has_loss_mask and transforms.reads_learn else ()
        return (("ids",) if transforms.reads_ids else ()) + learn

    def drawn(self, epoch: int, row_ids: Array, rows: Rows, widths: Array) -> dict[str, Array]:
        """What is drawn for planned rows of an epoch, by field; empty without an objective.

        widths: positions of each; None: `seq_len`
        """
        if self.draws is None:
            return {}
        if rows.pieces is None:
            lengths = np.where(row_ids < 0, 0, self.seq_len if widths is None else widths)
        else:
            lengths = rows.pieces.row_lengths
        drawn = self.draws.draw(epoch, row_ids, rows.starts, lengths, rows.sources, rows.passes)
        fields = {ROW_TABLE: drawn.rows, "prefix_lengths": drawn.prefix_lengths, "p_mask": drawn.p_mask}
        if drawn.spans is not None:
            fields |= {SPAN_TABLE: drawn.spans.table, "encoder_lengths": drawn.spans.encoder_lengths}
            fields["decoder_lengths"] = drawn.spans.decoder_lengths
        return fields

    def dtype(self, name: str) -> np.dtype[Any]:
        """Of one array."""
        spec = OUTPUTS[name]
        return spec.dtype or (self.mask_dtype if spec.is_mask else self.index_dtype)

    def shape(self, name: str, rows: int, width: int | None = None) -> tuple[int, ...]:
        """Shape of one array of some rows of `width` positions (`seq_len`); the last batch may be partial."""
        batch_size = max(1, rows) if self.batch_size is None else self.batch_size
        width = self.seq_len if width is None else width
        return OUTPUTS[name].shape(rows, width, batch_size, self.mtp, self.span_widths)

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
        even_rows: tuple[int, int] | None = None,
        loss_mask: Array = None,
        vocab_size: int | None = None,
        bad: Array = None,
        work: Array = None,
        row_table: Array = None,
        span_table: Array = None,
        scratch: Mapping[str, Array] | None = None,
        tables: Sequence[Array] | None = None,
    ) -> None:
        """Fill the arrays of a block of batches, the last of which may have fewer rows; without a batch_size, of one.

        On a GPU this queues one launch, or two with pieces, whatever the number of batches, and those of objectives.

        tokens: (N,), rows one after another, unless `pieces` or `starts` say where they are
        pieces: by their places in `tokens`; None where rows are runs of tokens
        out:    arrays of the block's rows, as `shape` has them
        starts: (R,), where rows that are runs of tokens begin in `tokens`
        width:  positions of a row, `seq_len` if not given
        even_rows: of pieces with `places`, which NumPy does not check: the first token of the rows in `tokens`,
            and the tokens from there to that of the next; the pieces of a row follow one another
        loss_mask: uint8 (N,), 0 for tokens that are not a label; None: all are
        bad, vocab_size, work: as the operators take them
        row_table, span_table, scratch, tables: of objectives: those of `drawn` for these rows, and on a GPU memory
            for what `scratch` names, and `Transforms.tables`
        """
        seq_len = self.seq_len if width is None else width
        made, learn = out, None
        if self.transforms is not None:
            if scratch is None:
                scratch = {name: np.empty_like(out["input_ids"]) for name in self.scratch}
            made = {name: array for name, array in out.items() if not OUTPUTS[name].needs_objective}
            made = {**made, "input_ids": scratch.get("ids", out["input_ids"])}
            learn = scratch.get("learn")
        if pieces is None:
            assert learn is None, "rows with a loss mask are made from pieces"
            inputs, labels = made["input_ids"], made["labels"]
            starts = range(0, len(tokens), seq_len + self.label_shift) if starts is None else starts
            check = {"vocab_size": vocab_size, "bad": bad}
            rows(tokens, starts, seq_len, label_shift=self.label_shift, out=(inputs, labels), **check)
        elif pieces.places is not None:
            assert bad is None, "these ids were checked when they were read"
            shape = len(pieces.row_offsets) - 1, seq_len
            layout = PieceLayout(PieceTables(*pieces[:4]), shape, places=pieces.places, even_rows=even_rows)
            rule = LabelRule(max(self.mtp, 1), not self.mask_boundaries, loss_mask)
            batch_rows = shape[0] if self.batch_size is None else self.batch_size
            fill_segments(tokens, layout, made, rule, pad_id=self.pad_id, batch_rows=batch_rows)
            if learn is not None:
                fill_segments(loss_mask, layout, {"input_ids": learn}, rule, pad_id=0, batch_rows=batch_rows)
        else:
            segments(
                tokens,
                *pieces[:4],
                seq_len,
                outputs=tuple(made),
                pad_id=self.pad_id,
                mtp=self.mtp,
                mask_boundaries=self.mask_boundaries,
                loss_mask=loss_mask,
                batch_rows=max(1, len(pieces.row_offsets) - 1) if self.batch_size is None else self.batch_size,
                out=made,
                index_dtype=self.index_dtype,
                mask_dtype=self.mask_dtype,
                vocab_size=vocab_size,
                bad=bad,
                work=work,
            )
            if learn is not None:
                of_mask: dict[str, Any] = {"outputs": ("input_ids",), "out": {"input_ids": learn}, "work": work}
                segments(loss_mask, *pieces[:4], seq_len, index_dtype=self.index_dtype, **of_mask)
        if self.transforms is not None:
            how = {"label_shift": self.label_shift, "learn": learn, "tables": tables, "span_table": span_table}
            self.transforms.apply(made["input_ids"], row_table, out, **how)

    def learned(self, tokens: Array, pieces: Pieces | None, loss_mask: Array, out: Array = None) -> Array:
        """The loss mask that `fill` takes: `loss_mask`, or where some labels are never learned, one that says so, too.

        tokens, pieces, loss_mask: as `fill` takes them, of a whole block. out: uint8 (N,), on a GPU.
        """
        if self.goldfish is None:
            return loss_mask
        assert pieces is not None
        assert pieces.lookback is not None
        out = np.empty(len(tokens), np.uint8) if out is None else out
        k, h = self.goldfish.k, self.goldfish.h
        goldfish(tokens, pieces.starts, pieces.lookback, out, h=h, k=k, loss_mask=loss_mask)
        return out

    def work_size(self, max_rows: int) -> int:
        """Elements of int64 memory that `fill` needs on a GPU for up to `max_rows` rows."""
        return work_size(max_rows * self.seq_len, self.most_rows(max_rows), self.batch_size) if self.in_pieces else 0

    def host_values(self, pieces: Pieces | None, sizes: Sequence[int], widths: Sequence[int]) -> list[dict[str, int]]:
        """The numbers of each batch of a block. The padding of a row is its last segment.

        sizes, widths: rows of each batch, 1 or more, and the positions of each of its rows
        """
        if pieces is None or not any(map(on_host, self.names)):
            return [{}] * len(sizes)
        table = pieces.row_segments
        if table is None:
            table = pieces.with_rows(np.repeat(widths, sizes)).row_segments
            assert table is not None
        firsts = [0, *itertools.accumulate(sizes[:-1])]
        columns = np.maximum.reduceat(table[0], firsts).tolist(), np.add.reduceat(table[1], firsts).tolist()
        return [{"max_seqlen": most, "num_segments": count} for most, count in zip(*columns, strict=True)]
