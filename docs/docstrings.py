"""An extension of griffe, which reads the docstrings of the API reference: descriptions of names become lists.

tokens:  (N,), ids                       - **tokens**: (N,), ids
bad:     int64 (1,), where the first ->  - **bad**: int64 (1,), where the first bad id is noted
         bad id is noted
"""

import re
from typing import Any

import griffe

_ENTRY = re.compile(r"((?:\*{0,2}[a-z_]\w*)(?:, \*{0,2}[a-z_]\w*)*): +(\S.*)")


def with_lists(docstring: str) -> str:
    """The docstring, in Markdown. Its first paragraph says what the whole is, and stays as it is."""
    first, *others = docstring.split("\n\n")
    return "\n\n".join([_with_powers(first), *(_as_list(other) or _with_powers(other) for other in others)])


def _with_powers(paragraph: str) -> str:
    """With `2**63` as text; to Markdown the stars are emphasis."""
    if paragraph.startswith("    "):  # code
        return paragraph
    parts = re.split(r"(`[^`]*`)", paragraph)
    return "".join(part if part.startswith("`") else part.replace("**", r"\*\*") for part in parts)


def _as_list(paragraph: str) -> str | None:
    """A list, if each line describes a name or, further to the right, continues the line before."""
    entries: list[list[str]] = []
    for line in paragraph.splitlines():
        if found := _ENTRY.fullmatch(line):
            entries.append([f"- **{found[1]}**: {_with_powers(found[2])}"])
        elif entries and line.startswith("  "):
            entries[-1].append(_with_powers(line.strip()))
        else:
            return None
    return "\n".join(" ".join(entry) for entry in entries)


class FieldLists(griffe.Extension):
    """Applies `with_lists` to every docstring."""

    def on_object(self, *, obj: griffe.Object, **others: Any) -> None:
        if obj.docstring:
            obj.docstring.value = with_lists(obj.docstring.value)
