"""A preview of a batch as HTML: in the page of `dali-pipes report`, and in a notebook.

    row 0   ⟨document 7, from token 120 of 900⟩ the end of it ⟨document 8⟩ a whole one ⟨padding: 12⟩

Documents have colors in turn, tokens whose label is ignored are gray, and special ids have a frame. A token is an `<i>`
whose row and piece have, as attributes, what tells its origin; the script of the page shows it.
"""

from typing import Any

from dali_pipes.loader.batch_preview import BatchPreview, PreviewPiece, PreviewRow
from dali_pipes.markup import rendered
from dali_pipes.runtime.messages import counted, printable

COLORS = 6
"""Colors of documents in the style sheet, which come in turn."""
_OPEN_TOKENS = 256
"""Rows of more tokens are folded, apart from the first of a batch."""
_BEGINNING = 80


def batch_as_html(preview: BatchPreview, *, level: int = 3) -> str:
    """For the page, whose style sheet and script it needs. level: of the heading."""
    return rendered("batch.html", batch=_view(preview), level=level)


def batch_in_notebook(preview: BatchPreview) -> str:
    """With its own style sheet and without a script."""
    return rendered("notebook_batch.html", batch=_view(preview), level=4)


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
    documents = {piece.origin.document for piece in row.pieces} - {None}
    facts = [] if row.origin.source_name is None else [f"source {row.origin.source_name}"]
    facts += [counted(len(documents), "document")] if documents else []
    facts.append(f"{row.masked:,} of {preview.columns:,} labels ignored")
    facts += [f"padding {row.padding:,}"] if row.padding else []
    return {
        "row": row.origin.row,
        "row_id": row.origin.row_id,
        "source": row.origin.source_name,
        "is_padding": row.origin.is_padding,
        "facts": facts,
        "beginning": _beginning(row),
        "is_open": is_first or shown <= _OPEN_TOKENS,
        "ids": " ".join(map(str, row.outputs["input_ids"][:shown])),
        "labels": " ".join(_label(label) for label in labels[:shown]),
        "padding": row.padding,
        "pieces": [_piece(preview, piece, number) for number, piece in enumerate(row.pieces)],
    }


def _label(label: int | list[int]) -> str:
    return ",".join(map(str, label)) if isinstance(label, list) else str(label)


def _beginning(row: PreviewRow) -> str:
    """Of the text of a row, for one that is folded."""
    for piece in row.pieces:
        text = " ".join(map(str, piece.runs[0].ids[:16])) if piece.text is None and piece.runs else piece.text
        if text:
            return printable(" ".join(text[: 2 * _BEGINNING].split()))[:_BEGINNING]
    return ""


def _piece(preview: BatchPreview, piece: PreviewPiece, number: int) -> dict[str, Any]:
    origin = piece.origin
    shown = sum(len(run.ids) for run in piece.runs)
    return {
        "color": number % COLORS,
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
        "hidden": origin.length - shown,
    }


def _text(text: str) -> str:
    """With escapes for what is not printable, apart from line breaks and tabs."""
    if text.isprintable():
        return text
    return "".join(c if c in "\n\t" else printable(c) for c in text)
