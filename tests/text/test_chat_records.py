"""Records of chat data: the forms they come in, and what is said of those in none."""

import json
import re
from typing import Any

import pytest
from chat_cases import samples

from dali_pipes.errors import CorpusFormatError
from dali_pipes.text.chat.conversation import parse_conversation
from dali_pipes.text.chat.tool_calls import Arguments

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


SYSTEM = {"role": "system", "content": "Be kind."}
FORMS: dict[str, dict[str, Any]] = {
    "messages": {"messages": [USER, ASSISTANT]},
    "sharegpt": {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]},
    "texts": {"prompt": "a", "completion": "b"},
    "lists": {"prompt": [USER], "completion": [ASSISTANT]},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("beside", [{"system": "Be kind."}, {"system_prompt": "Be kind."}])
def test_a_system_text_beside_the_turns_of_any_form_comes_first(form: str, beside: dict[str, str]) -> None:
    found = parse_conversation(FORMS[form] | beside, "x")
    assert found.messages == (SYSTEM, USER, ASSISTANT)
    assert found.weights == (True, True, True)
    assert found.num_prompt == (2 if form in ("texts", "lists") else 0)
    assert (found.texts, found.unused) == (None, ())
    assert parse_conversation(FORMS[form] | {"system": None, "system_prompt": " "}, "x").unused == ()


def test_the_same_system_text_twice_is_one_turn_and_two_texts_are_refused() -> None:
    both = {"system": "Be kind.", "system_prompt": "Be kind."}
    assert parse_conversation({"messages": [USER], **both}, "x").messages == (SYSTEM, USER)
    assert parse_conversation({"messages": [SYSTEM, USER], **both}, "x").messages == (SYSTEM, USER)
    parts = [{"type": "text", "text": "Be "}, {"type": "text", "text": "kind."}]
    assert parse_conversation({"messages": [USER], "system": parts}, "x").messages == (SYSTEM, USER)
    with pytest.raises(CorpusFormatError, match="x: 'system' and 'system_prompt'"):
        parse_conversation({"messages": [USER], **both, "system": "Be rude."}, "x")
    with pytest.raises(CorpusFormatError, match=r"x: 'system' is 'Be rude\.', .*message 0"):
        parse_conversation({"messages": [SYSTEM, USER], "system": "Be rude."}, "x")


@pytest.mark.parametrize("key", ["weight", "train", "loss", "loss_mask", "loss_weight", "loss_scale", "masked"])
@pytest.mark.parametrize("form", ["messages", "sharegpt", "lists"])
def test_flags_say_what_is_learned_and_are_not_handed_to_the_template(form: str, key: str) -> None:
    """The same in all forms and on all turns; null is no flag."""
    for value in (0, 1, False, True, 0.0, 1.0, None):
        record = {name: [turn | {key: value} for turn in turns] for name, turns in FORMS[form].items()}
        found = parse_conversation(record, "x")
        is_learned = value is None or bool(value) != (key == "masked")
        assert found.messages == (USER, ASSISTANT)
        assert found.weights == (is_learned, is_learned)
        asked = {name for _, name in found.unused}
        assert asked == ({key} if is_learned and value is not None else set()), "of the user's turn"
    bad: Any
    for bad in (2, 0.5, -1, "1", [0, 1], {}):
        record = {name: [turn | {key: bad} for turn in turns] for name, turns in FORMS[form].items()}
        with pytest.raises(CorpusFormatError, match=rf"\[0\]: '{key}' is .*; expected"):
            parse_conversation(record, "x")


@pytest.mark.parametrize(
    ("flags", "is_learned"),
    [
        ({"weight": 1, "masked": False, "loss": True}, True),
        ({"weight": 0, "masked": True, "train": False}, False),
        ({"weight": 1, "masked": True}, None),
        ({"weight": 1, "train": False}, None),
        ({"loss_mask": 0, "loss_scale": 1.0, "masked": None}, None),
    ],
)
def test_flags_that_contradict_each_other_are_refused(flags: dict[str, Any], is_learned: bool | None) -> None:
    record = {"messages": [USER, ASSISTANT | flags]}
    if is_learned is not None:
        assert parse_conversation(record, "x").weights == (True, is_learned)
        return
    with pytest.raises(CorpusFormatError, match=r"messages\[1\]: '\w+' is .* and '\w+' is "):
        parse_conversation(record, "x")


def test_parts_of_text_are_joined_and_null_keys_are_gone() -> None:
    parts = [{"type": "text", "text": "a", "image": None}, {"type": "text", "text": " b"}]
    assert parsed({"role": "user", "content": parts, "tool_calls": None, "name": "n", "weight": 1}) == [
        {"role": "user", "content": "a b", "name": "n"}
    ]
    assert parsed({"role": "user", "content": []}) == [{"role": "user", "content": ""}]


FUNCTION: dict[str, Any] = {"name": "add", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": FUNCTION}
SEARCH = {"type": "web_search"}


@pytest.mark.parametrize("key", ["tools", "functions", "tool_defs"])
def test_tools_reach_the_template_as_objects_from_whatever_they_are(key: str) -> None:
    """Bare functions are put into objects; what is one already, or is no function, stays as it is."""
    for tool in (FUNCTION, TOOL, {"type": "function", **FUNCTION}):
        for tools in ([tool, SEARCH], json.dumps([tool, SEARCH]), [json.dumps(tool), json.dumps(SEARCH)]):
            found = parse_conversation({"messages": [], key: tools}, "x")
            assert (found.variables, found.unused) == ({"tools": [TOOL, SEARCH]}, ())
    nothing: Any
    for nothing in (None, "", " ", "[]", [], "null", [""], {}):
        assert parse_conversation({"messages": [], key: nothing}, "x").variables == {}


def test_tools_and_documents_that_are_given_twice() -> None:
    record = {"messages": [], "tools": [TOOL], "functions": [FUNCTION], "chat_template_kwargs": {"tools": [TOOL]}}
    assert parse_conversation(record, "x").variables == {"tools": [TOOL]}
    with pytest.raises(CorpusFormatError, match="x: 'tools' and 'functions' "):
        parse_conversation(record | {"functions": [{"name": "sub"}]}, "x")
    with pytest.raises(CorpusFormatError, match="x: 'tools' and 'chat_template_kwargs' "):
        parse_conversation({"messages": [], "tools": [TOOL], "chat_template_kwargs": {"tools": [SEARCH]}}, "x")


def test_documents_reach_the_template() -> None:
    document = {"title": "T", "text": "a"}
    for given in ([document], json.dumps([document]), [json.dumps(document)]):
        assert parse_conversation({"messages": [], "documents": given}, "x").variables == {"documents": [document]}
    for bad in (["text"], [1], "text", 3, {"a": 1}):
        with pytest.raises(CorpusFormatError, match=r"^x: 'documents'"):
            parse_conversation({"messages": [], "documents": bad}, "x")
        found = parse_conversation({"messages": [], "documents": bad}, "x", {"messages"})
        assert (found.variables, found.unused) == ({}, (("records", "documents"),)), "nobody reads them"


def test_settings_of_a_record_for_the_template() -> None:
    settings: dict[str, Any] = {"enable_thinking": False, "xml_tools": ["a"]}
    given: Any
    for given in (settings, json.dumps(settings), settings | {"add_generation_prompt": False, "other": None}):
        assert parse_conversation({"messages": [], "chat_template_kwargs": given}, "x").variables == settings
    found = parse_conversation({"messages": [], "chat_template_kwargs": settings}, "x", {"xml_tools"})
    assert found.variables == {"xml_tools": ["a"]}
    assert found.unused == (("chat_template_kwargs", "enable_thinking"),)
    for bad, message in (
        ("{", "character 2"),
        ([1], r"\[1\] \(list\)"),
        ({"messages": []}, "messages"),
        ({"bos_token": "a", "add_generation_prompt": True}, "bos_token, add_generation_prompt"),
    ):
        with pytest.raises(CorpusFormatError, match=f"^x: 'chat_template_kwargs': .*{message}"):
            parse_conversation({"messages": [], "chat_template_kwargs": bad}, "x")


OSLO = {"city": "Oslo", "days": [1, None]}


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize("given", [OSLO, OSLO | {"unit": None}, json.dumps(OSLO), json.dumps(json.dumps(OSLO))])
def test_arguments_are_an_object_and_its_text(given: Any) -> None:
    of_calls: list[dict[str, Any]] = [
        {"tool_calls": [call(given)]},
        {"tool_calls": json.dumps([call(json.dumps(OSLO))])},
        {"tool_calls": [{"name": "f", "arguments": given}]},
        {"function_call": {"name": "f", "arguments": given}},
    ]
    for keys in of_calls:
        (message,) = parsed({"role": "assistant", "content": None, **keys})
        found = message.get("function_call") or message["tool_calls"][0].get("function", message["tool_calls"][0])
        arguments = found["arguments"]
        assert isinstance(arguments, Arguments)
        assert dict(arguments) == OSLO
        assert json.loads(str(arguments)) == OSLO


def test_no_arguments_are_an_empty_object() -> None:
    given: Any
    for given in ("", " ", "{}", "null", {}, [], '""'):
        (message,) = parsed({"role": "assistant", "content": None, "tool_calls": [call(given)]})
        arguments = message["tool_calls"][0]["function"]["arguments"]
        assert (arguments, str(arguments)) == ({}, "{}")


@pytest.mark.parametrize("nothing", ["", " ", "[]", "null", None, []])
def test_no_calls_as_a_text_are_no_calls(nothing: Any) -> None:
    assert not parsed(ASSISTANT | {"tool_calls": nothing})[0].get("tool_calls")
    with pytest.raises(CorpusFormatError, match="'content'"):
        parsed({"role": "assistant", "content": None, "tool_calls": nothing})


def test_text_of_arguments_is_as_it_was_written() -> None:
    text = '{"city":  "\\u00c5lesund"}'
    (message,) = parsed({"role": "assistant", "content": "", "tool_calls": [call(text)]})
    arguments = message["tool_calls"][0]["function"]["arguments"]
    assert (arguments["city"], str(arguments)) == ("Ålesund", text)


def test_nulls_in_arguments_and_tools_are_left_out_and_mentioned() -> None:
    messages = [{"role": "assistant", "content": "", "tool_calls": [call({"a": {"b": None, "c": 1}})]}]
    tool = TOOL | {"strict": None}
    found = parse_conversation({"messages": messages, "tools": [tool], "text": None}, "x")
    assert found.messages[0]["tool_calls"][0]["function"]["arguments"] == {"a": {"c": 1}}
    assert found.variables == {"tools": [TOOL]}
    assert [name for _, name in found.unused] == ["strict", "b"]


def test_fields_that_play_no_part_are_noted() -> None:
    record = {"messages": [USER, ASSISTANT], "chosen": "c", "rejected": [USER], "id": 7, "tags": [], "prompt": "a"}
    found = parse_conversation(record, "x")
    assert found.unused == (("records", "chosen"), ("records", "rejected")), "the prompt is in the messages"
    assert parse_conversation(record | {"prompt": "other"}, "x").unused[-1] == ("records", "prompt")
    assert parse_conversation(record | {"conversations": [USER]}, "x").unused[-1] == ("records", "conversations")


CALL = {"function": {"name": "f", "arguments": {}}}


@pytest.mark.parametrize("more", [{"tool_calls": [CALL]}, {"reasoning_content": "why"}])
def test_content_may_be_null_beside_what_replaces_it(more: dict[str, Any]) -> None:
    assert parsed({"role": "assistant", "content": None, **more}) == [{"role": "assistant", "content": None, **more}]
    assert parsed({"role": "assistant", **more}) == [{"role": "assistant", "content": None, **more}]


IMAGE = {"type": "image_url", "image_url": {"url": "x.png"}}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ([1], "[1] (list)"),
        ({}, "none"),
        ({"text": "a", "n": 1}, "text (str), n (int)"),
        ({"prompt": "a"}, "prompt (str)"),
        ({"prompt": "a", "completion": None}, "completion (NoneType)"),
        ({"prompt": "a", "completion": [ASSISTANT]}, "prompt (str), completion (list)"),
        ({"messages": "hi"}, "'messages' is 'hi'"),
        ({"messages": [USER, "b"]}, "messages[1]: found 'b'"),
        ({"messages": [{"text": "a"}]}, "messages[0]: the keys are text"),
        ({"messages": [{"role": "narrator", "content": "a"}]}, "'role' is 'narrator'"),
        ({"messages": [{"role": "im_end|>", "content": "a"}]}, "'role' is 'im_end|>'"),
        ({"conversations": [{"from": 1, "value": "a"}]}, "conversations[0]: 'from' is 1 (int)"),
        ({"conversations": [{"from": "gpt", "content": "a"}]}, "conversations[0]: 'value'"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0]: 'content'"),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": []}]}, "messages[0]: 'content'"),
        ({"messages": [{"role": "user", "content": 3}]}, "'content' is 3 (int)"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, "content[0]: found a part of type 'image_url'"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "content[0]: found 'a'"),
        ({"messages": [USER | {"weight": 0.5}]}, "messages[0]: 'weight' is 0.5 (float)"),
        ({"messages": [USER | {"train": "no"}]}, "messages[0]: 'train' is 'no'"),
        ({"messages": [USER], "images": ["x.png"]}, "'images' is ['x.png'] (list)"),
        ({"messages": [USER | {"audio": {"path": "x"}}]}, "messages[0]: 'audio' is {'path': 'x'} (dict)"),
        ({"messages": [USER], "system": 3}, "'system' is 3 (int)"),
        (
            {"messages": [ASSISTANT | {"tool_calls": [call("{}"), call("print(1)")]}]},
            "messages[0], tool_calls[1]: 'arguments': ",
        ),
        (
            {"messages": [ASSISTANT | {"tool_calls": [call([1])]}]},
            "messages[0], tool_calls[0]: 'arguments' is [1] (list)",
        ),
        (
            {"messages": [ASSISTANT | {"function_call": {"name": "f", "arguments": "7"}}]},
            "messages[0], function_call: 'arguments' is '7'",
        ),
        ({"messages": [USER], "tools": "{"}, "'tools': "),
        ({"messages": [USER], "tools": {"a": 1}}, "'tools': found {'a': 1} (dict)"),
    ],
)
def test_what_is_no_conversation_is_refused_by_place(record: Any, message: str) -> None:
    with pytest.raises(CorpusFormatError, match=rf"^data/a\.jsonl:7.*{re.escape(message)}"):
        parse_conversation(record, "data/a.jsonl:7")


@pytest.mark.parametrize("key", ["messages", "conversations"])
def test_turns_as_json_text_are_the_same_turns(key: str) -> None:
    """As columns of tables often are."""
    names = ("role", "content") if key == "messages" else ("from", "value")
    turns = [dict(zip(names, turn, strict=True)) for turn in (("user", "é"), ("assistant", '["a"]'))]
    turns[0]["weight"] = 0  # type: ignore[assignment]
    assert parse_conversation({key: json.dumps(turns)}, "a.csv:2") == parse_conversation({key: turns}, "a.csv:2")
    for value in ("", '{"role": "user"}', "[", "3"):
        with pytest.raises(CorpusFormatError, match=rf"a.csv:2: '{key}' is {re.escape(repr(value))}"):
            parse_conversation({key: value}, "a.csv:2")
