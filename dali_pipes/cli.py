"""The command `dali-pipes`: make and look at a corpus, at a configuration, and at what a loader serves. Trains nothing.

    dali-pipes tokenize data/*.jsonl.gz --tokenizer tokenizer.json --out tokens
    dali-pipes inspect data/*.bin
    dali-pipes check data --vocab-size 50257
    dali-pipes config configs/gpt2_124m.toml configs/h100.toml --set batch_size=32
    dali-pipes locate configs/gpt2_124m.toml --set corpus=data --step 1200 --row 3
    dali-pipes explain configs/gpt2_124m.toml --set corpus=data --step 1200 --world-size 8
    dali-pipes preview configs/gpt2_124m.toml --set corpus=data --step 1200 --tokenizer tokenizer.json

Results go to standard output, with --json as one object. What the user can mend goes to standard error as one line.
"""

import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from dali_pipes import __version__, cli_text, reports, terminal
from dali_pipes.cli_errors import errors_as_one_line
from dali_pipes.config import LoaderConfig
from dali_pipes.corpus import FORMATS, open_corpus
from dali_pipes.errors import ConfigError
from dali_pipes.progress import progress_bar
from dali_pipes.ranks import resolve_ranks

PROBLEMS_FOUND = 1

EXIT_STATUS = (
    "Exit status: 0 done; 1 `check` found problems; 2 a mistake in what was asked for, which standard error names; "
    "130 interrupted; 141 the reader of the output went away."
)

Paths = Annotated[list[str], typer.Argument(help="Files, folders or glob patterns, read as one corpus.")]
Format = Annotated[str, typer.Option(help=f"auto, {', '.join(FORMATS)}.")]
Dtype = Annotated[str | None, typer.Option(help="Integer type of files that do not state it.")]
EndId = Annotated[int | None, typer.Option("--eos", min=0, help="Id that ends every document.")]
StartId = Annotated[int | None, typer.Option("--start-id", min=0, help="Id that begins every document.")]
TokenColumn = Annotated[str | None, typer.Option(help="Column of Parquet and Arrow files that lists the ids.")]
VocabSize = Annotated[int | None, typer.Option(min=1, help="Ids at or above it are problems.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Files = Annotated[
    list[Path], typer.Argument(help="TOML, YAML or JSON files; later ones replace what earlier ones say.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting, over what the files say; may be repeated."),
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
    help="Look at token corpora and at the order in which a loader serves them.",
    epilog=EXIT_STATUS,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.command(epilog=EXIT_STATUS)(cli_text.tokenize)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"dali-pipes {__version__}")
        raise typer.Exit


@app.command(epilog=EXIT_STATUS)
def inspect(
    paths: Paths,
    format: Format = "auto",
    dtype: Dtype = None,
    eos: EndId = None,
    start_id: StartId = None,
    vocab_size: VocabSize = None,
    token_column: TokenColumn = None,
    full: Annotated[bool, typer.Option("--full", help="Look at all ids, not at a sample of them.")] = False,
    as_json: Json = False,
) -> None:
    """Show what a corpus holds: format, files, tokens, documents and their lengths, largest id, problems."""
    with (
        errors_as_one_line(),
        open_corpus(paths, format=format, dtype=dtype, eos_id=eos, token_column=token_column) as corpus,
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


@app.command(epilog=EXIT_STATUS)
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


@app.command(epilog=EXIT_STATUS)
def config(files: Files, assignments: Settings = None, as_json: Json = False) -> None:
    """Check a configuration and print it whole, as TOML, which loads again; as JSON too."""
    with errors_as_one_line():
        checked = LoaderConfig.from_file(*files, **_overrides(assignments))
        if as_json:
            terminal.show_json(checked.model_dump(mode="json", exclude_none=True))
        else:
            typer.echo(checked.to_toml(), nl=False)


@app.command(epilog=EXIT_STATUS)
def locate(
    files: Files,
    step: Step,
    row: Annotated[int, typer.Option(help="Row of the batch, from 0; `explain` tells of all of them.")],
    epoch: Epoch = 0,
    rank: Rank = None,
    world_size: WorldSize = None,
    state: SavedState = None,
    assignments: Settings = None,
    as_json: Json = False,
) -> None:
    """Say which files, offsets and documents a row comes from. Reads no tokens and uses no GPU."""
    with errors_as_one_line():
        batch = reports.locate_batch(_served(files, assignments, rank, world_size), step, epoch, state)
        found = reports.one_row(batch, row)
        if as_json:
            terminal.show_json(found.as_dict())
        else:
            terminal.show_row(found)


@app.command(epilog=EXIT_STATUS)
def explain(
    files: Files,
    step: Step,
    epoch: Epoch = 0,
    rank: Annotated[int | None, typer.Option(help="This rank alone; without it, all ranks of the step.")] = None,
    world_size: WorldSize = None,
    rows: Annotated[int, typer.Option(min=0, help="Most rows, and most names of files, to show.")] = 64,
    state: SavedState = None,
    assignments: Settings = None,
    as_json: Json = False,
) -> None:
    """Say what a step held: rows, tokens, padding, documents, files, and where each piece of each row comes from."""
    with errors_as_one_line():
        given = 0 if rank is None and world_size is not None else rank
        checked = _served(files, assignments, given, world_size)
        report = reports.explain_step(checked, step, epoch, all_ranks=rank is None, most=rows, state=state)
        if as_json:
            terminal.show_json(report.as_dict())
        else:
            terminal.show_step(report)


@app.command(epilog=EXIT_STATUS)
def preview(
    files: Files,
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
    assignments: Settings = None,
    as_json: Json = False,
) -> None:
    """Show a batch: tokens, document boundaries, ignored labels, padding, and where each piece of it comes from."""
    with errors_as_one_line():
        checked = _served(files, assignments, rank, world_size)
        tokenizer = tokenizer or (None if checked.tokenizer is None else Path(checked.tokenizer))
        text = None if tokenizer is None else reports.TokenText(tokenizer)
        batch = reports.preview_batch(checked, step, epoch, rows=rows, tokens=tokens, tokenizer=text, state=state)
        if as_json:
            terminal.show_json(batch.as_dict())
        else:
            terminal.show_preview(batch)


def _served(
    files: Sequence[Path], assignments: Sequence[str] | None, rank: int | None, world_size: int | None
) -> LoaderConfig:
    """The configuration of one rank."""
    given = {"rank": rank, "world_size": world_size}
    settings = {**_overrides(assignments), **{name: value for name, value in given.items() if value is not None}}
    if (rank is None) != (world_size is None) and LoaderConfig.from_file(
        *files, **_overrides(assignments)
    ).rank is None:
        raise ConfigError("--rank and --world-size go together: give both")
    settings |= {name: value for name, value in given.items() if value is not None}
    # Neither changes which token is where, and a GPU may be out of reach or busy.
    return resolve_ranks(LoaderConfig.from_file(*files, **{**settings, "device": "cpu", "placement": "host"}))


def _overrides(items: Sequence[str] | None) -> dict[str, Any]:
    """`key=value` texts as settings: values are TOML, or plain text where they are not; `none` is None."""
    settings: dict[str, Any] = {}
    for item in items or ():
        name, equals, text = item.partition("=")
        if not equals:
            raise ConfigError(f"--set {item}: expected key=value, such as batch_size=32")
        settings[name.strip()] = _value(text.strip())
    return settings


def _value(text: str) -> Any:
    if text.lower() == "none":
        return None
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


if __name__ == "__main__":
    app()
