"""Marks around the texts of messages, to find them again in a rendered conversation.

A mark is a character of two planes in which Unicode has none. If a conversation with marks is rendered the same except
for the marks, their positions are those of the texts.

    content   <think>\\nSo.\\n</think>\\n\\nHi         marked   <think>\\n(So.)\\n</think>\\n\\n(Hi)        (, ): marks

Marks go inside the white space around a text, so that it can be trimmed, and not into the tags of thoughts, so that a
template can find them. Text that is empty or white space gets none at first: templates test whether there is content.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dali_pipes.text.chat.conversation import CALLS, THOUGHTS, Message

BARE = "\U000b0001"
"""Placeholder for a text that does not occur in the conversation."""

_FIRST, _MOST = 0x90000, 1 << 16
_MARK = re.compile("([\U00090000-\U000affff])")
_TAG = re.compile("(</?think>)")
_OUTER_TAGS = re.compile(r"((?:<[^<>]*>\s*)*)(.*?)((?:\s*<[^<>]*>)*)", re.DOTALL)


class Part(NamedTuple):
    """A text of a message: characters `start` to `end`. name: identifies the text in every rendering."""

    start: int
    end: int
    message: int
    name: tuple[int, int]
    is_thought: bool


class Marked:
    """Messages with marks around their texts. way: from 0, which marks most, to `WAYS` - 1, or `THOUGHTS_ALONE`.
    only: the number of the single message to mark.
    """

    def __init__(self, messages: Sequence[Message], way: int = 0, only: int | None = None) -> None:
        self._texts: list[tuple[int, tuple[int, int], bool]] = []
        self.messages = []
        for k, message in enumerate(messages):
            marker = _Marker(self._texts, k, way)
            self.messages.append(_WAYS[way](marker, message) if only in (None, k) else message)

    @property
    def has_texts(self) -> bool:
        return bool(self._texts)

    def parts(self, rendered: str | None, expected: str) -> list[Part] | None:
        """The texts in `expected`, in order, found in `rendered`, which is the same with marks. None if it is not."""
        if rendered is None or len(self._texts) > _MOST:
            return None
        pieces = _MARK.split(rendered)
        if "".join(pieces[::2]) != expected:
            return None
        found: list[Part] = []
        opened: dict[int, int] = {}
        without_start = set()
        position = 0
        for text, mark in zip(pieces[::2], pieces[1::2], strict=False):
            position += len(text)
            number, is_close = divmod(ord(mark) - _FIRST, 2)
            if not is_close:
                opened[number] = position
                continue
            if number not in opened:
                without_start.add(number)
            # A template may cut the start of a text, and its mark; the part is then only the end of the text.
            found.append(Part(opened.pop(number, position), position, *self._texts[number]))
        if not without_start.isdisjoint(opened):
            return None  # written backwards, perhaps
        found += [Part(start, start, *self._texts[number]) for number, start in opened.items()]
        return sorted(found)


class _Marker:
    """Puts marks around texts of one message."""

    def __init__(self, texts: list[tuple[int, tuple[int, int], bool]], message: int, way: int) -> None:
        self._texts, self._message, self._way, self._first = texts, message, way, len(texts)

    def around(self, text: Any, *, is_thought: bool = False, even_if_empty: bool = False) -> Any:
        if not isinstance(text, str) or not (text.strip() or even_if_empty):
            return text
        core = text.strip()
        lead = text[: len(text) - len(text.lstrip())] if core else ""
        number = min(len(self._texts), _MOST - 1)
        self._texts.append((self._message, (self._way, len(self._texts) - self._first), is_thought))
        opened, closed = chr(_FIRST + 2 * number), chr(_FIRST + 2 * number + 1)
        return f"{lead}{opened}{core}{closed}{text[len(lead) + len(core) :]}"

    def within(self, text: str) -> str:
        found = _OUTER_TAGS.fullmatch(text)
        return text if found is None else f"{found[1]}{self.around(found[2])}{found[3]}"

    def pieces(self, message: Message, *, is_all: bool = True) -> Message:
        """Marks around the texts between the tags of thoughts in the content; only around thoughts unless `is_all`."""
        content = message["content"]
        if not content or message["role"] != "assistant":
            return self.content(message, self.around) if is_all else message
        pieces = _TAG.split(content.rstrip())
        for i in range(0, len(pieces), 2):
            is_last = i + 1 == len(pieces)
            is_thought = not is_last and pieces[i + 1] == "</think>" and (i == 0 or pieces[i - 1] == "<think>")
            if is_all or is_thought:
                is_end = is_last and i > 0
                pieces[i] = self.around(pieces[i], is_thought=is_thought, even_if_empty=is_end)
        return message | {"content": "".join(pieces) + content[len(content.rstrip()) :]}

    def content(self, message: Message, mark: Callable[[str], str]) -> Message:
        return message | {"content": mark(message["content"])} if message["content"] else message

    def thoughts(self, message: Message) -> Message:
        shown = {name: self.around(message[name], is_thought=True) for name in THOUGHTS if message.get(name)}
        return message | shown

    def calls(self, message: Message, *, with_arguments: bool = True) -> Message:
        return message | {name: self._call(message[name], with_arguments) for name in CALLS if message.get(name)}

    def _call(self, call: Any, with_arguments: bool) -> Any:
        if isinstance(call, list):
            return [self._call(one, with_arguments) for one in call]
        if not isinstance(call, dict):
            return call
        marked = dict(call)
        if "function" in call:
            marked["function"] = self._call(call["function"], with_arguments)
        if "name" in call:
            marked["name"] = self.around(call["name"])
        if "arguments" in call and with_arguments:
            marked["arguments"] = self._strings(call["arguments"])
        return marked

    def _strings(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._strings(item) for key, item in value.items()}
        if isinstance(value, list):
            return [self._strings(item) for item in value]
        return self.around(value)

    def blank(self, message: Message, *, is_before: bool) -> Message:
        """A mark before or after content that is only white space."""
        content = message["content"]
        if content is None or content.strip():
            return message
        mark = self.around("", even_if_empty=True)
        return message | {"content": mark + content if is_before else content + mark}


_WAYS: Sequence[Callable[[_Marker, Message], Message]] = (
    lambda marker, message: marker.calls(marker.pieces(marker.thoughts(message))),
    lambda marker, message: marker.calls(marker.pieces(marker.thoughts(message)), with_arguments=False),
    lambda marker, message: marker.pieces(marker.thoughts(message)),
    lambda marker, message: marker.content(marker.thoughts(message), marker.around),
    lambda marker, message: marker.content(marker.thoughts(message), marker.within),
    lambda marker, message: marker.blank(message, is_before=True),
    lambda marker, message: marker.blank(message, is_before=False),
    lambda marker, message: marker.pieces(marker.thoughts(message), is_all=False),
)
WITHOUT_CALLS, WAYS, THOUGHTS_ALONE = 2, len(_WAYS) - 1, len(_WAYS) - 1
"""The first way without calls; the number of ways that mark whole contents; the way that marks only thoughts."""
