"""Encodes whole records as conversations, and notes what of them is not used."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dali_pipes.errors import CorpusFormatError
from dali_pipes.fields import SYSTEM_TEXTS, holds_nothing
from dali_pipes.text.chat.chat_encoder import ChatEncoder, TurnsToLearn
from dali_pipes.text.chat.conversation import NOT_ASSISTANT_TURNS, Conversation, Message, parse_conversation
from dali_pipes.text.chat.rendering import Rendering
from dali_pipes.text.chat.template import ChatTemplate
from dali_pipes.text.documents import Document
from dali_pipes.text.encoder import Encoded
from dali_pipes.text.lost_characters import LostCharacters
from dali_pipes.text.notes import Notes
from dali_pipes.text.tokenizer import LoadedTokenizer

_RULES = 2
"""Changes with how records are encoded, so that a run does not continue one with other rules."""


class ConversationEncoder:
    """An `Encoder` of whole records. The template ends a conversation; one without anything to learn is dropped.

    template: None for records of two strings, prompt and completion, which then end with `eos_id`.
    template_settings: variables for the template; `chat_template_kwargs` of a record takes precedence.
    Raises what `ChatEncoder` and `parse_conversation` raise.
    """

    record_key = None
    has_mask = True

    def __init__(
        self,
        tokenizer: LoadedTokenizer,
        template: ChatTemplate | None,
        learn: TurnsToLearn,
        eos_id: int | None,
        template_settings: Mapping[str, Any] | None = None,
        *,
        learn_thoughts: bool = True,
    ) -> None:
        self._encoder = ChatEncoder(tokenizer.library, template, learn, eos_id=eos_id, learn_thoughts=learn_thoughts)
        self._template, self._learned_turns, self._given = template, learn, dict(template_settings or {})
        self._lost = (
            LostCharacters(tokenizer.library, special_is_text=template is None)
            if tokenizer.can_lose_characters
            else None
        )
        self.largest_id = tokenizer.largest_id
        self.settings: Mapping[str, str | int | None] = {
            **({} if learn_thoughts else {"learn_thoughts": False}),
            "tokenizer": tokenizer.sha256,
            "vocabulary": tokenizer.vocabulary,
            "eos_id": None if template else eos_id,
            "learn": learn,
            "chat_template": template.sha256 if template else None,
            # Some templates write the date into the system message.
            "date": f"{template.now:%Y-%m-%d}" if template and "strftime_now" in template.variables else None,
            "chat_template_kwargs": json.dumps(self._given, sort_keys=True) if self._given else None,
            "chat_rules": _RULES,
        }

    def encode(self, documents: Sequence[Document]) -> list[Encoded | None]:
        """Ids and loss mask of each conversation, None for one without anything to learn."""
        conversations = [self._conversation(document) for document in documents]
        encoded = self._encoder.encode_batch(conversations)
        kept = [number for number, one in enumerate(encoded) if one is not None]
        rendered = [Rendering(self._template, conversations[number]) for number in kept]
        notes = [self._notes(one) for one in rendered]
        if self._lost is not None:
            ids = [one[0] for one in encoded if one is not None]
            texts = [one.text for one in rendered]
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
                    f"{where}: '{beside[0]}' requires a chat template, which decides where it goes; pass a template "
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

    def _notes(self, rendering: Rendering) -> Notes:
        """Which parts of a conversation are not used."""
        conversation, notes = rendering.conversation, Notes()
        for kind, name in (*conversation.unused, *rendering.unseen_keys(), *rendering.unseen_texts()):
            if kind != NOT_ASSISTANT_TURNS or self._learned_turns != "all":
                notes.unused.add(kind, [name], conversation.where)
        return notes


def _reads_bare_tools(names: Collection[str]) -> bool:
    return "function" not in names and ("parameters" in names or "description" in names)


def _bare(tool: Any) -> Any:
    return tool["function"] if isinstance(tool, Mapping) and set(tool) == {"type", "function"} else tool


def _with_tool_calls(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Messages with `function_call` and the role "function", the older form of calls, in the newer form."""
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
