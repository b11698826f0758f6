"""The process of one part: `python -m gpu.child TASK.json`; its records go to a file, a line each, as they are made."""

import faulthandler
import importlib
import json
import sys
from pathlib import Path
from typing import Any

from gpu.session import Record, Session

_STACKS_BEFORE_END_S = 1.5


def main(task: dict[str, Any]) -> None:
    """Run the checks of the part's module."""
    faulthandler.enable()
    # A part that hangs says where, just before it is killed.
    faulthandler.dump_traceback_later(max(task["limit_s"] - _STACKS_BEFORE_END_S, 0.6 * task["limit_s"]))
    with Path(task["records"]).open("w", buffering=1) as records:

        def emit(record: Record) -> None:
            records.write(json.dumps(record) + "\n")

        session = Session(Path(task["folder"]), dry=task["dry"], limit_s=task["limit_s"], emit=emit)
        session.run(importlib.import_module(task["module"]).CHECKS)
        emit({"end": True})


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
