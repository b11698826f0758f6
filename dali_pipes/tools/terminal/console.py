"""Standard output of the command: what is shown, and what is made harmless before."""

import json
from typing import Any

from rich.console import Console


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # the library would exit with the status that means problems found


def output() -> Console:
    """Standard output, with colours on a terminal. Markup, emoji codes and highlighting of plain text are off."""
    return _Output(markup=False, emoji=False, highlight=False, soft_wrap=False)


def show_json(report: dict[str, Any]) -> None:
    """One object on standard output, in ASCII: what is no text, such as a byte of a file name, is an escape."""
    print(json.dumps(report, allow_nan=False))


def printable(text: str) -> str:
    """`text` with escapes for what moves the cursor, colours, hides or has no glyph: controls, surrogates, newlines."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode("ascii") for c in text)
