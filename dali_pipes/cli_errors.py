"""What the user can mend, on standard error as one line, with exit status 2."""

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from dali_pipes.errors import DaliPipesError

USER_ERROR = 2


@contextmanager
def errors_as_one_line() -> Iterator[None]:
    """Around the body of a command."""
    try:
        yield
    except (DaliPipesError, ModuleNotFoundError) as error:  # the second: no torch
        typer.echo("error: " + " ".join(line.strip() for line in str(error).splitlines()), err=True)
        raise typer.Exit(USER_ERROR) from None
