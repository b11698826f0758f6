"""How a process with a loader on a GPU begins and ends, one scenario a process: `python -m gpu.exits TASK`.

Prints "done" last.
"""

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from typing import Any

_HANG_S = 10

kept: list[Any] = []
"""Alive when the interpreter ends."""


def main(task: dict[str, Any]) -> None:
    """Run the scenario that the task names."""
    faulthandler.enable()
    if task["scenario"] == "first" and not task["dry"]:
        _loader_first(task["settings"])
    from gpu.machine import make_machine

    machine = make_machine(task["dry"])
    kept.append(machine)
    from dali_pipes import TokenLoader

    loader = TokenLoader(**task["settings"], repeat=True)
    batches = iter(loader)
    kept.extend([loader, batches, next(batches), next(batches), next(batches), next(batches)])
    if task["scenario"] == "daemon":
        thread = threading.Thread(target=_train, args=(batches, machine), daemon=True)
        thread.start()
        time.sleep(0.3)
    elif task["scenario"] == "fork":
        _fork(loader, batches)
    print("done", flush=True)
    if task["scenario"] == "error":
        raise FloatingPointError("the loop ended here")


def _loader_first(settings: dict[str, Any]) -> None:
    """A loader that is the first of the process to use the device: torch wakes it for the first batch."""
    import torch

    from dali_pipes import TokenLoader
    from gpu.batches import collect, difference, from_cpu

    used: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    assert not used, "something has used the device before"
    with TokenLoader(**settings, repeat=True) as loader:
        problem = difference(collect(loader, 5), from_cpu(settings, 5))
    assert not problem, problem


def _train(batches: Any, machine: Any) -> None:
    for batch in batches:
        machine.busy(1e-4)
        batch["input_ids"].sum()


def _first_error(batches: Any) -> str:
    """What is said by the time the block in hand, whose batches cost nothing more, has been used up."""
    try:
        for _ in range(100):
            next(batches)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _fork(loader: Any, batches: Any) -> None:
    """A forked child, where CUDA does not work, must get an error immediately, and the parent must not notice."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(_HANG_S)
        words = [_first_error(batches), _first_error(iter(loader))]
        os.write(writer, json.dumps(words).encode())
        os._exit(0)
    os.close(writer)
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"the child process exited with status {status}; {signal.SIGALRM.value} means a hang"
    with os.fdopen(reader) as pipe:
        words = json.loads(pipe.read())
    for text in words:
        assert "fork" in text, f"the child process got: {text}"
    print(words[0])
    kept.extend(next(batches) for _ in range(5))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
