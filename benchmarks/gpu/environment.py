"""Part 1: every kernel compiles, loads and runs on this card; the ceilings that later figures are held against."""

import itertools
import time
from typing import Any

import numpy as np

from gpu.batches import array_difference
from gpu.ceilings import ceilings
from gpu.session import Session

_TOKEN_DTYPES = ("uint8", "uint16", "int32", "uint32", "int64")
OUTPUT_DTYPES = ("int64", "int32")
_ROWS, _SEQ_LEN = 3, 8


def token_dtypes(session: Session) -> tuple[str, ...]:
    """What corpora are made of; in a dry run, where a compiler takes a second for each kernel, two of them."""
    return session.pick(_TOKEN_DTYPES, ("uint16", "int64"))


def versions(session: Session) -> None:
    for name, value in session.machine.about().items():
        session.note(name, value)


def kernels_compile_and_load(session: Session) -> None:
    """One call of every instance of the kernels of plain windows, with and without the check of ids.

    Those of `segments` have their turn in `features`, in many shapes.
    """
    machine = session.machine  # first: in a dry run it brings what `import cupy` finds
    import cupy

    from dali_pipes.operators import permute, rows, shuffled_rows

    started = time.perf_counter()
    images = cupy.asnumpy(permute(cupy.asarray(np.arange(10)), 10, 7))
    session.verify("kernel permute", array_difference(images, permute(np.arange(10), 10, 7)))
    starts = range(0, _ROWS * _SEQ_LEN, _SEQ_LEN)
    order: dict[str, Any] = {"row_step": 1, "num_rows": _ROWS, "key": 5, "origin": 0, "stride": _SEQ_LEN}
    for function in (rows, shuffled_rows):
        problems, count = "", 0
        for token, output, checked in itertools.product(token_dtypes(session), OUTPUT_DTYPES, (False, True)):
            tokens = np.arange(_ROWS * _SEQ_LEN + 1).astype(token)
            results = []
            for array in (cupy.asarray, np.asarray):
                options: dict[str, Any] = {"dtype": np.dtype(output)}
                if checked:
                    options |= {"vocab_size": 20, "bad": array(np.array([0, 2**63 - 1]))}
                if function is rows:
                    got = rows(array(tokens), starts, _SEQ_LEN, **options)
                else:
                    got = shuffled_rows(array(tokens), 0, _ROWS, **order, seq_len=_SEQ_LEN, **options)
                results.append([*got, *([options["bad"]] if checked else [])])
            for mine, expected in zip(*results, strict=True):
                problem = array_difference(cupy.asnumpy(mine), expected)
                problems += f"{token} to {output}, ids checked: {checked}: {problem}; " if problem else ""
            count += 1
        session.verify(f"kernel {function.__name__}, {count} instances", problems)
    machine.synchronize()
    session.note("seconds for compiling, loading and running these kernels", time.perf_counter() - started)


def copy_speeds(session: Session) -> None:
    for name, rate in ceilings(session).items():
        session.figure(f"ceiling: {name}", rate / 1e9, "GB/s")


CHECKS = (versions, kernels_compile_and_load, copy_speeds)
