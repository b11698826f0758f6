"""Where the assistant speaks in a rendered conversation: the learned spans, in characters.

Exact or refused, never guessed. `marks` finds the texts of each message in R, the rendered conversation:

    R   ...<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n<|im_start|>user\\nHow ...
        before         |head                  |own |tail                          after     (texts of other messages)

The turn begins in the head and ends in the tail, which both contain no text of a message. For the turn of message k:

    P = render(messages[:k]) and the generation prompt                  "...<|im_start|>assistant\\n"
    F = render(messages[:k + 1])                                        "...<|im_start|>assistant\\nHello<|im_end|>\\n"

If F starts with P, and R starts with F, the turn is what F has after P. Some templates render a turn differently once
others follow (thoughts are removed from all turns but the last, the system text moves to the last question, only the
last turn ends with `<|return|>`). Such a turn begins after the generation prompt if its head contains it; otherwise
where R differs from R with a placeholder as message k, which is where the header ends. It ends with what follows its
own text in F, or in F followed by a generation prompt. A turn that does not begin with the whole generation prompt is
learned from the end of its header: a prompt with an empty thought does not ask for a turn with a thought.

Last, each turn is proven not to contain text of another message, whatever the template does.

White space after the end marker ("\\n" after `<|im_end|>`) is not learned: the model has stopped by then. If only white
space follows the content, it is the end marker.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dali_pipes.errors import CorpusFormatError
from dali_pipes.text.chat.conversation import CALLS, MAY_REPLACE_CONTENT, THOUGHTS, Message
from dali_pipes.text.chat.marks import BARE, THOUGHTS_ALONE, WAYS, WITHOUT_CALLS, Marked, Part
from dali_pipes.text.chat.template import ChatTemplate, Span


class Turns:
    """The turns of one conversation, rendered as `text`. All methods raise CorpusFormatError, naming `where`."""

    def __init__(
        self, template: ChatTemplate, messages: Sequence[Message], variables: Mapping[str, Any], where: str, text: str
    ) -> None:
        self._template, self._messages, self._variables, self._where = template, messages, variables, where
        self._found: list[Part] | None = None
        self._rendered: dict[tuple[int, bool], str | None] = {}
        self.text = text

    def learned(self, numbers: Sequence[int]) -> list[Span]:
        """What the assistant says in these messages, with their end markers, in order."""
        spans = [self._turn(k) for k in numbers]
        for k, span, following in zip(numbers, spans, spans[1:], strict=False):
            if span[1] > following[0]:
                raise self._refused(k, "it shares text with the next turn")
        return spans

    def thoughts(self, k: int) -> list[Span]:
        """Where the thoughts of message k are shown, without the tags around them."""
        message = self._messages[k]
        texts = [message[key] for key in THOUGHTS if message.get(key)]
        if not texts and "</think>" not in (message["content"] or ""):
            return []
        for way in (0, THOUGHTS_ALONE):
            found = self._marked(k, way, self.text)
            if found is not None and all(isinstance(text, str) for text in texts):
                return [(part.start, part.end) for part in found if part.is_thought]
        raise self._refused(k, "its reasoning, which should not be learned, cannot be found")

    def refuse_unseen(self, k: int) -> None:
        """Refuse message k if the template does not show its calls, or any of its thoughts where it has nothing else.

        It would be learned as a turn without them. This is certain: without them the whole conversation is rendered the
        same.
        """
        message = self._messages[k]
        unseen = [key for key in CALLS if message.get(key)]
        if not unseen and not (message["content"] or "").strip():
            unseen = [key for key in THOUGHTS if message.get(key)]
        if not unseen:
            return
        bare = {key: value for key, value in message.items() if key not in unseen}
        if self._try([*self._messages[:k], bare, *self._messages[k + 1 :]]) == self.text:
            names = " and ".join(unseen)
            raise CorpusFormatError(
                f"{self._where}: the chat template {self._template.name} does not show the {names} of message {k}, so "
                f"the model would learn an answer without {names}. Use a template that shows {names}, write the text "
                'into the content, or set "weight": 0 on the message'
            )

    def whole_message(self, k: int) -> Span:
        """All text that message k adds, including its header."""
        before, whole = self._render(k) or "", self._render(k + 1)
        if whole is None or not (whole.startswith(before) and self.text.startswith(whole)):
            raise self._refused(k, "the text of earlier messages depends on it")
        self._prove(k, len(before), len(whole))
        return len(before), len(whole)

    def _turn(self, k: int) -> Span:
        own = [part for part in self._parts(k) if part.message == k]
        prompt, whole = self._render(k, prompt=True), self._render(k + 1)
        if prompt is not None and whole is not None and whole.startswith(prompt) and self.text.startswith(whole):
            start, end = len(prompt), len(whole)
            if prompt == self._render(k):
                header_end = self._header_end(k, start, own, "")
                start = start if header_end is None else header_end
        else:
            own = own or self._own(k, k)
            if not own:
                raise self._refused(
                    k, "the template renders the turn differently once others follow, and its text cannot be found"
                )
            end = self._end(k, own)
            start = self._start(k, prompt, own, end)
        if start > end:
            raise self._refused(k, "its end comes before its start")
        self._prove(k, start, end)
        visible = start + len(self.text[start:end].rstrip())
        texts = [part.end for part in own if start <= part.end <= end]
        return start, visible if visible > max([start, *texts]) else end

    def _parts(self, turn: int) -> list[Part]:
        """Texts of all messages in the conversation, in order. turn: the message that errors name."""
        if self._found is None:
            marked = Marked(self._messages)
            self._found = marked.parts(self._try(marked.messages), self.text)
        if self._found is None:
            self._found = sorted(part for k in range(len(self._messages)) for part in self._own(k, turn))
        return self._found

    def _own(self, k: int, turn: int) -> list[Part]:
        """Texts of message k, marked in the first way that changes nothing else; empty if the template shows none."""
        is_same = not Marked([self._messages[k]], WITHOUT_CALLS).has_texts
        for way in range(WAYS):
            if Marked([self._messages[k]], way).has_texts:
                found = self._marked(k, way, self.text)
                if found:
                    return found
                is_same |= found is not None
        if not is_same:
            raise self._refused(turn, f"the template changes the text of message {k}, which cannot be found")
        return []

    def _marked(
        self, k: int, way: int, expected: str, number: int | None = None, *, prompt: bool = False
    ) -> list[Part] | None:
        marked = Marked(self._messages[:number], way, only=k)
        return marked.parts(self._try(marked.messages, prompt=prompt), expected)

    def _start(self, k: int, prompt: str | None, own: Sequence[Part], end: int) -> int:
        """Start of a turn whose header differs from that of a last turn."""
        first = own[0].start
        others = [part for part in self._parts(k) if part.message != k]
        if k and not any(part.message == k - 1 for part in others):
            others += self._own(k - 1, k)  # an empty message, perhaps, whose marks change some templates
        before = max((part.end for part in others if part.start < first), default=0)
        is_prompted = prompt is not None and prompt != self._render(k) and self.text.startswith(prompt)
        if prompt is not None and is_prompted and before <= len(prompt) <= end:
            return len(prompt)
        request = self._request(k)
        if request is None:
            raise self._refused(k, "the generation prompt cannot be found")
        is_clear = request.strip() and not _holds(self._variables, request.strip())
        if own[0].start == own[0].end:  # its own text may come before that
            is_clear = is_clear and not _holds(self._messages[k], request.strip())
        found = self.text.find(request, before) if is_clear else -1
        if 0 <= found < first and found + len(request) <= end:
            if 0 <= self.text.find(request, found + 1) < first:
                raise self._refused(k, "the generation prompt appears twice")
            return found + len(request)
        header_end = self._header_end(k, before, own, request)
        if header_end is None and not request and k:
            header_end = self._end(k - 1, [part for part in others if part.message == k - 1])
        if header_end is None or not before <= header_end <= first:
            raise self._refused(k, "its start is ambiguous")
        return header_end

    def _header_end(self, k: int, before: int, own: Sequence[Part], request: str) -> int | None:
        """Where the header of turn k ends, not before `before`: up to there, it equals that of a placeholder text."""
        message = {key: value for key, value in self._messages[k].items() if key not in MAY_REPLACE_CONTENT}
        bare = self._try([*self._messages[:k], message | {"content": BARE}, *self._messages[k + 1 :]])
        if bare is None or bare.count(BARE) != 1:
            return None
        content, differs = bare.index(BARE), _common(self.text, bare)
        if differs < before or (own and differs > own[-1].end):
            return None
        if differs == content or (differs == before and not request.strip()):
            return differs
        # A generation prompt with an empty thought: the turn begins the same way, up to the thought.
        has_request = request.strip() and 0 <= bare.find(request, before, content) <= differs
        return differs if has_request and own and differs == own[0].start else None

    def _end(self, k: int, own: Sequence[Part]) -> int:
        """End of a turn that others may follow."""
        if k + 1 == len(self._messages):
            return len(self.text)
        found: dict[int, int] = {}
        request = self._request(k)
        for prompt, suffix in ((False, ""), (True, request)) if request else ((False, ""),):
            text = self._render(k + 1, prompt=prompt)
            if text is None or not text.endswith(suffix):
                continue
            parts = self._marked(k, own[0].name[0], text, k + 1, prompt=prompt) or ()
            for last in parts[-1:]:
                tail = text[last.end : len(text) - len(suffix)]
                # Several: templates repeat the name of a call before the answer of the tool.
                ends = [part.end for part in own if part.name == last.name and self.text.startswith(tail, part.end)]
                found |= {end: max(end + len(tail), found.get(end, 0)) for end in ends}
        if len(found) != 1:
            raise self._refused(k, "the template ends the turn differently once others follow")
        return next(iter(found.values()))

    def _request(self, k: int) -> str | None:
        """The generation prompt before message k; that of another place if it cannot be told there; None if nowhere."""
        end_of_text = self._template.tokens.get("eos_token", "")  # which some templates write once, at the very end
        for number in (k, len(self._messages), *range(len(self._messages))):
            before, prompt = self._render(number), self._render(number, prompt=True)
            if before is None or prompt is None:
                continue
            for without in (before, before.removesuffix(end_of_text)):
                if prompt.startswith(without):
                    return prompt[len(without) :]
        return None

    def _prove(self, k: int, start: int, end: int) -> None:
        """Refuse a turn that shares text with another message, or ends within its own text."""
        for part in self._parts(k):
            if part.message == k:
                if part.start < end < part.end:
                    raise self._refused(k, "it ends within its text")
            elif start < part.end and part.start < end:
                raise self._refused(k, f"it shares text with message {part.message}")

    def _render(self, number: int, *, prompt: bool = False) -> str | None:
        """The first messages, rendered once. None if the template refuses: many require a message, or a question."""
        if number == len(self._messages) and not prompt:
            return self.text
        if (number, prompt) not in self._rendered:
            self._rendered[number, prompt] = self._try(self._messages[:number], prompt=prompt)
        return self._rendered[number, prompt]

    def _try(self, messages: Sequence[Message], *, prompt: bool = False) -> str | None:
        try:
            return self._template.render(messages, self._variables, self._where, prompt=prompt)
        except CorpusFormatError:
            return None

    def _refused(self, k: int, why: str) -> CorpusFormatError:
        return CorpusFormatError(
            f"{self._where}: the answer in message {k} cannot be located in the rendered conversation: {why} (chat "
            f"template {self._template.name}). Put {{% generation %}} ... {{% endgeneration %}} around what the "
            "assistant says in the template"
        )


def _common(one: str, other: str) -> int:
    """Length of the common prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low


def _holds(value: Any, text: str) -> bool:
    if isinstance(value, Mapping):
        return any(_holds(key, text) or _holds(item, text) for key, item in value.items())
    if isinstance(value, list):
        return any(_holds(item, text) for item in value)
    return isinstance(value, str) and text in value
