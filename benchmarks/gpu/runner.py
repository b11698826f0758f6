"""Run a part in a process and a session of its own, for no longer than its limit, whatever happens in it."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from gpu.session import Record

_BENCHMARKS = Path(__file__).resolve().parents[1]
_POLL_S = 0.05
_TAIL_CHARACTERS = 6000
_WAIT_AFTER_KILL_S = 10.0


@dataclass(frozen=True)
class Part:
    """A module with `CHECKS`, and the seconds that its process gets, imports included."""

    name: str
    module: str
    limit_s: float


def run_part(part: Part, folder: Path, *, dry: bool, log: Callable[[str], None]) -> Record:
    """What the part left: its status, its checks, and the end of its output where it did not end well.

    Blocks for at most the limit and a moment. Files that parts share, and this part's own, are in `folder`.
    """
    task_path, records_path, output_path = (folder / f"{part.name}.{end}" for end in ("task", "records", "output"))
    records_path.touch()
    task = {"module": part.module, "folder": str(folder), "records": str(records_path)}
    task_path.write_text(json.dumps(task | {"limit_s": part.limit_s, "dry": dry}))
    started = time.monotonic()
    records: list[Record] = []
    with output_path.open("wb") as output, records_path.open() as lines, _process(task_path, output) as process:
        running = True
        while running:
            # Looked at before the records are read: those of the last moment are not missed.
            running = process.poll() is None and time.monotonic() - started < part.limit_s
            for record in _new_records(lines):
                records.append(record)
                text = progress_text(record)
                if text:
                    log(f"{part.name}: {text}")
            if running:
                time.sleep(_POLL_S)
        code = process.poll()
    why = _why_failed(code, part.limit_s, ended=any("end" in record for record in records))
    done = {record["done"] for record in records if "done" in record}
    planned: list[str] = next((record["plan"] for record in records if "plan" in record), [])
    outcome: Record = {
        "name": part.name,
        "status": "failed" if why else "done",
        "why": why,
        "seconds": round(time.monotonic() - started, 1),
        "limit_s": part.limit_s,
        "about": next((record["about"] for record in records if "about" in record), None),
        "checks": [record for record in records if "check" in record],
        "not_done": [name for name in planned if name not in done],
        "seconds_of_checks": {record["done"]: round(record["seconds"], 2) for record in records if "done" in record},
    }
    if why or any(check["result"] == "fail" for check in outcome["checks"]):
        outcome["output_tail"] = output_path.read_text(errors="replace")[-_TAIL_CHARACTERS:]
    if why:
        log(f"{part.name}: FAILED, {why}; not done: {', '.join(outcome['not_done']) or 'nothing'}")
    return outcome


def progress_text(record: Record) -> str:
    """One line for a record, empty where there is nothing to show."""
    if "check" in record:
        return f"{record['check']}: {value_text(record)} {record['wanted']} {record['result']}".rstrip()
    return ""


def value_text(check: Record) -> str:
    """A check's value with its unit, on one line."""
    value = check["value"]
    text = f"{value:.4g}" if isinstance(value, float) else " ".join(str(value).split())
    return f"{text} {check.get('unit', '')}".rstrip()


def _why_failed(code: int | None, limit_s: float, *, ended: bool) -> str:
    if code is None:
        return f"not finished at its limit of {limit_s:.0f} s"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    if code > 0 or not ended:
        return f"exited with code {code}" + (" after its last check" if ended else "")
    return ""


@contextlib.contextmanager
def _process(task_path: Path, output: IO[bytes]) -> Iterator["subprocess.Popen[bytes]"]:
    """The child; leaving kills all that is left of its session, workers included."""
    paths = [str(_BENCHMARKS), str(_BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-m", "gpu.child", str(task_path)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        # A process that is stuck in the driver may not even die; the next part goes on all the same.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_WAIT_AFTER_KILL_S)


def _new_records(lines: IO[str]) -> Iterator[Record]:
    """Whole lines that were added since the last call."""
    while True:
        position = lines.tell()
        line = lines.readline()
        if not line.endswith("\n"):
            lines.seek(position)
            return
        record: dict[str, Any] = json.loads(line)
        yield record
