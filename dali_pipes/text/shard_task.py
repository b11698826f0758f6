"""One shard of a run from plain settings: what the command line, Ray and other executors call.

    config = TokenizeConfig(["s3://bucket/text/*.jsonl.zst"], tokenizer="tokenizer.json", out="s3://bucket/tokens")
    tokenize_shard(config, 3, 16)        # inputs 3, 19, 35 ...; whoever finishes the last input publishes the result

A configuration is made of plain values, so executors can pickle it.
"""

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

from dali_pipes import __version__
from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.fields import TEMPLATE_OWN
from dali_pipes.runtime.messages import counted
from dali_pipes.text.chat import ChatTemplate, ConversationEncoder, TurnsToLearn, load_template, template_settings
from dali_pipes.text.encoder import Encoder, TextEncoder
from dali_pipes.text.formats.text_format import TextFile
from dali_pipes.text.inputs import find_text_files
from dali_pipes.text.shard_writer import Format
from dali_pipes.text.streams import ByteMeter
from dali_pipes.text.tokenize import SHARD_TOKENS, Advance, Job, Summary, publish_files, tokenize_files
from dali_pipes.text.tokenizer import LoadedTokenizer, end_of_text, load_tokenizer
from dali_pipes.uris import Uri

MADE_BY = f"dali_pipes {__version__}"
_NEWLINE = r"in a shell, write a newline as $'\n'"


@dataclass(frozen=True)
class TokenizeConfig:
    """What to tokenize and how: the options of `dali-pipes tokenize`, under the same names. Errors name the options.

    inputs: paths and URIs of files, folders and patterns; or the result of `find_text_files`, to search only once
    out:    output folder or URI, the same for all shards
    """

    inputs: Sequence[str] | Sequence[TextFile]
    tokenizer: str
    out: str
    format: Format = "megatron"
    eos: int | None = None
    no_eos: bool = False
    text_key: str = "text"
    separator: str | None = None
    chat: bool = False
    chat_template: str | None = None
    chat_template_name: str | None = None
    chat_template_kwargs: str | None = None
    learn: TurnsToLearn | None = None
    no_learn_thoughts: bool = False
    shard_tokens: int = SHARD_TOKENS


class Prepared(NamedTuple):
    """A configuration that was checked. ending: how documents end, in words. notes: about inputs and settings."""

    job: Job
    ending: str
    notes: list[str]


Begin = Callable[[Prepared], AbstractContextManager[Advance]]
"""Is called before the work; a context that gives the function that takes the bytes and tokens done."""


def tokenize_shard(
    config: TokenizeConfig, index: int = 0, count: int = 1, *, begin: Begin | None = None, publish: bool = True
) -> Summary:
    """Tokenize the inputs `index`, `index + count`, `index + 2 count` ... of a run. Blocks; uses all cores.

    Shards are independent: run them in any order, in parallel or not, on any machines with access to the inputs and
    `out`, and again after a failure. The shard that finishes the last input publishes the result, which is identical,
    byte for byte, to that of `count = 1`.

    begin:   shows progress; by default, notes go to standard error
    publish: False: do not publish; call `publish_shards` later. For thousands of shards

    Raises ConfigError, CorpusError (and its kinds) for the data, CorpusWriteError, and BackendError for a missing
    package.
    """
    prepared = prepare(config)
    with (_notes_shown if begin is None else begin)(prepared) as advance:
        return tokenize_files(prepared.job, config.out, MADE_BY, (index, count), advance, publish=publish)


def publish_shards(config: TokenizeConfig) -> Summary:
    """Publish a run whose shards were made with `publish=False`; `missing` counts unfinished inputs. Blocks."""
    return publish_files(prepare(config).job, config.out, MADE_BY)


def prepare(config: TokenizeConfig) -> Prepared:
    """Check a configuration, load the tokenizer and find the inputs. Blocks. Raises as `tokenize_shard`."""
    notes: list[str] = []
    _check(config)
    loaded = load_tokenizer(config.tokenizer)
    template = None
    if config.chat and config.chat_template != "none":
        beside = None if isinstance(loaded.path, Uri) else loaded.path
        template = load_template(beside, config.chat_template, name=config.chat_template_name)
    variables = _template_variables(config.chat_template_kwargs, template, notes)
    eos, ending = _end_of_documents(config, loaded, template)
    if template is not None:
        _note_text_as_markers(loaded, template, notes)
    files = _inputs(config, notes)
    if config.separator is not None:
        _check_separator(config.separator, files, notes)
    encoder: Encoder = (
        ConversationEncoder(
            loaded,
            template,
            config.learn or "assistant",
            eos,
            variables,
            learn_thoughts=not config.no_learn_thoughts,
        )
        if config.chat
        else TextEncoder(loaded, eos, ends_empty=config.format == "flat", text_key=config.text_key)
    )
    return Prepared(Job(files, encoder, config.format, config.separator, config.shard_tokens), ending, notes)


def _inputs(config: TokenizeConfig, notes: list[str]) -> list[TextFile]:
    found = [one for one in config.inputs if isinstance(one, TextFile)]
    return found or find_text_files([one for one in config.inputs if not isinstance(one, TextFile)], notes)


@contextlib.contextmanager
def _notes_shown(prepared: Prepared) -> Iterator[Advance]:
    for note in prepared.notes:
        print(f"dali_pipes: {note}", file=sys.stderr)
    yield lambda done, tokens: None


def _check(config: TokenizeConfig) -> None:
    """Raise ConfigError for a setting that is invalid or contradicts another."""
    if config.separator == "":
        raise ConfigError("--separator: is empty; leave it out to make each file one document")
    if config.shard_tokens < 1:
        raise ConfigError(f"--shard-tokens {config.shard_tokens}: expected 1 or more")
    if config.eos is not None and config.no_eos:
        raise ConfigError(f"--eos {config.eos}: cannot be combined with --no-eos; leave one out")
    if config.eos is not None and config.eos < 0:
        raise ConfigError(f"--eos {config.eos}: expected an id of 0 or more")
    of_chats: dict[str, str | bool | None] = {
        "--chat-template": config.chat_template,
        "--chat-template-name": config.chat_template_name,
        "--chat-template-kwargs": config.chat_template_kwargs,
        "--learn": config.learn,
        "--no-learn-thoughts": config.no_learn_thoughts or None,
    }
    for option, value in of_chats.items():
        if value is not None and not config.chat:
            shown = option if value is True else f"{option} {value}"
            raise ConfigError(f"{shown}: applies only to conversations; add --chat, or leave it out")
    if config.chat_template == "none" and config.chat_template_name is not None:
        raise ConfigError("--chat-template-name: cannot be combined with --chat-template none; leave one out")


def _end_of_documents(
    config: TokenizeConfig, tokenizer: LoadedTokenizer, template: ChatTemplate | None
) -> tuple[int | None, str]:
    """The id to append to each document, and how documents end, in words. Raises ConfigError."""
    if template is not None:
        if config.eos is not None or config.no_eos:
            given = "--no-eos" if config.no_eos else f"--eos {config.eos}"
            raise ConfigError(f"{given}: the chat template decides how a conversation ends; leave it out")
        return None, f"documents end as in the chat template {template.name}"
    if config.no_eos:
        return None, "without an id after documents"
    if config.eos is not None:
        return config.eos, f"id {config.eos} after each document"
    name, eos = end_of_text(tokenizer)
    return eos, f"{name} (id {eos}) after each document"


def _template_variables(text: str | None, template: ChatTemplate | None, notes: list[str]) -> dict[str, Any]:
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
        notes.append(
            f"warning: --chat-template-kwargs: the chat template {template.name} does not use {name!r}; it uses "
            f"{', '.join(sorted(template.variables - TEMPLATE_OWN)) or 'none'}"
        )
    return found


def _check_separator(separator: str, files: Sequence[TextFile], notes: list[str]) -> None:
    """Refuse a separator that is not in any .txt file: each file would silently become one document."""
    if re.search(r"\\[nrt]", separator):
        notes.append(f"warning: --separator {separator}: the backslash is taken literally; {_NEWLINE}")
    texts = [file for file in files if file.kind == "plain"]
    if not any(is_in(file.chunks(ByteMeter()), separator.encode()) for file in texts):
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


def _note_text_as_markers(tokenizer: LoadedTokenizer, template: ChatTemplate, notes: list[str]) -> None:
    missing = sorted(text for text in template.markers if tokenizer.library.token_to_id(text) is None)
    if missing:
        notes.append(
            f"warning: the chat template {template.name} writes {', '.join(missing)}, but {tokenizer.path} does not "
            f"have {'tokens' if len(missing) > 1 else 'a token'} for {'these' if len(missing) > 1 else 'this'}: "
            "each is encoded as ordinary text, in several ids. Use the tokenizer of the template's model"
        )
