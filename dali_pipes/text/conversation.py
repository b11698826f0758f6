"""One record of chat or prompt/completion data, checked and brought into one form.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}         (ShareGPT)
    {"prompt": "Hi", "completion": "Hello"}                             or two lists of messages

A record with several of these is read as the first of them. What a message holds besides its role and content
(`name`, `tool_calls`, `reasoning_content`, ...) is handed to the chat template as it is, but for keys that are null:
tables have them in every row, templates ask whether a key is there.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from dali_pipes.errors import CorpusFormatError

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "function",
    "ipython": "ipython",
}
"""Names of the speakers as data sets write them, and as templates know them."""

CALLS = ("tool_calls", "function_call")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
MAY_REPLACE_CONTENT = (*CALLS, *THOUGHTS)
"""A message with one of these may have no content."""

Message = dict[str, Any]


@dataclass(frozen=True)
class Conversation:
    """where: file and line. texts: prompt and completion where they are strings; there are no messages then.
    messages: each with "role" and "content", a string or None. weights: whether a message may be learned.
    num_prompt: so many messages at the start are context, their assistant turns not learned.
    variables: what the chat template gets beside the messages, such as "tools"; names without a value are left out.
    """

    where: str
    messages: tuple[Message, ...] = ()
    weights: tuple[bool, ...] = ()
    num_prompt: int = 0
    variables: Mapping[str, Any] = field(default_factory=dict)
    texts: tuple[str, str] | None = None


def parse_conversation(record: Mapping[str, Any], where: str) -> Conversation:
    """Bring a record into one form. `where` is the file and line that errors name.

    A `weight` or `train` of 0 or false on a message means that it is not learned. Content as a list of parts
    {"type": "text", "text": ...} is joined. A conversation without messages is one: it has nothing to learn.

    Raises CorpusFormatError for a record in none of the forms, unknown roles, content that is not text.
    """
    if not isinstance(record, Mapping):
        raise CorpusFormatError(f"{where}: found {_shown(record)} where a JSON object with a conversation was expected")
    tools = _tools(record.get("tools"), where)
    variables = {"tools": tools} if tools else {}
    for key in ("messages", "conversations"):
        if record.get(key) is not None:
            messages, weights = _messages(record[key], where, key)
            system = record.get("system") if key == "conversations" else None
            if isinstance(system, str) and system and not any(m["role"] == "system" for m in messages):
                messages.insert(0, {"role": "system", "content": system})
                weights.insert(0, True)
            return Conversation(where, tuple(messages), tuple(weights), variables=variables)
    prompt, completion = record.get("prompt"), record.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        return Conversation(where, variables=variables, texts=(prompt, completion))
    if isinstance(prompt, list) and isinstance(completion, list):
        before, weights_before = _messages(prompt, where, "prompt")
        after, weights_after = _messages(completion, where, "completion")
        return Conversation(
            where, (*before, *after), (*weights_before, *weights_after), num_prompt=len(before), variables=variables
        )
    found = ", ".join(f"{key} ({type(value).__name__})" for key, value in record.items()) or "none"
    raise CorpusFormatError(
        f"{where}: no conversation among the keys {found}. Expected 'messages' (a list of objects with role and "
        "content), 'conversations' (a list of objects with from and value), or 'prompt' and 'completion' (two strings "
        "or two lists of messages)"
    )


def _messages(value: Any, where: str, key: str) -> tuple[list[Message], list[bool]]:
    if not isinstance(value, list):
        raise CorpusFormatError(f"{where}: '{key}' is {_shown(value)}; expected a list of messages")
    messages, weights = [], []
    for number, item in enumerate(value):
        message, weight = _message(item, f"{where}, {key}[{number}]")
        messages.append(message)
        weights.append(weight)
    return messages, weights


def _message(item: Any, where: str) -> tuple[Message, bool]:
    if not isinstance(item, Mapping):
        raise CorpusFormatError(f"{where}: found {_shown(item)}; expected an object with role and content")
    names = ("from", "value") if "from" in item and "role" not in item else ("role", "content")
    role = item.get(names[0])
    if not isinstance(role, str) or role not in ROLES:
        found = f"'{names[0]}' is {_shown(role)}" if names[0] in item else f"the keys are {', '.join(item) or 'none'}"
        raise CorpusFormatError(f"{where}: {found}; expected '{names[0]}' with one of {', '.join(ROLES)}")
    message: Message = {"role": ROLES[role], "content": None}
    rest = {key: value for key, value in item.items() if value is not None and key not in (*names, "weight", "train")}
    content = item.get(names[1])
    if isinstance(content, list):
        content = "".join(_part(part, f"{where}, {names[1]}[{number}]") for number, part in enumerate(content))
    if content is not None and not isinstance(content, str):
        raise CorpusFormatError(f"{where}: '{names[1]}' is {_shown(content)}; expected text or a list of text parts")
    if content is None and not any(rest.get(key) for key in MAY_REPLACE_CONTENT):
        raise CorpusFormatError(
            f"{where}: no '{names[1]}' (keys: {', '.join(item)}); only a message with one of "
            f"{', '.join(MAY_REPLACE_CONTENT)} may be without"
        )
    message["content"] = content
    return message | rest, _weight(item, "weight", where) and _weight(item, "train", where)


def _part(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = f"a part of type {_shown(part.get('type'))}" if isinstance(part, Mapping) else _shown(part)
    raise CorpusFormatError(
        f'{where}: found {kind}; only text can be tokenised: {{"type": "text", "text": ...}}. Remove the other parts '
        "or the conversation"
    )


def _weight(item: Mapping[str, Any], key: str, where: str) -> bool:
    weight = item.get(key)
    if weight is None:
        return True
    if not isinstance(weight, int | float) or weight not in (0, 1):
        raise CorpusFormatError(f"{where}: '{key}' is {_shown(weight)}; expected 0 (do not learn) or 1")
    return bool(weight)


def _tools(tools: Any, where: str) -> list[Any] | None:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except ValueError as error:
            raise CorpusFormatError(f"{where}: 'tools' is a text that is not JSON: {error}") from None
    if tools is not None and not isinstance(tools, list):
        raise CorpusFormatError(f"{where}: 'tools' is {_shown(tools)}; expected a list of tool descriptions")
    return tools or None


def _shown(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= 60 else text[:57] + '...'} ({type(value).__name__})"
