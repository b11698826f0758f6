"""Writers of corpus files are those of the corpus tests, the benchmark is a script in its own folder."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS / "corpus"), str(TESTS.parent / "benchmarks")]


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the cache of the user who runs it."""
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "cache"))
