"""A line of the log of a run: one JSON object, with figures by name."""

import json
from typing import Any

EXAMPLE = '{"step": 100, "loss": 3.21, "tokens_per_second": 412345}'
STEPS = ("step", "_step", "global_step", "train/global_step", "iteration")
"""Names of the step, the first that a line has."""


def object_of(line: bytes) -> dict[str, Any] | None:
    """The object in a line; None if the line is anything else."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def is_named(whole: str, name: str) -> bool:
    """Whether a figure has a name, also after a prefix such as `data/`; `val/loss` is not a `loss`."""
    return whole == name or (whole.endswith(f"/{name}") and not whole.startswith(("val", "eval")))
