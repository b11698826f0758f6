"""Where in a rendered conversation an assistant speaks: what is learned, in characters.

Exact or refused, never guessed. For the turn of message k, R the rendered conversation:

    P = render(messages[:k]) and what asks the assistant to speak       "...<|im_start|>assistant\\n"
    F = render(messages[:k + 1])                                        "...<|im_start|>assistant\\nHello<|im_end|>\\n"

If P begins F, and F begins R, the turn is what F has more than P. Some templates show a turn differently later on
(reasoning is cut from all but the last, the system text moves to the last question). There the end of the content is
found with a mark in it, a character that no text has; R without the mark must be R, else the turn is refused. The
turn then ends with what F has behind the mark, and starts behind the same request to speak, or with the content.

White space behind the end marker ("\\n" after `<|im_end|>`) is not learned: the model has stopped by then. Where
white space is all there is behind the content, it is the end marker.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dali_pipes.errors import CorpusFormatError
from dali_pipes.text.chat_template import ChatTemplate, Span
from dali_pipes.text.conversation import CALLS, MAY_REPLACE_CONTENT, Message

START, END = "\U000b0000", "\U000b0001"
"""Marks, of a plane without characters."""


class Turns:
    """The turns of one conversation, rendered as `text`. Each method raises CorpusFormatError, naming `where`."""

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any], where: str, text: str
    ) -> None:
        self._template, self._messages, self._variables, self._where = template, messages, variables, where
        self.text = text

    def learned(self, k: int) -> Span:
        """What the assistant says in message k, its end marker too."""
        whole = self._render(k + 1)
        prompt = self._prompt(k)
        if prompt is None or not (whole.startswith(prompt) and self.text.startswith(whole)):
            return self._marked_turn(k, whole, prompt)
        start, end = len(prompt), len(whole)
        if prompt == self._render_or_none(k):
            # Nothing asks the assistant to speak: a header, if there is one, is not part of the prompt.
            marked = self._marked(k, whole)
            start = start if marked is None or marked[0] is None else marked[0]
        return start, self._without_space(k, whole, start, end)

    def refuse_unseen(self, k: int) -> None:
        """Refuse message k if it has no content, and the template shows nothing of what it has instead.

        It would be learned as an empty turn. Of calls and thoughts, the calls are what counts. It is certain: without
        them the whole conversation is rendered the same.
        """
        message = self._messages[k]
        if (message["content"] or "").strip():
            return
        instead = [key for key in MAY_REPLACE_CONTENT if message.get(key)]
        unseen = [key for key in instead if key in CALLS] or instead
        if not unseen:
            return
        bare = {key: value for key, value in message.items() if key not in unseen}
        messages = [*self._messages[:k], bare, *self._messages[k + 1 :]]
        try:
            text = self._template.render(messages, self._variables, self._where)
        except CorpusFormatError:
            return  # it does look at them
        if text == self.text:
            raise CorpusFormatError(
                f"{self._where}: message {k} has no content but {', '.join(unseen)}, which the chat template "
                f"{self._template.name} does not show, so that an empty turn would be learned. Give a template that "
                f'shows it, write it into the content, or put "weight": 0 on the message'
            )

    def whole_message(self, k: int) -> Span:
        """All text that message k adds, its header too."""
        before, behind = self._render_or_none(k) or "", self._render(k + 1)
        if not (behind.startswith(before) and self.text.startswith(behind)):
            raise self._refused(k, "the text of the messages before it changes with it")
        return len(before), len(behind)

    def _marked_turn(self, k: int, whole: str, prompt: str | None) -> Span:
        """A turn that stands in the conversation differently from how it stands at the end of its prefix."""
        in_text, in_whole = self._marked(k, self.text), self._marked(k, whole)
        if in_text is None or in_whole is None:
            raise self._refused(k, "it shows the turn differently when others follow, and its content is not found")
        content_end, tail = in_text[1], whole[in_whole[1] :]
        if not self.text.startswith(tail, content_end):
            raise self._refused(k, "it ends the turn differently when others follow")
        start = self._behind_request(k, prompt, content_end)
        if start is None:
            start = in_text[0]
        if start is None or start > content_end:
            raise self._refused(k, "it shows the turn differently when others follow, and where it starts is not clear")
        return start, self._without_space(k, self.text, start, content_end + len(tail), content_end)

    def _behind_request(self, k: int, prompt: str | None, content_end: int) -> int | None:
        before = self._render_or_none(k)
        if prompt is None:  # what asks at the end of the conversation asks at its start too
            prompt, before = self._prompt(len(self._messages)), self.text
        elif self.text.startswith(prompt) and len(prompt) <= content_end:
            return len(prompt)
        request = prompt.removeprefix(before) if prompt and before is not None and prompt.startswith(before) else ""
        if not request.strip() or _holds(self._messages[k], request.strip()):
            return None
        found = self.text.rfind(request, 0, content_end)
        return None if found < 0 else found + len(request)

    def _without_space(self, k: int, text: str, start: int, end: int, content_end: int | None = None) -> int:
        """`end`, or the end of the end marker before it."""
        visible = start + len(text[start:end].rstrip())
        if visible == end:
            return end
        if content_end is None:
            content = (self._messages[k]["content"] or "").strip()
            turn = text[start:visible]
            if not turn or turn.strip() == content:
                return end
            if not content or turn[-1] != content[-1]:
                return visible
            marked = self._marked(k, text)
            if marked is None:
                raise self._refused(k, "its end marker cannot be told from its content")
            content_end = marked[1]
        return visible if visible > content_end else end

    def _marked(self, k: int, expected: str) -> tuple[int | None, int] | None:
        """Start, if it can be marked, and end of the content of message k in `expected`; where the content cannot be
        marked, the end of the name of its last tool call.
        """
        number = len(self._messages) if expected is self.text else k + 1
        for message in _marked_messages(self._messages[k]):
            messages = [*self._messages[:k], message, *self._messages[k + 1 : number]]
            try:
                text = self._template.render(messages, self._variables, self._where)
            except CorpusFormatError:
                continue
            if text.count(END) != 1 or text.count(START) > 1 or text.replace(START, "").replace(END, "") != expected:
                continue
            first, last = text.find(START), text.find(END)
            if first < 0:
                return None, last
            if first < last:
                return first, last - 1
        return None

    def _prompt(self, k: int) -> str | None:
        try:
            return self._template.render(self._messages[:k], self._variables, self._where, prompt=True)
        except CorpusFormatError:
            if k:
                raise
            return None  # many templates cannot render a conversation without messages

    def _render(self, number: int) -> str:
        if number == len(self._messages):
            return self.text
        return self._template.render(self._messages[:number], self._variables, self._where)

    def _render_or_none(self, number: int) -> str | None:
        try:
            return self._render(number)
        except CorpusFormatError:
            return None

    def _refused(self, k: int, why: str) -> CorpusFormatError:
        return CorpusFormatError(
            f"{self._where}: what the assistant says in message {k} cannot be told from the rest: {why} (chat template "
            f"{self._template.name}). Put {{% generation %}} ... {{% endgeneration %}} around it in the template"
        )


def _marked_messages(message: Message) -> Iterator[Message]:
    """The message with marks around its content, then with the end mark alone: templates look at how content begins.

    The marks are inside of the white space around the content, so that it can be trimmed; where the content is white
    space, they are before it, then behind it. Last, a mark behind the name of the last tool call.
    """
    content = message["content"]
    if content is not None:
        core = content.strip()
        lead = content[: len(content) - len(content.lstrip())] if core else ""
        tail = content[len(lead) + len(core) :]
        for start in (START, ""):
            yield message | {"content": f"{lead}{start}{core}{END}{tail}"}
            if not core and tail:
                yield message | {"content": f"{tail}{start}{END}"}
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not calls or not isinstance(calls[-1], dict):
        return
    function = calls[-1].get("function", calls[-1])
    if isinstance(function, dict) and isinstance(function.get("name"), str):
        named = function | {"name": function["name"] + END}
        last = calls[-1] | {"function": named} if "function" in calls[-1] else named
        yield message | {"tool_calls": [*calls[:-1], last]}


def _holds(value: Any, text: str) -> bool:
    if isinstance(value, dict):
        return any(_holds(item, text) for item in value.values())
    if isinstance(value, list):
        return any(_holds(item, text) for item in value)
    return isinstance(value, str) and text in value
