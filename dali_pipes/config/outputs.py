"""The fields of a batch: one table for all code that builds, carries or delivers batches.

                    shape of a batch of B rows, T positions            made from
    POSITIONS       (B, T), labels (B, T, mtp) where mtp > 0            the rows' tokens, by a kernel
    SEGMENT_BOUNDS  (B * T + 1,) int32: `cu_seqlens`                    the same
    ROWS            (B,)                                                the plan
    ENCODER, DECODER, CAUSAL    (B, positions), as `SpanWidths` say     the rows' tokens, by a kernel
    NUMBER          a Python int, known before any work is queued       the plan

A new field needs a line here, what makes it, and its test.
"""

from collections.abc import Collection, Iterable
from enum import Enum
from typing import Any, NamedTuple

import numpy as np

from dali_pipes.config.span_counts import SpanWidths


class Axes(Enum):
    """What a field has an entry for."""

    POSITIONS = "one entry per position of each row"
    SEGMENT_BOUNDS = "one entry per segment of the batch, in an array of fixed length"
    ROWS = "one entry per row"
    ROW_TABLE = "one line per row, which only kernels read"
    ENCODER = "one entry per position of a corrupted row"
    DECODER = "one entry per position of what was taken out of a row"
    CAUSAL = "one entry per position of both, one after the other"
    SPAN_TABLE = "one line per row, which only kernels read, with two entries per span"
    NUMBER = "one integer, on the host"


class OutputSpec(NamedTuple):
    """One field of a batch.

    dtype:           of the array; None: as the settings `index_dtype` and, of a mask, `mask_dtype` say
    is_mask:         whether its values are 0 and 1
    tells_documents: whether it depends on where documents begin and end
    needs_pieces:    whether rows have to be cut into pieces of documents for it
    has_labels_axis: whether it has an axis more with multi-token prediction, one entry for each token ahead
    with_field:      the field that it accompanies, and without which it is not delivered; "": it is requested by name
    needs_objective: the kind of `objective` that makes it; "": it does not need one
    """

    name: str
    axes: Axes
    description: str
    dtype: np.dtype[Any] | None = None
    is_mask: bool = False
    tells_documents: bool = False
    needs_pieces: bool = False
    has_labels_axis: bool = False
    with_field: str = ""
    needs_objective: str = ""

    @property
    def from_plan(self) -> bool:
        """Whether no kernel makes it: it is known as soon as the rows are planned."""
        return self.axes in (Axes.ROWS, Axes.ROW_TABLE, Axes.SPAN_TABLE, Axes.NUMBER)

    def shape(
        self, rows: int, width: int, batch_size: int, mtp: int, spans: SpanWidths | None = None
    ) -> tuple[int, ...]:
        """Shape of the array for `rows` rows of `width` positions, in batches of which the last may be partial.

        `SEGMENT_BOUNDS` have a line for each batch, as long for a partial batch as for a whole one.
        spans: of the objective of this kind
        """
        if spans is not None and self.axes in (Axes.ENCODER, Axes.DECODER, Axes.CAUSAL, Axes.SPAN_TABLE):
            of_spans = {Axes.ENCODER: spans.encoder, Axes.DECODER: spans.decoder, Axes.CAUSAL: spans.causal}
            return rows, of_spans.get(self.axes, SPAN_COLUMNS + 2 * spans.spans)
        if self.axes is Axes.ROWS:
            return (rows,)
        if self.axes is Axes.ROW_TABLE:
            return (rows, ROW_COLUMNS)
        if self.axes is Axes.SEGMENT_BOUNDS:
            return -(-rows // batch_size), batch_size * width + 1
        assert self.axes is Axes.POSITIONS, f"{self.name} is not an array"
        return (rows, width, mtp) if self.has_labels_axis and mtp else (rows, width)


_INT64 = np.dtype(np.int64)

ROW_COLUMNS = 5
"""Of the table that `noised_rows` reads."""

ROW_TABLE = "row_table"
"""The name of that table, which is not a field of a batch."""

SPAN_COLUMNS = 2
"""Of the table that `corrupted_spans` reads, before those of spans."""

SPAN_TABLE = "span_table"
"""The name of that table."""

OUTPUTS = {
    spec.name: spec
    for spec in (
        OutputSpec("input_ids", Axes.POSITIONS, "ids of the tokens; pad_id on padding"),
        OutputSpec("labels", Axes.POSITIONS, "ids to predict; -100 where the loss is ignored", has_labels_axis=True),
        OutputSpec(
            "position_ids", Axes.POSITIONS, "0, 1, ... within each document", tells_documents=True, needs_pieces=True
        ),
        OutputSpec(
            "segment_ids",
            Axes.POSITIONS,
            "number of the document within its row, from 1; 0 on padding",
            tells_documents=True,
            needs_pieces=True,
        ),
        OutputSpec(
            "loss_mask",
            Axes.POSITIONS,
            "1 where the label counts in the loss, else 0",
            is_mask=True,
            needs_pieces=True,
        ),
        OutputSpec(
            "attention_mask",
            Axes.POSITIONS,
            "1 on tokens, 0 on padding",
            is_mask=True,
            tells_documents=True,
            needs_pieces=True,
        ),
        OutputSpec(
            "cu_seqlens",
            Axes.SEGMENT_BOUNDS,
            "where each document of the batch begins, for variable-length attention",
            np.dtype(np.int32),
            tells_documents=True,
            needs_pieces=True,
        ),
        OutputSpec(
            "max_seqlen",
            Axes.NUMBER,
            "tokens of the longest document in the batch",
            tells_documents=True,
            needs_pieces=True,
        ),
        OutputSpec("row_ids", Axes.ROWS, "place of each row in the order of its epoch; -1 for a padding row", _INT64),
        OutputSpec(
            "source_ids",
            Axes.ROWS,
            "number of the source of each row, in the order of `mixture`; -1 for a padding row",
            _INT64,
        ),
        OutputSpec(
            "noisy_ids",
            Axes.POSITIONS,
            "with an objective of kind `diffusion`: `input_ids` with the masked ids replaced",
            needs_objective="diffusion",
        ),
        OutputSpec(
            "masked",
            Axes.POSITIONS,
            "with `diffusion`: 1 where `noisy_ids` is masked, else 0",
            is_mask=True,
            needs_objective="diffusion",
        ),
        OutputSpec(
            "p_mask",
            Axes.ROWS,
            "with `diffusion`: masking rate of the row, float32",
            np.dtype(np.float32),
            needs_objective="diffusion",
        ),
        OutputSpec(
            "prefix_lengths",
            Axes.ROWS,
            "with an objective of kind `prefix`: number of tokens in the prefix of the row",
            _INT64,
            needs_objective="prefix",
        ),
        *(
            OutputSpec(name, axes, f"with `objective` of kind `spans`: {description}", dtype, needs_objective="spans")
            for name, axes, description, dtype in (
                ("encoder_ids", Axes.ENCODER, "the row, each span replaced by a sentinel; pad_id after it", None),
                ("encoder_lengths", Axes.ROWS, "ids in each row of `encoder_ids`", _INT64),
                ("decoder_input_ids", Axes.DECODER, "`start_id`, then the targets without the last", None),
                ("decoder_labels", Axes.DECODER, "targets: each sentinel and its span; -100 after them", None),
                ("decoder_lengths", Axes.ROWS, "targets of each row", _INT64),
                ("causal_ids", Axes.CAUSAL, "corrupted row and targets, one after the other; pad_id after them", None),
                ("causal_labels", Axes.CAUSAL, "the targets in `causal_ids`, and -100; as `label_shift` says", None),
            )
        ),
        OutputSpec(
            "num_segments",
            Axes.NUMBER,
            "documents in the batch, including the padding of rows",
            tells_documents=True,
            needs_pieces=True,
            with_field="cu_seqlens",
        ),
        OutputSpec(ROW_TABLE, Axes.ROW_TABLE, "keys, lengths and rates of rows", _INT64, with_field=ROW_TABLE),
        OutputSpec(
            SPAN_TABLE, Axes.SPAN_TABLE, "where the spans of rows are", np.dtype(np.int32), with_field=SPAN_TABLE
        ),
    )
}
"""By name, in the order in which messages list them."""

OUTPUT_NAMES = tuple(name for name, spec in OUTPUTS.items() if not spec.with_field and not spec.needs_objective)
"""Names that the setting `outputs` accepts."""

OBJECTIVE_OUTPUTS = tuple(name for name, spec in OUTPUTS.items() if spec.needs_objective)
"""Names that it accepts with the setting `objective`."""


def require_kinds(outputs: Iterable[str], kinds: Collection[str]) -> None:
    """ValueError for a field that needs a kind of `objective` which is missing.

    kinds: of all entries, in all sources of a mixture
    """
    for name in outputs:
        needed = OUTPUTS[name].needs_objective if name in OUTPUTS else ""
        if needed and needed not in kinds:
            raise ValueError(
                f'outputs: {name} requires an objective with kind = "{needed}", found '
                f"{', '.join(sorted(kinds)) or 'none'}; add the objective, or remove {name}"
            )


def on_host(name: str) -> bool:
    """Whether a field is a whole number on the host."""
    return OUTPUTS[name].axes is Axes.NUMBER


def arrays_of(names: tuple[str, ...]) -> tuple[str, ...]:
    """The fields that are arrays."""
    return tuple(name for name in names if not on_host(name))


def made_from_plans(names: tuple[str, ...]) -> tuple[str, ...]:
    """The arrays that no kernel makes: `Plan.field` has them."""
    return tuple(name for name in arrays_of(names) if OUTPUTS[name].from_plan)


def made_by_kernels(names: tuple[str, ...]) -> tuple[str, ...]:
    """The fields that kernels make of tokens."""
    return tuple(name for name in names if not OUTPUTS[name].from_plan)
