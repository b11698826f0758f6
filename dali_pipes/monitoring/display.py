"""Objects whose `repr` is a small table, and whose display in a notebook is one in HTML.

TokenLoader
  corpus    data/train_000.bin and 102 more files: llmc, 10,300,000,000 tokens
  epoch     10,058,593 rows, 78,582 steps of 8 ranks x (16, 1024)
"""

from typing import NamedTuple


class Table(NamedTuple):
    title: str
    rows: list[tuple[str, str]]
    """Name and value."""


class ShownAsTable:
    """Base class: an object that Python shows as its `_table()`."""

    __slots__ = ()

    def _table(self) -> Table:
        raise NotImplementedError

    def __repr__(self) -> str:
        title, rows = self._table()
        width = max((len(name) for name, _ in rows), default=0)
        return "\n".join([title, *(f"  {name:<{width}}  {value}" for name, value in rows)])

    def _repr_html_(self) -> str:
        import html  # for notebooks alone

        title, rows = self._table()
        cell = '<td style="text-align: left">'
        lines = "".join(f"<tr>{cell}{html.escape(n)}</td>{cell}{html.escape(v)}</td></tr>" for n, v in rows)
        return f"<div><b>{html.escape(title)}</b><table>{lines}</table></div>"
