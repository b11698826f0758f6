"""CPU time of `from dali_pipes import TokenLoader` in a process that has imported torch and NumPy.

    python benchmarks/import_cost.py
    python benchmarks/import_cost.py --rounds 11

After torch has been imported, a few thousand more objects make Python's collector run a full collection. That is a part
of the first row; the second is the same import without a collection. Each measurement is
a new process, in turns. The last line is one JSON line.
"""

import json
import statistics
import subprocess
import sys
from typing import Annotated, Any

import typer
from comparison.report import machine, wide_console
from rich.table import Table

_IMPORT = "from dali_pipes import TokenLoader"
_PYDANTIC = "import pydantic.functional_validators, pydantic.main, pydantic.types"
STATEMENTS = {
    "TokenLoader": _IMPORT,
    "TokenLoader, no collection": f"gc.disable(); {_IMPORT}",
    "pydantic alone, no collection": f"gc.disable(); {_PYDANTIC}",
    "a full collection": "gc.collect()",
    "import dali_pipes": "import dali_pipes",
}
_SOURCE = """
import gc, time
import numpy, torch
begin, cpu_begin = time.perf_counter(), time.process_time()
{statement}
print(time.process_time() - cpu_begin, time.perf_counter() - begin)
"""


def main(rounds: Annotated[int, typer.Option(min=1, help="new processes per statement")] = 7) -> None:
    """Measure, print a table; the last line is one JSON line."""
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in STATEMENTS}
    for _ in range(rounds):
        for name, statement in STATEMENTS.items():
            command = [sys.executable, "-c", _SOURCE.format(statement=statement)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            found[name].append(tuple(map(float, done.stdout.split())))
    entries: list[dict[str, Any]] = []
    grid = Table(title="after `import numpy, torch`: median (low to high)")
    for heading in ("what", "CPU ms", "wall ms"):
        grid.add_column(heading)
    for name, times in found.items():
        entry: dict[str, Any] = {"statement": name}
        for key, column in zip(("cpu_s", "wall_s"), zip(*times, strict=True), strict=True):
            entry[key] = {"median": statistics.median(column), "low": min(column), "high": max(column)}
        entries.append(entry)
        shown = ({kind: 1e3 * value for kind, value in entry[key].items()} for key in ("cpu_s", "wall_s"))
        grid.add_row(name, *("{median:.1f} ({low:.1f} to {high:.1f})".format(**one) for one in shown))
    wide_console().print(grid)
    print(json.dumps({"benchmark": "import_cost", "machine": machine(), "rounds": rounds, "entries": entries}))


if __name__ == "__main__":
    typer.run(main)
