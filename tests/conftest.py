"""Shared fixtures: a watchdog for all tests, counting corpora, an oracle, and scripts in a process of their own."""

import os
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from counting import CountingCorpus
from hypothesis import settings
from watchdog import Watchdog

settings.register_profile("untimed", deadline=None)  # how long an example takes depends on what else the machine does
settings.load_profile("untimed")

ARCHIVES = Path(__file__).parent / "data" / "corpus"
WATCHDOG = pytest.StashKey[Watchdog]()


def pytest_configure(config: pytest.Config) -> None:
    """A test that hangs ends with the stacks of all its processes; those that only hand out tests are not watched."""
    os.environ["PYTHONFAULTHANDLER"] = "1"  # a Python process that is aborted writes its stacks
    runs_tests = hasattr(config, "workerinput") or config.getoption("dist", "no") == "no"
    if runs_tests and not config.getoption("usepdb"):
        config.stash[WATCHDOG] = Watchdog()


def pytest_unconfigure(config: pytest.Config) -> None:
    if WATCHDOG in config.stash:
        config.stash[WATCHDOG].end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    if WATCHDOG in item.config.stash:
        item.config.stash[WATCHDOG].begin(item.nodeid)
    return (yield)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is found in the corpora of the tests is not kept in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DALI_PIPES_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample corpora, unpacked; tests read them and leave them as they are."""
    folder = tmp_path_factory.mktemp("samples")
    for packed in sorted(ARCHIVES.glob("*.tar.xz")):
        with tarfile.open(packed) as archive:
            for member in archive.getmembers():
                content = archive.extractfile(member)
                assert content is not None
                path = folder / member.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content.read())
    return folder


@pytest.fixture
def counting(tmp_path: Path) -> Callable[..., CountingCorpus]:
    def make(*sizes: int, dtype: str = "uint32", vocab_size: int | None = None, name: str = "data") -> CountingCorpus:
        return CountingCorpus(tmp_path / name, sizes, dtype, vocab_size)

    return make


@pytest.fixture
def run_script(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python source in a fresh process; one that hangs is aborted and returns with its stacks."""

    def run(
        source: str, *arguments: object, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / f"script_{len(list(tmp_path.glob('script_*')))}.py"
        script.write_text("import faulthandler; faulthandler.enable()\n" + textwrap.dedent(source))
        command = [sys.executable, str(script), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)

    return run
