"""A log that a run is writing, one JSON object a line: new lines as they come, and what the last ones say."""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dali_pipes.errors import ConfigError
from dali_pipes.runtime.messages import counted
from dali_pipes.tools.reports.log_lines import EXAMPLE, STEPS, is_named, object_of

_TAIL_BYTES = 1 << 18
"""Of a log that exists already, no more than this is read."""
_MOST_WARNINGS = 3
_TIME = "wall_seconds"
_TEXTS = ("warning", "advice")


@dataclass(frozen=True)
class RunNow:
    """What the newest lines of a log say: the last value of each figure. None, or empty, for what they do not have."""

    lines: int
    """Lines read so far; of a log that was long at the start, only those of its end."""
    step: float | None
    epoch: float | None
    tokens_per_second: float | None
    """Between the last two lines, if they have the counters; else as the last line has it."""
    data_wait_ratio: float | None
    ready_blocks: float | None
    loss: float | None
    mfu: float | None
    model_flops_per_s: float | None
    shares: Mapping[str, float]
    """Of the rows of all sources, by name: from `source_rows`."""
    warnings: tuple[str, ...]
    """The last ones, oldest first."""

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {**asdict(self), "shares": dict(self.shares), "warnings": list(self.warnings)}


class FollowedLog:
    """Reads what is added to a log. `path` must exist; a file that becomes shorter is read again from its start."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._rest = b""
        self._last: dict[str, Any] = {}
        """The newest value by name: lines may have different figures."""
        self._timed: list[dict[str, Any]] = []
        """The last two lines with the time that has passed."""
        self._warnings: list[str] = []
        self._lines = 0
        self._others = 0
        """Lines that are not JSON objects."""
        size = self._size()
        self._offset = max(0, size - _TAIL_BYTES)
        self._is_cut = self._offset > 0
        """Whether reading begins within a line."""

    def poll(self) -> bool:
        """Read what is new; whether there was a new line. Raises `ConfigError` if the file cannot be read."""
        if self._size() < self._offset:
            self._offset, self._rest, self._last, self._timed = 0, b"", {}, []
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
        except OSError as error:
            raise self._unreadable(error) from error
        self._offset += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        if self._is_cut and lines:
            del lines[0]
            self._is_cut = False
        for line in lines:
            self._take(line)
        return bool(lines)

    def check(self) -> None:
        """Raise `ConfigError` if there is something in the file, but no line of a log so far."""
        if self._lines == 0 and (self._others or self._rest):
            raise ConfigError(
                f"{self.path}: expected one JSON object per line, such as {EXAMPLE}; found "
                f"{counted(self._others + bool(self._rest), 'line')}, none of them a JSON object"
            )

    def now(self) -> RunNow:
        """What the lines read so far say."""
        last = self._last
        rows = last.get("source_rows")
        counts = {name: value for name, value in rows.items() if _is_number(value)} if isinstance(rows, dict) else {}
        total = sum(counts.values())
        return RunNow(
            lines=self._lines,
            step=next((step for name in STEPS if (step := _figure(last, name)) is not None), None),
            epoch=_figure(last, "epoch"),
            tokens_per_second=self._rate("tokens", "tokens_per_second"),
            data_wait_ratio=self._rate("data_wait_seconds", "data_wait_ratio"),
            ready_blocks=_figure(last, "ready_blocks"),
            loss=_figure(last, "loss"),
            mfu=_figure(last, "mfu"),
            model_flops_per_s=_figure(last, "model_flops_per_s"),
            shares={name: count / total for name, count in counts.items()} if total > 0 else {},
            warnings=tuple(self._warnings),
        )

    def _take(self, line: bytes) -> None:
        record = object_of(line)
        if record is None:
            self._others += 1
            return
        self._lines += 1
        self._last |= record
        if _figure(record, _TIME) is not None:
            self._timed = [*self._timed[-1:], record]
        for name in _TEXTS:
            text = record.get(name)
            if isinstance(text, str) and text and text not in self._warnings[-1:]:
                self._warnings = [*self._warnings, text][-_MOST_WARNINGS:]

    def _rate(self, amount: str, otherwise: str) -> float | None:
        figures = [(_figure(record, amount), _figure(record, _TIME)) for record in self._timed]
        if len(figures) == 2:
            (before, began), (after, ended) = figures
            if before is not None and began is not None and after is not None and ended is not None and ended > began:
                return (after - before) / (ended - began)
        return _figure(self._last, otherwise)

    def _size(self) -> int:
        try:
            return os.stat(self.path).st_size
        except OSError as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: OSError) -> ConfigError:
        return ConfigError(f"{self.path}: cannot read the log: {error.strerror}")


def _figure(record: Mapping[str, Any], name: str) -> float | None:
    """A number by its name."""
    for whole, value in record.items():
        if is_named(whole, name) and _is_number(value):
            return float(value)
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
