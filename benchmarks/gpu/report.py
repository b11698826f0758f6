"""The table, the JSON and the last line."""

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from gpu.runner import value_text
from gpu.session import Record

_TABLE_WIDTH = 150
_CELL_CHARACTERS = 120


def wide_console() -> Console:
    """A console as wide as the table needs, also where the output goes to a file."""
    console = Console()
    return console if console.width >= _TABLE_WIDTH else Console(width=_TABLE_WIDTH)


def about(parts: list[Record]) -> dict[str, Any]:
    """The card and versions, as the first part that reached the device says."""
    return next((part["about"] for part in parts if part["about"]), {})


def summary(parts: list[Record]) -> dict[str, Any]:
    """Names by result; `ok` is false where something is wrong, and says nothing about figures that were missed."""
    by_result: dict[str, list[str]] = {"pass": [], "missed": [], "fail": [], "": []}
    for part in parts:
        for check in part["checks"]:
            by_result[check["result"]].append(f"{part['name']}: {check['check']}")
    failed_parts = {part["name"]: part["why"] for part in parts if part["status"] != "done"}
    not_done = [f"{part['name']}: {name}" for part in parts for name in part["not_done"]]
    return {
        "ok": not by_result["fail"] and not failed_parts,
        "passed": len(by_result["pass"]),
        "missed": by_result["missed"],
        "failed": by_result["fail"],
        "failed_parts": failed_parts,
        "not_done": not_done,
    }


def table(parts: list[Record]) -> Table:
    """Every check of every part."""
    grid = Table(title="gpu_check")
    for heading in ("part", "check", "value", "wanted", "result"):
        grid.add_column(heading, overflow="fold")
    styles = {"fail": "bold red", "missed": "yellow", "pass": "green"}
    for part in parts:
        for check in part["checks"]:
            value = value_text(check)
            cells = (part["name"], check["check"], value[:_CELL_CHARACTERS], check["wanted"], check["result"])
            grid.add_row(*(_plain(cell) for cell in cells), style=styles.get(check["result"]))
        for name in part["not_done"]:
            grid.add_row(part["name"], _plain(name), "", "", "NOT DONE", style="bold red")
        status = f"{part['seconds']} s of {part['limit_s']:.0f}"
        grid.add_row(part["name"], "the whole part", status, _plain(part["why"]), part["status"], end_section=True)
    return grid


def show_failures(console: Console, parts: list[Record]) -> None:
    """Details of what is wrong, with the end of the output of parts that did not end well."""
    for part in parts:
        for check in part["checks"]:
            if check["result"] == "fail":
                text = f"FAILED {part['name']}: {check['check']}: {check['value']}\n{check.get('details', '')}"
                console.print(text, markup=False, highlight=False)
        if part["status"] != "done":
            console.print(f"FAILED {part['name']}: {part['why']}", markup=False, highlight=False)
            console.print(part.get("output_tail", ""), markup=False, highlight=False)


def save(path: Path, text: str) -> None:
    """Write it whole or not at all."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.rename(path)


def _plain(text: str) -> str:
    """Brackets are text here, not markup."""
    return text.replace("[", r"\[")
