"""Median, low and high of figures over the rounds, and their table."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rich.table import Table

PARTS = ("median", "low", "high")


class Column(NamedTuple):
    """A figure in a table."""

    key: str
    heading: str
    factor: float
    """From the unit of the figure to that of the heading."""
    form: str


def spread(rounds: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """The figures of at least one round, by `PARTS`."""
    picks: tuple[Callable[[list[float]], float], ...] = (statistics.median, min, max)
    return {
        part: {key: pick([one[key] for one in rounds]) for key in rounds[0]}
        for part, pick in zip(PARTS, picks, strict=True)
    }


def spread_table(
    title: str, first: str, columns: Sequence[Column], entries: Iterable[tuple[str, Mapping[str, Any]]]
) -> Table:
    """A row for each label and entry: "failed" if it does not have figures, "-" for one that it does not have."""
    grid = Table(title=title)
    grid.add_column(first, no_wrap=True)
    for column in columns:
        grid.add_column(column.heading, justify="right", no_wrap=True)
    for label, entry in entries:
        grid.add_row(label, *(_cell(entry, column) for column in columns))
    return grid


def _cell(entry: Mapping[str, Any], column: Column) -> str:
    if "median" not in entry:
        return "failed"
    if column.key not in entry["median"]:
        return "-"
    return "{} ({} to {})".format(*(column.form.format(entry[part][column.key] * column.factor) for part in PARTS))
