"""Tools as chat templates expect them: descriptions as objects, and the arguments of a call as an object or as text.

The arguments of a call come as an object, or, as in the API of OpenAI, as its JSON text. Some templates need the one
(`arguments | tojson`, `arguments.items()`), some the other (`'...' + arguments`, `{{ arguments }}`). They get a value
that is the object, and the text wherever a text is used:

    {"city": "Oslo"} or '{"city": "Oslo"}'      arguments | tojson     {"city": "Oslo"}
                                                arguments.city         Oslo
                                                {{ arguments }}        {"city": "Oslo"}       as it was written
"""

import json
from collections.abc import Mapping
from typing import Any

from dali_pipes.errors import CorpusFormatError
from dali_pipes.fields import holds_nothing

_MOST_ENCODINGS = 4
_MOST_SHOWN = 60


class Arguments(dict[str, Any]):
    """The arguments of a call: an object that is its JSON text where a template prints it or treats it as a text."""

    def __init__(self, values: Mapping[str, Any], text: str) -> None:
        super().__init__(values)
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __add__(self, other: str) -> str:
        return self.text + other if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return other + self.text if isinstance(other, str) else NotImplemented

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):
            return self.text == other
        return super().__eq__(other) and self.text == getattr(other, "text", self.text)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None

    def __getitem__(self, key: Any) -> Any:
        return self.text[key] if isinstance(key, slice) else super().__getitem__(key)

    def __getattr__(self, name: str) -> Any:
        """`strip`, `startswith` and so on, of the text; a template asks for arguments of such names first."""
        if name.startswith("_") or name == "text" or name in self or not hasattr(str, name):
            raise AttributeError(name)
        return getattr(self.text, name)


def parsed_calls(calls: Any, where: str) -> Any:
    """`tool_calls` of a message with their arguments as `Arguments`; a JSON text of calls is decoded first.

    Raises CorpusFormatError, naming the call, for arguments that are not an object or the JSON text of one.
    """
    calls = decoded(calls, where)
    if not isinstance(calls, list):
        return calls
    return [parsed_call(decoded(call, f"{where}[{n}]"), f"{where}[{n}]") for n, call in enumerate(calls)]


def parsed_call(call: Any, where: str) -> Any:
    """The same for one call: {"name", "arguments"}, or an object with that under "function"."""
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": parsed_call(call["function"], where)}
    if call.get("arguments") is None:
        return dict(call)
    return {**call, "arguments": _arguments(call["arguments"], where)}


def parsed_tools(tools: Any, where: str) -> list[Any]:
    """Descriptions of tools, as a list, its JSON text, or a list of JSON texts; a bare function is put into an object:

        {"name": "clock", ...}      {"type": "function", "function": {"name": "clock", ...}}

    Raises CorpusFormatError for what is not a list.
    """
    tools = decoded(tools, where)
    if holds_nothing(tools):
        return []
    if not isinstance(tools, list):
        raise CorpusFormatError(f"{where} is {shown(tools)}; expected a list of tool descriptions")
    described = [decoded(tool, f"{where}[{number}]") for number, tool in enumerate(tools)]
    return [_wrapped(tool) for tool in described if not holds_nothing(tool)]


def decoded(value: Any, where: str) -> Any:
    """The value of a JSON text, None for a blank one; any other value as it is. Raises CorpusFormatError."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise CorpusFormatError(f"{where} is not valid JSON: {error}. Correct or remove it") from None


def shown(value: Any) -> str:
    """The beginning of a value and its type, for messages."""
    text = repr(value)
    short = text if len(text) <= _MOST_SHOWN else text[: _MOST_SHOWN - 3] + "..."
    return f"{short} ({type(value).__name__})"


def _arguments(found: Any, where: str) -> Arguments:
    value, text = found, None
    for _ in range(_MOST_ENCODINGS):  # some data sets encode the text once more
        if not isinstance(value, str):
            break
        text = value
        value = decoded(value, f"{where}: 'arguments'")
    if value is None or value == []:
        return Arguments({}, "{}")
    if not isinstance(value, Mapping):
        raise CorpusFormatError(
            f"{where}: 'arguments' is {shown(found)}; expected a JSON object, or the text of one. Correct or remove "
            "the conversation"
        )
    return Arguments(value, json.dumps(value, ensure_ascii=False) if text is None else text)


def _wrapped(tool: Any) -> Any:
    is_function = isinstance(tool, Mapping) and isinstance(tool.get("name"), str) and "function" not in tool
    if not is_function or tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
