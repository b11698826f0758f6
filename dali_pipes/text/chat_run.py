"""Conversations as a run writes them: ids, and a mask of what to learn beside them."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dali_pipes.errors import CorpusFormatError
from dali_pipes.fields import CALL_KEYS, DOCUMENTS, MESSAGE_LINKS, SYSTEM_TEXTS, holds_nothing, unused
from dali_pipes.text.chat import ChatEncoder, ChatTemplate, Conversation, Learn, parse_conversation
from dali_pipes.text.conversation import CALLS, OF_OTHERS, Message
from dali_pipes.text.documents import Document
from dali_pipes.text.encoder import Encoded
from dali_pipes.text.lost_characters import LostCharacters
from dali_pipes.text.notes import Notes
from dali_pipes.text.tokenizer import LoadedTokenizer

OF_MESSAGES = "messages"
_MARK = "\U000b0030"
"""A code point of a plane without characters."""
_RULES = 2
"""Changes with what is made of a record: a run goes on only where the same was made of those before."""


class ConversationEncoder:
    """An `Encoder` of whole records; what ends a conversation is the template's. One with nothing to learn is dropped.

    template: None for records of two strings, prompt and completion, which `eos_id` then ends.
    template_settings: variables for the template, where a record does not say otherwise in `chat_template_kwargs`.
    Raises what `ChatEncoder` and `parse_conversation` raise.
    """

    record_key = None
    has_mask = True

    def __init__(
        self,
        tokenizer: LoadedTokenizer,
        template: ChatTemplate | None,
        learn: Learn,
        eos_id: int | None,
        template_settings: Mapping[str, Any] | None = None,
        *,
        learn_thoughts: bool = True,
    ) -> None:
        self._encoder = ChatEncoder(tokenizer.library, template, learn, eos_id=eos_id, learn_thoughts=learn_thoughts)
        self._template, self._learn, self._given = template, learn, dict(template_settings or {})
        self._lost = (
            LostCharacters(tokenizer.library, special_is_text=template is None)
            if tokenizer.can_lose_characters
            else None
        )
        self.largest_id = tokenizer.largest_id
        self.settings: Mapping[str, str | int | None] = {
            **({} if learn_thoughts else {"learn_thoughts": False}),
            "tokenizer": tokenizer.sha256,
            "eos_id": None if template else eos_id,
            "learn": learn,
            "chat_template": template.sha256 if template else None,
            # Some templates write the date into the system message.
            "date": f"{template.now:%Y-%m-%d}" if template and "strftime_now" in template.variables else None,
            "chat_template_kwargs": json.dumps(self._given, sort_keys=True) if self._given else None,
            "chat_rules": _RULES,
        }

    def encode(self, documents: Sequence[Document]) -> list[Encoded | None]:
        """Ids and mask of each conversation, None for one in which nothing is learned."""
        conversations = [self._conversation(document) for document in documents]
        encoded = self._encoder.encode_batch(conversations)
        kept = [number for number, one in enumerate(encoded) if one is not None]
        shown = [_Shown(self._template, conversations[number]) for number in kept]
        notes = [self._notes(one) for one in shown]
        if self._lost is not None:
            ids = [one[0] for one in encoded if one is not None]
            texts = [one.text for one in shown]
            for noted, text, lost in zip(notes, texts, self._lost.find(texts, ids), strict=True):
                noted.count(text, lost)
        by_number = dict(zip(kept, notes, strict=True))
        return [None if one is None else Encoded(*one, notes=by_number[n]) for n, one in enumerate(encoded)]

    def _conversation(self, document: Document) -> Conversation:
        template, where = self._template, document.place
        found = parse_conversation(document.content, where, template.variables if template else ())
        if template is None:
            beside = [key for key in SYSTEM_TEXTS if not holds_nothing(document.content.get(key))]
            if found.texts is None and beside and isinstance(document.content.get("prompt"), str):
                raise CorpusFormatError(
                    f"{where}: '{beside[0]}' needs a chat template, which says where to put it. Pass a template "
                    "(--chat-template), or write the text into the prompt"
                )
            return found
        variables = {**self._given, **found.variables}
        if variables.get("tools") and _reads_bare_tools(template.names):
            variables["tools"] = [_bare(tool) for tool in variables["tools"]]
        messages = found.messages
        if "tool_calls" in template.names and "function_call" not in template.names:
            messages = _with_tool_calls(messages)
        return replace(found, variables=variables, messages=messages)

    def _notes(self, shown: "_Shown") -> Notes:
        """What of a conversation is not used. Raises CorpusFormatError for calls to learn that are not shown."""
        conversation, notes = shown.conversation, Notes()
        unseen = shown.unseen_keys()
        self._refuse_lost_calls(conversation, {name for kind, name in unseen if kind == OF_MESSAGES})
        for kind, name in (*conversation.unused, *unseen, *shown.unseen_texts()):
            if kind != OF_OTHERS or self._learn != "all":
                notes.unused.add(kind, [name], conversation.where)
        return notes

    def _refuse_lost_calls(self, conversation: Conversation, unseen: Collection[str]) -> None:
        spoken = [k for k, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        for k in spoken[-1:] if self._learn == "last" else spoken:
            lost = [name for name in CALLS if name in unseen and conversation.messages[k].get(name)]
            if lost and conversation.weights[k] and k >= conversation.num_prompt:
                raise CorpusFormatError(
                    f"{conversation.where}: message {k} has {lost[0]}, which the chat template "
                    f"{self._template.name if self._template else 'none'} does not show, so an answer without "
                    "the call would be learned. Use a template that shows it, write it into the content, or put "
                    '"weight": 0 on the message'
                )


class _Shown:
    """What a template shows of a conversation. Without a template, all of its two texts."""

    def __init__(self, template: ChatTemplate | None, conversation: Conversation) -> None:
        self._template, self.conversation = template, conversation
        self._messages: Sequence[Message] = conversation.messages
        if conversation.texts is not None and template is not None:
            prompt, completion = conversation.texts
            self._messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        self.text = "".join(conversation.texts or ())
        if template is not None:
            self.text = template.render(self._messages, conversation.variables, conversation.where)

    def unseen_keys(self) -> list[tuple[str, str]]:
        """Keys of messages and of their calls that are not shown, once for each that has one."""
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
        found = [(OF_MESSAGES, name) for message in self._messages for name in message if name in of_messages]
        return found + [("tool calls", name) for call in _calls(self._messages) for name in call if name in of_calls]

    def unseen_texts(self) -> list[tuple[str, str]]:
        """Contents of messages that are not shown, such as system messages that a template passes over; tools and
        documents that it reads, but does not show.
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
        """Whether other messages, or without a variable the same ones, are rendered the same."""
        assert self._template is not None, "only a template shows one thing and not another"
        variables = {name: value for name, value in self.conversation.variables.items() if name != without}
        try:
            return self._template.render(messages, variables, self.conversation.where) == self.text
        except CorpusFormatError:
            return False


def _reads_bare_tools(names: Collection[str]) -> bool:
    return "function" not in names and ("parameters" in names or "description" in names)


def _bare(tool: Any) -> Any:
    return tool["function"] if isinstance(tool, Mapping) and set(tool) == {"type", "function"} else tool


def _with_tool_calls(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Calls and their answers of the older form, `function_call` and the role "function", in the newer one."""
    if not any(message.get("function_call") for message in messages):
        return tuple(messages)
    found = []
    for message in messages:
        call = message.get("function_call")
        if isinstance(call, Mapping) and call and not message.get("tool_calls"):
            rest = {key: value for key, value in message.items() if key != "function_call"}
            message = rest | {"tool_calls": [{"type": "function", "function": call}]}
        elif message["role"] == "function":
            message = message | {"role": "tool"}
        found.append(message)
    return tuple(found)


def _calls(messages: Sequence[Message]) -> list[Mapping[str, Any]]:
    """The calls of all messages, and what is under `function` of each."""
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
