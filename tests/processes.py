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


@pytest.fixture(scope="session")
def run_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[Any]]:
    """Run one script in several processes at once, as a launcher does, and return what each printed as JSON."""

    def run(source: str, world_size: int, *arguments: object) -> list[Any]:
        folder = tmp_path_factory.mktemp("ranks")
        script = folder / "script.py"
        script.write_text(textwrap.dedent(source))
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        paths = [str(Path(__file__).parent), environment.get("PYTHONPATH", "")]  # for the oracle
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        processes = []
        for rank in range(world_size):
            command = [sys.executable, str(script), str(rank), str(world_size), *map(str, arguments)]
            environment["PYTHONHASHSEED"] = str(rank)
            with (folder / f"out_{rank}").open("w") as out, (folder / f"err_{rank}").open("w") as err:
                processes.append(subprocess.Popen(command, stdout=out, stderr=err, cwd=folder, env=environment))
        _wait_for_all_or_an_error(processes)
        for process in processes:
            process.kill()  # the others may wait for one that has failed
        codes = [process.wait() for process in processes]
        errors = [(folder / f"err_{rank}").read_text() for rank in range(world_size)]
        assert codes == [0] * world_size, "\n".join(errors)
        return [json.loads((folder / f"out_{rank}").read_text()) for rank in range(world_size)]

    return run


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
