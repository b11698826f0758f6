"""Chat templates of the families in use, each as Jinja and again by hand, and a slow oracle for ids and mask.

By hand: a conversation is a list of pieces (text, who wrote it, whether it is learned). The oracle cuts the text at the
special tokens that the template wrote, encodes each cut as ordinary text, and follows the *bytes* of every token to the
characters it is made of: no offsets of the library, no marks, no rendering of prefixes.
"""

import json
import sys
import tarfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

ARCHIVE = Path(__file__).parents[1] / "data" / "chat" / "samples.tar.xz"
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|start|>", "<|stop|>", "<s>", "</s>", "[INST]", "[/INST]"]
SIZE = 2000
"""Ids of the small tokenizer, without the special ones."""

Message = dict[str, Any]


class Piece(NamedTuple):
    text: str
    is_template: bool = True
    is_learned: bool = False


class Family(NamedTuple):
    source: str
    by_hand: Callable[[Sequence[Message]], list[Piece]]


def _spoken(head: str, content: str, end: str, after: str, is_learned: bool) -> list[Piece]:
    return [Piece(head), Piece(content, False, is_learned), Piece(end, True, is_learned), Piece(after)]


def _chatml(messages: Sequence[Message]) -> list[Piece]:
    pieces = []
    for m in messages:
        is_learned = m["role"] == "assistant"
        pieces += _spoken(f"<|im_start|>{m['role']}\n", m["content"], "<|im_end|>", "\n", is_learned)
    return pieces


def _default_system(messages: Sequence[Message]) -> list[Piece]:
    before = [] if messages[0]["role"] == "system" else [Piece("<|im_start|>system\nBe helpful.<|im_end|>\n")]
    return before + _chatml(messages)


def _trimmed(messages: Sequence[Message]) -> list[Piece]:
    pieces = [Piece("<s>")]
    for m in messages:
        head = f"<|start|>{m['role']}<|start|>\n\n"
        pieces += _spoken(head, m["content"].strip(), "<|stop|>", "", m["role"] == "assistant")
    return pieces


def _system_last(messages: Sequence[Message]) -> list[Piece]:
    """As some of Mistral's: no request to speak, and the system text wanders to the last question."""
    system = messages[0]["content"] + "\n\n" if messages[0]["role"] == "system" else ""
    last = max((k for k, m in enumerate(messages) if m["role"] == "user"), default=-1)
    pieces = [Piece("<s>")]
    for k, m in enumerate(messages):
        if m["role"] == "user":
            text = (system if k == last else "") + m["content"]
            pieces += [Piece("[INST]"), Piece(text, False), Piece("[/INST]")]
        elif m["role"] == "assistant":
            pieces += _spoken(" ", m["content"].strip(), "</s>", "", True)
    return pieces


def _thinking(messages: Sequence[Message]) -> list[Piece]:
    """As Qwen3's: what was thought is shown in the last answer only, where it is shown even if empty."""
    asked = max((k for k, m in enumerate(messages) if m["role"] == "user"), default=-1)
    pieces = []
    for k, m in enumerate(messages):
        is_learned = m["role"] == "assistant"
        content, thought = m["content"], ""
        if is_learned and "</think>" in content:
            thought = content.split("</think>")[0].rstrip("\n").split("<think>")[-1].lstrip("\n")
            content = content.split("</think>")[-1].lstrip("\n")
        pieces += [Piece(f"<|im_start|>{m['role']}\n")]
        if is_learned and k > asked and (k == len(messages) - 1 or thought):
            block = [("<think>\n", True), (thought.strip("\n"), False), ("\n</think>\n\n", True)]
            pieces += [Piece(text, by_template, True) for text, by_template in block]
            content = content.lstrip("\n")
        pieces += _spoken("", content, "<|im_end|>", "\n", is_learned)
    return pieces


def _plain_text(messages: Sequence[Message]) -> list[Piece]:
    """No special tokens at all: the line's end is the end marker."""
    return [
        piece for m in messages for piece in _spoken(f"{m['role']}: ", m["content"], "\n", "", m["role"] == "assistant")
    ]


def _generation(messages: Sequence[Message]) -> list[Piece]:
    """The template says what is learned: the content without its end marker."""
    pieces = []
    for m in messages:
        is_learned = m["role"] == "assistant"
        pieces += [Piece(f"<|start|>{m['role']}\n"), Piece(m["content"], False, is_learned), Piece("<|stop|>\n")]
    return pieces


_CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

FAMILIES = {
    "chatml": Family(_CHATML, _chatml),
    "default system": Family(
        "{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}{%- endif %}"
        + _CHATML,
        _default_system,
    ),
    "trimmed": Family(
        "{{- bos_token }}{%- for m in messages %}"
        "{{- '<|start|>' + m['role'] + '<|start|>\\n\\n' + m['content'] | trim + '<|stop|>' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- '<|start|>assistant<|start|>\\n\\n' }}{%- endif %}",
        _trimmed,
    ),
    "system last": Family(
        """\
{%- if messages and messages[0].role == 'system' %}
    {%- set system = messages[0].content + '\\n\\n' %}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages if m.role == 'user' %}{%- set ns.last = ns.last + 1 %}{%- endfor %}
{{- bos_token }}
{%- set ask = namespace(number=-1) %}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- set ask.number = ask.number + 1 %}
        {%- if ask.number == ns.last and system is defined %}
            {{- '[INST]' + system + m.content + '[/INST]' }}
        {%- else %}
            {{- '[INST]' + m.content + '[/INST]' }}
        {%- endif %}
    {%- elif m.role == 'assistant' %}
        {{- ' ' + m.content | trim + eos_token }}
    {%- endif %}
{%- endfor %}""",
        _system_last,
    ),
    "thinking": Family(
        """\
{%- if messages[0].role == 'nobody' %}{%- endif %}
{%- set ns = namespace(asked=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.asked = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- set content = m.content %}
    {%- set thought = '' %}
    {%- if m.role == 'assistant' and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' and loop.index0 > ns.asked and (loop.last or thought) %}
        {{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}
    {%- else %}
        {{- content }}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
        _thinking,
    ),
    "plain text": Family(
        "{%- for m in messages %}{{- m.role + ': ' + m.content + '\\n' }}{%- endfor %}"
        "{%- if add_generation_prompt %}{{- 'assistant: ' }}{%- endif %}",
        _plain_text,
    ),
    "generation": Family(
        """\
{%- for m in messages %}
    {{- '<|start|>' + m.role + '\\n' }}
    {%- if m.role == 'assistant' %}
        {%- generation %}{{- m.content }}{%- endgeneration %}
    {%- else %}
        {{- m.content }}
    {%- endif %}
    {{- '<|stop|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant\\n' }}{%- endif %}""",
        _generation,
    ),
}
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@cache
def samples() -> dict[str, list[Any]]:
    """The lines of the sample files, by their names without suffix."""
    with tarfile.open(ARCHIVE) as archive:
        found = {}
        for member in archive.getmembers():
            content = archive.extractfile(member)
            assert content is not None
            found[member.name.removesuffix(".jsonl")] = [json.loads(line) for line in content.read().split(b"\n")[:-1]]
        return found


@cache
def gpt2() -> Tokenizer:
    """GPT-2 with the special tokens of the templates here."""
    from gpt2_tokenizer import tokenizer_json

    made = Tokenizer.from_str(tokenizer_json())
    made.add_special_tokens(SPECIAL)
    return made


@cache
def small_json() -> str:
    """The first ids of GPT-2, which take a fiftieth of its time to read."""
    from gpt2_tokenizer import tokenizer_json

    settings = json.loads(tokenizer_json())
    model = settings["model"]
    model["vocab"] = {piece: number for piece, number in model["vocab"].items() if number < SIZE}
    del model["merges"][SIZE - 256 :]
    settings["added_tokens"] = []
    return json.dumps(settings)


@cache
def tokenizer() -> Tokenizer:
    """The first ids of GPT-2, which is quicker to make, with the special tokens of the templates here."""
    made = Tokenizer.from_str(small_json())
    made.add_special_tokens(SPECIAL)
    return made


@cache
def _ordinary() -> tuple[Tokenizer, list[bytes]]:
    from decode import load_pieces

    return Tokenizer.from_str(small_json()), load_pieces()[:SIZE]


def oracle(pieces: Sequence[Piece]) -> tuple[list[int], list[int]]:
    """ids and mask, as the module's docstring says."""
    library, bytes_of = _ordinary()
    text = "".join(piece.text for piece in pieces)
    by_template = [piece.is_template for piece in pieces for _ in piece.text]
    learned = [piece.is_learned for piece in pieces for _ in piece.text]
    ids: list[int] = []
    mask: list[int] = []

    def take(start: int, end: int) -> None:
        owners = [i for i in range(start, end) for _ in text[i].encode()]
        for token in library.encode(text[start:end]).ids:
            size = len(bytes_of[token])
            ids.append(token)
            mask.append(int(any(learned[i] for i in owners[:size])))
            del owners[:size]
        assert owners == []

    start = position = 0
    while position < len(text):
        token = next((t for t in SPECIAL if text.startswith(t, position)), None)
        if token is None or not all(by_template[position : position + len(token)]):
            position += 1
            continue
        take(start, position)
        number = tokenizer().token_to_id(token)
        assert number is not None
        ids.append(number)
        mask.append(int(any(learned[position : position + len(token)])))
        start = position = position + len(token)
    take(start, position)
    return ids, mask
