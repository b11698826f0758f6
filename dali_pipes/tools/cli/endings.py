"""How a command ends: a mistake of the user is one line on standard error and status 2, never a traceback."""

import contextlib
import io
import os
import sys
from collections.abc import Iterator

import typer

from dali_pipes.errors import DaliPipesError
from dali_pipes.runtime.messages import printable

PROBLEMS_FOUND = 1
USER_ERROR = 2
INTERRUPTED = 130
PIPE_CLOSED = 141
"""The last two are what a shell reports for a process that SIGINT or SIGPIPE ended."""

EXIT_STATUS = (
    "Exit status: 0 success; 1 `check` found problems; 2 usage or input error, explained on standard error; "
    "130 interrupted; 141 the reader of the output closed the pipe."
)


@contextlib.contextmanager
def errors_as_one_line() -> Iterator[None]:
    """Around the body of a command. Ctrl-C gives status 130, a closed pipe status 141."""
    if sys.stdout is None:  # closed by the shell, by a user who wants only the exit status
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal that is not UTF-8 shows escapes
            stream.reconfigure(errors="backslashreplace")
    try:
        yield
        sys.stdout.flush()
    except (DaliPipesError, ModuleNotFoundError) as error:  # the second: an optional package
        _say("error: " + " ".join(printable(line.strip()) for line in str(error).splitlines()))
        raise typer.Exit(USER_ERROR) from None
    except KeyboardInterrupt:
        _say("interrupted")
        raise typer.Exit(INTERRUPTED) from None
    except BrokenPipeError:
        _drop_output()
        raise typer.Exit(PIPE_CLOSED) from None
    except OSError as error:
        _drop_output()
        where = "standard output" if error.filename is None else printable(str(error.filename))
        _say(f"error: {where}: {error.strerror or error}")
        raise typer.Exit(USER_ERROR) from None


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        typer.echo(text, err=True)


def _drop_output() -> None:
    """The interpreter flushes the buffer when it exits, which would fail a second time."""
    with contextlib.suppress(OSError), open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), sys.stdout.fileno())
