"""Shared fixtures: a watchdog for all tests, counting corpora, an oracle, and scripts in a process of their own."""

import gc
import os
import signal
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from counting import CountingCorpus
from hang_watchdog import Watchdog
from hypothesis import settings
from profiles import PROFILES

# How long an example takes depends on what else the machine does: no deadline.
for profile, count in PROFILES.items():
    settings.register_profile(profile, deadline=None, max_examples=count)
settings.load_profile("quick")
# Test processes share the cores; threads of theirs would wait for one another there.
for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(name, "1")

pytest_plugins = ["processes"]
ARCHIVES = Path(__file__).parent / "data" / "corpus"
LONG_FILES = [
    "test_launched.py",
    "test_train_gpt.py",
    "test_compare.py",
    "test_jax.py",
    "test_trainer_resume.py",
    "test_gpu_check.py",
    "test_losses.py",
    "test_ranks.py",
    "test_teardown.py",
    "test_device_mesh.py",
    "test_kernels_sanitised.py",
    "test_kill_and_restart.py",
    "test_faults.py",
    "test_forks_and_interrupts.py",
    "test_lengths.py",
    "test_batches_stay.py",
    "test_torch_modes.py",
    "test_planned_windows.py",
    "test_open_text.py",
    "test_segments.py",
    "test_permute_statistics.py",
    "test_distributed_checkpoints.py",
    "test_text_runs.py",
    "test_packed_resume.py",
    "test_saved_batches.py",
    "test_settings.py",
    "test_torchrun.py",
    "test_endings.py",
    "test_cpu_only.py",
    "test_printed.py",
    "test_file_names_and_locales.py",
    "test_tool_arguments.py",
    "test_nothing_left.py",
    "test_sample_workers.py",
    "test_sample_graph.py",
    "test_many_ranks.py",
]
"""They run first, the longest of all at once, so that no worker has one left when the others are done."""
WATCHDOG = pytest.StashKey[Watchdog]()


def pytest_configure(config: pytest.Config) -> None:
    """A test that hangs ends with the stacks of all its processes; those that only hand out tests are not watched."""
    os.environ["PYTHONFAULTHANDLER"] = "1"  # a Python process that is aborted writes its stacks
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what runs in the background
        signal.signal(signal.SIGINT, signal.default_int_handler)  # else processes of tests would ignore Ctrl-C, too
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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first, so that no worker has one left when the others are done."""
    rank = {name: number for number, name in enumerate(LONG_FILES)}
    items.sort(key=lambda item: rank.get(item.path.name, len(rank)))


def pytest_collection_finish() -> None:
    """What the imports made need not be searched in every collection of garbage: tests ask for hundreds of them."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is found in the corpora of the tests is not kept in the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DALI_PIPES_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def no_waits() -> Iterator[None]:
    """Reads that fail are tried again at once; a test that is about the waits sets some."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dali_pipes.storage.retries._FIRST_WAIT_S", 0.0)
        patch.setattr("dali_pipes.storage.retries._BUSY_WAIT_S", 0.0)
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
def load() -> Iterator[Callable[..., Any]]:
    """Makes loaders over a counting corpus, on the CPU and with every output; closes them after the test."""
    from dali_pipes import TokenLoader

    opened: list[Any] = []

    def make(corpus: Any, **settings: Any) -> Any:
        defaults = {
            "corpus": corpus.pattern,
            "dtype": corpus.dtype,
            "device": "cpu",
            "outputs": ("input_ids", "labels", "row_ids"),
        }
        opened.append(TokenLoader(**{**defaults, **settings}))
        return opened[-1]

    yield make
    for loader in opened:
        loader.close()


@pytest.fixture
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The queue of a test's loaders: "direct", without DALI, or "dali", where a test asks for it with `indirect`."""
    name = str(getattr(request, "param", "direct"))
    if name == "direct":
        monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    else:
        monkeypatch.setattr("dali_pipes.engine.build.BuiltSource._choose_engine", lambda *_: name)
    return name


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
