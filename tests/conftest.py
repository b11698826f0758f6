"""Shared fixtures: a watchdog around every test, counting corpora, an oracle, and scripts in a process of their own."""

import faulthandler
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from counting import CountingCorpus
from hypothesis import settings

settings.register_profile("untimed", deadline=None)  # how long an example takes depends on what else the machine does
settings.load_profile("untimed")

HANG_S = 240
ARCHIVES = Path(__file__).parent / "data" / "corpus"


@pytest.fixture(autouse=True)
def watchdog() -> Iterator[None]:
    """A test that hangs ends the run with a stack dump of every thread."""
    faulthandler.dump_traceback_later(HANG_S, exit=True, file=sys.__stderr__ or sys.stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


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
    """Run Python source in a fresh process; a hang fails the test with the stacks of that process."""

    def run(
        source: str, *arguments: object, timeout_s: float = 60, environment: dict[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        script = tmp_path / f"script_{len(list(tmp_path.glob('script_*')))}.py"
        prefix = f"import faulthandler; faulthandler.dump_traceback_later({timeout_s}, exit=True)\n"
        script.write_text(prefix + textwrap.dedent(source))
        return subprocess.run(
            [sys.executable, str(script), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout_s + 30,
            env=environment,
            cwd=tmp_path,
            check=False,
        )

    return run
