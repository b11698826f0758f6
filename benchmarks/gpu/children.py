"""Part 8: what may leave a process in ruins, each in a separate process: `python -m gpu.scenes TASK`.

A failed kernel, captures with default settings, two devices in one process, and kernels under compute-sanitizer.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from gpu.batches import ON_GPU
from gpu.session import Session

_END_S = 4.0
_SANITIZER = "compute-sanitizer"
_ERRORS_FOUND = 86


def children(session: Session) -> None:
    """All together, so that their imports overlap."""
    devices = session.machine.devices()
    settings = _settings(session)
    tool = shutil.which(_SANITIZER) or shutil.which(_SANITIZER, path="/usr/local/cuda/bin:/opt/cuda/bin")
    around = [] if tool is None or session.dry else [tool, "--tool", "memcheck", "--error-exitcode", str(_ERRORS_FOUND)]
    scenes = ["failed_kernel", "captures", *(["two_devices"] if devices > 1 else [])]
    # In a dry run, where imports are most of the time, each scene with one of the placements.
    tasks = session.pick(list(itertools.product(scenes, ON_GPU)), list(zip(scenes, ON_GPU, strict=False)))
    started = [(scene, on_gpu, _start(session, scene, settings | on_gpu)) for scene, on_gpu in tasks]
    kernels = _start(session, "kernels", {}, around)
    for scene, on_gpu, child in started:
        _REPORTS[scene](session, str(on_gpu["placement"]), *_ended(session, child))
    if devices < 2:
        session.not_run("two devices in one process", f"{devices} device is visible")
    found, problem = _ended(session, kernels)
    session.verify(f"kernels beside NumPy, {'under ' + _SANITIZER if around else 'plain'}", problem or found["problem"])
    if not around:
        why = "this is a dry run" if session.dry else "it is neither on PATH nor in /usr/local/cuda/bin"
        session.not_run(_SANITIZER, why)


def _failed_kernel(session: Session, placement: str, found: dict[str, Any], problem: str) -> None:
    """The loader's error says that a kernel before it failed, and the loader closes."""
    words = str(found.get("error", "no error"))
    if not problem and not ("device-side assert" in words and "not an error of the loader" in words):
        problem = f"the loader said: {words}"
    session.verify(f"device-side assert in the model, {placement}", problem)


def _captures(session: Session, placement: str, found: dict[str, Any], problem: str) -> None:
    """A capture right after each batch, while the next blocks are made. DALI's threads cannot be exempted from it."""
    session.verify(f"graphs captured beside a loader, {placement}", problem)
    if not problem:
        name = f"captures that failed of {found['captures']} with default settings, {placement}"
        session.figure(name, found["failed"], "", at_most=0.0)


def _two_devices(session: Session, placement: str, found: dict[str, Any], problem: str) -> None:
    """Loaders on two devices of one process, in turns, whichever device is current."""
    session.verify(f"two devices in one process, {placement}", problem or found["problem"])


def _settings(session: Session) -> dict[str, Any]:
    batch_size, seq_len = session.pick((8, 1024), (2, 16))
    corpus = session.corpus("children", batch_size * seq_len * 64 + 1)
    return {"corpus": corpus, "batch_size": batch_size, "seq_len": seq_len, "seed": 8, "batches_per_run": 4}


def _start(
    session: Session, scene: str, settings: dict[str, Any], around: Sequence[str] = ()
) -> "subprocess.Popen[str]":
    task = {"scene": scene, "settings": settings, "dry": session.dry}
    return subprocess.Popen(
        [*around, sys.executable, "-m", "gpu.scenes", json.dumps(task)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


def _ended(session: Session, child: "subprocess.Popen[str]") -> tuple[dict[str, Any], str]:
    """What a scene reported, and the problem if it did not end well."""
    try:
        output, errors = child.communicate(timeout=max(1.0, session.left_s - _END_S))
    except subprocess.TimeoutExpired:
        child.kill()
        return {}, f"it hangs: {child.communicate()[1][-1500:]}"
    if child.returncode == _ERRORS_FOUND:
        return {}, f"{_SANITIZER} found errors: {output[-3000:]}"
    reports = [line for line in output.splitlines() if line.startswith("{")]  # a sanitizer prints other lines
    if child.returncode or not reports:
        return {}, f"exit code {child.returncode}: {errors[-1500:]}"
    report: dict[str, Any] = json.loads(reports[-1])
    return report, ""


_REPORTS = {"failed_kernel": _failed_kernel, "captures": _captures, "two_devices": _two_devices}

CHECKS = (children,)
