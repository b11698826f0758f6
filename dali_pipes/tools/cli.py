"""The command `dali-pipes`: make and look at a corpus, at a configuration, and at what a loader serves. Trains nothing.

    dali-pipes tokenize data/*.jsonl.gz --tokenizer tokenizer.json --out tokens
    dali-pipes inspect data/*.bin
    dali-pipes check data --vocab-size 50257
    dali-pipes config gpt2_124m h100 --set batch_size=32
    dali-pipes locate run.toml --step 1200 --row 3
    dali-pipes explain run.toml --step 1200 --world-size 8
    dali-pipes preview data/*.bin --batch-size 8 --seq-len 1024 --tokenizer tokenizer.json

Results go to standard output, with --json as one object. What the user can mend goes to standard error as one line.
"""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dali_pipes import __version__
from dali_pipes.config import LoaderConfig
from dali_pipes.config.settings_files import Source, presets
from dali_pipes.corpus import FORMATS, open_corpus
from dali_pipes.runtime.progress import progress_bar
from dali_pipes.tools import cli_text, reports, terminal
from dali_pipes.tools.cli_errors import errors_as_one_line
from dali_pipes.tools.cli_help import FLAG, Command, Group
from dali_pipes.tools.cli_settings import BatchSize, Given, SeqLen, Settings, of_one_rank, settings_given

PROBLEMS_FOUND = 1

EXIT_STATUS = (
    "Exit status: 0 done; 1 `check` found problems; 2 a mistake in what was asked for, which standard error names; "
    "130 interrupted; 141 the reader of the output went away."
)

Paths = Annotated[
    list[str], typer.Argument(help="Files, folders or glob patterns, read as one corpus; or synthetic:10B.")
]
Format = Annotated[str, typer.Option(help=f"auto, {', '.join(FORMATS)}.")]
Dtype = Annotated[str | None, typer.Option(help="Integer type of files that do not state it.")]
EndId = Annotated[int | None, typer.Option("--eos", min=0, help="Id that ends every document.")]
StartId = Annotated[int | None, typer.Option("--start-id", min=0, help="Id that begins every document.")]
TokenColumn = Annotated[str | None, typer.Option(help="Column of Parquet and Arrow files that lists the ids.")]
VocabSize = Annotated[int | None, typer.Option(min=1, help="Ids at or above it are problems.")]
Json = Annotated[
    bool,
    typer.Option("--json/--no-json", metavar=FLAG, show_default=False, help="Print one JSON object and nothing else."),
]
Step = Annotated[int, typer.Option(help="Number of the batch within its epoch, from 0.")]
Epoch = Annotated[int, typer.Option(help="Epoch, from 0.")]
Rank = Annotated[int | None, typer.Option(help="Rank that was served the batch.")]
WorldSize = Annotated[int | None, typer.Option(help="Number of ranks.")]
SavedState = Annotated[
    Path | None,
    typer.Option("--state", help="State, as JSON, that the run went on from with another number of rows in a step."),
]

app = typer.Typer(
    cls=Group,
    help="Look at token corpora and at the order in which a loader serves them.",
    epilog=EXIT_STATUS,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command(cls=Command, epilog=EXIT_STATUS)(cli_text.tokenize)


@app.callback(invoke_without_command=True)
def main(
    version: Annotated[bool, typer.Option("--version", metavar=FLAG, help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"dali-pipes {__version__}")
        raise typer.Exit


@app.command(cls=Command, epilog=EXIT_STATUS)
def inspect(
    paths: Paths,
    format: Format = "auto",
    dtype: Dtype = None,
    eos: EndId = None,
    start_id: StartId = None,
    vocab_size: VocabSize = None,
    token_column: TokenColumn = None,
    full: Annotated[
        bool,
        typer.Option("--full/--no-full", metavar=FLAG, show_default=False, help="Read all ids instead of a sample."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a corpus holds: format, files, tokens, documents and their lengths, largest id, problems."""
    with (
        errors_as_one_line(),
        open_corpus(
            paths, format=format, dtype=dtype, eos_id=eos, token_column=token_column, vocab_size=vocab_size
        ) as corpus,
    ):
        width = corpus.dtype.itemsize
        with progress_bar("reading ids", corpus.num_tokens * width if full else 0, in_bytes=True) as advance:
            report = reports.inspect_corpus(
                corpus, start_id=start_id, vocab_size=vocab_size, full=full, advance=lambda ids: advance(ids * width)
            )
        if as_json:
            terminal.show_json(report.as_dict())
        else:
            terminal.show_corpus(report)


@app.command(cls=Command, epilog=EXIT_STATUS)
def check(
    paths: Paths,
    format: Format = "auto",
    dtype: Dtype = None,
    eos: EndId = None,
    start_id: StartId = None,
    vocab_size: VocabSize = None,
    token_column: TokenColumn = None,
    as_json: Json = False,
) -> None:
    """Read a corpus whole and list what is wrong: ids out of range, index against data, documents, checksums."""
    with errors_as_one_line():
        report = reports.check_corpus(
            paths,
            format=format,
            dtype=dtype,
            eos_id=eos,
            start_id=start_id,
            vocab_size=vocab_size,
            token_column=token_column,
            progress=partial(progress_bar, in_bytes=True),
        )
        if as_json:
            terminal.show_json(report.as_dict())
        else:
            terminal.show_check(report)
    if not report.is_clean:
        raise typer.Exit(PROBLEMS_FOUND)


@app.command(cls=Command, epilog=EXIT_STATUS)
def config(
    given: Given = (),  # type: ignore[assignment]
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    assignments: Settings = None,
    as_json: Json = False,
) -> None:
    """Check a configuration and print all of it as TOML or JSON, which loads again. Without arguments, list presets."""
    with errors_as_one_line():
        if not (given or assignments or batch_size or seq_len):
            if as_json:
                terminal.show_json({"presets": presets()})
            else:
                terminal.show_presets(presets())
            return
        shape = {"batch_size": batch_size, "seq_len": seq_len}
        checked = LoaderConfig.from_sources(*settings_given(given, assignments, shape, "config"))
        if as_json:
            terminal.show_json(checked.model_dump(mode="json", exclude_none=True))
        else:
            typer.echo(checked.to_toml(), nl=False)


@app.command(cls=Command, epilog=EXIT_STATUS)
def locate(
    given: Given,
    step: Step,
    row: Annotated[int, typer.Option(help="Row of the batch, from 0; `explain` tells of all of them.")],
    epoch: Epoch = 0,
    rank: Rank = None,
    world_size: WorldSize = None,
    state: SavedState = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    assignments: Settings = None,
    as_json: Json = False,
) -> None:
    """Say which files, offsets and documents a row comes from. Reads no tokens and uses no GPU."""
    with errors_as_one_line():
        options = {"batch_size": batch_size, "seq_len": seq_len, "rank": rank, "world_size": world_size}
        checked = of_one_rank(settings_given(given, assignments, options, "locate"))
        batch = reports.locate_batch(checked, step, epoch, state)
        found = reports.one_row(batch, row)
        if as_json:
            terminal.show_json(found.as_dict())
        else:
            terminal.show_row(found)


@app.command(cls=Command, epilog=EXIT_STATUS)
def explain(
    given: Given,
    step: Step,
    epoch: Epoch = 0,
    rank: Annotated[int | None, typer.Option(help="This rank alone; without it, all ranks of the step.")] = None,
    world_size: WorldSize = None,
    rows: Annotated[int, typer.Option(min=0, help="Most rows, and most names of files, to show.")] = 64,
    state: SavedState = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    assignments: Settings = None,
    as_json: Json = False,
) -> None:
    """Say what a step held: rows, tokens, padding, documents, files, and where each piece of each row comes from."""
    with errors_as_one_line():
        given_rank = 0 if rank is None and world_size is not None else rank  # it is one of all ranks
        options = {"batch_size": batch_size, "seq_len": seq_len, "rank": given_rank, "world_size": world_size}
        checked = of_one_rank(settings_given(given, assignments, options, "explain"))
        report = reports.explain_step(checked, step, epoch, all_ranks=rank is None, most=rows, state=state)
        if as_json:
            terminal.show_json(report.as_dict())
        else:
            terminal.show_step(report)


@app.command(cls=Command, epilog=EXIT_STATUS)
def preview(
    given: Given,
    step: Step = 0,
    epoch: Epoch = 0,
    rank: Rank = None,
    world_size: WorldSize = None,
    rows: Annotated[int, typer.Option(min=1, help="Most rows to show.")] = 4,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of a row to show.")] = 256,
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="tokenizer.json, by default that of the configuration; without one, ids are shown."),
    ] = None,
    state: SavedState = None,
    batch_size: BatchSize = None,
    seq_len: SeqLen = None,
    assignments: Settings = None,
    as_json: Json = False,
) -> None:
    """Show a batch: tokens, document boundaries, ignored labels, padding, and where each piece of it comes from."""
    with errors_as_one_line():
        options = {"batch_size": batch_size, "seq_len": seq_len, "rank": rank, "world_size": world_size}
        sources = settings_given(given, assignments, options, "preview")
        if tokenizer is not None:  # also for data that is text, unless the configuration names another
            sources.insert(0, Source(f"--tokenizer {tokenizer}", {"tokenizer": str(tokenizer)}))
        checked = of_one_rank(sources)
        tokenizer = tokenizer or (None if checked.tokenizer is None else Path(checked.tokenizer))
        text = None if tokenizer is None else reports.TokenText(tokenizer)
        batch = reports.preview_batch(checked, step, epoch, rows=rows, tokens=tokens, tokenizer=text, state=state)
        if as_json:
            terminal.show_json(batch.as_dict())
        else:
            terminal.show_preview(batch)


if __name__ == "__main__":
    app()
