"""What a section of the page consists of: facts, charts, tables, and remarks, as plain data.

A number that a command prints with `--json` has the same name here as there, and its value is kept beside its text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from dali_pipes.markup import number
from dali_pipes.markup.render import percent

Unit = Literal["number", "share", "text"]


class Value(NamedTuple):
    """A value, and how it is shown."""

    raw: Any
    unit: Unit = "number"

    @property
    def text(self) -> str:
        """`1,203,874`, `12.3%`, or the text itself."""
        if self.unit == "text":
            return "\N{EN DASH}" if self.raw is None else str(self.raw)
        return percent(self.raw) if self.unit == "share" else number(self.raw)


class Fact(NamedTuple):
    """A labeled value. `key` is its name in the JSON of the command that also prints it."""

    key: str
    label: str
    value: Value
    is_sample: bool = False


class Column(NamedTuple):
    key: str
    label: str
    unit: Unit = "number"


@dataclass(frozen=True)
class DataTable:
    """Rows by column. `key` names the table in the page."""

    key: str
    caption: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Value, ...], ...]
    is_sample: bool = False
    left_out: int = 0
    """Rows that are not shown."""
    is_narrow: bool = False
    """Whether it fits beside a chart."""


def table_of(
    key: str,
    caption: str,
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Any]],
    *,
    most: int = 64,
    is_sample: bool = False,
    is_narrow: bool = False,
) -> DataTable:
    """A table of the first `most` of some records, in the order of the columns."""
    cells = tuple(tuple(Value(row[column.key], column.unit) for column in columns) for row in rows[:most])
    return DataTable(key, caption, tuple(columns), cells, is_sample, max(0, len(rows) - most), is_narrow)


class Legend(NamedTuple):
    name: str
    color: int
    """Number of the series in the style sheet."""


@dataclass(frozen=True)
class Chart:
    """A chart as SVG. `description` says in words what it shows, for those who do not see it."""

    key: str
    title: str
    svg: str
    description: str
    legend: tuple[Legend, ...] = ()
    is_sample: bool = False


@dataclass(frozen=True)
class Part:
    """A part of a section, with a heading where there are several."""

    key: str
    heading: str = ""
    facts: tuple[Fact, ...] = ()
    charts: tuple[Chart, ...] = ()
    tables: tuple[DataTable, ...] = ()
    notes: tuple[str, ...] = ()
    problems: tuple[tuple[str, str], ...] = ()
    """Kind and message."""
    problems_not_listed: int = 0


@dataclass(frozen=True)
class Section:
    """A section of the page. `missing`: why some or all of it could not be made."""

    key: str
    title: str
    about: str = ""
    parts: tuple[Part, ...] = ()
    missing: tuple[str, ...] = ()
    batches: tuple[str, ...] = field(default=(), repr=False)
    """Batches as HTML, each from its template."""

    def facts(self) -> dict[str, Any]:
        """Every fact by part and name, for JSON."""
        return {
            f"{part.key}.{fact.key}" if part.key else fact.key: fact.value.raw
            for part in self.parts
            for fact in part.facts
        }
