"""The processes of part 8, one scene each: `python -m gpu.scenes TASK`. The last line is what was found, as JSON."""

import contextlib
import faulthandler
import json
import os
import sys
from typing import Any

import numpy as np

from gpu.machine import Machine, make_machine

_CAPTURES = 200


def failed_kernel(machine: Machine, settings: dict[str, Any]) -> dict[str, Any]:
    """What the loader says after a kernel of the model has failed."""
    from dali_pipes import TokenLoader

    with TokenLoader(**settings, repeat=True) as loader:
        batches = iter(loader)
        next(batches)
        machine.fail_a_kernel()
        with contextlib.suppress(RuntimeError):  # torch's own error, if it comes first
            machine.synchronize()
        try:
            for _ in range(200):
                next(batches)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
    return {"error": "no error"}


def captures(machine: Machine, settings: dict[str, Any]) -> dict[str, Any]:
    """How many of many captures with torch's default settings fail, right after a batch; the batches stay right."""
    import torch

    from dali_pipes import TokenLoader
    from gpu.batches import arrays, difference, from_cpu

    failed, got = 0, []
    count = 12 if machine.dry else _CAPTURES
    result = torch.zeros((), dtype=torch.int64, device=machine.device)
    with TokenLoader(**settings, repeat=True, static_buffers=True) as loader:
        for step, batch in zip(range(count), loader, strict=False):

            def work(static: Any = batch) -> None:
                result.copy_(static["input_ids"].sum())

            try:
                machine.capture(work, "global")()
            except RuntimeError:
                failed += 1
            if step % 10 == 0:
                got.append((step, arrays(batch)))
    expected = from_cpu(settings, count)
    problem = difference([batch for _, batch in got], [expected[step] for step, _ in got])
    assert not problem, problem
    return {"captures": count, "failed": failed}


def two_devices(machine: Machine, settings: dict[str, Any]) -> dict[str, Any]:
    """Batches of loaders on two devices, taken in turns while either is the current one."""
    from dali_pipes import TokenLoader
    from gpu.batches import arrays, difference, from_cpu

    got: list[list[Any]] = [[], []]
    with contextlib.ExitStack() as stack:
        feeds = []
        for number in range(2):
            machine.use(number)
            loader = stack.enter_context(TokenLoader(**settings | {"device": f"cuda:{number}"}, repeat=True))
            feeds.append(iter(loader))
        for step in range(24):
            for number, feed in enumerate(feeds):
                machine.use((number + step) % 2)
                got[number].append(arrays(next(feed)))
    expected = from_cpu(settings, 24)
    problems = {number: difference(batches, expected) for number, batches in enumerate(got)}
    return {"problem": "; ".join(f"cuda:{number}: {problem}" for number, problem in problems.items() if problem)}


def kernels(machine: Machine, settings: dict[str, Any]) -> dict[str, Any]:
    """Every operator on CuPy against NumPy, at sizes that end within a block of threads."""
    import cupy

    from dali_pipes.operators import permute, rows, segments, shuffled_rows
    from dali_pipes.operators.segments import OUTPUTS
    from gpu.batches import array_difference

    generator = np.random.default_rng(3)
    problems = []
    for dtype in ("uint16", "int64"):
        tokens = generator.integers(0, 100, 401).astype(dtype)
        offsets, lengths = np.array([0, 2, 3, 6]), np.array([7, 10, 17, 1, 2, 14])
        starts = np.array([0, 100, 50, 7, 384, 200])
        pieces = {"row_offsets": offsets, "piece_starts": starts, "piece_lengths": lengths}
        pieces["piece_ends"] = starts + lengths
        order: dict[str, Any] = {"row_step": 2, "num_rows": 23, "key": 5, "origin": 3, "stride": 17, "seq_len": 17}
        results: list[list[Any]] = []
        for array in (cupy.asarray, np.asarray):
            bad: dict[str, Any] = {"vocab_size": 90, "bad": array(np.array([0, 2**63 - 1]))}
            tables: dict[str, Any] = {name: array(part) for name, part in pieces.items()}
            made = segments(array(tokens), **tables, seq_len=17, outputs=OUTPUTS, batch_rows=2)
            results.append(
                [
                    permute(array(np.arange(1000)), 1001, 9),
                    *rows(array(tokens), array(starts), 13, **bad),
                    *shuffled_rows(array(tokens), 1, 7, **order, **bad),
                    bad["bad"],
                    *(made[name] for name in sorted(made)),
                ]
            )
        for number, (mine, expected) in enumerate(zip(*results, strict=True)):
            problem = array_difference(cupy.asnumpy(mine), expected)
            problems += [f"{dtype}, result {number}: {problem}"] if problem else []
    return {"problem": "; ".join(problems)}


SCENES = {function.__name__: function for function in (failed_kernel, captures, two_devices, kernels)}

if __name__ == "__main__":
    faulthandler.enable()
    task = json.loads(sys.argv[1])
    machine = make_machine(task["dry"])
    found = SCENES[task["scene"]](machine, task["settings"])
    print(json.dumps(found), flush=True)
    if task["scene"] == "failed_kernel":
        sys.stdout.flush()
        os._exit(0)  # torch's own destructors may abort a process whose device is of no use
