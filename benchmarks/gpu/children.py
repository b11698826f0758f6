"""Part 8: what may leave a process in ruins, each in one of its own: `python -m gpu.scenes TASK`.

A failed kernel, captures with default settings, two devices in one process, and kernels under compute-sanitizer.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from gpu.batches import ON_GPU
from gpu.session import Session

_LIMIT_S = 40.0
_END_S = 4.0
_SANITIZER = "compute-sanitizer"
_ERRORS_FOUND = 86


def failed_kernel_of_the_model(session: Session) -> None:
    """The loader's error says that a kernel before it failed, and the loader closes."""
    for on_gpu in ON_GPU:
        name = f"device-side assert in the model, {on_gpu['placement']}"
        found, problem = _child(session, "failed_kernel", _settings(session) | on_gpu)
        words = str(found.get("error", "no error"))
        if not problem and not ("device-side assert" in words and "not an error of the loader" in words):
            problem = f"the loader said: {words}"
        session.verify(name, problem)


def captures_with_default_settings(session: Session) -> None:
    """A capture right after each batch, while the next blocks are made. DALI's threads cannot be exempted from it."""
    for on_gpu in ON_GPU:
        found, problem = _child(session, "captures", _settings(session) | on_gpu)
        session.verify(f"graphs captured beside a loader, {on_gpu['placement']}", problem)
        if not problem:
            name = f"captures that failed of {found['captures']} with default settings, {on_gpu['placement']}"
            session.figure(name, found["failed"], "", at_most=0.0)


def two_devices(session: Session) -> None:
    """Loaders on two devices of one process, in turns, whichever device is current."""
    count = session.machine.devices()
    for on_gpu in ON_GPU:
        name = f"two devices in one process, {on_gpu['placement']}"
        if count < 2:
            session.not_run(name, f"{count} device is visible")
            continue
        found, problem = _child(session, "two_devices", _settings(session) | on_gpu)
        session.verify(name, problem or found["problem"])


def kernels_under_the_sanitizer(session: Session) -> None:
    """memcheck over every kernel of `dali_pipes` at small sizes; the results are compared with NumPy's, too."""
    tool = shutil.which(_SANITIZER) or shutil.which(_SANITIZER, path="/usr/local/cuda/bin:/opt/cuda/bin")
    if tool is None and not session.dry:
        session.not_run(
            "kernels under compute-sanitizer", f"{_SANITIZER} is neither on PATH nor in /usr/local/cuda/bin"
        )
        return
    around = [] if tool is None or session.dry else [tool, "--tool", "memcheck", "--error-exitcode", str(_ERRORS_FOUND)]
    found, problem = _child(session, "kernels", {}, around)
    session.verify("kernels under compute-sanitizer", problem or found["problem"])
    if session.dry:
        session.not_run("compute-sanitizer itself", "a dry run compares the kernels without it")


def _settings(session: Session) -> dict[str, Any]:
    batch_size, seq_len = session.pick((8, 1024), (2, 16))
    corpus = session.corpus("children", batch_size * seq_len * 64 + 1)
    return {"corpus": corpus, "batch_size": batch_size, "seq_len": seq_len, "seed": 8, "batches_per_run": 4}


def _child(
    session: Session, scene: str, settings: dict[str, Any], around: list[str] | None = None
) -> tuple[dict[str, Any], str]:
    """What a scene reported, and the problem if it did not end well."""
    task = {"scene": scene, "settings": settings, "dry": session.dry}
    command = [*(around or []), sys.executable, "-m", "gpu.scenes", json.dumps(task)]
    limit_s = max(1.0, session.left_s - _END_S)
    if not session.dry:
        limit_s = min(limit_s, _LIMIT_S)
    folder = Path(__file__).parents[1]
    try:
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=limit_s,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            cwd=folder,
        )
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"")[-1500:]
        return {}, f"not finished after {limit_s:.0f} s: {said.decode(errors='replace')}"
    lines = ended.stdout.splitlines()
    if ended.returncode == _ERRORS_FOUND and around:
        return {}, f"{_SANITIZER} found errors: {ended.stdout[-3000:]}"
    if ended.returncode or not lines:
        return {}, f"exit code {ended.returncode}: {ended.stderr[-1500:]}"
    reports = [line for line in lines if line.startswith("{")]  # the sanitizer prints lines of its own
    report: dict[str, Any] = json.loads(reports[-1])
    return report, ""


CHECKS = (
    failed_kernel_of_the_model,
    captures_with_default_settings,
    two_devices,
    kernels_under_the_sanitizer,
)
