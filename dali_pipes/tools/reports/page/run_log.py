"""A log of a training run, one JSON object a line, as figures by step.

    {"step": 100, "loss": 3.21, "data/tokens_per_second": 412345.0, "loss_by_source": {"web": 3.3, "code": 2.9}}

Objects within an object are read as `name/inner`. Values that are not numbers are left out.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dali_pipes.errors import ConfigError
from dali_pipes.runtime.messages import counted
from dali_pipes.tools.reports.log_lines import EXAMPLE, STEPS, object_of

_TOO_LARGE = 1e300
"""Not for a chart; infinity and NaN are not below it, either."""
_MOST_LINES = 20_000
"""Lines that are read as JSON; of a longer log evenly many of all parts."""


@dataclass(frozen=True)
class RunLog:
    """Figures by name: steps, and the values there."""

    path: Path
    lines: int
    """Lines of the file."""
    lines_read: int
    lines_wrong: int
    """Lines that were read and are not a JSON object, such as the last one of a run that writes it now."""
    last_step: float
    courses: Mapping[str, tuple[list[float], list[float]]]


def read_log(path: Path) -> RunLog:
    """Read a log; of a long one a part of the lines. Blocks. Raises `ConfigError` for a file without any figures."""
    try:
        with path.open("rb") as file:
            lines = sum(1 for _ in file)
        every = max(1, -(-lines // _MOST_LINES))
        with path.open("rb") as file:
            kept = [line for number, line in enumerate(file) if number % every == 0 or number == lines - 1]
    except OSError as error:
        raise ConfigError(f"--log {path}: cannot read the log: {error.strerror}") from error
    courses: dict[str, tuple[list[float], list[float]]] = {}
    wrong, step = 0, -1.0
    for number, line in enumerate(kept):
        if not line.strip():
            continue
        found = object_of(line)
        if found is None:
            wrong += 1
            continue
        record = dict(_numbers(found, ""))
        step = next((record[name] for name in STEPS if name in record), float(number))
        for name, value in record.items():
            if name not in STEPS:
                steps, values = courses.setdefault(name, ([], []))
                steps.append(step)
                values.append(value)
    if not courses:
        raise ConfigError(
            f"--log {path}: expected one JSON object with numbers per line, such as {EXAMPLE}; found "
            + (f"{counted(lines, 'line')}, none of them of this form" if lines else "an empty file")
        )
    return RunLog(path, lines, len(kept), wrong, step, courses)


def _numbers(record: dict[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    """The finite numbers of an object by name."""
    for name, value in record.items():
        if isinstance(value, dict) and not prefix:
            yield from _numbers(value, f"{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _TOO_LARGE:
            yield prefix + name, float(value)
