"""What is learned of a turn, for templates that show a turn differently by what follows it: against masks by structure.

A `Style` is a template in words. `source` writes it as Jinja, `by_hand` as pieces of text that know whose they are.
"""

from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from typing import Any, Literal, NamedTuple

import pytest
from chat_cases import TOKENS, Message, Piece, oracle, tokenizer
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes.errors import CorpusFormatError
from dali_pipes.text.chat import ChatEncoder, ChatTemplate, parse_conversation

NOW = datetime(2024, 7, 26, tzinfo=UTC)
HEAD = "<|im_start|>assistant\n"
PREFIXES = {"nothing": "", "a thought": "<think>\n", "an empty thought": "<think>\n\n</think>\n\n"}


class Style(NamedTuple):
    """asks_with: what follows the header in the request to speak. shown_in: turns whose thoughts are shown.
    shows_empty: a turn without a thought shows an empty one there. trims: content is trimmed. splits: thoughts may be
    in the content. last_differs: the last answer ends with <|stop|>. ends_all: so does the conversation, in addition.
    moves_system: the system text is in the last question.
    """

    asks_with: Literal["nothing", "a thought", "an empty thought"]
    shown_in: Literal["no turn", "the last message", "turns after the last question", "all turns"]
    shows_empty: bool = False
    trims: bool = False
    splits: bool = False
    last_differs: bool = False
    ends_all: bool = False
    moves_system: bool = False


STYLES = st.builds(
    Style,
    st.sampled_from(list(PREFIXES)),
    st.sampled_from(["no turn", "the last message", "turns after the last question", "all turns"]),
    *[st.booleans()] * 6,
)


def source(style: Style) -> str:
    shown = {
        "no turn": "false",
        "the last message": "loop.last",
        "turns after the last question": "loop.index0 > ns.asked",
        "all turns": "true",
    }[style.shown_in]
    split = """\
    {%- if m.role == 'assistant' and not thought and '</think>' in content %}
        {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}"""
    return f"""\
{{%- set ns = namespace(asked=-1, system='') %}}
{{%- for m in messages %}}
    {{%- if m.role == 'user' %}}{{%- set ns.asked = loop.index0 %}}{{%- endif %}}
    {{%- if m.role == 'system' %}}{{%- set ns.system = m.content %}}{{%- endif %}}
{{%- endfor %}}
{{%- for m in messages %}}
    {{%- set content = m.content or '' %}}
    {"{%- set content = content | trim %}" if style.trims else ""}
    {{%- set thought = m.reasoning_content or '' %}}
    {split if style.splits else ""}
    {"{%- if m.role == 'system' %}{%- continue %}{%- endif %}" if style.moves_system else ""}
    {{{{- '<|im_start|>' + m.role + '\\n' }}}}
    {"{%- if loop.index0 == ns.asked %}{{- ns.system }}{%- endif %}" if style.moves_system else ""}
    {{%- if m.role == 'assistant' and {shown} and (thought or {str(style.shows_empty).lower()}) %}}
        {{{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}}}
    {{%- endif %}}
    {{{{- content }}}}
    {{%- for call in m.tool_calls or [] %}}
        {{{{- '<tool_call>' + call.function.name + (call.function.arguments | tojson) + '</tool_call>' }}}}
    {{%- endfor %}}
    {{%- set is_end = m.role == 'assistant' and loop.last and not add_generation_prompt %}}
    {{{{- '<|stop|>' if {str(style.last_differs).lower()} and is_end else '<|im_end|>' }}}}
    {{{{- '\\n' }}}}
{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- {HEAD + PREFIXES[style.asks_with]!r} }}}}
{{%- elif {str(style.ends_all).lower()} %}}{{{{- eos_token }}}}{{%- endif %}}"""


def thought_and_content(style: Style, m: Message) -> tuple[str, str]:
    thought, content = m.get("reasoning_content") or "", m["content"] or ""
    content = content.strip() if style.trims else content
    if m["role"] == "assistant" and style.splits and not thought and "</think>" in content:
        thought = content.split("</think>")[0].split("<think>")[-1].strip("\n")
        content = content.split("</think>")[-1].lstrip("\n")
    return thought, content


def by_hand(style: Style, messages: list[Message], *, learn_thoughts: bool = True) -> list[Piece]:
    asked = max((k for k, m in enumerate(messages) if m["role"] == "user"), default=-1)
    system = "".join(m["content"] for m in messages if m["role"] == "system")
    prefix = PREFIXES[style.asks_with]
    pieces: list[Piece] = []
    for k, m in enumerate(messages):
        if m["role"] == "system" and style.moves_system:
            continue
        is_last = k == len(messages) - 1
        is_shown = {
            "no turn": False,
            "the last message": is_last,
            "turns after the last question": k > asked,
            "all turns": True,
        }[style.shown_in] and m["role"] == "assistant"
        thought, content = thought_and_content(style, m)
        turn = []
        if is_shown and (thought or style.shows_empty):
            turn += [Piece("<think>\n"), Piece(thought, False), Piece("\n</think>\n\n")]
        turn += [Piece(content, False)]
        for call in m.get("tool_calls") or []:
            function = call["function"]
            turn += [Piece("<tool_call>"), Piece(function["name"], False)]
            turn += [Piece('{"of": "'), Piece(function["arguments"]["of"], False), Piece('"}</tool_call>')]
        is_end = style.last_differs and is_last and m["role"] == "assistant"
        turn += [Piece("<|stop|>" if is_end else "<|im_end|>")]
        end = Piece("\n")
        pieces += [Piece(f"<|im_start|>{m['role']}\n")]
        if k == asked and style.moves_system:
            pieces += [Piece(system, False)]
        if m["role"] != "assistant" or m.get("weight") == 0:
            pieces += [*turn, end]
            continue
        text = "".join(piece.text for piece in turn)
        asks_empty = style.asks_with == "an empty thought"
        if text.startswith(prefix):
            given = len(prefix)
        else:  # only where an empty thought would be shown does the turn begin as the request does
            given = len("<think>\n") if asks_empty and is_shown and style.shows_empty else 0
        for number, piece in enumerate(turn):
            cut, given = min(given, len(piece.text)), max(0, given - len(piece.text))
            is_thought = number == 1 and len(turn) > 3 and turn[0].text == "<think>\n"
            is_learned = learn_thoughts or not is_thought
            pieces += [piece._replace(text=piece.text[:cut])]
            pieces += [piece._replace(text=piece.text[cut:], is_learned=is_learned)]
        last_is_all = is_last and style.ends_all
        pieces += [end._replace(is_learned=last_is_all)]
    if style.ends_all:
        is_learned = messages[-1]["role"] == "assistant" and messages[-1].get("weight") != 0
        pieces += [Piece("</s>", True, is_learned)]
    return pieces


@cache
def encoder(style: Style, learn: Any = "assistant", learn_thoughts: bool = True) -> ChatEncoder:
    template = ChatTemplate("the template", {"default": source(style)}, TOKENS, NOW)
    return ChatEncoder(tokenizer(), template, learn, learn_thoughts=learn_thoughts)


def encode(made: ChatEncoder, messages: list[Message], **more: Any) -> tuple[list[int], list[int]] | None:
    found = made.encode_batch([parse_conversation({"messages": messages, **more}, "a.jsonl:1")])[0]
    return None if found is None else (found[0].tolist(), found[1].tolist())


WORDS = ["a", "b", "Yes", "é", "\n", " ", "assistant\n", "user\n", "{", "<|im_end|>", "<|im_start|>assistant\n"]
PLAIN = st.lists(st.sampled_from(WORDS), min_size=1, max_size=3).map("".join).map(str.strip).filter(bool)
NASTY = st.lists(
    st.sampled_from([*WORDS, "<think>", "</think>", "<think>\n", "\n</think>\n\n", "\n\n", HEAD + "<think>\n"]),
    max_size=4,
).map("".join)


CALL = {"type": "function", "function": {"name": "add", "arguments": {"of": "x"}}}
CALLING: Message = {"role": "assistant", "content": "a", "tool_calls": [CALL]}


@st.composite
def conversations(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> list[Message]:
    """Also with texts that are the same in several messages, and with none."""
    some = st.one_of(st.just("Same"), texts)
    messages: list[Message] = [{"role": "system", "content": draw(some)}] if draw(st.booleans()) else []
    for role in draw(st.lists(st.sampled_from(["user", "assistant", "tool"]), min_size=1, max_size=6)):
        message: Message = {"role": role, "content": draw(some)}
        if role == "assistant":
            if draw(st.booleans()):
                message["reasoning_content"] = draw(some)
            if draw(st.integers(0, 3)) == 0:
                call = {
                    "name": draw(st.sampled_from(["add", "Same"])),
                    "arguments": {"of": draw(st.sampled_from(["x", ""]))},
                }
                message["tool_calls"] = [{"type": "function", "function": call}]
                message["content"] = draw(st.sampled_from([message["content"], "", None]))
            elif draw(st.integers(0, 3)) == 0:
                message["content"] = ""
            if draw(st.integers(0, 4)) == 0:
                message["weight"] = 0
        messages.append(message)
    return messages


def is_empty_turn(style: Style, m: Message) -> bool:
    """A turn of thoughts alone is refused where they are not shown: see test_chat_unseen."""
    return m["role"] == "assistant" and not (m["content"] or "").strip() and not m.get("tool_calls")


@settings(max_examples=examples(35))
@given(style=STYLES, messages=conversations(PLAIN))
@example(
    Style("a thought", "turns after the last question", shows_empty=False),
    [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "reasoning_content": "c"},
        {"role": "tool", "content": "d"},
        {"role": "assistant", "content": "e"},
        {"role": "tool", "content": "f"},
        {"role": "assistant", "content": "g"},
    ],
)
def test_masks_are_those_of_the_structure(style: Style, messages: list[Message]) -> None:
    assume(any(m["role"] == "assistant" for m in messages))
    assume(not any(is_empty_turn(style, m) and m.get("reasoning_content") for m in messages))
    ids, mask = oracle(by_hand(style, messages))
    assert encode(encoder(style), messages) == ((ids, mask) if any(mask) else None)


@settings(max_examples=examples(35))
@given(style=STYLES, messages=conversations(NASTY))
def test_masks_are_right_or_refused_whatever_messages_hold(style: Style, messages: list[Message]) -> None:
    """Texts with tags of thoughts and with what asks to speak, alone and at their ends."""
    ids, mask = oracle(by_hand(style, messages))
    with suppress(CorpusFormatError):
        assert encode(encoder(style), messages) == ((ids, mask) if any(mask) else None)


@settings(max_examples=examples(20))
@given(style=STYLES, messages=conversations(PLAIN))
@example(Style("nothing", "no turn", last_differs=True), [CALLING, CALLING, CALLING])
def test_thoughts_are_left_out_and_nothing_else(style: Style, messages: list[Message]) -> None:
    assume(not any(is_empty_turn(style, m) and m.get("reasoning_content") for m in messages))
    ids, mask = oracle(by_hand(style, messages, learn_thoughts=False))
    assert encode(encoder(style, learn_thoughts=False), messages) == ((ids, mask) if any(mask) else None)


def test_the_grid_is_not_all_refused() -> None:
    """Thoughts in content, for every style that splits them off: the same as thoughts in a field of their own."""
    for asks_with in PREFIXES:
        for shown_in in ("no turn", "the last message", "turns after the last question", "all turns"):
            for shows_empty in (False, True):
                style = Style(asks_with, shown_in, shows_empty, splits=True)  # type: ignore[arg-type]
                turns = [("q", "t", "a"), ("q", "u", "b")]
                apart: list[Message] = []
                together: list[Message] = []
                for question, thought, answer in turns:
                    asked = {"role": "user", "content": question}
                    apart += [asked, {"role": "assistant", "content": answer, "reasoning_content": thought}]
                    content = f"<think>\n{thought}\n</think>\n\n{answer}"
                    together += [asked, {"role": "assistant", "content": content}]
                for learn_thoughts in (True, False):
                    made = encoder(style, learn_thoughts=learn_thoughts)
                    expected = oracle(by_hand(style, apart, learn_thoughts=learn_thoughts))
                    assert encode(made, apart) == encode(made, together) == expected


CHANNELS = """\
{%- set call = namespace(name=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set rest = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | list %}
        {%- set answers = rest | rejectattr('tool_calls', 'defined') | list %}
        {%- set is_end = loop.last and not add_generation_prompt %}
        {%- if m.thinking and (is_end or (m.tool_calls and not answers)) %}
            {{- '<|start|>assistant<s>analysis</s>' + m.thinking + '<|im_end|>' }}
        {%- endif %}
        {%- if m.tool_calls %}
            {%- set call.name = m.tool_calls[0].function.name %}
            {{- '<|start|>assistant to=' + call.name + '<s>commentary</s>' }}
            {{- m.tool_calls[0].function.arguments | tojson + '[INST]' }}
        {%- else %}
            {{- '<|start|>assistant<s>final</s>' + m.content + ('<|stop|>' if is_end else '<|im_end|>') }}
        {%- endif %}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>' + call.name + ' to=assistant<s>commentary</s>' + m.content | tojson + '<|im_end|>' }}
    {%- else %}
        {{- '<|start|>' + m.role + '</s>' + m.content + '<|im_end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{%- endif %}"""
"""As gpt-oss's: a thought is a message before the answer, kept before a call until there is an answer; names of calls
come again in what tools say; the last answer alone ends with its own marker."""

END_OF_ALL = """\
{%- for m in messages %}{{- '<|start|>' + m.role + '[INST]' + m.content + '<|stop|>\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant[INST]' }}{%- else %}{{- eos_token }}{%- endif %}"""
"""As Phi 3's and Phi 4 mini's."""

ASK: Message = {"role": "user", "content": "a"}
CALLS: Message = {"role": "assistant", "content": "", "thinking": "why", "tool_calls": [CALL]}
TOOL: Message = {"role": "tool", "content": "x"}
SAY: Message = {"role": "assistant", "content": "b", "thinking": "so"}
CALLED = ' to=add<s>commentary</s>{"of": "x"}[INST]'


def pieces_learned(made: ChatEncoder, messages: list[Message]) -> list[str]:
    """Learned text, turn by turn and cut where something is not learned."""
    found = encode(made, messages)
    assert found is not None
    runs: list[list[int]] = [[]] if found[1][0] else []
    for k, (token, is_learned) in enumerate(zip(*found, strict=True)):
        if is_learned and k and not found[1][k - 1]:
            runs.append([])
        if is_learned:
            runs[-1].append(token)
    return [tokenizer().decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize(
    ("messages", "learned"),
    [
        ([ASK, SAY], ["<s>analysis</s>so<|im_end|><|start|>assistant<s>final</s>b<|stop|>"]),
        (
            [ASK, SAY, ASK, SAY],
            ["<s>final</s>b<|im_end|>", "<s>analysis</s>so<|im_end|><|start|>assistant<s>final</s>b<|stop|>"],
        ),
        ([ASK, CALLS], [f"<s>analysis</s>why<|im_end|><|start|>assistant{CALLED}"]),
        (
            [ASK, CALLS, TOOL, CALLS],
            [f"<s>analysis</s>why<|im_end|><|start|>assistant{CALLED}"] * 2,
        ),
        ([ASK, CALLS, TOOL, SAY | {"thinking": None}, ASK], [CALLED, "<s>final</s>b<|im_end|>"]),
        ([SAY, ASK, SAY | {"weight": 0}], ["<s>final</s>b<|im_end|>"]),
    ],
)
def test_channels_are_learned_as_they_are_shown(messages: list[Message], learned: list[str]) -> None:
    made = ChatEncoder(tokenizer(), ChatTemplate("t", {"default": CHANNELS}, TOKENS, NOW))
    assert pieces_learned(made, messages) == learned


def test_the_end_of_all_is_no_end_of_a_turn() -> None:
    made = ChatEncoder(tokenizer(), ChatTemplate("t", {"default": END_OF_ALL}, TOKENS, NOW))
    assert pieces_learned(made, [ASK, SAY, ASK, SAY]) == ["b<|stop|>", "b<|stop|>\n</s>"]
    assert pieces_learned(made, [ASK, SAY, ASK]) == ["b<|stop|>"]


@pytest.mark.parametrize("learn", ["assistant", "last", "all"])
def test_only_the_thought_is_left_out(learn: str) -> None:
    style = Style("nothing", "all turns")
    thinking = {"role": "assistant", "content": "b", "reasoning": "so"}  # a name that few templates read
    learned = pieces_learned(encoder(style, learn, False), [ASK, thinking])
    before = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n" if learn == "all" else ""
    after = "\n" if learn == "all" else ""
    assert learned == [before + "<think>\n", "\n</think>\n\nb<|im_end|>" + after]


@pytest.mark.parametrize(
    ("shown", "message", "match"),
    [
        (
            "{{ m.content | upper if loop.last else m.content[::-1] }}",
            "say",
            "message 1 .* message 0",
        ),
        ("{{ m.content }}{{ messages[0].content if m.role == 'assistant' }}|", "say", "message 1 .* message 0"),
    ],
)
def test_a_message_that_is_not_found_or_is_within_a_turn_is_refused(shown: str, message: str, match: str) -> None:
    source = "{% for m in messages %}" + shown + "{% endfor %}{{ '|' if add_generation_prompt }}"
    made = ChatEncoder(tokenizer(), ChatTemplate("t", {"default": source}, TOKENS, NOW))
    with pytest.raises(CorpusFormatError, match=rf"a\.jsonl:1: .*{match}"):
        encode(made, [{"role": "user", "content": "hello"}, {"role": "assistant", "content": message}])


def test_thoughts_that_are_not_found_cannot_be_left_out() -> None:
    turn = "{% generation %}{{ m.content + (m.reasoning_content or '') | SHOWN | string }}{% endgeneration %}"
    source = "{% for m in messages %}|" + turn + "{% endfor %}"
    messages = [{"role": "assistant", "content": "b.", "reasoning_content": "so"}]

    def made(shown: str) -> ChatEncoder:
        template = ChatTemplate("t", {"default": source.replace("SHOWN", shown)}, TOKENS, NOW)
        return ChatEncoder(tokenizer(), template, learn_thoughts=False)

    assert pieces_learned(made("replace('o', '0')"), messages) == ["b."]
    with pytest.raises(CorpusFormatError, match=r"message 0 .*reasoning"):
        encode(made("length"), messages)


MOVES_TOOLS = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {{- ('[TOOLS]' if loop.last else '') + '[INST]' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[CALL]' }}{% for c in m.tool_calls %}{{ c.function.name + (c.function.arguments | tojson) }}{% endfor %}
        {{- '</s>' }}
    {%- elif m.role == 'assistant' %}{{- ' ' + m.content + '</s>' }}
    {%- else %}{{- '[RESULT]' + m.content + '[/RESULT]' }}
    {%- endif %}
{%- endfor %}"""


@settings(max_examples=examples(20))
@given(
    st.lists(st.tuples(PLAIN, st.lists(st.tuples(st.sampled_from(["f", "a"]), PLAIN), max_size=3), PLAIN), min_size=1)
)
def test_calls_after_no_request_begin_where_what_is_before_ends(rounds: list[Any]) -> None:
    """As some of Mistral's: nothing asks to speak, and what is shown before a last question moves with it."""
    messages: list[Message] = []
    pieces = [Piece("<s>")]
    for question, calls, answer in rounds:
        messages.append({"role": "user", "content": question})
        pieces += [Piece("[INST]"), Piece(question, False), Piece("[/INST]")]
        for name, result in calls:
            call = {"type": "function", "function": {"name": name, "arguments": {"of": "x"}}}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "content": result},
            ]
            spoken = [
                Piece("[CALL]", True, True),
                Piece(f'{name}{{"of": "x"}}', False, True),
                Piece("</s>", True, True),
            ]
            pieces += [*spoken, Piece("[RESULT]"), Piece(result, False), Piece("[/RESULT]")]
        messages.append({"role": "assistant", "content": answer})
        pieces += [Piece(" "), Piece(answer, False, True), Piece("</s>", True, True)]
    template = ChatTemplate("the template", {"default": MOVES_TOOLS}, TOKENS, NOW)
    ids, mask = oracle(pieces)
    assert encode(ChatEncoder(tokenizer(), template), messages) == (ids, mask)
