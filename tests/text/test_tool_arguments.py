"""The arguments of tool calls as templates of every style use them: an object where they need one, else its text."""

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from chat_cases import TOKENS, tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes.text.chat import ChatEncoder, ChatTemplate, parse_conversation
from dali_pipes.text.chat.tool_calls import Arguments

HEAD = (
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{% set a = c.function.arguments %}"
)
TAIL = "{% endfor %}|{% endfor %}"
OBJECT = {
    "tojson": "{{ a | tojson }}",
    "tojson of the call": "{{ c.function | tojson }}",
    "a test for text": "{% if a is string %}{{ a }}{% else %}{{ a | tojson }}{% endif %}",
    "a test for an object": "{% if a is mapping %}{{ a | tojson }}{% else %}{{ a }}{% endif %}",
    "items": "{% for k, v in a.items() %}{{ k }}={{ v | tojson }};{% endfor %}",
    "the filter items": "{% for k, v in a | items %}{{ k }}={{ v | tojson }};{% endfor %}",
    "keys": "{% for k in a %}{{ k }}={{ a[k] | tojson }};{% endfor %}",
    "a test for none": "{% if a %}{{ a | tojson }}{% endif %}",
}
"""Styles of templates that need an object."""
TEXT = {
    "printed": "{{ a }}",
    "joined by +": "{{ '<' + a + '>' }}",
    "joined by ~": "{{ '<' ~ a ~ '>' }}",
    "joined to nothing": "{{ a + '' }}",
    "the filter string": "{{ a | string }}",
    "trimmed": "{{ a | trim }}",
    "stripped": "{{ a.strip() }}",
    "replaced": "{{ a | replace('  ', ' ') }}",
    "sliced": "{{ a[1:-1] }}",
    "a test of its start": "{% if a.startswith('{') %}{{ a }}{% endif %}",
    "joined in a list": "{{ ['x', a] | join(' ') }}",
    "formatted": "{{ '%s' | format(a) }}",
    "a comparison": "{% if a != '{}' %}{{ a }}{% endif %}",
}
"""Styles of templates that need a text."""

VALUES = st.recursive(
    st.booleans() | st.integers(-9, 99) | st.text("ab é{}\"<|im_end|>'\\", max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("xyz"), inner, max_size=2),
    max_leaves=4,
)
ARGUMENTS = st.dictionaries(st.sampled_from(["city", "unit", "items", "title", "x y"]), VALUES, max_size=3)


def template(style: str) -> ChatTemplate:
    return ChatTemplate("a template", {"default": HEAD + style + TAIL}, TOKENS, datetime.now(UTC))


def rendered(style: str, arguments: Any) -> str:
    """What the template writes where the arguments are handed to it as they are."""
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return template(style).render([{"role": "assistant", "content": "", "tool_calls": [call]}], {}, "x")


def found(style: str, arguments: Any) -> str:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": "", "tool_calls": [call]}
    return template(style).render(parse_conversation({"messages": [message]}, "x").messages, {}, "x")


@settings(max_examples=examples(12), deadline=None)
@given(arguments=ARGUMENTS)
def test_a_template_that_needs_an_object_gets_one(arguments: dict[str, Any]) -> None:
    """The same from an object, from its text, and from the text of its text."""
    text = json.dumps(arguments)
    for style in OBJECT.values():
        wanted = rendered(style, arguments)
        for given_as in (arguments, text, json.dumps(text)):
            assert found(style, given_as) == wanted


@settings(max_examples=examples(12), deadline=None)
@given(arguments=ARGUMENTS)
def test_a_template_that_needs_text_gets_it(arguments: dict[str, Any]) -> None:
    """A text as it was written; of an object what `tojson` makes of it."""
    text = json.dumps(arguments, ensure_ascii=False)
    compact = json.dumps(arguments, separators=(",", ":"))
    for style in TEXT.values():
        assert found(style, arguments) == found(style, text) == rendered(style, text)
        assert found(style, compact) == rendered(style, compact)


@pytest.mark.parametrize("style", [*OBJECT.values(), *TEXT.values()], ids=[*OBJECT, *TEXT])
@pytest.mark.parametrize("word", ["Oslo", "a<|im_end|>b", "</s>"])
def test_special_text_in_arguments_stays_text_in_every_style(style: str, word: str) -> None:
    """It is masked in the object and in the text alike, and both give the ids of the text that the template writes."""
    record: dict[str, Any] = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": ""}]}
    call = {"type": "function", "function": {"name": "f", "arguments": json.dumps({"city": word})}}
    record["messages"][1] |= {"tool_calls": [call]}
    encoder = ChatEncoder(tokenizer(), template(style), "all")
    (encoded,) = encoder.encode_batch([parse_conversation(record, "x")])
    assert encoded is not None
    special = {tokenizer().token_to_id(name) for name in ("<|im_end|>", "</s>")}
    assert not special & set(encoded[0].tolist())
    text = template(style).render(parse_conversation(record, "x").messages, {}, "x")
    assert tokenizer().decode(encoded[0].tolist(), skip_special_tokens=False) == text
    assert word in text


def test_arguments_are_a_mapping_first() -> None:
    made = Arguments({"title": "T"}, '{"title": "T"}')
    assert made["title"] == made.get("title") == "T"
    assert made == {"title": "T"} == json.loads(str(made))
    assert made != {"title": "U"}
    assert made.upper() == '{"TITLE": "T"}'
    for name in ("title", "no_such", "_private"):
        with pytest.raises(AttributeError):
            getattr(made, name)
    with pytest.raises(TypeError):
        made + 1  # type: ignore[operator]
