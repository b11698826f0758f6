"""Run the command in this process, and insist on how it ended."""

import json
import re
from typing import Any

from typer.testing import CliRunner, Result

from dali_pipes.tools.cli import app


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def run_well(*arguments: object, status: int = 0) -> str:
    result = run(*arguments)
    assert result.exit_code == status, (result.exit_code, result.output, result.exception)
    assert result.stderr == ""
    return result.stdout


def run_json(*arguments: object, status: int = 0) -> dict[str, Any]:
    """The one object on standard output, which is one line of ASCII."""
    printed = run_well(*arguments, "--json", status=status)
    assert printed.isascii()
    assert re.fullmatch(r"\{.*\}\n", printed)
    found: dict[str, Any] = json.loads(printed)
    return found


def one_line_error(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 2, (result.output, result.exception)
    assert result.stdout == ""
    assert re.fullmatch(r"error: [^\n]+\n", result.stderr), result.stderr
    return result.stderr
