"""Everything that only a CUDA host can show, in one command: parity, lifetimes, cost, training, faults.

    python benchmarks/gpu_check.py                          # under 8 minutes, the sum of the limits
    python benchmarks/gpu_check.py --parts parity,lifetime
    python benchmarks/gpu_check.py --dry                    # everything on a CPU, at tiny sizes

Each part runs in a separate process, for at most its time limit. Its results are kept whatever happens to it, and the
next part runs. It needs torch, CuPy, DALI, NumPy and pydantic, wherever Python finds them; this checkout need not be
installed. See `benchmarks/README.md`.
"""

import argparse
import json
import signal
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

from gpu.report import about, failures, save, summary, table
from gpu.runner import Part, run_part
from gpu.session import Record

PARTS = (
    Part("environment", "gpu.environment", 30),
    Part("parity", "gpu.parity", 50),
    Part("features", "gpu.features", 80),
    Part("lifetime", "gpu.lifetime", 40),
    Part("cost", "gpu.cost", 85),
    Part("training", "gpu.training", 95),
    Part("faults", "gpu.faults", 45),
    Part("children", "gpu.children", 55),
)


def main(arguments: list[str] | None = None) -> int:
    """Check, print a table, write a JSON; the last line is one JSON line.

    Returns 1 if a check failed or a part did not finish; a figure that misses its target is only reported.
    """
    names = ",".join(part.name for part in PARTS)
    parser = argparse.ArgumentParser(description="Check everything that only a CUDA host can show.")
    parser.add_argument("--parts", default=names, help="parts to run, separated by commas (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_check"), help="folder for the JSON")
    parser.add_argument("--seconds-scale", type=float, default=1.0, help="factor for the time limits of the parts")
    parser.add_argument("--dry", action="store_true", help="run on a CPU at tiny sizes; figures are meaningless")
    given = parser.parse_args(arguments)
    wanted = [name.strip() for name in given.parts.split(",")]
    unknown = set(wanted) - {part.name for part in PARTS}
    if unknown:
        parser.error(f"unknown parts {sorted(unknown)}; expected some of {names}")
    if given.seconds_scale <= 0:
        parser.error(f"--seconds-scale is {given.seconds_scale}, expected more than 0")
    chosen = [replace(part, limit_s=part.limit_s * given.seconds_scale) for part in PARTS if part.name in wanted]
    left_out = [part.name for part in PARTS if part.name not in wanted]
    return 0 if run_parts(chosen, given.out, left_out, dry=given.dry) else 1


def run_parts(parts: list[Part], out: Path, left_out: list[str], *, dry: bool) -> bool:
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
            report = {"benchmark": "gpu_check", "about": about(outcomes), "summary": summary(outcomes, left_out)}
            save(out / "gpu_check.json", json.dumps(report | {"parts": outcomes}, indent=1) + "\n")
    found = summary(outcomes, left_out)
    print(*table(outcomes), *failures(outcomes), sep="\n")
    print("Not run:", *(found["not_run"] or ["nothing was left out"]), sep="\n  ")
    print(json.dumps({"benchmark": "gpu_check", **_short(about(outcomes)), **found}), flush=True)
    return bool(found["ok"])


def _short(machine: Record) -> Record:
    return {name: machine.get(name) for name in ("date", "dry", "card", "driver", "cuda_runtime")}


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the running part is ended, too
    sys.exit(main())
