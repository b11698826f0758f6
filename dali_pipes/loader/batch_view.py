"""A preview of a batch, and how it shows itself: as text, and as HTML in a notebook and in the page of `report`.

    row 0   ⟨document 7, from token 120 of 900⟩ the end of it ⟨document 8⟩ a whole one ⟨padding: 12⟩

Documents have colors in turn, tokens whose label is ignored are gray, and special ids have a frame. A token is an `<i>`
whose row and piece have, as attributes, what tells its origin; the script of the page shows it.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from dali_pipes.loader.batch_origin import BatchOrigin, PieceOrigin, RowOrigin
from dali_pipes.markup import rendered
from dali_pipes.monitoring.display import ShownAsTable, Table
from dali_pipes.runtime.messages import counted, printable

COLORS = 6
"""Colors of documents in the style sheet, which come in turn."""
_OPEN_TOKENS = 256
"""Rows of more tokens are folded, apart from the first of a batch."""
_BEGINNING = 80

Ranges = tuple[tuple[int, int], ...]
"""Of positions in a row: first, and one past the last."""


class Run(NamedTuple):
    """Consecutive tokens of one piece, all with a label or all without."""

    is_masked: bool
    """Whether the labels at these tokens are ignored."""
    ids: list[int]
    text: str | None
    texts: list[str] | None
    """Of each token; "" after the first of several that are one character."""
    own_labels: list[int] | None = None
    """Their labels, where an objective learns the ids at their own places."""
    own_text: str | None = None


@dataclass(frozen=True)
class PreviewPiece:
    """A piece of a row with its shown tokens. `positions`: its first and last position id."""

    origin: PieceOrigin
    segment: int | None
    positions: tuple[int, int] | None
    runs: tuple[Run, ...]
    text: str | None
    """Of all shown tokens, decoded together."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**self.origin.as_dict(), "segment": self.segment, "positions": self.positions, "text": self.text}


@dataclass(frozen=True)
class PreviewRow:
    """A row, or this rank's share of it; columns in `origin` and `pieces` count within the share.

    `outputs` are its outputs by name, (T,) ((T, k) for labels with mtp), cut to the shown tokens.
    """

    origin: RowOrigin
    pieces: tuple[PreviewPiece, ...]
    outputs: dict[str, Any]
    padding: int
    """Columns without a token; all of them in a padding row."""
    masked: int
    """Columns whose label is ignored, including padding and columns that are not shown."""
    drawn: dict[str, float]
    """What an objective has drawn for the row, by output: `prefix_lengths`, `p_mask`."""
    sentinels_in_data: int
    """Ids of the row's documents that a model cannot tell from sentinels of fill-in-the-middle."""
    corrupted: tuple[tuple[str, Run], ...] = ()
    """Of an objective of kind `spans`: `encoder_ids` and the learned ones of `decoder_labels`, without padding."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        own = {"padding": self.padding, "masked": self.masked, **self.drawn, **self.outputs}
        own |= {f"{name}_text": run.text for name, run in self.corrupted if run.text is not None}
        if self.sentinels_in_data:
            own["sentinels_in_data"] = self.sentinels_in_data
        return {**self.origin.as_dict(), **own, "pieces": [piece.as_dict() for piece in self.pieces]}


@dataclass(frozen=True, repr=False)
class BatchPreview(ShownAsTable):
    """The first rows of a batch, and the first tokens of each. A notebook shows them in colors."""

    batch: BatchOrigin
    row_mode: str
    rows: tuple[PreviewRow, ...]
    tokens: int
    """Maximum number of tokens shown per row."""
    warning: str | None
    """About the documents, as a loader prints it."""
    width: int
    """Positions per row; fewer than seq_len in a length bucket."""
    context_parallel: tuple[int, int] | None
    """Context-parallel rank and size; None: rows are whole."""
    context_split: str
    ranges: Ranges
    """The positions of the columns, in order."""
    special_ids: frozenset[int]
    """Ids that are not text: special tokens of the tokenizer, sentinels, and ids that end or begin documents."""
    objective: str | None = None
    """What is learned; None: the next token."""

    @property
    def columns(self) -> int:
        """Positions per row that this rank gets."""
        return sum(end - first for first, end in self.ranges)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able. `row_positions`: the positions of the shown columns in the row; None for whole rows."""
        about = {name: value for name, value in vars(self.batch).items() if name != "rows"}
        about |= {"row_mode": self.row_mode, "batch_rows": len(self.batch.rows), "tokens": self.tokens}
        about |= {} if self.objective is None else {"objective": self.objective}
        about |= {"width": self.width, "columns": self.columns, "context_parallel": self.context_parallel}
        is_whole = self.context_parallel is None
        positions = [position for first, end in self.ranges for position in range(first, end)]
        about |= {"context_split": None if is_whole else self.context_split}
        about |= {"row_positions": None if is_whole else positions[: self.tokens]}
        return {**about, "warning": self.warning, "rows": [row.as_dict() for row in self.rows]}

    def as_html(self) -> str:
        """For a page with the style sheet and script of the report."""
        return rendered("batch.html", batch=_view(self))

    def _table(self) -> Table:
        batch = self.batch
        title = f"BatchPreview of step {batch.step:,}, epoch {batch.epoch}, rank {batch.rank} of {batch.world_size:,}"
        rows = [
            (f"row {row.origin.row}", ", ".join(filter(None, (*_facts(self, row), _quoted(row))))) for row in self.rows
        ]
        return Table(title, rows)

    def _repr_html_(self) -> str:
        """With its own style sheet and without a script."""
        return rendered("notebook_batch.html", batch=_view(self))


def _view(preview: BatchPreview) -> dict[str, Any]:
    batch = preview.batch
    return {
        "step": batch.step,
        "epoch": batch.epoch,
        "rank": batch.rank,
        "world_size": batch.world_size,
        "num_rows": len(batch.rows),
        "row_mode": preview.row_mode,
        "columns": preview.columns,
        "warning": preview.warning,
        "has_text": any(run.texts is not None for row in preview.rows for piece in row.pieces for run in piece.runs),
        "rows": [_row(preview, row, number == 0) for number, row in enumerate(preview.rows)],
    }


def _row(preview: BatchPreview, row: PreviewRow, is_first: bool) -> dict[str, Any]:
    labels = row.outputs["labels"]
    shown = sum(len(run.ids) for piece in row.pieces for run in piece.runs)
    return {
        "row": row.origin.row,
        "row_id": row.origin.row_id,
        "source": row.origin.source_name,
        "is_padding": row.origin.is_padding,
        "facts": _facts(preview, row),
        "beginning": _beginning(row),
        "is_open": is_first or shown <= _OPEN_TOKENS,
        "ids": " ".join(map(str, row.outputs["input_ids"][:shown])),
        "labels": " ".join(_label(label) for label in labels[:shown]),
        "padding": row.padding,
        "hidden": preview.columns - row.padding - shown,
        "corrupted": [(name, printable(run.text or " ".join(map(str, run.ids)))) for name, run in row.corrupted],
        "pieces": [_piece(preview, piece, number) for number, piece in enumerate(row.pieces) if piece.runs],
    }


def _facts(preview: BatchPreview, row: PreviewRow) -> list[str]:
    documents = {piece.origin.document for piece in row.pieces} - {None}
    facts = [] if row.origin.source_name is None else [f"source {printable(row.origin.source_name)}"]
    facts += [counted(len(documents), "document")] if documents else []
    facts.append(f"{row.masked:,} of {preview.columns:,} labels ignored")
    facts += [f"padding {row.padding:,}"] if row.padding else []
    facts += [f"{name} {value:g}" for name, value in row.drawn.items()]
    facts += [f"{counted(row.sentinels_in_data, 'sentinel')} in the data"] if row.sentinels_in_data else []
    return facts


def _label(label: int | list[int]) -> str:
    return ",".join(map(str, label)) if isinstance(label, list) else str(label)


def _quoted(row: PreviewRow) -> str:
    """The beginning of a row after other facts: a text between quotation marks, ids as they are."""
    begins = _beginning(row)
    return f'"{begins}"' if begins and any(piece.text for piece in row.pieces) else begins


def _beginning(row: PreviewRow) -> str:
    """Of the text of a row, for one that is folded."""
    for piece in row.pieces:
        text = " ".join(map(str, piece.runs[0].ids[:16])) if piece.text is None and piece.runs else piece.text
        if text:
            return printable(" ".join(text[: 2 * _BEGINNING].split()))[:_BEGINNING]
    return ""


def _piece(preview: BatchPreview, piece: PreviewPiece, number: int) -> dict[str, Any]:
    origin = piece.origin
    return {
        "color": number % COLORS,
        "sentinel": origin.sentinel,
        "file": printable(str(origin.file)),
        "offset": origin.offset,
        "column": origin.column,
        "document": origin.document,
        "document_offset": origin.document_offset,
        "document_length": origin.document_length,
        "first_position": None if piece.positions is None else piece.positions[0],
        "runs": [
            (
                run.is_masked,
                [
                    (token in preview.special_ids, _text(text))
                    for token, text in zip(run.ids, run.texts or map(str, run.ids), strict=True)
                ],
            )
            for run in piece.runs
        ],
    }


def _text(text: str) -> str:
    """With escapes for what is not printable, apart from line breaks and tabs."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" else printable(c) for c in text)
