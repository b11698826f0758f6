"""One record of chat or prompt/completion data, checked and normalized.

    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}         (ShareGPT)
    {"prompt": "Hi", "completion": "Hello"}                             or two lists of messages

A record with several of these is read as the first of them. Any form may come with `system` or `system_prompt`, the
text of a system turn, and with `tools`, `functions` or `tool_defs`, `documents`, and `chat_template_kwargs`, for the
template. What a message contains besides its role and content (`name`, `tool_calls`, `reasoning_content`, ...) is
passed to the template, except for flags that decide what is learned. `messages` and `conversations` may be the JSON
text of a list.

Keys that are null are removed at any depth: a row of a table has the keys of all rows, and only without nulls do a
table and a file of JSON Lines mean the same. A null that matters is kept in arguments that are JSON text.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from dali_pipes.errors import CorpusFormatError
from dali_pipes.fields import (
    CHAT_FORMS,
    DOCUMENTS,
    LEARNED_FLAGS,
    MASKED_FLAG,
    MEDIA,
    SYSTEM_TEXTS,
    TEMPLATE_OWN,
    TEMPLATE_SETTINGS,
    TOOL_LISTS,
    holds_nothing,
    null_keys,
    unused,
    without_nulls,
)
from dali_pipes.text.chat.tool_calls import parsed_call, parsed_calls, parsed_tools
from dali_pipes.text.json_values import parse_if_text, parse_list, shown

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
"""Roles as data sets write them, and as templates know them."""

CALLS = ("tool_calls", "function_call")
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
MAY_REPLACE_CONTENT = (*CALLS, *THOUGHTS)
"""A message with one of these does not need content."""

NOT_ASSISTANT_TURNS = "turns that are not the assistant's"
"""Kind of unused fields: flags that ask to learn turns of others, which are learned only in "all"."""

Message = dict[str, Any]
Unused = tuple[tuple[str, str], ...]
"""Kinds and names of unused fields, for `UnusedFields`."""


@dataclass(frozen=True)
class Conversation:
    """where: file and line. texts: prompt and completion if they are strings; then `messages` is empty.
    messages: each with "role" and "content", a string or None. weights: whether a message may be learned.
    num_prompt: messages at the start that are context: their assistant turns are not learned.
    variables: further variables of the chat template, such as "tools", without empty ones.
    unused: fields of the record and flags of its messages that are not used.
    """

    where: str
    messages: tuple[Message, ...] = ()
    weights: tuple[bool, ...] = ()
    num_prompt: int = 0
    variables: Mapping[str, Any] = field(default_factory=dict)
    texts: tuple[str, str] | None = None
    unused: Unused = field(default=(), compare=False)

    def with_messages(self) -> "Conversation":
        """The same with its two texts, if it has them, as messages of the user and the assistant."""
        if self.texts is None:
            return self
        return replace(self, texts=None, messages=_as_messages(*self.texts), weights=(True, True), num_prompt=1)


def parse_conversation(
    record: Mapping[str, Any], where: str, template_variables: Collection[str] | None = None
) -> Conversation:
    """Normalize a record. `where` is the file and line that errors name.

    Flags decide whether a message is learned: it is not if one of `weight`, `train`, `loss`, `loss_mask`, `loss_weight`
    and `loss_scale` is 0 or false, or if `masked` is true. Content as a list of parts {"type": "text", "text": ...} is
    joined. A conversation without messages is valid, and there is nothing to learn in it.

    template_variables: those that the template reads; fields for others are not used. None: it may read all.

    Raises CorpusFormatError for a record in another form, unknown roles, content that is not text, images, audio and
    video, flags other than 0 and 1, and contradictory fields.
    """
    if not isinstance(record, Mapping):
        raise CorpusFormatError(f"{where}: found {shown(record)}; expected a JSON object with a conversation")
    _refuse_media(record, where)
    form = next((keys for keys in CHAT_FORMS if all(record.get(key) is not None for key in keys)), ())
    values = [record[key] for key in form]
    texts: tuple[str, str] | None = None
    if form == ("prompt", "completion") and all(isinstance(value, str) for value in values):
        texts = (values[0], values[1])
        values = [[message] for message in _as_messages(*texts)]
    if not form or (len(form) > 1 and not all(isinstance(value, list) for value in values)):
        raise CorpusFormatError(_no_form(record, where))
    parts = [[_message(*item) for item in _items(value, where, key)] for key, value in zip(form, values, strict=True)]
    num_prompt = len(parts[0]) if len(form) > 1 else 0
    turns = [turn for part in parts for turn in part]
    system = _system(record, where, [message for message, _, _ in turns])
    if system is not None:
        turns.insert(0, (system, True, ()))
        num_prompt += len(form) > 1
        texts = None
    messages = tuple(message for message, _, _ in turns)
    variables, unread = _variables(record, where, template_variables)
    return Conversation(
        where,
        () if texts else messages,
        () if texts else tuple(is_learned for _, is_learned, _ in turns),
        0 if texts else num_prompt,
        variables,
        texts,
        (*_unused(record, form, messages), *unread, *(one for _, _, notes in turns for one in notes)),
    )


def _as_messages(prompt: str, completion: str) -> tuple[Message, Message]:
    return {"role": "user", "content": prompt}, {"role": "assistant", "content": completion}


def template_settings(value: Any, where: str) -> dict[str, Any]:
    """Variables for a template, from an object or its JSON text. Raises CorpusFormatError."""
    found = parse_if_text(value, where)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise CorpusFormatError(f"{where}: found {shown(found)}; expected a JSON object of names and values")
    settings = dict(found)
    for name in ("add_generation_prompt", "continue_final_message"):
        if settings.get(name) is False:  # as it is in any case
            del settings[name]
    own = [name for name in settings if name in TEMPLATE_OWN]
    if own:
        raise CorpusFormatError(f"{where}: found {', '.join(own)}, which `tokenize` sets; remove it")
    for name in ("tools", DOCUMENTS):
        if name in settings:
            settings[name] = _FOR_TEMPLATES[name](settings[name], f"{where}, '{name}'")
    return settings


def _no_form(record: Mapping[str, Any], where: str) -> str:
    found = ", ".join(f"{key} ({type(value).__name__})" for key, value in record.items()) or "none"
    return (
        f"{where}: not a conversation; the keys are {found}. Expected 'messages' (a list of objects with role and "
        "content), 'conversations' (a list of objects with from and value), or 'prompt' and 'completion' (two strings "
        "or two lists of messages)"
    )


def _refuse_media(item: Mapping[str, Any], where: str) -> None:
    found = [name for name, value in item.items() if name.lower() in MEDIA and not holds_nothing(value)]
    if found:
        raise CorpusFormatError(
            f"{where}: '{found[0]}' is {shown(item[found[0]])}; only text can be tokenized. Remove the conversations "
            "with images, audio or video, or only this field if the text makes sense without it"
        )


def _items(value: Any, where: str, key: str) -> Iterator[tuple[Any, str]]:
    found = value
    with suppress(CorpusFormatError):  # in tables, above all CSV, it is often JSON text
        found = parse_if_text(value, where)
    if not isinstance(found, list):
        raise CorpusFormatError(f"{where}: '{key}' is {shown(value)}; expected a list of messages")
    yield from ((item, f"{where}, {key}[{number}]") for number, item in enumerate(found))


def _message(item: Any, where: str) -> tuple[Message, bool, Unused]:
    """The message, whether it may be learned, and its fields that are not used."""
    if not isinstance(item, Mapping):
        raise CorpusFormatError(f"{where}: found {shown(item)}; expected an object with role and content")
    names = ("from", "value") if "from" in item and "role" not in item else ("role", "content")
    role = item.get(names[0])
    if not isinstance(role, str) or role not in ROLES:
        found = f"'{names[0]}' is {shown(role)}" if names[0] in item else f"the keys are {', '.join(item) or 'none'}"
        raise CorpusFormatError(f"{where}: {found}; expected '{names[0]}' with one of {', '.join(ROLES)}")
    _refuse_media(item, where)
    flags = _flags(item, where)
    rest = without_nulls({key: value for key, value in item.items() if key not in (*names, *flags)})
    for key, parsed in (("tool_calls", parsed_calls), ("function_call", parsed_call)):
        if key in rest:
            rest[key] = parsed(rest[key], f"{where}, {key}")
    rest = {key: value for key, value in rest.items() if value is not None}
    content = None if item.get(names[1]) is None else _text(item[names[1]], where, names[1])
    if content is None and not any(rest.get(key) for key in MAY_REPLACE_CONTENT):
        raise CorpusFormatError(
            f"{where}: '{names[1]}' is missing (the keys are {', '.join(item)}); only a message with one of "
            f"{', '.join(MAY_REPLACE_CONTENT)} does not need it"
        )
    not_used = [("tool calls, where it is null,", name) for call in _given_arguments(item) for name in null_keys(call)]
    if ROLES[role] != "assistant":
        not_used += [(NOT_ASSISTANT_TURNS, key) for key, is_learned in flags.items() if is_learned]
    return {"role": ROLES[role], "content": content} | rest, all(flags.values()), tuple(not_used)


def _given_arguments(item: Mapping[str, Any]) -> Iterator[Any]:
    """The arguments of the calls of a message, as in the record."""
    calls = item.get("tool_calls")
    for call in (*(calls if isinstance(calls, list) else ()), item.get("function_call")):
        if isinstance(call, Mapping):
            function = call.get("function")
            yield (function if isinstance(function, Mapping) else call).get("arguments")


def _text(content: Any, where: str, key: str) -> str:
    if isinstance(content, list):
        return "".join(_part(part, f"{where}, {key}[{number}]") for number, part in enumerate(content))
    if not isinstance(content, str):
        raise CorpusFormatError(f"{where}: '{key}' is {shown(content)}; expected text or a list of text parts")
    return content


def _part(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = f"a part of type {shown(part.get('type'))}" if isinstance(part, Mapping) else shown(part)
    raise CorpusFormatError(
        f'{where}: found {kind}; only text can be tokenized: {{"type": "text", "text": ...}}. Remove the other parts '
        "or the conversation"
    )


def _flags(item: Mapping[str, Any], where: str) -> dict[str, bool]:
    """The flags of a message by name: whether the message is learned."""
    found = {}
    for key in (*LEARNED_FLAGS, MASKED_FLAG):
        value = item.get(key)
        if value is None:
            continue
        if not isinstance(value, int | float) or value not in (0, 1):
            not_learned, learned = ("1", "0") if key == MASKED_FLAG else ("0", "1")
            raise CorpusFormatError(
                f"{where}: '{key}' is {shown(value)}; expected {not_learned} (do not learn) or {learned}"
            )
        found[key] = bool(value) != (key == MASKED_FLAG)
    if len(set(found.values())) > 1:
        values = " and ".join(f"'{key}' is {item[key]!r}" for key in found)
        raise CorpusFormatError(f"{where}: {values}, which contradict each other; remove one of them")
    return found


def _system(record: Mapping[str, Any], where: str, messages: Sequence[Message]) -> Message | None:
    """The system turn that a record has outside its messages; None if the messages contain it."""
    texts = {key: _text(record[key], where, key) for key in SYSTEM_TEXTS if not holds_nothing(record.get(key))}
    if not texts:
        return None
    if len({text.strip() for text in texts.values()}) > 1:
        raise CorpusFormatError(f"{where}: {' and '.join(map(repr, texts))} are different texts; remove one of them")
    key, text = next(iter(texts.items()))
    there = [number for number, message in enumerate(messages) if message["role"] == "system"]
    if any((messages[number]["content"] or "").strip() == text.strip() for number in there):
        return None
    if there:
        raise CorpusFormatError(
            f"{where}: '{key}' is {shown(text)}, but message {there[0]} is a system message with different text; "
            "remove one of them"
        )
    return {"role": "system", "content": text}


def _variables(
    record: Mapping[str, Any], where: str, template_variables: Collection[str] | None
) -> tuple[dict[str, Any], Unused]:
    """Variables of the template from fields outside the messages, and those fields that it does not read."""
    found: dict[str, Any] = {}
    not_used: list[tuple[str, str]] = []
    given_by: dict[str, str] = {}

    def give(name: str, value: Any, key: str) -> None:
        if holds_nothing(value) and name in ("tools", DOCUMENTS):
            return
        if name in found and found[name] != value:
            raise CorpusFormatError(f"{where}: '{given_by[name]}' and '{key}' are different {name}; remove one of them")
        found[name], given_by[name] = value, key

    for key in (*TOOL_LISTS, DOCUMENTS):
        value, name = record.get(key), "tools" if key in TOOL_LISTS else key
        if holds_nothing(value):
            continue
        if template_variables is not None and name not in template_variables:
            not_used.append(("records", key))
            continue
        not_used += [(f"{name}, where it is null,", one) for one in dict.fromkeys(null_keys(value))]
        give(name, _FOR_TEMPLATES[name](without_nulls(value), f"{where}: '{key}'"), key)
    settings = template_settings(without_nulls(record.get(TEMPLATE_SETTINGS)), f"{where}: '{TEMPLATE_SETTINGS}'")
    for name, value in settings.items():
        if template_variables is not None and name not in template_variables:
            not_used.append((TEMPLATE_SETTINGS, name))
        else:
            give(name, value, TEMPLATE_SETTINGS)
    return found, tuple(not_used)


def _documents(value: Any, where: str) -> list[Any]:
    found = parse_list(value, where, "a list of documents")
    for number, one in enumerate(found):
        if not isinstance(one, Mapping):
            raise CorpusFormatError(
                f"{where}[{number}]: found {shown(one)}; expected an object, such as {{'title': ..., 'text': ...}}"
            )
    return found


_FOR_TEMPLATES = {"tools": parsed_tools, DOCUMENTS: _documents}


def _unused(record: Mapping[str, Any], form: tuple[str, ...], messages: Sequence[Message]) -> Unused:
    """Fields that no template gets, except for texts that are also in a message."""
    names = unused(record, (*form, *SYSTEM_TEXTS, *TOOL_LISTS, DOCUMENTS, TEMPLATE_SETTINGS))
    contents = {(message["content"] or "").strip() for message in messages} if names else set()
    return tuple(
        ("records", name) for name in names if not (isinstance(record[name], str) and record[name].strip() in contents)
    )
