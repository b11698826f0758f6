"""Conversations to token ids and a loss mask.

    conversation  user: Hi   assistant: Hello
    rendered      <|im_start|>user\\nHi<|im_end|>\\n<|im_start|>assistant\\nHello<|im_end|>\\n
    loss mask     0           0   0 00         0 0           0        0 1    1         0

The ids are those of one encoding of the whole rendered text, as `apply_chat_template` of transformers returns them:
where text of the template and of a message touch, they are cut into tokens together. One thing differs: special-token
text in a message stays text (see `special_text`). The model is trained on a token that shares a character with a
learned span, also where the token spans the border, and on all tokens of a character of several bytes.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.text.chat.conversation import Conversation, Message
from dali_pipes.text.chat.special_text import SpecialText, Tokens
from dali_pipes.text.chat.template import HOW_TO_SET, ChatTemplate, Span
from dali_pipes.text.chat.turns import Turns
from dali_pipes.text.json_values import check_surrogates

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TurnsToLearn = Literal["assistant", "last", "all"]
Encoded = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]
"""ids (n,) and loss mask (n,): 1 for a token that is learned, 0 for context."""


class _Rendered(NamedTuple):
    text: str
    spans: list[Span]
    is_masked: bool
    place: str


class ChatEncoder:
    """Encodes conversations, each one independently of the others. Thread-safe.

    learn: "assistant": what assistants say and their end markers; where the template has `{% generation %}` blocks,
    exactly these, else see `turns`. "last": only the last of these turns. "all": every token. A message of weight 0 is
    not learned; in "all", its header is not either. Assistant turns in a `prompt` are context except in "all".
    learn_thoughts: whether to learn the thoughts that a template shows: the text of `reasoning_content`, `reasoning` or
    `thinking`, and content up to `</think>`. Their tags are always learned.

    Two strings, prompt and completion, are a question of the user and an answer of the assistant. Without a template
    each is encoded separately as ordinary text, followed by `eos_id` if given; the completion and `eos_id` are learned.
    `eos_id` is not used with a template, which has its own end markers.

    Raises ConfigError for an unknown `learn`, and if the template writes a bos_token or eos_token that the tokenizer
    does not know; BackendError without tokenizers.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        template: ChatTemplate | None,
        learn: TurnsToLearn = "assistant",
        *,
        eos_id: int | None = None,
        learn_thoughts: bool = True,
    ) -> None:
        if learn not in get_args(TurnsToLearn):
            raise ConfigError(f"learn = {learn!r}; expected one of {', '.join(get_args(TurnsToLearn))}")
        for name, text in template.tokens.items() if template is not None else ():
            if template and name in template.variables and tokenizer.token_to_id(text) is None:
                raise ConfigError(
                    f"chat template: {template.name} writes the {name} {text!r}, which is not a token of the "
                    "tokenizer; use the tokenizer of the template's model"
                )
        self._text = SpecialText(tokenizer)
        self._template, self._learned_turns, self._learn_thoughts = template, learn, learn_thoughts
        self._eos = [] if eos_id is None else [eos_id]

    def encode_batch(self, conversations: Sequence[Conversation]) -> list[Encoded | None]:
        """ids and loss mask of each conversation; None for one without anything to learn. Blocks; uses all cores.

        Raises CorpusFormatError, naming the place of the conversation, if the template refuses it, does not show the
        calls of a learned turn, or does not let the learned text be located for certain, and for half of a surrogate
        pair; ConfigError for messages without a template.
        """
        found: list[Encoded | None] = [None] * len(conversations)
        plain = [i for i, one in enumerate(conversations) if self._template is None and one.texts is not None]
        rendered = {i: self._rendered(one) for i, one in enumerate(conversations) if i not in set(plain)}
        rendered = {i: one for i, one in rendered.items() if one.spans}
        for is_masked in (False, True):
            chosen = [i for i, one in rendered.items() if one.is_masked == is_masked]
            texts, places = [rendered[i].text for i in chosen], [rendered[i].place for i in chosen]
            tokens = self._text.encode_masked(texts, places) if is_masked else self._text.encode(texts)
            for i, one in zip(chosen, tokens, strict=True):
                found[i] = _supervised(one.ids, _mask(one, rendered[i]))
        for i, encoded in zip(plain, self._plain([conversations[i] for i in plain]), strict=True):
            found[i] = encoded
        return found

    def _plain(self, conversations: Sequence[Conversation]) -> list[Encoded | None]:
        for one in conversations:
            for text in one.texts or ():
                check_surrogates(text, one.where)
        ids = iter(self._text.encode_ordinary([text for one in conversations for text in one.texts or ()]))
        found = []
        for prompt, completion in zip(ids, ids, strict=True):
            whole = np.concatenate([prompt, completion, np.array(self._eos, np.int64)])
            mask = np.ones(len(whole), np.uint8)
            mask[: 0 if self._learned_turns == "all" else len(prompt)] = 0
            found.append(_supervised(whole, mask))
        return found

    def _rendered(self, conversation: Conversation) -> _Rendered:
        template, where = self._template, conversation.where
        if template is None:
            raise ConfigError(f"{where}: messages require a chat template. {HOW_TO_SET}")
        conversation = conversation.with_messages()
        messages = conversation.messages
        learned = self._learned_messages(conversation)
        if not learned:
            return _Rendered("", [], False, where)
        masked, variables = self._text.masked(list(messages)), self._text.masked(dict(conversation.variables))
        is_masked = masked != list(messages) or variables != conversation.variables
        text = template.render(masked, variables, where)
        check_surrogates(text, where)
        if is_masked:
            as_it_is = template.render(messages, conversation.variables, where)
            if self._text.unmasked(text) != as_it_is:
                raise CorpusFormatError(
                    f"{where}: a message contains the text of a special token, and the chat template {template.name} "
                    "changes its output because of it, so the text cannot be told from the template's own; remove it "
                    "from the message"
                )
        turns = Turns(template, masked, variables, where, text)
        spoken = [k for k in learned if messages[k]["role"] == "assistant"]
        for k in spoken:
            turns.refuse_unseen(k)
        spans = self._spans(turns, conversation, learned, variables, masked)
        if not self._learn_thoughts:
            for k in spoken:
                self._check_tags(messages[k]["content"], masked[k]["content"], where, k)
                spans = _without(spans, turns.thoughts(k))
        return _Rendered(text, spans, is_masked, where)

    def _check_tags(self, content: str | None, masked: str | None, where: str, k: int) -> None:
        if "</think>" in (content or "") and "</think>" not in (masked or ""):
            raise CorpusFormatError(
                f"{where}: the reasoning in the content of message {k} cannot be excluded from the loss, because "
                "</think> is a special token of the tokenizer; move the reasoning to reasoning_content"
            )

    def _learned_messages(self, conversation: Conversation) -> list[int]:
        """Numbers of the messages to learn; of any role in "all"."""
        if self._learned_turns == "all":
            return [k for k, weight in enumerate(conversation.weights) if weight]
        spoken = [k for k, message in enumerate(conversation.messages) if message["role"] == "assistant"]
        spoken = [k for k in spoken if k >= conversation.num_prompt]
        return [k for k in (spoken[-1:] if self._learned_turns == "last" else spoken) if conversation.weights[k]]

    def _spans(
        self,
        turns: Turns,
        conversation: Conversation,
        learned: list[int],
        variables: Mapping[str, Any],
        masked: Sequence[Message],
    ) -> list[Span]:
        template, text = self._template, turns.text
        assert template is not None, "conversations are rendered with a template"
        if self._learned_turns == "all":
            weights = enumerate(conversation.weights)
            return _without([(0, len(text))], [turns.whole_message(k) for k, weight in weights if not weight])
        if not template.has_generation(variables):
            return turns.learned(learned)
        blocks = template.generated(masked, variables, conversation.where, text)
        if len(learned) == sum(message["role"] == "assistant" for message in masked):
            return blocks
        chosen = turns.learned(learned)
        return [block for block in blocks if any(block[0] < end and start < block[1] for start, end in chosen)]


def _without(spans: Sequence[Span], holes: Sequence[Span]) -> list[Span]:
    """The spans, which are in order, without the holes."""
    left = list(spans)
    for start, end in holes:
        cut = [part for a, b in left for part in ((a, min(b, start)), (max(a, end), b))]
        left = [(a, b) for a, b in cut if a < b]
    return left


def _mask(tokens: Tokens, rendered: _Rendered) -> npt.NDArray[np.uint8]:
    """1 for each token that shares a character with a span."""
    is_learned = np.zeros(len(rendered.text) + 1, np.int64)
    for start, end in rendered.spans:
        is_learned[start + 1 : end + 1] = 1
    before = np.cumsum(is_learned)  # before[i]: learned characters among the first i
    start, end = tokens.offsets.T
    mask: npt.NDArray[np.uint8] = (before[end] > before[start]).astype(np.uint8)
    return mask


def _supervised(ids: npt.NDArray[np.int64], mask: npt.NDArray[np.uint8]) -> Encoded | None:
    return (ids, mask) if mask.any() else None
