"""A counting corpus that the recipes train on, and the trainers that may not be installed."""

import importlib.util

import pytest
from counting import CountingCorpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> CountingCorpus:
    """43 rows of 8 ids that count; a validation share of 0.3 leaves 30 rows to train on, and has 13."""
    return CountingCorpus(tmp_path_factory.mktemp("trainers") / "data", [120, 230], "uint16")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose mark `needs` names a package that is missing, before its fixtures import it."""
    for mark in item.iter_markers("needs"):
        for package in mark.args:
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed: the extra `trainers` brings it")


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, and no hub."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
