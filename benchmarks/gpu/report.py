"""The table, the JSON and the last line."""

from pathlib import Path
from typing import Any

from gpu.runner import value_text
from gpu.session import NOT_RUN, Record

_CELL_CHARACTERS = 100
_HEADINGS = ("part", "check", "value", "wanted", "result")


def about(parts: list[Record]) -> dict[str, Any]:
    """The card and versions, as the first part that reached the device says."""
    return next((part["about"] for part in parts if part["about"]), {})


def summary(parts: list[Record], left_out: list[str]) -> dict[str, Any]:
    """Names by result; `ok` is false where something is wrong, and says nothing about figures that were missed.

    left_out: parts that were not asked for
    """
    by_result: dict[str, list[str]] = {"pass": [], "missed": [], "fail": [], "": [], NOT_RUN: []}
    for part in parts:
        for check in part["checks"]:
            why = f": {check['value']}" if check["result"] == NOT_RUN else ""
            by_result[check["result"]].append(f"{part['name']}: {check['check']}{why}")
    failed_parts = {part["name"]: part["why"] for part in parts if part["status"] != "done"}
    not_done = [f"{part['name']}: {name}" for part in parts for name in part["not_done"]]
    return {
        "ok": not by_result["fail"] and not failed_parts,
        "passed": len(by_result["pass"]),
        "missed": by_result["missed"],
        "failed": by_result["fail"],
        "failed_parts": failed_parts,
        "not_done": not_done,
        "not_run": [*by_result[NOT_RUN], *(f"{name}: not asked for" for name in left_out)],
    }


def table(parts: list[Record]) -> list[str]:
    """Every check of every part, a line each."""
    rows = [_HEADINGS]
    for part in parts:
        for check in part["checks"]:
            value = value_text(check)[:_CELL_CHARACTERS]
            rows.append((part["name"], check["check"], value, check["wanted"], check["result"]))
        rows += [(part["name"], name, "", "", "NOT DONE") for name in part["not_done"]]
        status = f"{part['seconds']} s of {part['limit_s']:.0f}"
        rows.append((part["name"], "the whole part", status, part["why"], part["status"]))
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def failures(parts: list[Record]) -> list[str]:
    """Details of what is wrong, with the end of the output of parts that did not end well."""
    lines = []
    for part in parts:
        for check in part["checks"]:
            if check["result"] == "fail":
                text = f"FAILED {part['name']}: {check['check']}: {check['value']}"
                lines += [text, check.get("details", "")]
        if part["status"] != "done":
            lines += [f"FAILED {part['name']}: {part['why']}", part.get("output_tail", "")]
    return lines


def save(path: Path, text: str) -> None:
    """Write it whole or not at all."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.rename(path)
