"""A turn whose calls, or only thoughts, a template does not show is not learned as a turn without them."""

from datetime import UTC, datetime
from typing import Any

import pytest
from chat_cases import FAMILIES, TOKENS, Message, tokenizer

from dali_pipes.errors import CorpusFormatError
from dali_pipes.text.chat import ChatEncoder, ChatTemplate, parse_conversation

SHOWS_CALLS = "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{{ m.tool_calls or '' }}|{% endfor %}"
SHOWS_THOUGHTS = "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}{{ m.reasoning or '' }}|{% endfor %}"
SHOWS_NONE = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}"  # and writes None for no content
NEEDS_CONTENT = "{% for m in messages %}{{ m.role + ': ' + (m.content or m.tool_calls[0].name) + '|' }}{% endfor %}"


ASKED: Message = {"role": "user", "content": "a"}
SAID: Message = {"role": "assistant", "content": "b"}


def encode(source: str, learn: Any, *messages: Message) -> Any:
    made = ChatEncoder(tokenizer(), ChatTemplate("a template", {"default": source}, TOKENS, datetime.now(UTC)), learn)
    return made.encode_batch([parse_conversation({"messages": list(messages)}, "a.jsonl:1")])[0]


@pytest.mark.parametrize("learn", ["assistant", "last", "all"])
@pytest.mark.parametrize("content", [None, "", " "])
@pytest.mark.parametrize(
    ("source", "extra", "unseen"),
    [
        (SHOWS_CALLS, {"tool_calls": [{"name": "add"}]}, None),
        (SHOWS_CALLS, {"function_call": {"name": "add"}}, "function_call"),
        (SHOWS_CALLS, {"reasoning": "so"}, "reasoning"),
        (SHOWS_CALLS, {"reasoning": "so", "tool_calls": [{"name": "add"}]}, None),
        (SHOWS_THOUGHTS, {"reasoning": "so"}, None),
        (SHOWS_THOUGHTS, {"reasoning": "so", "tool_calls": [{"name": "add"}]}, "tool_calls"),
        (SHOWS_NONE, {"tool_calls": [{"name": "add"}]}, "tool_calls"),
        (SHOWS_NONE, {"tool_calls": [{"name": "<|im_end|>"}]}, "tool_calls"),
        (FAMILIES["generation"].source.replace("m.content", "(m.content or '')"), {"tool_calls": [1]}, "tool_calls"),
    ],
)
def test_a_turn_of_which_nothing_is_shown_is_refused(
    source: str, extra: dict[str, Any], unseen: str | None, content: str | None, learn: str
) -> None:
    """Calls always; thoughts where the turn has nothing else. A turn that is not learned is left alone."""
    turn: Message = {"role": "assistant", "content": content, **extra}
    if unseen is None:
        assert encode(source, learn, ASKED, turn) is not None
        return
    with pytest.raises(CorpusFormatError, match=rf"a\.jsonl:1: .*a template .*{unseen} of message 1"):
        encode(source, learn, ASKED, turn)
    assert encode(source, learn, ASKED, turn | {"weight": 0}, ASKED, SAID) is not None
    if unseen == "reasoning":
        assert encode(source, learn, ASKED, turn | {"content": "x"}) is not None
    else:
        with pytest.raises(CorpusFormatError, match=f"{unseen} of message 1"):
            encode(source, learn, ASKED, turn | {"content": "x"})


def test_a_template_that_needs_calls_shows_them() -> None:
    """It fails without them, which is no reason to refuse."""
    assert encode(NEEDS_CONTENT, "all", ASKED, {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]})
