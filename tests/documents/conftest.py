"""A cache for each test."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or writes the cache of the user who runs it."""
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "cache"))
