"""Tools as chat templates expect them: descriptions as objects, and the arguments of a call as an object or a string.

Data sets write the arguments of a call as an object or, like the OpenAI API, as its JSON text. Some templates need the
object (`arguments | tojson`, `arguments.items()`), some the text (`'...' + arguments`, `{{ arguments }}`). They get a
value that is the object, and acts as the text wherever a string is used:

    {"city": "Oslo"} or '{"city": "Oslo"}'      arguments | tojson     {"city": "Oslo"}
                                                arguments.city         Oslo
                                                {{ arguments }}        {"city": "Oslo"}       as written
"""

import json
from collections.abc import Mapping
from typing import Any

from dali_pipes.errors import CorpusFormatError
from dali_pipes.fields import holds_nothing
from dali_pipes.text.json_values import parse_if_text, parse_list, shown

_MOST_ENCODINGS = 4


class Arguments(dict[str, Any]):
    """The arguments of a call: an object that acts as its JSON text where a template uses it as a string."""

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
        """Methods of the text, such as `strip` and `startswith`; arguments of the same names come first."""
        if name.startswith("_") or name == "text" or name in self or not hasattr(str, name):
            raise AttributeError(name)
        return getattr(self.text, name)


def parsed_calls(calls: Any, where: str) -> Any:
    """`tool_calls` of a message, or their JSON text, with the arguments as `Arguments`.

    Raises CorpusFormatError, naming the call, for arguments that are not an object or its JSON text.
    """
    calls = parse_if_text(calls, where)
    if not isinstance(calls, list):
        return calls
    return [parsed_call(call, f"{where}[{n}]") for n, call in enumerate(calls)]


def parsed_call(call: Any, where: str) -> Any:
    """The same for one call: {"name", "arguments"}, or an object with these under "function"."""
    call = parse_if_text(call, where)
    if not isinstance(call, Mapping):
        return call
    if isinstance(call.get("function"), Mapping):
        return {**call, "function": parsed_call(call["function"], where)}
    if call.get("arguments") is None:
        return dict(call)
    return {**call, "arguments": _arguments(call["arguments"], where)}


def parsed_tools(tools: Any, where: str) -> list[Any]:
    """Descriptions of tools, as a list, its JSON text, or a list of JSON texts. A bare function becomes an object:

        {"name": "clock", ...}      {"type": "function", "function": {"name": "clock", ...}}

    Raises CorpusFormatError for anything but a list.
    """
    return [_wrapped(tool) for tool in parse_list(tools, where, "a list of tools") if not holds_nothing(tool)]


def _arguments(found: Any, where: str) -> Arguments:
    value, text = found, None
    for _ in range(_MOST_ENCODINGS):  # some data sets encode the text again
        if not isinstance(value, str):
            break
        text = value
        value = parse_if_text(value, f"{where}: 'arguments'")
    if value is None or value == []:
        return Arguments({}, "{}")
    if not isinstance(value, Mapping):
        raise CorpusFormatError(
            f"{where}: 'arguments' is {shown(found)}; expected a JSON object or its text. Correct or remove the "
            "conversation"
        )
    return Arguments(value, json.dumps(value, ensure_ascii=False) if text is None else text)


def _wrapped(tool: Any) -> Any:
    is_function = isinstance(tool, Mapping) and isinstance(tool.get("name"), str) and "function" not in tool
    if not is_function or tool.get("type", "function") != "function":
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
