"""Part 7: what goes wrong around a loader on a GPU, and what is left of it afterwards.

Errors are caught here; exits and forks happen in processes of their own, see `exits`.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from typing import Any

from dali_pipes import TokenLoader
from dali_pipes.errors import DaliPipesError
from gpu.batches import ON_GPU, arrays, difference, from_cpu
from gpu.session import Session

_CHILD_LIMIT_S = 40.0


def _settings(session: Session) -> dict[str, Any]:
    batch_size, seq_len = session.pick((8, 1024), (2, 16))
    corpus = session.corpus("faults", batch_size * seq_len * 12 + 1)
    return {"corpus": corpus, "batch_size": batch_size, "seq_len": seq_len, "seed": 6, "batches_per_run": 3}


def out_of_memory_in_the_step(session: Session) -> None:
    """Caught by the trainer; the batches before and after it are those of an undisturbed run."""
    machine = session.machine
    for on_gpu in ON_GPU:
        settings = _settings(session) | on_gpu
        got, caught = [], 0
        with TokenLoader(**settings, repeat=True) as loader:
            for number, batch in zip(range(20), loader, strict=False):
                if number in (4, 5, 11):
                    try:
                        machine.exhaust()
                    except machine.out_of_memory:
                        caught += 1
                got.append(arrays(batch))
        problem = difference(got, from_cpu(settings, len(got))) or ("" if caught == 3 else f"caught {caught} of 3")
        session.verify(f"out of memory in the step, {on_gpu['placement']}", problem)


def out_of_memory_in_the_loader(session: Session) -> None:
    """A corpus that does not fit is refused with the numbers; afterwards the same loader can be built."""
    machine = session.machine
    tokens = session.pick(2**27, 2**12)
    shape = {"batch_size": session.pick(8, 2), "seq_len": session.pick(1024, 16), "batches_per_run": 2}
    settings = {"corpus": session.corpus("large", tokens)} | shape | ON_GPU[1]
    problem = _refused(settings | {"max_device_bytes": tokens})
    session.verify("corpus above max_device_bytes", problem)
    with machine.nearly_full(leave_bytes=tokens):  # half the corpus
        problem = _refused(settings)
    session.verify("corpus above the free memory", problem)
    with TokenLoader(**settings) as loader:
        got = [arrays(next(iter(loader)))]
    session.verify("the same corpus once there is room", difference(got, from_cpu(settings, 1)))


def _refused(settings: dict[str, Any]) -> str:
    """The problem with how a loader that cannot fit is refused, if any."""
    try:
        with TokenLoader(**settings) as loader:
            next(iter(loader))
    except DaliPipesError as error:
        numbers = re.findall(r"\d+(?:\.\d+)?", str(error))
        return "" if len(numbers) >= 2 else f"the message does not have both sizes: {error}"
    except Exception as error:
        return f"{type(error).__name__} instead of an error of dali_pipes: {error}"
    return "no error"


def exception_in_the_loop(session: Session) -> None:
    """The same iterator continues after it; so does a new loader from the state; a new `for` is the next epoch."""
    for on_gpu in ON_GPU:
        settings = _settings(session) | on_gpu
        with TokenLoader(**settings) as loader:
            batches, got = iter(loader), []
            for number in range(8):
                try:
                    got.append(arrays(next(batches)))
                    if number % 3 == 1:
                        raise FloatingPointError("the loss is not a number")
                except FloatingPointError:
                    pass
            state = loader.state_dict()
            epoch = len(loader)
            second = [arrays(batch) for batch in loader]
        with TokenLoader(**settings) as resumed:
            resumed.load_state_dict(state)
            got += [arrays(batch) for batch in resumed]
        problem = difference(got + second, from_cpu(settings, 2 * epoch))
        session.verify(f"exception in the loop, {on_gpu['placement']}", problem)


def exits_and_forks(session: Session) -> None:
    """All together, so that their imports overlap."""
    settings = _settings(session)
    wanted = {
        "first": (0, ""),
        "held": (0, ""),
        "error": (1, "the loop ended here"),
        "daemon": (0, ""),
        "fork": (0, ""),
    }
    # In a dry run, where imports are most of the time, each scenario with one of the placements.
    tasks = session.pick(
        list(itertools.product(wanted, ON_GPU)), list(zip(wanted, itertools.cycle(ON_GPU), strict=False))
    )
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    children = []
    for scenario, on_gpu in tasks:
        task = {"scenario": scenario, "settings": settings | on_gpu, "dry": session.dry}
        command = [sys.executable, "-m", "gpu.exits", json.dumps(task)]
        children.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        )
    for (scenario, on_gpu), child in zip(tasks, children, strict=True):
        code, words = wanted[scenario]
        name = f"process: {scenario}, {on_gpu['placement']}"
        try:
            output, errors = child.communicate(
                timeout=min(session.pick(_CHILD_LIMIT_S, session.left_s), max(1.0, session.left_s - 4))
            )
        except subprocess.TimeoutExpired:
            child.kill()
            session.verify(name, "hangs", child.communicate()[1][-2000:])
            continue
        problem = "" if child.returncode == code else f"exit code {child.returncode}, expected {code}"
        problem = problem or ("" if output.endswith("done\n") else "did not reach its end")
        problem = problem or ("" if words in errors else f"the error does not contain {words!r}")
        problem = problem or ("the output has signs of an abort" if re.search(_ABORT, errors) else "")
        session.verify(name, problem, errors[-2000:] if problem else None)
        if scenario == "fork":
            session.note(f"{name}: error in the child process", output.removesuffix("done\n").strip())


_ABORT = r"terminate called|core dumped|Segmentation fault|Fatal Python error|CUDA error|cudaError"

CHECKS = (out_of_memory_in_the_step, out_of_memory_in_the_loader, exception_in_the_loop, exits_and_forks)
