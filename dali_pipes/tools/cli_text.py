"""The command `dali-pipes tokenize`: text files to a corpus of tokens.

    dali-pipes tokenize data/*.jsonl.gz --tokenizer tokenizer.json --out tokens
    dali-pipes tokenize chats.jsonl --chat --tokenizer model/tokenizer.json --out tokens
    dali-pipes tokenize data/*.jsonl.gz --tokenizer tokenizer.json --out tokens --shard 3/16    # one of 16 machines

The counts go to standard output; what it does, and a bar on a terminal, to standard error.
"""

import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from dali_pipes import __version__
from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.fields import TEMPLATE_OWN
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
    CHATML_MARKERS,
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
from dali_pipes.tools.cli_errors import INTERRUPTED, errors_as_one_line
from dali_pipes.tools.cli_help import FLAG
from dali_pipes.tools.terminal import printable

_ESCAPES = "in a shell a line end is $'\\n', with the dollar sign"


def tokenize(
    inputs: Annotated[list[str], typer.Argument(help="Text files, folders or glob patterns.")],
    tokenizer: Annotated[str, typer.Option(help="tokenizer.json of the tokenizers library, or its folder.")],
    out: Annotated[Path, typer.Option(help="Folder for the tokens: new, or of a run of this command to go on with.")],
    format: Annotated[
        Format, typer.Option(metavar="FORMAT", help="megatron separates documents by an index, flat by the eos id.")
    ] = "megatron",
    eos: Annotated[
        int | None, typer.Option(help="Id behind each document; by default the end-of-text token, if there is one.")
    ] = None,
    no_eos: Annotated[bool, typer.Option("--no-eos", metavar=FLAG, help="Do not add an id after documents.")] = False,
    text_key: Annotated[str, typer.Option(help="Key or column of the text.")] = "text",
    separator: Annotated[
        str | None,
        typer.Option(
            help=r"What lies between documents of a .txt file, such as $'\n\n'; by default a file is one.",
            show_default=False,
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", metavar=FLAG, help="Records are conversations; write ids and loss masks.")
    ] = False,
    chat_template: Annotated[
        str | None,
        typer.Option(
            help="Jinja file, JSON file of a tokenizer, chatml, or none; by default what lies beside tokenizer."
        ),
    ] = None,
    chat_template_name: Annotated[
        str | None,
        typer.Option(help="Name of the template to use; by default tool_use for records with tools, else default."),
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
            help="Which turns are learned: assistant (the default), last (only the last assistant turn) or all.",
            show_default=False,
        ),
    ] = None,
    no_learn_thoughts: Annotated[
        bool,
        typer.Option("--no-learn-thoughts", metavar=FLAG, help="Do not learn the reasoning that the template shows."),
    ] = False,
    shard: Annotated[str, typer.Option(metavar="I/N", help="Do input I, I + N, I + 2N ... alone, from 0.")] = "0/1",
    shard_tokens: Annotated[int, typer.Option(help="An output file with as many tokens takes no more.")] = SHARD_TOKENS,
) -> None:
    """Turn text (.txt, .jsonl, .csv, also .gz and .zst, Parquet, Arrow, MDS, ArrayRecord, WebDataset) into tokens.

    With --chat, conversations: `messages`, ShareGPT, prompt and completion; the masks are files named .loss.

    Start the same command again after an interruption: what is finished is not done again.
    """
    # Set to false by many to quiet a warning of the library about forks; here it would leave all cores but one idle.
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    with errors_as_one_line(), _interrupts_as_one_line():
        part = _shard(shard)
        text_key = _as_text("--text-key", text_key)
        separator = None if separator is None else _as_text("--separator", separator)
        if separator == "":
            raise ConfigError("--separator: expected a text that is not empty; leave it out for a document a file")
        if shard_tokens < 1:
            raise ConfigError(f"--shard-tokens {shard_tokens}: expected a number above 0")
        for option, value in (
            ("--chat-template", chat_template),
            ("--chat-template-name", chat_template_name),
            ("--chat-template-kwargs", chat_template_kwargs),
            ("--learn", learn),
            ("--no-learn-thoughts", no_learn_thoughts or None),
        ):
            if value is not None and not chat:
                shown = option if value is True else f"{option} {value}"
                raise ConfigError(f"{shown}: applies only to conversations; add --chat, or leave it out")
        if chat_template == "none" and chat_template_name is not None:
            raise ConfigError("--chat-template-name: cannot be combined with --chat-template none; leave one out")
        loaded = load_tokenizer(tokenizer)
        if eos is not None and (no_eos or eos < 0):
            raise ConfigError(f"--eos {eos}: expected an id, 0 or above, and no --no-eos beside it")
        template = None
        if chat and chat_template != "none":
            template = load_template(loaded.path, chat_template, name=chat_template_name)
        variables = _template_variables(chat_template_kwargs, template)
        ending = "no id behind each document"
        if template is not None:
            if eos is not None or no_eos:
                raise ConfigError("--eos: what ends a conversation is said by its template; leave it out")
            ending = f"ends of documents as the chat template of {template.name} writes them"
            if chat_template == "chatml":
                _warn_of_text_as_markers(loaded)
        elif eos is not None:
            ending = f"id {eos} behind each document"
        elif not no_eos:
            name, eos = end_of_text(loaded)
            ending = f"{name}, id {eos}, behind each document"
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
        typer.echo(f"{len(files)} inputs, {job.settings['id_type']} ids, {ending}, into {out}", err=True)
        start = time.monotonic()
        with show_progress("tokenising", total) as advance:
            summary = tokenize_files(job, out, f"dali_pipes {__version__}", part, advance)
    _show(summary, out, time.monotonic() - start)
    for line in Notes.from_json(summary.notes).lines():
        typer.echo(f"warning: {line}", err=True)
    if job.settings["id_type"] == "uint32":
        typer.echo('flat files do not say their type: open them with dtype = "uint32"')


def _template_variables(text: str | None, template: ChatTemplate | None) -> dict[str, Any]:
    """The variables of --chat-template-kwargs. Raises ConfigError for what is not an object, and without a template."""
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
    """A value as the UTF-8 text that was typed, whatever the locale. Raises ConfigError."""
    try:
        return os.fsencode(value).decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{option} {value!r}: is not UTF-8; give it as UTF-8 text") from None


def _check_separator(separator: str, files: Sequence[TextFile]) -> None:
    """Refuse one that is in no .txt file, whose documents would all become one; reads them until it is found."""
    if re.search(r"\\[nrt]", separator):
        typer.echo(f"warning: --separator {separator}: is taken as it is, with its backslash; {_ESCAPES}", err=True)
    texts = [file for file in files if file.kind == "plain"]
    chunks = (read_chunks(file.path, file.compression, ByteMeter()) for file in texts)
    if not any(is_in(of_file, separator.encode()) for of_file in chunks):
        raise ConfigError(
            f"--separator {separator!r}: is in none of {len(texts)} .txt files; {_ESCAPES}, and without a separator "
            "each file is a document"
        )


def is_in(chunks: Iterable[bytes], separator: bytes) -> bool:
    """Whether what the chunks are of holds the separator; reads no further than there."""
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
        typer.echo("interrupted; start the same command again to go on", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _warn_of_text_as_markers(tokenizer: LoadedTokenizer) -> None:
    known = {token.content for token in tokenizer.library.get_added_tokens_decoder().values()}
    missing = [marker for marker in CHATML_MARKERS if marker not in known]
    if missing:
        typer.echo(
            f"warning: --chat-template chatml: {tokenizer.path} has no token {' and no '.join(missing)}, so these "
            "markers become ordinary text, several ids each",
            err=True,
        )


def _shard(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not int(found[1]) < int(found[2]):
        raise ConfigError(f"--shard {text}: expected I/N with I from 0 to N - 1, such as 0/4, 1/4, 2/4 and 3/4")
    return int(found[1]), int(found[2])


def _show(summary: Summary, out: Path, seconds: float) -> None:
    dropped = f", {summary.dropped} dropped" if summary.dropped else ""
    typer.echo(
        f"{summary.tokens} tokens, {summary.documents} documents ({summary.empty} empty{dropped}), "
        f"{summary.shards} shards, {seconds:.1f} s"
    )
    if summary.missing:
        typer.echo(f"{summary.missing} inputs are left to other processes; {out} can be opened when they are done")
