"""The commands for a corpus: `inspect` looks at its headers and a sample of its ids, `check` at all of it; `copy`."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from dali_pipes.config.settings_files import CONFIG_SUFFIXES
from dali_pipes.corpus import FORMATS, open_corpus
from dali_pipes.corpus.copying import copy_corpus
from dali_pipes.errors import ConfigError
from dali_pipes.runtime.messages import counted, printable
from dali_pipes.runtime.progress import progress_bar
from dali_pipes.tools import reports, terminal
from dali_pipes.tools.cli.endings import PROBLEMS_FOUND, errors_as_one_line
from dali_pipes.tools.cli.flags import FLAG, Json
from dali_pipes.uris import is_uri, without_secrets

Paths = Annotated[
    list[str], typer.Argument(help="Files, folders, glob patterns, or URIs, read as one corpus; or synthetic:10B.")
]
Format = Annotated[str, typer.Option(help=f"File format: auto, {', '.join(FORMATS)}.")]
Dtype = Annotated[str | None, typer.Option(help="Integer type of the ids, for files that do not store it.")]
EndId = Annotated[int | None, typer.Option("--eos", min=0, help="Id that ends every document.")]
StartId = Annotated[int | None, typer.Option("--start-id", min=0, help="Id that begins every document.")]
TokenColumn = Annotated[str | None, typer.Option(help="Column with the token ids in Parquet, Arrow, and MDS files.")]
VocabSize = Annotated[int | None, typer.Option(min=1, help="Report ids greater than or equal to this number.")]


def inspect(
    paths: Paths,
    format: Format = "auto",
    dtype: Dtype = None,
    eos: EndId = None,
    start_id: StartId = None,
    vocab_size: VocabSize = None,
    token_column: TokenColumn = None,
    keep: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="File with the number of times to read each document (setting `keep`)."),
    ] = None,
    full: Annotated[
        bool,
        typer.Option("--full/--no-full", metavar=FLAG, show_default=False, help="Read all ids instead of a sample."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Summarize a corpus: format, files, tokens, documents and their lengths, largest id, and problems."""
    with (
        errors_as_one_line(),
        open_corpus(
            _data(paths, "inspect"),
            format=format,
            dtype=dtype,
            eos_id=eos,
            token_column=token_column,
            vocab_size=vocab_size,
            keep=keep,
        ) as corpus,
    ):
        width = corpus.dtype.itemsize
        with progress_bar("reading ids", corpus.num_tokens * width if full else 0, in_bytes=True) as advance:
            report = reports.inspect_corpus(
                corpus, start_id=start_id, vocab_size=vocab_size, full=full, advance=lambda ids: advance(ids * width)
            )
        terminal.show(report, terminal.show_corpus, as_json=as_json)


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
    """Read a whole corpus and list its problems: ids out of range, damaged indexes, wrong documents, bad checksums."""
    with errors_as_one_line():
        report = reports.check_corpus(
            _data(paths, "check"),
            format=format,
            dtype=dtype,
            eos_id=eos,
            start_id=start_id,
            vocab_size=vocab_size,
            token_column=token_column,
            progress=partial(progress_bar, in_bytes=True),
        )
        terminal.show(report, terminal.show_check, as_json=as_json)
    if not report.is_clean:
        raise typer.Exit(PROBLEMS_FOUND)


def copy(
    uris: Annotated[list[str], typer.Argument(help="URIs of files, folders, or glob patterns; then the local folder.")],
    read_requests: Annotated[int, typer.Option(min=1, help="Requests in flight.")] = 64,
    as_json: Json = False,
) -> None:
    """Copy a corpus from an object store or web server to a local folder. Run it again to continue an interrupted copy.

    Indexes, masks and manifests next to the files are copied too, and each file is compared with its object.
    """
    with errors_as_one_line():
        *entries, folder = uris
        if not entries or is_uri(folder):
            raise ConfigError(
                f"copy: give URIs and then a local folder, such as `dali-pipes copy {without_secrets(folder)} data`"
            )
        done = copy_corpus(
            entries,
            folder,
            read_requests=read_requests,
            progress=lambda total: progress_bar("copying", total, in_bytes=True),
        )
        if as_json:
            terminal.show_json({**done._asdict(), "folder": str(done.folder)})
        else:
            copied = counted(done.files - done.found, "file")
            folder = printable(str(done.folder))
            print(f"{folder}: {copied} copied ({done.copied_bytes:,} bytes), {done.found:,} already there")


def _data(paths: Sequence[str], command: str) -> Sequence[str]:
    """The paths. Raises `ConfigError` if one names a configuration, which would be read as ids."""
    for path in paths:
        if is_uri(path):
            continue
        if Path(path).suffix in CONFIG_SUFFIXES and Path(path).suffix != ".json":  # .json: an index of shards, too
            raise ConfigError(
                f"{path}: this is a configuration, and {command} takes data; pass the paths of its corpus, or those of "
                "each source of its mixture in a separate command"
            )
    return paths
