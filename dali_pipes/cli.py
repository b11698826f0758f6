"""The command `dali-pipes`: look at a corpus, check a configuration, find where a row comes from. Trains nothing.

    dali-pipes inspect data/*.bin
    dali-pipes config configs/gpt2_124m.toml configs/h100.toml --set batch_size=32
    dali-pipes locate configs/gpt2_124m.toml --set corpus=data --step 1200 --row 3

Results go to standard output. What the user can mend goes to standard error as one line, with exit status 2.
"""

import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from dali_pipes import __version__
from dali_pipes.config import LoaderConfig
from dali_pipes.corpus import FORMATS, Corpus, open_corpus
from dali_pipes.errors import ConfigError, DaliPipesError

USER_ERROR = 2

Files = Annotated[
    list[Path], typer.Argument(help="TOML, YAML or JSON files; later ones replace what earlier ones say.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting, over what the files say; may be repeated."),
]

app = typer.Typer(
    help="Look at token corpora and at the order in which a loader serves them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback(invoke_without_command=True)
def main(version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if version:
        typer.echo(f"dali-pipes {__version__}")
        raise typer.Exit


@app.command()
def inspect(
    paths: Annotated[list[str], typer.Argument(help="Files, folders or glob patterns, read as one corpus.")],
    format: Annotated[str, typer.Option(help=f"auto, {', '.join(FORMATS)}.")] = "auto",
    dtype: Annotated[str | None, typer.Option(help="Integer type of files that do not state it.")] = None,
) -> None:
    """Show what a corpus holds: format, files, tokens, documents, type of the ids, fingerprint."""
    with _errors_as_one_line(), open_corpus(paths, format=format, dtype=dtype) as corpus:
        table = Table(show_header=False)
        for name, value in _facts(corpus):
            table.add_row(name, Text(value, overflow="fold"))
        Console().print(table)


@app.command()
def config(files: Files, assignments: Settings = None) -> None:
    """Check a configuration and print it whole, as TOML."""
    with _errors_as_one_line():
        typer.echo(LoaderConfig.from_file(*files, **_overrides(assignments)).to_toml(), nl=False)


@app.command()
def locate(
    files: Files,
    step: Annotated[int, typer.Option(help="Number of the batch within its epoch, from 0.")],
    row: Annotated[int, typer.Option(help="Row of the batch, from 0.")],
    epoch: Annotated[int, typer.Option(help="Epoch, from 0.")] = 0,
    rank: Annotated[int | None, typer.Option(help="Rank that was served the batch.")] = None,
    world_size: Annotated[int | None, typer.Option(help="Number of ranks.")] = None,
    assignments: Settings = None,
) -> None:
    """Say which file and offset a row comes from. Reads no tokens and uses no GPU."""
    with _errors_as_one_line():
        from dali_pipes import TokenLoader  # imports torch, which the other commands do not need

        given = {"rank": rank, "world_size": world_size}
        settings = {**_overrides(assignments), **{name: value for name, value in given.items() if value is not None}}
        # Neither changes which token is where, and a GPU may be out of reach or busy.
        checked = LoaderConfig.from_file(*files, **{**settings, "device": "cpu", "placement": "host"})
        with TokenLoader(checked) as loader:
            place = loader.locate(step, row, epoch)
    for name, value in place._asdict().items():
        typer.echo(f"{name:<9} {value}")


def _facts(corpus: Corpus) -> Iterator[tuple[str, str]]:
    first, last = corpus.files[0].name, corpus.files[-1].name
    yield "format", corpus.format
    yield "files", f"1 ({first})" if len(corpus.files) == 1 else f"{len(corpus.files)} ({first} to {last})"
    yield "tokens", str(corpus.num_tokens)
    yield "documents", "not known by this format" if corpus.num_documents is None else str(corpus.num_documents)
    yield "dtype", corpus.dtype.name
    if corpus.loss_mask is not None:
        yield "loss masks", f"{corpus.loss_mask.num_files} of {len(corpus.files)} files"
    yield "fingerprint", corpus.fingerprint


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


@contextmanager
def _errors_as_one_line() -> Iterator[None]:
    try:
        yield
    except (DaliPipesError, ModuleNotFoundError) as error:  # the second: no torch
        typer.echo("error: " + " ".join(line.strip() for line in str(error).splitlines()), err=True)
        raise typer.Exit(USER_ERROR) from None
