"""`gpu_check.py`: its dry run passes; and whatever one part does, the others run and the report says so."""

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_check
import gpu_stand_in
import numpy as np
import pytest
from gpu.batches import difference
from gpu.runner import Part, run_part
from hang_watchdog import processes_per_core

NEEDS_COMPILER = pytest.mark.skipif(gpu_stand_in.why_not() is not None, reason=str(gpu_stand_in.why_not()))

NO_LIMIT_S = 86_400.0
HANGS_AFTER_S = float(round(2.5 * (1 + processes_per_core())))
"""Enough to start a process and to import the checks, also on a machine that does much else."""

BROKEN = {
    "good": """
        def speed(session):
            session.figure("rate", 3.0, "GB/s", at_least=5.0)
            session.figure("wait", 0.1, "%", at_most=0.5)
            session.verify("data", "")
        CHECKS = (speed,)
    """,
    "raising": """
        def first(session):
            raise ValueError("[no] such thing")
        def second(session):
            session.verify("after the error", "")
        CHECKS = (first, second)
    """,
    "unimportable": "import there_is_no_such_module",
    "hanging": """
        import subprocess, time
        def good(session):
            session.verify("before the hang", "")
        def never_ends(session):
            worker = subprocess.Popen(["sleep", "infinity"])
            session.note("worker", worker.pid)
            time.sleep(1e6)
        CHECKS = (good, never_ends)
    """,
    "dying": """
        import os, signal
        def good(session):
            session.verify("before the signal", "")
        def dies(session):
            os.kill(os.getpid(), signal.SIGSEGV)
        CHECKS = (good, dies)
    """,
    "leaving": """
        import os
        def leaves(session):
            print("last words", flush=True)
            os._exit(3)
        CHECKS = (leaves,)
    """,
    "wrong": """
        def bits(session):
            session.verify("parity", "2 of 9 values differ")
        CHECKS = (bits,)
    """,
}


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Part]:
    """A part whose module does what its name says."""
    for name, text in BROKEN.items():
        lines = [line.removeprefix(" " * 8) for line in text.splitlines()]
        (tmp_path / f"part_{name}.py").write_text("\n".join(lines))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return lambda name: Part(name, f"part_{name}", HANGS_AFTER_S if name == "hanging" else NO_LIMIT_S)


def run(
    parts: tuple[Part, ...], *options: str, monkeypatch: pytest.MonkeyPatch, out: Path
) -> tuple[int, Any, Any, str]:
    """The script with these parts: exit code, the JSON file, the last line, all output."""
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    names = ",".join(part.name for part in parts)
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            code = gpu_check.main(["--parts", names, "--dry", "--out", str(out), *options])
        except SystemExit as error:  # of argparse
            code = int(error.code or 0)
    output = said.getvalue()
    if not (out / "gpu_check.json").exists():
        return code, None, None, output
    report = json.loads((out / "gpu_check.json").read_text())
    return code, report, json.loads(output.splitlines()[-1]), output


@NEEDS_COMPILER
def test_parts_of_the_dry_run_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that takes the least; the others import torch and DALI in process after process."""
    names = ("parity",)
    parts = tuple(replace(part, limit_s=NO_LIMIT_S) for part in gpu_check.PARTS if part.name in names)
    code, report, last, output = run(parts, monkeypatch=monkeypatch, out=tmp_path / "out")
    assert (code, last["failed"], last["failed_parts"], last["not_done"]) == (0, [], {}, []), output
    assert tuple(part["name"] for part in report["parts"]) == names
    assert all(part["checks"] for part in report["parts"])


@pytest.mark.slow
@NEEDS_COMPILER
def test_the_dry_run_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = tuple(replace(part, limit_s=NO_LIMIT_S) for part in gpu_check.PARTS)  # a busy machine is no failure
    code, report, last, output = run(parts, monkeypatch=monkeypatch, out=tmp_path / "out")
    assert (code, last["failed"], last["failed_parts"], last["not_done"]) == (0, [], {}, []), output
    assert [part["name"] for part in report["parts"]] == [part.name for part in gpu_check.PARTS]
    assert {"card", "driver", "cuda_runtime", "python", "versions", "date"} <= set(report["about"])
    assert set(report["about"]["versions"]) == {"torch", "numpy", "cupy", "nvidia.dali"}
    found = {check["check"]: check for part in report["parts"] for check in part["checks"]}
    assert {name for name, check in found.items() if check["result"] in ("pass", "missed") and check["wanted"]} == {
        *(
            f"{kernel}, 2^{size} tokens: share"
            for kernel in ("rows", "rows, ids checked", "shuffled_rows, ids checked")
            for size in (6, 8)
        ),
        *(
            f"ours {placement}: {figure}"
            for placement in ("host", "device", "pinned")
            for figure in (
                "main-thread CPU a batch",
                *(f"single calls, {call}" for call in ("warm", "cold", "next block")),
                "CPU for 10^9 tokens",
                *(f"next() {share}" for share in ("p50", "p99", "p99.9", "mean")),
                *(
                    f"growth of {what} in 40 steps"
                    for what in (
                        "pinned memory",
                        "loader's device memory",
                        "DALI's memory",
                        "the device",
                        "the process",
                    )
                ),
                "rate against the fixed batch",
                "data wait, 3 block switches a round",
                "time of the device, of a step",
            )
        ),
        *(
            f"ours {placement}, closed: {figure}"
            for placement in ("host", "device", "pinned")
            for figure in ("device memory above the first", "pinned blocks kept by CuPy")
        ),
        "captures that failed of 12 with default settings, device",
    }, "the figures that issue a target"
    assert last["not_run"] == ["children: compute-sanitizer: this is a dry run"]
    assert all(check in output for check in ("steps/s", "next() p99.9", "graph replayed", "fork"))


def test_it_fits_in_eight_minutes() -> None:
    assert sum(part.limit_s for part in gpu_check.PARTS) <= 8 * 60


def test_a_checkout_and_few_packages_are_enough(tmp_path: Path) -> None:
    """A machine without pip: torch, CuPy, DALI, NumPy and pydantic are all that there is, and nothing is installed."""
    for name in ("typer", "click", "rich", "yaml", "psutil", "matplotlib"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not here')")
    benchmarks = Path(gpu_check.__file__).parent
    modules = sorted(path.stem for path in (benchmarks / "gpu").glob("[a-z]*.py"))
    assert {"children", "cost", "scenes", "training"} <= set(modules)
    text = "import gpu_check, dali_pipes.loader.token_loader, dali_pipes.engine.dali\n" + "".join(
        f"import gpu.{name}\n" for name in modules
    )
    paths = (tmp_path, benchmarks, benchmarks.parent)
    environment = {"PYTHONPATH": ":".join(map(str, paths)), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", text], env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_a_part_may_raise_hang_or_die_and_the_others_run(
    tmp_path: Path, broken: Callable[[str], Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("raising", "unimportable", "hanging", "dying", "leaving", "good")
    code, report, last, output = run(tuple(map(broken, names)), monkeypatch=monkeypatch, out=tmp_path / "out")
    assert code == 1
    part = {found["name"]: found for found in report["parts"]}
    assert list(part) == list(names)
    assert {name: found["status"] for name, found in part.items()} == {
        **dict.fromkeys(names, "failed"),
        "raising": "done",
        "good": "done",
    }
    assert [check["result"] for check in part["raising"]["checks"]] == ["fail", "pass"]
    assert "[no] such thing" in part["raising"]["checks"][0]["value"]
    assert "Traceback" in part["raising"]["checks"][0]["details"]
    assert "there_is_no_such_module" in part["unimportable"]["output_tail"]
    assert part["hanging"]["why"] == f"not finished at its limit of {HANGS_AFTER_S:.0f} s"
    assert part["hanging"]["checks"][0]["result"] == "pass"
    assert part["hanging"]["not_done"] == ["never ends"]
    assert "never_ends" in part["hanging"]["output_tail"], "the stacks, shortly before the end"
    worker = part["hanging"]["checks"][1]["value"]
    state = Path(f"/proc/{worker}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z", "what the part started was killed with it"
    assert part["dying"]["why"] == "killed by SIGSEGV"
    assert part["dying"]["not_done"] == ["dies"]
    assert part["leaving"]["why"] == "exited with code 3"
    assert "last words" in part["leaving"]["output_tail"]
    assert [check["result"] for check in part["good"]["checks"]] == ["missed", "pass", "pass"]
    assert set(last["failed_parts"]) == {"unimportable", "hanging", "dying", "leaving"}
    assert "hanging: never ends" in last["not_done"]
    assert all(text in output for text in ("killed by SIGSEGV", "NOT DONE", "[no] such thing", "last words"))


def test_only_wrong_data_is_a_failure_not_a_missed_figure(
    tmp_path: Path, broken: Callable[[str], Part], monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = (broken("good"), broken("wrong"))
    code, report, last, _output = run(parts, "--parts", "good", monkeypatch=monkeypatch, out=tmp_path / "good")
    assert code == 0
    assert [part["name"] for part in report["parts"]] == ["good"]
    assert last["not_run"] == ["wrong: not asked for"]
    assert (last["ok"], last["passed"], last["missed"]) == (True, 2, ["good: rate"])
    code, _report, last, output = run(parts, monkeypatch=monkeypatch, out=tmp_path / "both")
    assert code == 1
    assert last["failed"] == ["wrong: parity"]
    assert "2 of 9 values differ" in output
    code, report, _last, output = run(parts, "--parts", "good,bad", monkeypatch=monkeypatch, out=tmp_path / "none")
    assert (code, report) == (2, None)
    assert "bad" in output


def test_limits_scale(tmp_path: Path, broken: Callable[[str], Part], monkeypatch: pytest.MonkeyPatch) -> None:
    code, report, _last, _output = run(
        (broken("good"),), "--seconds-scale", "0.5", monkeypatch=monkeypatch, out=tmp_path / "out"
    )
    assert (code, report["parts"][0]["limit_s"]) == (0, NO_LIMIT_S / 2)


def test_records_are_shown_as_they_come(tmp_path: Path, broken: Callable[[str], Part]) -> None:
    lines: list[str] = []
    run_part(broken("good"), tmp_path, dry=True, log=lines.append)
    assert lines == ["good: rate: 3 GB/s >= 5 missed", "good: wait: 0.1 % <= 0.5 pass", "good: data: ok  pass"]


def test_a_difference_is_found_wherever_it_is() -> None:
    expected = [{"input_ids": np.arange(6).reshape(2, 3) + number} for number in range(3)]
    assert difference(expected, expected) == ""
    assert "2 batches, expected 3" in difference(expected[:2], expected)
    assert "int32" in difference([{"input_ids": expected[0]["input_ids"].astype(np.int32)}], expected[:1])
    assert "labels" in difference([{"labels": expected[0]["input_ids"]}], expected[:1])
    changed = [{"input_ids": batch["input_ids"].copy()} for batch in expected]
    changed[2]["input_ids"][1, 0] = -1
    assert difference(changed, expected) == "batch 2, input_ids: 1 of 6 values differ, first at (1, 0): -1, expected 5"
