"""What `locate`, `explain` and `preview` show. Colours repeat what the marks say: a pipe or a file loses nothing."""

from rich.console import Console
from rich.text import Text

from dali_pipes.tools.reports import (
    BatchOrigin,
    BatchPreview,
    PieceOrigin,
    PreviewPiece,
    PreviewRow,
    RowOrigin,
    StepReport,
)
from dali_pipes.tools.terminal.console import output, printable

_MASKED = ("⟦", "⟧")
_MASKED_ASCII = ("[[", "]]")


def show_step(step: StepReport) -> None:
    """Its figures, then a line for each row and for each piece of it."""
    console = output()
    whose = f"all {step.world_size} ranks" if step.rank is None else f"rank {step.rank} of {step.world_size}"
    console.print(f"step {step.step} of epoch {step.epoch}, {whose}")
    if step.is_skipped:
        console.print(Text("left out: one of skip_steps", style="bold"))
    fillers = f" and {step.padding_rows} that only fill a batch" if step.padding_rows else ""
    files = ", ".join(printable(str(file)) for file in step.files)
    facts = {
        "rows": f"{step.num_rows} of {step.width} positions{fillers}",
        "row ids": f"{step.row_ids[0]} to {step.row_ids[1]}",
        "tokens": f"{step.tokens}, and {step.padding} positions of padding",
        "documents": "not looked for: these rows do not need them" if step.documents is None else step.documents,
        "files": f"{step.num_files}: {files}{', ...' if step.num_files > len(step.files) else ''}",
    }
    for name, value in facts.items():
        console.print(Text(f"{name:<9} {value}"), soft_wrap=True)
    for rank, row in step.rows:
        what = ": only fills the batch, every label is ignored" if row.is_padding else ""
        console.print(Text(f"rank {rank}, row {row.row}, row id {row.row_id}{what}", style="bold"))
        for piece in row.pieces:
            console.print(Text(f"-- {_piece(piece)}"), soft_wrap=True)
    if step.rows_left_out:
        console.print(f"... {step.rows_left_out} more rows, which --rows shows")


def show_row(row: RowOrigin) -> None:
    """One line a fact, and one a piece where there are several."""
    first = row.pieces[0]
    facts = {"file": first.file, "offset": first.offset, "source": 0, "position": first.position, "row_id": row.row_id}
    if first.document is not None:
        facts["document"] = _document(first, "").removeprefix("document ")
    lines = [f"{name:<9} {value}" for name, value in facts.items()]
    if len(row.pieces) > 1:
        lines += [f"piece     {_piece(piece)}" for piece in row.pieces]
    for line in lines:
        output().print(Text(printable(line)), soft_wrap=True)


def show_preview(preview: BatchPreview) -> None:
    """Row by row and piece by piece: where it comes from, then its tokens."""
    console = output()
    opening, closing = _marks(console)
    if preview.warning is not None:
        console.print(Text(f"note: {printable(preview.warning)}"), soft_wrap=True)
    console.print(
        f"{_step(preview.batch)}; {len(preview.rows)} of its {len(preview.batch.rows)} rows, {preview.row_mode}"
    )
    if preview.context_parallel is not None:
        console.print(Text(_share(preview)), soft_wrap=True)
    console.print(Text("labels behind ").append(f"{opening}tokens{closing}", style="red").append(" are ignored"))
    for row in preview.rows:
        _show_row(console, preview, row)


def _show_row(console: Console, preview: BatchPreview, row: PreviewRow) -> None:
    console.print()
    about = f"row {row.origin.row}, row id {row.origin.row_id}: {row.masked} of {preview.columns} labels ignored"
    console.print(Text(about, style="bold"))
    for piece in row.pieces:
        about = _piece(piece.origin)
        if piece.segment is not None and piece.positions is not None:
            about += f", segment {piece.segment}, positions {piece.positions[0]} to {piece.positions[1]}"
        console.print(Text(f"-- {about}", style="cyan"), soft_wrap=True)
        console.print(_tokens(console, piece), soft_wrap=True)
    if row.padding:
        what = "the whole row: it only fills the batch" if row.origin.is_padding else f"{row.padding} places"
        console.print(Text(f"-- padding, {what}", style="dim"))


def _tokens(console: Console, piece: PreviewPiece) -> Text:
    opening, closing = _marks(console)
    parts = Text(" " if piece.text is None else "").join(
        Text(f"{opening}{shown}{closing}", style="red") if run.is_masked else Text(shown)
        for run in piece.runs
        for shown in [_lines(console, run.text) if run.text is not None else " ".join(map(str, run.ids))]
    )
    hidden = piece.origin.length - sum(len(run.ids) for run in piece.runs)
    return parts.append(f" ... {hidden} more tokens", style="dim") if hidden else parts


def _lines(console: Console, text: str) -> str:
    """Newlines break the line and are marked, other controls are escapes."""
    mark = "\\n\n" if console.options.ascii_only else "↵\n"
    return mark.join(printable(line) for line in text.split("\n"))


def _marks(console: Console) -> tuple[str, str]:
    return _MASKED_ASCII if console.options.ascii_only else _MASKED


def _step(batch: BatchOrigin) -> str:
    return f"step {batch.step} of epoch {batch.epoch}, rank {batch.rank} of {batch.world_size}"


def _share(preview: BatchPreview) -> str:
    """Which part of every row this is."""
    assert preview.context_parallel is not None
    rank, size = preview.context_parallel
    positions = " and ".join(
        f"{first} to {end - 1}" if end - first > 1 else str(first) for first, end in preview.ranges
    )
    return (
        f"the share of context-parallel rank {rank} of {size}, {preview.context_split}: columns 0 to "
        f"{preview.columns - 1} are positions {positions} of each row of {preview.width}"
    )


def _piece(piece: PieceOrigin) -> str:
    document = _document(piece, "")
    columns = f"columns {piece.column} to {piece.column + piece.length - 1}"
    return f"{columns}, {document}{', ' if document else ''}{printable(str(piece.file))} token {piece.offset}"


def _document(piece: PieceOrigin, unknown: str) -> str:
    if piece.document is None:
        return unknown
    return f"document {piece.document} from token {piece.document_offset} of {piece.document_length}"
