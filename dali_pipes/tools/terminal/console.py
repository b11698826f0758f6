"""The standard output of the command, and the escaping of text for it."""

import json
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from rich.console import Console


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # rich would exit with status 1, which means problems found


def output() -> Console:
    """Standard output, with colors on a terminal. Markup, emoji codes, and highlighting are off."""
    return _Output(markup=False, emoji=False, highlight=False, soft_wrap=False)


def show_json(report: dict[str, Any]) -> None:
    """One JSON object on standard output, in ASCII; bytes of file names that are not valid text are escaped."""
    print(json.dumps(report, allow_nan=False))


class Reported(Protocol):
    """A report of any kind."""

    def as_dict(self) -> dict[str, Any]:
        """Its content for JSON."""


Report = TypeVar("Report", bound=Reported)


def show(report: Report, in_text: Callable[[Report], None], *, as_json: bool) -> None:
    """A report as one JSON object, or as `in_text` shows it."""
    if as_json:
        show_json(report.as_dict())
    else:
        in_text(report)
