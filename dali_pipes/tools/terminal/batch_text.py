"""What `locate`, `explain`, and `preview` show. Colors only repeat the marks, so a pipe or a file loses nothing."""

from rich.console import Console
from rich.text import Text

from dali_pipes.runtime.messages import counted, printable
from dali_pipes.tools.reports import (
    BatchPreview,
    PieceOrigin,
    PreviewPiece,
    PreviewRow,
    RowOrigin,
    Run,
    SamplesPreview,
    StepReport,
)
from dali_pipes.tools.terminal.console import output

_MASKED = ("⟦", "⟧")
_MASKED_ASCII = ("[[", "]]")


def show_step(step: StepReport) -> None:
    """Totals, then a line for each row and for each piece of it."""
    console = output()
    ranks = f"rank {step.rank} of {step.world_size:,}"
    if step.rank is None:
        ranks = "all " * (step.world_size > 1) + counted(step.world_size, "rank")
    console.print(f"step {step.step:,} of epoch {step.epoch}, {ranks}")
    if step.is_skipped:
        console.print(Text("skipped: this step is listed in skip_steps", style="bold"))
    padding_rows = f", plus {counted(step.padding_rows, 'padding row')}" if step.padding_rows else ""
    files = ", ".join(printable(str(file)) for file in step.files)
    facts = {
        "rows": f"{step.num_rows:,} of {counted(step.width, 'position')}{padding_rows}",
        "row ids": f"{step.row_ids[0]:,} to {step.row_ids[1]:,}",
        "tokens": f"{step.tokens:,}, plus {counted(step.padding, 'padding position')}",
        "documents": "not loaded: these rows do not use them" if step.documents is None else f"{step.documents:,}",
        "files": f"{step.num_files:,}: {files}{', ...' if step.num_files > len(step.files) else ''}",
    }
    if step.objective is not None:
        facts["objective"] = printable(step.objective)
    for name, value in facts.items():
        console.print(Text(f"{name:<9} {value}"), soft_wrap=True)
    for rank, row in step.rows:
        remark = ": padding row, all labels ignored" if row.is_padding else ""
        source = "" if row.source_name is None else f", {_source(row)}"
        about = f"rank {rank}, row {row.row}, row id {row.row_id:,}{source}{remark}"
        console.print(Text(about, style="bold"))
        for piece in row.pieces:
            console.print(Text(f"-- {_piece(piece)}"), soft_wrap=True)
    if step.rows_left_out:
        console.print(f"... {counted(step.rows_left_out, 'more row')}; raise --rows to show more")


def show_row(row: RowOrigin) -> None:
    """One line per fact, and one per piece if there are several."""
    first = row.first or row.pieces[0]
    facts = {
        "file": str(first.file),
        "offset": f"{first.offset:,}",
        "source": _source(row).removeprefix("source "),
        "position": f"{first.position:,}",
        "row_id": f"{row.row_id:,}",
    }
    if first.document is not None:
        facts["document"] = _document(first)
    lines = [f"{name:<9} {value}" for name, value in facts.items()]
    if len(row.pieces) > 1:
        lines += [f"piece     {_piece(piece)}" for piece in row.pieces]
    for line in lines:
        output().print(Text(printable(line)), soft_wrap=True)


def show_samples(preview: SamplesPreview) -> None:
    """Where the picture is, and a line for each sample in it."""
    console = output()
    console.print(
        Text(
            f"{printable(preview.dataset)}, step {preview.step:,} of epoch {preview.epoch}: "
            f"{counted(len(preview.samples), 'sample')} in {printable(str(preview.path))}"
        ),
        soft_wrap=True,
    )
    for sample in preview.samples:
        group = "" if sample.group is None else f", group {printable(sample.group)}"
        console.print(Text(f"row {sample.row:,}: item {sample.item:,}{group}"), soft_wrap=True)


def show_preview(preview: BatchPreview) -> None:
    """Row by row and piece by piece: the origin, then the tokens."""
    console = output()
    opening, closing = _marks(console)
    batch = preview.batch
    if preview.warning is not None:
        console.print(Text(f"note: {printable(preview.warning)}"), soft_wrap=True)
    console.print(
        f"step {batch.step:,} of epoch {batch.epoch}, rank {batch.rank} of {batch.world_size:,}: "
        f"{len(preview.rows)} of {counted(len(batch.rows), 'row')}, {preview.row_mode}"
    )
    if preview.context_parallel is not None:
        console.print(Text(_share(preview)), soft_wrap=True)
    if preview.objective is not None:
        console.print(Text(f"objective: {printable(preview.objective)}"), soft_wrap=True)
    console.print(Text("labels at ").append(f"{opening}marked tokens{closing}", style="red").append(" are ignored"))
    for row in preview.rows:
        _show_row(console, preview, row)


def _show_row(console: Console, preview: BatchPreview, row: PreviewRow) -> None:
    console.print()
    source = "" if row.origin.source_name is None else f", {_source(row.origin)}"
    about = (
        f"row {row.origin.row}, row id {row.origin.row_id:,}{source}: {row.masked} of {preview.columns} labels ignored"
    )
    if row.sentinels_in_data:
        about += f", {counted(row.sentinels_in_data, 'sentinel')} already in the data"
    about += "".join(f", {name} {value:.4g}" for name, value in row.drawn.items())
    console.print(Text(about, style="bold"))
    for piece in row.pieces:
        about = _piece(piece.origin)
        if piece.segment is not None and piece.positions is not None:
            about += f", segment {piece.segment}, positions {piece.positions[0]} to {piece.positions[1]}"
        console.print(Text(f"-- {about}", style="cyan"), soft_wrap=True)
        console.print(_tokens(console, piece), soft_wrap=True)
    for name, run in row.corrupted:
        console.print(Text(f"-- {name}", style="cyan"))
        console.print(Text(_run(console, run)), soft_wrap=True)
    if row.padding:
        extent = "the whole row" if row.origin.is_padding else counted(row.padding, "position")
        console.print(Text(f"-- padding, {extent}", style="dim"))


def _tokens(console: Console, piece: PreviewPiece) -> Text:
    opening, closing = _marks(console)
    parts = Text(" " if piece.text is None else "").join(
        Text(f"{opening}{shown}{closing}", style="red") if run.is_masked else Text(shown)
        for run in piece.runs
        for shown in [_run(console, run)]
    )
    hidden = piece.origin.length - sum(len(run.ids) for run in piece.runs)
    return parts.append(f" ... {counted(hidden, 'more token')}", style="dim") if hidden else parts


def _run(console: Console, run: Run) -> str:
    """The tokens, and after an arrow the labels at their places if these are not the next tokens."""
    shown = _lines(console, run.text) if run.text is not None else " ".join(map(str, run.ids))
    if run.own_labels is None:
        return shown
    labels = _lines(console, run.own_text) if run.own_text is not None else " ".join(map(str, run.own_labels))
    return f"{shown}{'->' if console.options.ascii_only else '→'}{labels}"


def _lines(console: Console, text: str) -> str:
    """Newlines are marked and kept; other control characters are escaped."""
    mark = "\\n\n" if console.options.ascii_only else "↵\n"
    return mark.join(printable(line) for line in text.split("\n"))


def _marks(console: Console) -> tuple[str, str]:
    return _MASKED_ASCII if console.options.ascii_only else _MASKED


def _share(preview: BatchPreview) -> str:
    """Which part of every row a context-parallel rank gets."""
    assert preview.context_parallel is not None
    rank, size = preview.context_parallel
    positions = " and ".join(
        f"{first} to {end - 1}" if end - first > 1 else str(first) for first, end in preview.ranges
    )
    return (
        f"context-parallel rank {rank} of {size}, {preview.context_split}: columns 0 to {preview.columns - 1} are "
        f"positions {positions} of each {preview.width}-position row"
    )


def _piece(piece: PieceOrigin) -> str:
    if piece.file is None:
        return f"column {piece.column}: sentinel before the {piece.sentinel}"
    columns = f"columns {piece.column} to {piece.column + piece.length - 1}"
    document = "" if piece.document is None else f"document {_document(piece)}, "
    return f"{columns}: {document}{printable(str(piece.file))} token {piece.offset:,}"


def _source(row: RowOrigin) -> str:
    return str(row.source) if row.source_name is None else f"source {row.source}, {printable(row.source_name)}"


def _document(piece: PieceOrigin) -> str:
    return f"{piece.document:,} from token {piece.document_offset:,} of {piece.document_length:,}"
