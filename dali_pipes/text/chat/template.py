"""Jinja chat templates, rendered like `apply_chat_template` of transformers.

The places of template files, their variables and their environment are the same: a sandbox in which messages cannot be
changed, `trim_blocks` and `lstrip_blocks`, `break` and `continue`, a `tojson` that does not escape HTML,
`raise_exception`, `strftime_now`, and `{% generation %}` around what the assistant writes.
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.runtime.optional import optional_package
from dali_pipes.text.chat.conversation import Message

if TYPE_CHECKING:
    from jinja2 import Environment

CHATML = """\
{% for message in messages %}
{% if message['content'] is not string or message['tool_calls'] %}
{{ raise_exception('ChatML has no tool calls: give the template of the model') }}
{% endif %}
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}
{{ '<|im_start|>assistant\\n' }}
{%- endif %}
"""
"""Its hash is among the settings of runs: any change would refuse to continue them."""
_MARKER = re.compile(r"<([|\uff5c])[^<>|\uff5c\s]+\1>")
"""`<|im_start|>` and the like, also with DeepSeek's wide bars."""
OPEN, CLOSE = "\U000b0010", "\U000b0011"
"""Mark a `{% generation %}` block. Code points of a plane without characters, so they do not occur in text."""

TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
HOW_TO_SET = (
    "Pass a file (--chat-template FILE: Jinja source, or a tokenizer_config.json with a chat_template), pass "
    "--chat-template chatml for ChatML, or put chat_template.jinja or tokenizer_config.json next to tokenizer.json"
)
RESERVED = ("messages", "add_generation_prompt", "continue_final_message", "chat_template")
"""Variables that a record cannot set, except to a false value, which changes nothing."""

ADDITIONAL = "additional_chat_templates"
Span = tuple[int, int]


class ChatTemplate:
    """A compiled template. Rendering is thread-safe.

    name: for messages. sources: Jinja source by name. selected: the name of the one to use; by default, like
    transformers, "tool_use" for conversations with tools, if it exists, else "default".
    tokens: texts of `bos_token`, `eos_token` and so on, for the template. now: the time that `strftime_now` returns.

    variables: names that the sources read but do not set. names: every attribute, key and string in them: a key of a
    message that is not among these is shown only if the message is shown as a whole. markers: the texts such as
    `<|im_start|>` that they write; a vocabulary has a token for each, if it is the one of the template's model.

    Raises BackendError without jinja2, ConfigError for invalid Jinja source, and for a name that does not exist.
    """

    def __init__(
        self,
        name: str,
        sources: Mapping[str, str],
        tokens: Mapping[str, str],
        now: datetime,
        selected: str | None = None,
    ) -> None:
        environment = _environment()
        from jinja2 import TemplateSyntaxError, meta, nodes

        wanted = ("default", "tool_use") if selected is None else (selected,)
        used = {key: sources[key] for key in wanted if key in sources}
        if not used:
            raise ConfigError(
                f"chat template: {name} does not contain a template named {wanted[0]}; choose one of "
                f"{', '.join(sources)} with --chat-template-name"
            )
        self.name, self.tokens, self.now, self._selected = name, dict(tokens), now, selected
        self._compiled = {}
        self._with_generation = set()
        self.variables: set[str] = set()
        self.names: set[str] = set()
        self.markers: set[str] = set()
        for key, source in used.items():
            try:
                tree = environment.parse(source)
                self._compiled[key] = environment.from_string(source)
            except TemplateSyntaxError as error:
                raise ConfigError(f"chat template: {name}, line {error.lineno}: {error.message}") from None
            self.variables |= meta.find_undeclared_variables(tree)
            self.names |= _names_in(tree)
            self.markers |= _markers_in(tree)
            if any(node.name == "_generated" for node in tree.find_all(nodes.ExtensionAttribute)):
                self._with_generation.add(key)
        chosen = [dict(sources), self.tokens, *([] if selected is None else [selected])]
        self.sha256 = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()

    def has_generation(self, variables: Mapping[str, Any]) -> bool:
        """Whether the template marks what the assistant writes with `{% generation %}`."""
        return self._which(variables) in self._with_generation

    def render(
        self, messages: Sequence[Message], variables: Mapping[str, Any], where: str, *, prompt: bool = False
    ) -> str:
        """The conversation as text; with `prompt`, followed by the generation prompt.

        Raises CorpusFormatError, naming `where`, for any error in the template.
        """
        return self._render(messages, variables, where, prompt, False)

    def generated(self, messages: Sequence[Message], variables: Mapping[str, Any], where: str, text: str) -> list[Span]:
        """Spans of the `{% generation %}` blocks in `text`, the rendered conversation, in order.

        Raises CorpusFormatError if marks around the blocks change the text: the template trims or measures it.
        """
        pieces: list[str] = []
        spans: list[Span] = []
        length = 0
        for number, part in enumerate(self._render(messages, variables, where, False, True).split(OPEN)):
            inside, is_closed, outside = part.partition(CLOSE)
            if bool(number) != bool(is_closed):
                raise CorpusFormatError(
                    f"{where}: the {{% generation %}} blocks of {self.name} are nested or truncated"
                )
            if number:
                spans.append((length, length + len(inside)))
            pieces += (inside, outside)
            length += len(inside) + len(outside)
        if "".join(pieces) != text:
            raise CorpusFormatError(
                f"{where}: the chat template {self.name} changes the text of its {{% generation %}} blocks after they "
                "end, so the learned text cannot be located; move the change into the blocks"
            )
        return spans

    def _which(self, variables: Mapping[str, Any]) -> str:
        if self._selected is not None:
            return self._selected
        return "tool_use" if variables.get("tools") and "tool_use" in self._compiled else "default"

    def _render(
        self, messages: Sequence[Message], variables: Mapping[str, Any], where: str, prompt: bool, mark: bool
    ) -> str:
        reserved = [name for name in RESERVED if variables.get(name)]
        if reserved:
            raise CorpusFormatError(
                f"{where}: the record sets {', '.join(reserved)}, a variable of the chat template that `tokenize` "
                "sets; remove it from the record"
            )
        which = self._which(variables)
        if which not in self._compiled:
            raise CorpusFormatError(
                f"{where}: the chat template {self.name} does not contain a template named default, for conversations "
                "without tools; choose another one with --chat-template-name"
            )
        given: dict[str, Any] = {"tools": None, "documents": None, **self.tokens, **variables}
        given |= {
            "messages": [_with_thoughts(message) for message in messages],
            "add_generation_prompt": prompt,
            "mark_generated_": mark,
        }
        try:
            return self._compiled[which].render(given | {"strftime_now": self.now.strftime})
        except Exception as error:  # a template is a program: it may raise anything
            raise CorpusFormatError(
                f"{where}: the chat template {self.name} cannot render this conversation: {error}. Correct or remove "
                "the conversation, or use another template"
            ) from error


def _names_in(tree: Any) -> set[str]:
    from jinja2 import nodes

    attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
    return attributes | {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}


def _markers_in(tree: Any) -> set[str]:
    from jinja2 import nodes

    written = [part for node in tree.find_all((nodes.Output, nodes.Assign)) for part in node.find_all(nodes.Expr)]
    texts = [part.data for part in written if isinstance(part, nodes.TemplateData)]
    texts += [part.value for part in written if isinstance(part, nodes.Const) and isinstance(part.value, str)]
    return {match[0] for text in texts for match in _MARKER.finditer(text)}


def _with_thoughts(message: Message) -> Message:
    """The message with its thoughts under the names that templates read, like transformers 5 and later."""
    names = ("reasoning_content", "thinking", "reasoning")
    thoughts = next((message[name] for name in names if message.get(name) is not None), None)
    return message if thoughts is None else {"thinking": thoughts, **message, "reasoning_content": thoughts}


@functools.cache
def _environment() -> "Environment":
    with optional_package("jinja2", "chat", purpose="to render chat templates"):
        import jinja2
        from jinja2 import nodes
        from jinja2.ext import Extension
        from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        tags = {"generation"}  # noqa: RUF012 (read as jinja2 names it)

        def parse(self, parser: Any) -> nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.CallBlock(self.call_method("_generated"), [], [], body).set_lineno(line)

        @jinja2.pass_context
        def _generated(self, context: Any, caller: Any) -> str:
            text = caller()
            return f"{OPEN}{text}{CLOSE}" if context.get("mark_generated_") else str(text)

    def to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    return environment


def load_template(
    tokenizer_json: Path | None,
    template: str | Path | None = None,
    *,
    name: str | None = None,
    now: datetime | None = None,
) -> ChatTemplate:
    """The given template, or the one next to the tokenizer.

    template: "chatml"; a file with Jinja source; a `.json` with a `chat_template` (one, or several with names). None:
    in the folder of `tokenizer_json`, `chat_template.jinja`, which is the default, and
    `additional_chat_templates/NAME.jinja`; without these, `tokenizer_config.json`. name: which one of several; see
    `ChatTemplate`. Texts of bos_token, eos_token and so on come from the `.json` file, else from the
    `tokenizer_config.json` next to the template or the tokenizer.

    Raises ConfigError if there is none, naming the places; for a file that cannot be read; and for a template that uses
    a bos_token or eos_token that is not in any of these files. BackendError without jinja2.
    """
    now = now or datetime.now().astimezone()
    if template == "chatml":
        return ChatTemplate("chatml", {"default": CHATML}, {}, now, name)
    beside = None if tokenizer_json is None else tokenizer_json.parent
    files = _find(beside) if template is None else {"default": Path(template).expanduser()}
    file = next(iter(files.values()))
    is_json = file.suffix == ".json"
    sources: Any = _config(file).get("chat_template") if is_json else {key: _read(path) for key, path in files.items()}
    if isinstance(sources, list):
        sources = {entry.get("name"): entry.get("template") for entry in sources if isinstance(entry, dict)}
    if isinstance(sources, str):
        sources = {"default": sources}
    if not isinstance(sources, dict) or not all(isinstance(item, str) for pair in sources.items() for item in pair):
        raise ConfigError(
            f"chat template: {file} does not contain a chat_template (a string, or a list of named templates)"
        )
    configs = [file] if is_json else []
    configs += [folder / "tokenizer_config.json" for folder in dict.fromkeys((file.parent, beside)) if folder]
    known = next((path for path in configs if path.is_file()), None)
    tokens = {} if known is None else _tokens(_config(known))
    made = ChatTemplate(str(file), sources, tokens, now, name)
    unknown = sorted(made.variables & set(TOKEN_NAMES))
    if known is None and unknown:
        raise ConfigError(
            f"chat template: {file} uses {', '.join(unknown)}, which must be in a tokenizer_config.json; not found: "
            f"{', '.join(map(str, configs))}"
        )
    return made


def _find(folder: Path | None) -> dict[str, Path]:
    """Files of templates by name. A tokenizer_config.json, which may contain several, counts as one."""
    if folder is None:
        raise ConfigError(f"chat template: not given. {HOW_TO_SET}")
    jinja, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    found = {"default": jinja} if jinja.is_file() else {}
    found |= {path.stem: path for path in sorted((folder / ADDITIONAL).glob("*.jinja"))}
    if found:
        return found
    if config.is_file() and _config(config).get("chat_template"):
        return {"default": config}
    state = "does not contain a chat_template" if config.is_file() else "does not exist"
    raise ConfigError(f"chat template: not given, and {jinja} does not exist, {config} {state}. {HOW_TO_SET}")


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"chat template: {file} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from error


def _config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(_read(file))
    except ValueError as error:
        raise ConfigError(f"chat template: {file} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise ConfigError(f"chat template: {file} is not a JSON object")
    return config


def _tokens(config: dict[str, Any]) -> dict[str, str]:
    """Texts of tokens, each written as a string or as an object with the string under `content`."""
    found = {name: config.get(name) for name in TOKEN_NAMES}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in found.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
