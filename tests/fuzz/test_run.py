"""The fuzzer itself: it counts cases, tells a crash, a hang and an exception, and keeps what reproduces them."""

import itertools
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import run

FAKE = """#!/bin/sh
n=0
while [ "$1" != --first ]; do shift; done
n=$2
echo $n
if [ $n = 0 ]; then echo '"AssertionError: 17 bytes"'; echo 1; echo 2; kill -SEGV $$; fi
if [ $n = 3 ]; then exec sleep infinity; fi
echo $((n + 1))
sleep 0.3
"""


@pytest.mark.slow
def test_findings_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "python"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    monkeypatch.setattr(run, "CASE_S", 3)
    monkeypatch.setattr(run, "time", SimpleNamespace(monotonic=itertools.count(0, 0.2).__next__))  # so long each child
    cases, findings = run.fuzz("npy", 5, 1.2, tmp_path / "out")
    assert cases >= 4
    first_lines = [finding.splitlines()[0] for finding in findings]
    assert first_lines[0] == "AssertionError: 17 bytes"
    assert first_lines[1].startswith("the process ended with -11")
    assert first_lines[2].startswith("a hang of more than")
    assert len(findings) == 3
    kept = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert kept == ["npy-5-0.zip", "npy-5-2.zip", "npy-5-3.zip"]
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)  # as replay() leaves it
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "cache"))
    run.replay(tmp_path / "out" / "npy-5-0.zip")


def test_it_runs(tmp_path: Path) -> None:
    command = [
        sys.executable,
        run.__file__,
        "--seconds",
        "0.5",
        "--kinds",
        "llmc",
        "--seed",
        "3",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "seed 3" in done.stdout
    assert "cases a second, 0 findings" in done.stdout
