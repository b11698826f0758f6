"""The command `dali-pipes tokenize`: turns text files into a corpus of tokens.

    dali-pipes tokenize data/*.jsonl.gz --tokenizer tokenizer.json --out tokens
    dali-pipes tokenize chats.jsonl --chat --tokenizer model/tokenizer.json --out tokens
    dali-pipes tokenize data/*.jsonl.gz --tokenizer tokenizer.json --out tokens --shard 3/16    # one of 16 machines

The counts go to standard output; messages, and a progress bar on a terminal, go to standard error.
"""

import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dali_pipes import __version__
from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.fields import TEMPLATE_OWN
from dali_pipes.runtime.messages import counted, printable
from dali_pipes.text import (
    Encoder,
    Job,
    Summary,
    TextEncoder,
    TextFile,
    find_text_files,
    load_tokenizer,
    tokenize_files,
)
from dali_pipes.text.chat import (
    ChatTemplate,
    ConversationEncoder,
    TurnsToLearn,
    load_template,
    template_settings,
)
from dali_pipes.text.notes import Notes
from dali_pipes.text.progress import show_progress
from dali_pipes.text.shard_writer import Format
from dali_pipes.text.streams import ByteMeter, read_chunks
from dali_pipes.text.tokenize import SHARD_TOKENS
from dali_pipes.text.tokenizer import LoadedTokenizer, end_of_text
from dali_pipes.tools.cli.endings import INTERRUPTED, errors_as_one_line
from dali_pipes.tools.cli.flags import FLAG

_NEWLINE = r"in a shell, write a newline as $'\n'"


def tokenize(
    inputs: Annotated[list[str], typer.Argument(help="Text files, folders, or glob patterns.")],
    tokenizer: Annotated[str, typer.Option(help="tokenizer.json of the tokenizers library, or its folder.")],
    out: Annotated[
        Path, typer.Option(help="Output folder: a new one, or that of an interrupted run, which then continues.")
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
        part = _shard(shard)
        text_key = _as_text("--text-key", text_key)
        separator = None if separator is None else _as_text("--separator", separator)
        if separator == "":
            raise ConfigError("--separator: is empty; leave it out to make each file one document")
        if shard_tokens < 1:
            raise ConfigError(f"--shard-tokens {shard_tokens}: expected 1 or more")
        if not chat:
            _refuse_chat_options(
                {
                    "--chat-template": chat_template,
                    "--chat-template-name": chat_template_name,
                    "--chat-template-kwargs": chat_template_kwargs,
                    "--learn": learn,
                    "--no-learn-thoughts": no_learn_thoughts or None,
                }
            )
        if chat_template == "none" and chat_template_name is not None:
            raise ConfigError("--chat-template-name: cannot be combined with --chat-template none; leave one out")
        loaded = load_tokenizer(tokenizer)
        template = None
        if chat and chat_template != "none":
            template = load_template(loaded.path, chat_template, name=chat_template_name)
        variables = _template_variables(chat_template_kwargs, template)
        eos, ending = _end_of_documents(eos, no_eos, loaded, template)
        if template is not None:
            _warn_of_text_as_markers(loaded, template)
        notes: list[str] = []
        files = find_text_files(inputs, notes)
        for note in notes:
            typer.echo(printable(note), err=True)
        if separator is not None:
            _check_separator(separator, files)
        encoder: Encoder = (
            ConversationEncoder(
                loaded, template, learn or "assistant", eos, variables, learn_thoughts=not no_learn_thoughts
            )
            if chat
            else TextEncoder(loaded, eos, ends_empty=format == "flat", text_key=text_key)
        )
        job = Job(files, encoder, format, separator, shard_tokens)
        total = sum(file.size for files in job.items[part[0] :: part[1]] for file in files)
        id_type = job.settings["id_type"]
        typer.echo(f"{counted(len(files), 'input')} to {id_type} ids in {out}, {ending}", err=True)
        start = time.monotonic()
        with show_progress("tokenizing", total) as advance:
            summary = tokenize_files(job, out, f"dali_pipes {__version__}", part, advance)
    _show(summary, out, time.monotonic() - start)
    for line in Notes.from_json(summary.notes).lines():
        typer.echo(f"warning: {line}", err=True)
    if id_type == "uint32":
        typer.echo('flat files do not store their integer type; open these with dtype = "uint32"')


def _refuse_chat_options(options: Mapping[str, str | bool | None]) -> None:
    """Raise ConfigError for an option that needs --chat."""
    for option, value in options.items():
        if value is not None:
            shown = option if value is True else f"{option} {value}"
            raise ConfigError(f"{shown}: applies only to conversations; add --chat, or leave it out")


def _end_of_documents(
    eos: int | None, no_eos: bool, tokenizer: LoadedTokenizer, template: ChatTemplate | None
) -> tuple[int | None, str]:
    """The id to append to each document, and how documents end, in words. Raises ConfigError."""
    if eos is not None and no_eos:
        raise ConfigError(f"--eos {eos}: cannot be combined with --no-eos; leave one out")
    if eos is not None and eos < 0:
        raise ConfigError(f"--eos {eos}: expected an id of 0 or more")
    if template is not None:
        if eos is not None or no_eos:
            given = "--no-eos" if no_eos else f"--eos {eos}"
            raise ConfigError(f"{given}: the chat template decides how a conversation ends; leave it out")
        return None, f"documents end as in the chat template {template.name}"
    if no_eos:
        return None, "without an id after documents"
    if eos is not None:
        return eos, f"id {eos} after each document"
    name, eos = end_of_text(tokenizer)
    return eos, f"{name} (id {eos}) after each document"


def _template_variables(text: str | None, template: ChatTemplate | None) -> dict[str, Any]:
    """The variables of --chat-template-kwargs. Raises ConfigError without a template, or if they are not an object."""
    if text is None:
        return {}
    if template is None:
        raise ConfigError(f"--chat-template-kwargs {text}: needs a chat template; leave it out")
    try:
        found = template_settings(text, f"--chat-template-kwargs {text}")
    except CorpusFormatError as error:
        raise ConfigError(str(error)) from None
    for name in sorted(set(found) - template.variables):
        typer.echo(
            f"warning: --chat-template-kwargs: the chat template {template.name} does not use {name!r}; it uses "
            f"{', '.join(sorted(template.variables - TEMPLATE_OWN)) or 'none'}",
            err=True,
        )
    return found


def _as_text(option: str, value: str) -> str:
    """A value as UTF-8 text, independent of the locale. Raises ConfigError."""
    try:
        return os.fsencode(value).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{option} {value!r}: is not valid UTF-8; enter UTF-8 text") from None


def _check_separator(separator: str, files: Sequence[TextFile]) -> None:
    """Refuse a separator that is not in any .txt file: each file would silently become one document."""
    if re.search(r"\\[nrt]", separator):
        typer.echo(f"warning: --separator {separator}: the backslash is taken literally; {_NEWLINE}", err=True)
    texts = [file for file in files if file.kind == "plain"]
    chunks = (read_chunks(file.path, file.compression, ByteMeter()) for file in texts)
    if not any(is_in(of_file, separator.encode()) for of_file in chunks):
        raise ConfigError(
            f"--separator {separator!r}: not found in {counted(len(texts), '.txt file')}; {_NEWLINE}, or leave the "
            "option out to make each file one document"
        )


def is_in(chunks: Iterable[bytes], separator: bytes) -> bool:
    """Whether the joined chunks contain the separator; reads no further than its first occurrence."""
    end = b""
    for chunk in chunks:
        end += chunk
        if separator in end:
            return True
        end = end[max(0, len(end) - len(separator) + 1) :]
    return False


@contextmanager
def _interrupts_as_one_line() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("interrupted; run the same command again to continue", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _warn_of_text_as_markers(tokenizer: LoadedTokenizer, template: ChatTemplate) -> None:
    missing = sorted(text for text in template.markers if tokenizer.library.token_to_id(text) is None)
    if missing:
        typer.echo(
            f"warning: the chat template {template.name} writes {', '.join(missing)}, but {tokenizer.path} does not "
            f"have {'tokens' if len(missing) > 1 else 'a token'} for {'these' if len(missing) > 1 else 'this'}: "
            "each is encoded as ordinary text, in several ids. Use the tokenizer of the template's model",
            err=True,
        )


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        raise ConfigError(f"--shard {text}: expected I/N with I from 0 to N - 1, such as 0/4, 1/4, 2/4, or 3/4")
    return int(found[1]), int(found[2])


def _show(summary: Summary, out: Path, seconds: float) -> None:
    dropped = f", {summary.dropped:,} dropped" if summary.dropped else ""
    typer.echo(
        f"{counted(summary.tokens, 'token')}, {counted(summary.documents, 'document')} "
        f"({summary.empty:,} empty{dropped}), {counted(summary.shards, 'shard')}, {seconds:.1f} s"
    )
    if summary.missing:
        typer.echo(f"{counted(summary.missing, 'input')} left for other shards; {out} can be opened once all are done")
