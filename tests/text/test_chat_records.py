"""Records of chat data: the forms they come in, and what is said of those in none."""

import re
from typing import Any

import pytest
from chat_cases import samples

from dali_pipes.errors import CorpusFormatError
from dali_pipes.text.conversation import parse_conversation

USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


def parsed(*messages: Any) -> list[dict[str, Any]]:
    return list(parse_conversation({"messages": list(messages)}, "a.jsonl:1").messages)


def test_the_forms_of_the_samples_say_the_same() -> None:
    kinds = (samples()[kind] for kind in ("messages", "sharegpt", "prompt_completion"))
    for messages, sharegpt, pair in zip(*kinds, strict=True):
        conversation = parse_conversation(messages, "x")
        assert conversation == parse_conversation(sharegpt, "x")
        assert conversation.messages == tuple(messages["messages"])
        texts = parse_conversation(pair, "x").texts
        assert texts == tuple(m["content"] for m in messages["messages"] if m["role"] != "system")[:2]


def test_records_with_several_forms_are_read_as_messages() -> None:
    record = {"prompt": "a", "prompt_id": "1", "conversations": None, "messages": [USER, ASSISTANT]}
    assert parse_conversation(record, "x").messages == (USER, ASSISTANT)
    assert parse_conversation({"conversations": [USER], "messages": None}, "x").messages == (USER,)


def test_lists_as_prompt_and_completion() -> None:
    found = parse_conversation({"prompt": [USER, ASSISTANT], "completion": [ASSISTANT]}, "x")
    assert found.messages == (USER, ASSISTANT, ASSISTANT)
    assert (found.num_prompt, found.texts) == (2, None)


def test_names_of_speakers() -> None:
    turns = [{"from": name, "value": "a"} for name in ("system", "human", "gpt", "observation", "function_call")]
    found = parse_conversation({"conversations": turns}, "x").messages
    assert [message["role"] for message in found] == ["system", "user", "assistant", "tool", "assistant"]


def test_a_system_text_beside_the_turns_of_sharegpt_comes_first() -> None:
    record = {"system": "Be kind.", "conversations": [{"from": "human", "value": "a"}]}
    found = parse_conversation(record, "x")
    assert found.messages == ({"role": "system", "content": "Be kind."}, USER)
    assert found.weights == (True, True)


def test_parts_of_text_are_joined_and_null_keys_are_gone() -> None:
    parts = [{"type": "text", "text": "a", "image": None}, {"type": "text", "text": " b"}]
    assert parsed({"role": "user", "content": parts, "tool_calls": None, "name": "n", "weight": 1}) == [
        {"role": "user", "content": "a b", "name": "n"}
    ]
    assert parsed({"role": "user", "content": []}) == [{"role": "user", "content": ""}]


def test_tools_are_a_list_or_its_json() -> None:
    for tools in ([{"name": "add"}], '[{"name": "add"}]'):
        assert parse_conversation({"messages": [], "tools": tools}, "x").variables == {"tools": [{"name": "add"}]}
    nothing: Any
    for nothing in (None, "", "[]", []):
        assert parse_conversation({"messages": [], "tools": nothing}, "x").variables == {}


CALL = {"function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize("more", [{"tool_calls": [CALL]}, {"reasoning_content": "why"}])
def test_content_may_be_null_beside_what_replaces_it(more: dict[str, Any]) -> None:
    assert parsed({"role": "assistant", "content": None, **more}) == [{"role": "assistant", "content": None, **more}]
    assert parsed({"role": "assistant", **more}) == [{"role": "assistant", "content": None, **more}]


IMAGE = {"type": "image_url", "image_url": {"url": "x.png"}}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], "found [1] (list) where a JSON object"),
        ({}, "among the keys none"),
        ({"text": "a", "n": 1}, "among the keys text (str), n (int). Expected 'messages'"),
        ({"prompt": "a"}, "among the keys prompt (str)"),
        ({"prompt": "a", "completion": None}, "completion (NoneType)"),
        ({"prompt": "a", "completion": [ASSISTANT]}, "prompt (str), completion (list)"),
        ({"messages": "hi"}, "'messages' is 'hi' (str); expected a list"),
        ({"messages": [USER, "b"]}, "messages[1]: found 'b' (str); expected an object with role and content"),
        ({"messages": [{"text": "a"}]}, "messages[0]: the keys are text; expected 'role' with one of system,"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "'role' is 'narrator' (str); expected 'role' with one"),
        ({"messages": [{"role": "im_end|>", "content": "a"}]}, "'role' is 'im_end|>'"),
        ({"conversations": [{"from": 1, "value": "a"}]}, "conversations[0]: 'from' is 1 (int)"),
        ({"conversations": [{"from": "gpt", "content": "a"}]}, "conversations[0]: no 'value' (keys: from, content)"),
        ({"messages": [{"role": "user", "content": None}]}, "no 'content' (keys: role, content); only a message with"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "no 'content'"),
        ({"messages": [{"role": "user", "content": 3}]}, "'content' is 3 (int); expected text"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "content[0]: found a part of type 'image_url' (str)"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "content[0]: found 'a' (str); only text"),
        ({"messages": [USER | {"weight": 0.5}]}, "messages[0]: 'weight' is 0.5 (float); expected 0"),
        ({"messages": [USER | {"train": "no"}]}, "messages[0]: 'train' is 'no' (str)"),
        ({"messages": [USER], "tools": "{"}, "'tools' is a text that is not JSON"),
        ({"messages": [USER], "tools": {"a": 1}}, "'tools' is {'a': 1} (dict); expected a list"),
    ],
)
def test_what_is_no_conversation_is_refused_by_place(record: Any, message: str) -> None:
    with pytest.raises(CorpusFormatError, match=rf"^data/a\.jsonl:7.*{re.escape(message)}"):
        parse_conversation(record, "data/a.jsonl:7")
