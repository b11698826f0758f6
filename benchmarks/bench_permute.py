"""Time and memory until the first rows of an epoch's order are known: `permute` and a shuffled index table.

The table is `Generator.permutation` of NumPy, `random.permutation` of CuPy. See `benchmarks/README.md`.
"""

import tracemalloc
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import typer
from operator_timing import measure, modules, report

from dali_pipes.operators import permute

_ROWS = 1024
_MANY = 2**20
_KEY = 2024


def main(
    quick: Annotated[bool, typer.Option("--quick", help="a small set, only to check that it runs")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="samples per alternative")] = 9,
) -> None:
    """Check the order, measure, print a table; the last line is one JSON line."""
    n, many, rounds = (10_000, 4096, 3) if quick else (10_000_000, _MANY, rounds)
    check(10_000)
    entries = []
    for module in modules():
        indices = module.arange(min(many, n))
        first = indices[:_ROWS]
        shuffle = np.random.default_rng(0).permutation if module is np else module.random.permutation

        def by_formula(first: Any = first) -> Any:
            return permute(first, n, _KEY)

        def by_table(shuffle: Any = shuffle) -> Any:
            return shuffle(n)[:_ROWS]

        timed = measure(module, {"permute": by_formula, "table": by_table}, "table", rounds)
        if module is np:
            for entry, run in zip(timed, (by_formula, by_table), strict=True):
                entry["peak_bytes"] = peak_bytes(run)
        entries += [{"case": f"first {first.size} of {n}", "rows": first.size, "n": n} | entry for entry in timed]
        whole = {"permute": lambda indices=indices: permute(indices, n, _KEY), "copy": indices.copy}
        timed = measure(module, whole, "copy", rounds)[:1]
        entries += [{"case": f"{indices.size} of {n}", "rows": indices.size, "n": n} | entry for entry in timed]
    report("permute", entries)


def check(n: int) -> None:
    """Stop unless `permute` is a bijection, and the same one everywhere."""
    order = permute(np.arange(n), n, _KEY)
    if not np.array_equal(np.sort(order), np.arange(n)):
        raise SystemExit(f"permute is not a bijection on [0, {n})")
    for module in modules()[1:]:
        if not bool((permute(module.arange(n), n, _KEY) == module.asarray(order)).all()):
            raise SystemExit(f"permute differs on {module.__name__}")


def peak_bytes(run: Callable[[], object]) -> int:
    """Most memory that one call holds at a time, its result included."""
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


if __name__ == "__main__":
    typer.run(main)
