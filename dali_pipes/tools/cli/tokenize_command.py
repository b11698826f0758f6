"""The command `dali-pipes tokenize`: turns text files into a corpus of tokens.

    dali-pipes tokenize data/*.jsonl.gz --tokenizer tokenizer.json --out tokens
    dali-pipes tokenize chats.jsonl --chat --tokenizer model/tokenizer.json --out tokens
    dali-pipes tokenize data/*.jsonl.gz --tokenizer tokenizer.json --out tokens --shard 3/16    # one of 16 machines
    dali-pipes tokenize 's3://bucket/text/*' --tokenizer tokenizer.json --out s3://bucket/tokens --ray

The counts go to standard output; messages, and a progress bar on a terminal, go to standard error.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from dali_pipes.errors import ConfigError
from dali_pipes.runtime.messages import counted, printable
from dali_pipes.text import Summary, TokenizeConfig, tokenize_shard
from dali_pipes.text.chat import TurnsToLearn
from dali_pipes.text.notes import Notes
from dali_pipes.text.on_ray import tokenize_on_ray
from dali_pipes.text.progress import show_progress
from dali_pipes.text.shard_task import Prepared
from dali_pipes.text.shard_writer import Format
from dali_pipes.text.tokenize import SHARD_TOKENS, Advance
from dali_pipes.tools.cli.endings import INTERRUPTED, errors_as_one_line
from dali_pipes.tools.cli.flags import FLAG
from dali_pipes.uris import without_secrets


def tokenize(
    inputs: Annotated[list[str], typer.Argument(help="Text files, folders, glob patterns, or URIs.")],
    tokenizer: Annotated[str, typer.Option(help="tokenizer.json of the tokenizers library, or its folder or URI.")],
    out: Annotated[
        str,
        typer.Option(help="Output folder or URI: a new one, or that of an interrupted run to continue."),
    ],
    format: Annotated[
        Format,
        typer.Option(
            metavar="FORMAT", help="megatron (document boundaries in an index) or flat (boundaries by eos id)."
        ),
    ] = "megatron",
    eos: Annotated[
        int | None,
        typer.Option(help="Id to append to each document; by default, the tokenizer's end-of-text token, if any."),
    ] = None,
    no_eos: Annotated[bool, typer.Option("--no-eos", metavar=FLAG, help="Do not append an id to documents.")] = False,
    text_key: Annotated[str, typer.Option(help="Key or column with the text.")] = "text",
    separator: Annotated[
        str | None,
        typer.Option(
            help=r"Text between documents in .txt files, such as $'\n\n'; by default, each file is one document.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", metavar=FLAG, help="Records are conversations; write ids and loss masks.")
    ] = False,
    chat_template: Annotated[
        str | None,
        typer.Option(
            help="Chat template: a Jinja file, a tokenizer's JSON file, chatml, or none; by default, the one next to "
            "the tokenizer."
        ),
    ] = None,
    chat_template_name: Annotated[
        str | None,
        typer.Option(help="Template to use; by default, tool_use for records with tools, otherwise default."),
    ] = None,
    chat_template_kwargs: Annotated[
        str | None,
        typer.Option(
            metavar="JSON",
            help="Variables for the template, such as '{\"enable_thinking\": false}'; "
            "those in a record take precedence.",
        ),
    ] = None,
    learn: Annotated[
        TurnsToLearn | None,
        typer.Option(
            metavar="TURNS",
            help="Turns to train on: assistant (the default), last (only the last assistant turn), or all.",
            show_default=False,
        ),
    ] = None,
    no_learn_thoughts: Annotated[
        bool,
        typer.Option(
            "--no-learn-thoughts", metavar=FLAG, help="Do not train on the reasoning that the template renders."
        ),
    ] = False,
    shard: Annotated[
        str, typer.Option(metavar="I/N", help="Process only inputs I, I + N, I + 2N, ..., from 0.")
    ] = "0/1",
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="[ADDRESS]",
            help="Run on the Ray cluster at ADDRESS (host:port, ray://host:port, or local). Without ADDRESS: the "
            "cluster of this machine, or else a new local one.",
            show_default=False,
        ),
    ] = None,
    shard_tokens: Annotated[
        int, typer.Option(help="Start a new output file once one has this many tokens.")
    ] = SHARD_TOKENS,
) -> None:
    """Tokenize text (.txt, .jsonl, .csv, also .gz and .zst; Parquet, Arrow, MDS, ArrayRecord, TFRecord, WebDataset).

    With --chat, tokenize conversations (`messages`, ShareGPT, or prompt and completion) and write loss masks (.loss).

    After an interruption, run the same command again: finished output is kept.
    """
    # Often set to false to silence a warning about forks; here that would leave all cores but one idle.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    with errors_as_one_line(), _interrupts_as_one_line():
        index, count = _shard(shard)
        if ray is not None and count > 1:
            raise ConfigError(
                f"--shard {shard}: cannot be combined with --ray, which divides the inputs; leave out --shard"
            )
        config = TokenizeConfig(
            inputs=inputs,
            tokenizer=tokenizer,
            out=out,
            format=format,
            eos=eos,
            no_eos=no_eos,
            text_key=_as_text("--text-key", text_key),
            separator=None if separator is None else _as_text("--separator", separator),
            chat=chat,
            chat_template=chat_template,
            chat_template_name=chat_template_name,
            chat_template_kwargs=chat_template_kwargs,
            learn=learn,
            no_learn_thoughts=no_learn_thoughts,
            shard_tokens=shard_tokens,
        )
        shown = _Shown(out, index, count)
        if ray is None:
            summary = tokenize_shard(config, index, count, begin=shown.begin)
        else:
            summary = tokenize_on_ray(config, ray or None, begin=shown.begin)
    _show(summary, out, time.monotonic() - shown.start)
    for line in Notes.from_json(summary.notes).lines():
        typer.echo(f"warning: {line}", err=True)
    if shown.id_type == "uint32":
        typer.echo('flat files do not store their integer type; open these with dtype = "uint32"')


class _Shown:
    """Shows notes, what is going to be done, and the progress of a shard. start: when the work began."""

    def __init__(self, out: str, index: int, count: int) -> None:
        self.start, self.id_type = 0.0, ""
        self._where, self._index, self._count = without_secrets(out), index, count

    @contextmanager
    def begin(self, prepared: Prepared) -> Iterator[Advance]:
        for note in prepared.notes:
            typer.echo(printable(note), err=True)
        job = prepared.job
        self.start, self.id_type = time.monotonic(), job.settings["id_type"]
        inputs = counted(len(job.inputs), "input")
        typer.echo(f"{inputs} to {self.id_type} ids in {self._where}, {prepared.ending}", err=True)
        total = sum(file.size for files in job.items[self._index :: self._count] for file in files)
        with show_progress("tokenizing", total) as advance:
            yield advance


def _as_text(option: str, value: str) -> str:
    """A value as UTF-8 text, independent of the locale. Raises ConfigError."""
    try:
        return os.fsencode(value).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{option} {value!r}: is not valid UTF-8; enter UTF-8 text") from None


@contextmanager
def _interrupts_as_one_line() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted; run the same command again to continue", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        raise ConfigError(f"--shard {text}: expected I/N with I from 0 to N - 1, such as 0/4, 1/4, 2/4, or 3/4")
    return int(found[1]), int(found[2])


def _show(summary: Summary, out: str, seconds: float) -> None:
    dropped = f", {summary.dropped:,} dropped" if summary.dropped else ""
    typer.echo(
        f"{counted(summary.tokens, 'token')}, {counted(summary.documents, 'document')} "
        f"({summary.empty:,} empty{dropped}), {counted(summary.shards, 'shard')}, {seconds:.1f} s"
    )
    if summary.missing:
        left, where = counted(summary.missing, "input"), without_secrets(out)
        typer.echo(f"{left} left for other shards; loaders can open {where} once all are done")
