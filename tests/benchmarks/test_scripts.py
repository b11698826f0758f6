"""Each benchmark starts as a script, from any folder. Other tests cover what it does."""

import subprocess
import sys
from pathlib import Path

import pytest

MAIN = 'if __name__ == "__main__":'
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(
    path.name for path in BENCHMARKS.glob("*.py") if {"import typer", MAIN} <= {*path.read_text().split("\n")}
)


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_it_starts_as_a_script(tmp_path: Path, name: str) -> None:
    command = [sys.executable, str(BENCHMARKS / name), "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert name in done.stdout
    assert not list(tmp_path.iterdir())
