"""Do something at a line of our own code, as a signal handler does, or an interrupt, in whatever it comes to."""

import linecache
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

import dali_pipes

_OURS = str(Path(dali_pipes.__file__).parent)

Line = tuple[str, int]
"""File and number."""


class AtLine:
    """A context in which `action` is called, once, when this thread comes to a line for the first time.

    Lines of `with` are left out when they are come to again: at their end, where the interpreter takes no signal, a
    lock would stay locked. So are those of `yield`, and __del__, whose errors go nowhere.
    """

    def __init__(self, line: Line | None = None, action: Callable[[], object] = lambda: None) -> None:
        self.lines: list[Line] = []
        """All that were come to, in that order."""
        self.acted = False
        self._line, self._action = line, action

    def __enter__(self) -> Self:
        self._before = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        sys.settrace(self._before)

    def _trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if event == "call":
            return self._trace if code.co_filename.startswith(_OURS) and code.co_name != "__del__" else None
        line = code.co_filename, frame.f_lineno
        if event == "line" and not self.acted and line not in self.lines:
            self.lines.append(line)
            if line == self._line:
                self.acted = True
                sys.settrace(self._before)
                self._action()
        return self._trace


def lines_of(call: Callable[[], object]) -> list[Line]:
    """The lines of ours that a call comes to, without those of `yield`."""
    with AtLine() as survey:
        call()
    return [line for line in survey.lines if not linecache.getline(*line).lstrip().startswith("yield")]
