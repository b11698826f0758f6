"""A line of the log of a run: one JSON object."""

import json
from typing import Any

EXAMPLE = '{"step": 100, "loss": 3.21, "tokens_per_second": 412345}'


def object_of(line: bytes) -> dict[str, Any] | None:
    """The object in a line; None if the line is anything else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None
