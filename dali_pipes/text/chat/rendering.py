"""A conversation as a chat template renders it, and what of it the template does not show."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from dali_pipes.errors import CorpusFormatError
from dali_pipes.fields import CALL_KEYS, DOCUMENTS, MESSAGE_LINKS, unused
from dali_pipes.text.chat.conversation import Conversation, Message
from dali_pipes.text.chat.template import ChatTemplate

_MARK = "\U000b0030"
"""A code point of a plane without characters."""


class Rendering:
    """A conversation as text; without a template, its two texts."""

    def __init__(self, template: ChatTemplate | None, conversation: Conversation) -> None:
        self._template = template
        self.conversation = conversation if template is None else conversation.with_messages()
        self._messages = self.conversation.messages
        self.text = "".join(conversation.texts or ())
        if template is not None:
            self.text = template.render(self._messages, conversation.variables, conversation.where)

    def unseen_keys(self) -> list[tuple[str, str]]:
        """(kind, name) of each key of a message or call that the template does not show."""
        if self._template is None:
            return []
        known = {"role", "content", *MESSAGE_LINKS, *self._template.names}
        known_in_calls = {*CALL_KEYS, *MESSAGE_LINKS, *self._template.names}
        of_messages = {name for message in self._messages for name in unused(message, known)}
        of_calls = {name for call in _calls(self._messages) for name in unused(call, known_in_calls)}
        if not of_messages and not of_calls:
            return []
        # A template that shows a message or a call as a whole shows keys that it does not name.
        if not self._is_same(_all_without(self._messages, of_messages, of_calls)):
            of_messages = {name for name in of_messages if self._is_same(_all_without(self._messages, {name}, ()))}
            of_calls = {name for name in of_calls if self._is_same(_all_without(self._messages, (), {name}))}
        found = [("messages", name) for message in self._messages for name in message if name in of_messages]
        return found + [("tool calls", name) for call in _calls(self._messages) for name in call if name in of_calls]

    def unseen_texts(self) -> list[tuple[str, str]]:
        """The same for contents of messages, such as system messages that a template skips, and for tools and documents
        that it reads but does not show.
        """
        found: list[tuple[str, str]] = []
        if self._template is None:
            return found
        for k, message in enumerate(self._messages):
            content = (message["content"] or "").strip()
            if content and content not in self.text:
                other = {**message, "content": content + _MARK}
                if self._is_same([*self._messages[:k], other, *self._messages[k + 1 :]]):
                    found.append((f"{message['role']} messages", "content"))
        for name in ("tools", DOCUMENTS):
            if self.conversation.variables.get(name) and self._is_same(self._messages, without=name):
                found.append(("records", name))
        return found

    def _is_same(self, messages: Sequence[Message], without: str = "") -> bool:
        """Whether other messages, or the same ones without a variable, are rendered the same."""
        assert self._template is not None, "without a template, all texts are shown"
        variables = {name: value for name, value in self.conversation.variables.items() if name != without}
        try:
            return self._template.render(messages, variables, self.conversation.where) == self.text
        except CorpusFormatError:
            return False


def _calls(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """The calls of all messages, and the object under `function` of each."""
    found = []
    for message in messages:
        calls = message.get("tool_calls")
        for call in calls if isinstance(calls, list) else ():
            found += [part for part in (call, _function(call)) if isinstance(part, Mapping)]
    return found


def _function(call: Any) -> Any:
    return call.get("function") if isinstance(call, Mapping) else None


def _all_without(messages: Sequence[Message], of_messages: Collection[str], of_calls: Collection[str]) -> list[Message]:
    return [_without(message, of_messages, of_calls) for message in messages]


def _without(message: Message, of_messages: Collection[str], of_calls: Collection[str]) -> Message:
    kept = {key: value for key, value in message.items() if key not in of_messages}
    if of_calls and isinstance(kept.get("tool_calls"), list):
        kept["tool_calls"] = [_call_without(call, of_calls) for call in kept["tool_calls"]]
    return kept


def _call_without(call: Any, names: Collection[str]) -> Any:
    if not isinstance(call, Mapping):
        return call
    kept = {key: value for key, value in call.items() if key not in names}
    return kept | {"function": _call_without(kept["function"], names)} if "function" in kept else kept
