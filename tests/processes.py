"""Groups of processes: the ranks of a run, and scenarios that each need a process to themselves."""

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from multiprocessing import connection
from pathlib import Path
from typing import Any, NamedTuple

import pytest

# Forks the ranks once the first lines of the script are run, its imports, since these take most of a rank's time.
_FORKED_RANKS = """
import gc, os, runpy, sys
folder, world_size, *arguments = sys.argv[1:]
script = os.path.join(folder, "script.py")
exec(open(script).read().partition("\\n\\n")[0])
gc.collect()
gc.freeze()
running = []
for rank in range(int(world_size)):
    pid = os.fork()
    if pid == 0:
        for number, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{folder}/{name}_{rank}", os.O_WRONLY | os.O_CREAT, 0o666), number)
        sys.argv = [script, str(rank), world_size, *arguments]
        try:
            runpy.run_path(script, run_name="__main__")
            sys.stdout.flush()
            os._exit(0)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            os._exit(1)
    running.append(pid)
failed = False
while running:
    pid, status = os.wait()
    running.remove(pid)
    if status and not failed:
        failed = True
        for other in running:
            os.kill(other, 9)  # they may wait for the one that has failed
sys.exit(failed)
"""


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Run one script in several processes at once, as a launcher does, and return what each printed as JSON.

    `forked` makes the imports once for all of them; then they have one seed of `hash`, and do not end as a program.
    """

    def run(source: str, world_size: int, *arguments: object, forked: bool = False) -> list[Any]:
        folder = tmp_path_factory.mktemp("ranks")
        script = folder / "script.py"
        script.write_text(textwrap.dedent(source).lstrip())
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        paths = [str(Path(__file__).parent), environment.get("PYTHONPATH", "")]  # for the oracle
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if forked:
            command = [sys.executable, "-c", _FORKED_RANKS, str(folder), str(world_size), *map(str, arguments)]
            codes = [subprocess.run(command, cwd=folder, env=environment, check=False).returncode]
        else:
            codes = _run_each(folder, world_size, environment, script, list(map(str, arguments)))
        errors = [path.read_text() for path in sorted(folder.glob("err_*"))]
        assert set(codes) == {0}, "\n".join(errors)
        return [json.loads((folder / f"out_{rank}").read_text()) for rank in range(world_size)]

    return run


def _run_each(
    folder: Path, world_size: int, environment: dict[str, str], script: Path, arguments: list[str]
) -> list[int]:
    processes = []
    for rank in range(world_size):
        command = [sys.executable, str(script), str(rank), str(world_size), *arguments]
        environment["PYTHONHASHSEED"] = str(rank)
        with (folder / f"out_{rank}").open("w") as out, (folder / f"err_{rank}").open("w") as err:
            processes.append(subprocess.Popen(command, stdout=out, stderr=err, cwd=folder, env=environment))
    _wait_for_all_or_an_error(processes)
    for process in processes:
        process.kill()  # the others may wait for one that has failed
    return [process.wait() for process in processes]


def _wait_for_all_or_an_error(processes: list[subprocess.Popen[bytes]]) -> None:
    running = {os.pidfd_open(process.pid): process for process in processes}
    try:
        while running and not any(process.returncode for process in processes):
            for descriptor in connection.wait(list(running)):
                assert isinstance(descriptor, int)
                running.pop(descriptor).wait()
                os.close(descriptor)
    finally:
        for descriptor in running:
            os.close(descriptor)


class Ended(NamedTuple):
    """How a process ended."""

    code: int
    """Exit code, or minus the number of the signal that ended it."""
    out: str
    err: str


# Forks a child for every scenario before any loader or thread exists, so that each runs and ends as a program of its
# own would, and the second that the imports take is spent once.
_DRIVER = """
import gc, json, os, signal, sys, threading, time
from pathlib import Path
import numpy as np
import torch
import nvidia.dali.fn, nvidia.dali.types, nvidia.dali.pipeline
from dali_pipes import LoaderConfig, TokenLoader, build_pipeline
from dali_pipes.corpus import Corpus
from dali_pipes.errors import *
import dali_pipes.engine.dali, dali_pipes.engine.block_stream

FOLDER = Path(sys.argv[1])
signal.signal(signal.SIGINT, signal.default_int_handler)  # a parent may have it ignored

gc.collect()
gc.freeze()  # what the imports made need not be searched through when a child ends: 0.3 s instead of 1.0
running = []

def finish(pid, name):
    status = os.waitpid(pid, 0)[1]
    (FOLDER / f"{name}.code").write_text(str(os.waitstatus_to_exitcode(status)))

for name, source in json.loads((FOLDER / "scenarios.json").read_text()).items():
    if len(running) == 2:
        finish(*running.pop(0))
    pid = os.fork()
    if pid == 0:
        for number, suffix in ((1, "out"), (2, "err")):
            os.dup2(os.open(FOLDER / f"{name}.{suffix}", os.O_WRONLY | os.O_CREAT, 0o666), number)
        break
    running.append((pid, name))
else:
    while running:
        finish(*running.pop(0))
    sys.exit()
os.mkdir(FOLDER / name)
os.chdir(FOLDER / name)
exec(compile(source, name, "exec"))
"""


@pytest.fixture(scope="session")
def run_scenarios(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, Ended]]:
    """Run sources by name, each in a process and a working folder of its own; a hang ends with a stack dump."""

    def run(preamble: str, scenarios: dict[str, str]) -> dict[str, Ended]:
        folder = tmp_path_factory.mktemp("scenarios")
        begin = textwrap.dedent(preamble) + "\n"
        sources = {name: begin + textwrap.dedent(source) for name, source in scenarios.items()}
        (folder / "scenarios.json").write_text(json.dumps(sources))
        (folder / "driver.py").write_text(_DRIVER)
        command = [sys.executable, "driver.py", str(folder)]
        done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return {name: _ended(folder, name) for name in scenarios}

    return run


def _ended(folder: Path, name: str) -> Ended:
    code, out, err = ((folder / f"{name}.{suffix}").read_text() for suffix in ("code", "out", "err"))
    return Ended(int(code), out, err)
