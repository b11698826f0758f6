"""Everything that only a CUDA host can show, in one command: parity, lifetimes, cost, training, faults.

    python benchmarks/gpu_check.py                          # under 8 minutes, the sum of the limits
    python benchmarks/gpu_check.py --parts parity,lifetime
    python benchmarks/gpu_check.py --dry                    # everything on a CPU, at tiny sizes

Each part runs in a separate process, for at most its time limit. Its results are kept whatever happens to it, and the
next part runs. See `benchmarks/README.md`.
"""

import json
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from gpu.report import about, save, show_failures, summary, table, wide_console
from gpu.runner import Part, run_part
from gpu.session import Record

PARTS = (
    Part("environment", "gpu.environment", 40),
    Part("parity", "gpu.parity", 60),
    Part("features", "gpu.features", 90),
    Part("lifetime", "gpu.lifetime", 50),
    Part("cost", "gpu.cost", 70),
    Part("training", "gpu.training", 100),
    Part("faults", "gpu.faults", 40),
)
_NAMES = ",".join(part.name for part in PARTS)


def main(
    parts: Annotated[str, typer.Option(help="parts to run, separated by commas")] = _NAMES,
    out: Annotated[Path, typer.Option(help="folder for the JSON")] = Path("runs/gpu_check"),
    seconds_scale: Annotated[float, typer.Option(min=0.01, help="factor for the time limits of the parts")] = 1.0,
    dry: Annotated[bool, typer.Option(help="run everything on a CPU at tiny sizes; figures are meaningless")] = False,
) -> None:
    """Check, print a table, write a JSON; the last line is one JSON line.

    Exit code 1 if a check failed or a part did not finish; a figure that misses its target is only reported.
    """
    wanted = [name.strip() for name in parts.split(",")]
    unknown = set(wanted) - {part.name for part in PARTS}
    if unknown:
        raise typer.BadParameter(f"unknown parts {sorted(unknown)}; expected some of {_NAMES}")
    chosen = [replace(part, limit_s=part.limit_s * seconds_scale) for part in PARTS if part.name in wanted]
    if not run_parts(chosen, out, dry=dry):
        raise typer.Exit(1)


def run_parts(parts: list[Part], out: Path, *, dry: bool) -> bool:
    """Run the parts one after another and report; returns whether all is right. The JSON is up to date after each."""
    started = time.perf_counter()

    def log(text: str) -> None:
        print(f"[{time.perf_counter() - started:6.1f} s] {text}", flush=True)

    out.mkdir(parents=True, exist_ok=True)
    outcomes: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="gpu_check_", ignore_cleanup_errors=True) as folder:
        for part in parts:
            log(f"{part.name}: at most {part.limit_s:.0f} s")
            outcomes.append(run_part(part, Path(folder), dry=dry, log=log))
            report = {"benchmark": "gpu_check", "about": about(outcomes), "summary": summary(outcomes)}
            save(out / "gpu_check.json", json.dumps(report | {"parts": outcomes}, indent=1) + "\n")
    console = wide_console()
    console.print(table(outcomes))
    show_failures(console, outcomes)
    found = summary(outcomes)
    print(json.dumps({"benchmark": "gpu_check", **_short(about(outcomes)), **found}), flush=True)
    return bool(found["ok"])


def _short(machine: Record) -> Record:
    return {name: machine.get(name) for name in ("date", "dry", "card", "driver", "cuda_runtime")}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the running part is ended, too
    typer.run(main)
