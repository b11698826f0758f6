"""Standard output and standard error of the command: what is written where, and how a command ends."""

import contextlib
import io
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console

from dali_pipes.errors import DaliPipesError

USER_ERROR = 2
INTERRUPTED = 130
PIPE_CLOSED = 141
"""As a shell reports a process that SIGINT or SIGPIPE ended."""


class _Output(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError  # `ends_well` knows what to do


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


@contextlib.contextmanager
def ends_well() -> Iterator[None]:
    """Around a command: no traceback for what is not a fault of the program.

    What the user can mend is one line on standard error and status 2, Ctrl-C status 130, and a reader of standard
    output that has gone away status 141.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that is not UTF-8 shows escapes
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except (DaliPipesError, ModuleNotFoundError) as error:  # the second: an optional package
        _say("error: " + " ".join(printable(line.strip()) for line in str(error).splitlines()))
        raise SystemExit(USER_ERROR) from None
    except KeyboardInterrupt:
        _say("interrupted")
        raise SystemExit(INTERRUPTED) from None
    except BrokenPipeError:
        _drop_output()
        raise SystemExit(PIPE_CLOSED) from None
    except OSError as error:
        _drop_output()
        where = "standard output" if error.filename is None else printable(os.fsdecode(error.filename))
        _say(f"error: {where}: {error.strerror or error}")
        raise SystemExit(USER_ERROR) from None


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _drop_output() -> None:
    """What is left in the buffer would be written, and fail once more, when the interpreter ends."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), sys.stdout.fileno())
