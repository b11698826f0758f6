"""The benchmark of imports measures each statement in a process where it works."""

import json
import subprocess
import sys
from pathlib import Path

import import_cost
import pytest


@pytest.mark.slow  # five processes that import torch
def test_every_statement_is_timed() -> None:
    command = [sys.executable, str(Path(import_cost.__file__)), "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert [entry["statement"] for entry in report["entries"]] == list(import_cost.STATEMENTS)
    assert all(entry["cpu_s"]["low"] > 0 for entry in report["entries"])
