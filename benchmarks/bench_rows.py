"""Time of `rows` and `shuffled_rows`, compared with a gather by index on the CPU and a plain copy on a GPU.

Tokens are uint16, results int64, rows start anywhere. The copy moves as many bytes as `rows` reads and writes, so the
ratio shows how close a kernel is to the memory bandwidth. See `benchmarks/README.md`.
"""

from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import torch
import typer
from operator_timing import measure, modules, report

from dali_pipes.operators import permute, rows, shuffled_rows

Results = tuple[Any, Any]
_VOCAB_SIZE = 32_000
_KEY = 2024


def main(
    quick: Annotated[bool, typer.Option("--quick", help="tiny sizes, only to check that it runs")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="samples per alternative")] = 15,
) -> None:
    """Check every alternative against the gather by index, measure, print a table; the last line is one JSON line."""
    num_tokens = 50_000 if quick else 100_000_000
    sizes = [(4, 64), (3, 33)] if quick else [(64, 1024), (512, 1024), (512, 1023), (64, 8192)]
    tokens = np.random.default_rng(0).integers(0, _VOCAB_SIZE, num_tokens, np.uint16)
    entries = []
    for module in modules():
        there = module.asarray(tokens)
        for count, seq_len in sizes:
            numbers = np.arange(count)
            starts = permute(numbers, num_tokens // seq_len - 1, _KEY) * seq_len
            wanted = gather(tokens, starts, seq_len)
            alternatives, baseline = _alternatives(module, there, starts, seq_len, wanted)
            case = f"{count} x {seq_len}"
            timed = measure(module, alternatives, baseline, 3 if quick else rounds)
            entries += [{"case": case, "rows": count, "seq_len": seq_len} | entry for entry in timed]
            fused = {name: alternatives[name] for name in ("permute, rows", "shuffled_rows")}
            timed = measure(module, fused, "permute, rows", 3 if quick else rounds)
            entries += [{"case": case, "rows": count, "seq_len": seq_len} | entry for entry in timed[1:]]
    report("rows", entries)


def gather(tokens: Any, starts: Any, seq_len: int) -> Results:
    """The reference: every token by its index."""
    module = np if isinstance(tokens, np.ndarray) else __import__("cupy")
    read = tokens[starts[:, None] + module.arange(seq_len + 1)].astype(np.int64)
    return read[:, :-1].copy(), read[:, 1:].copy()


def _alternatives(
    module: Any, tokens: Any, host_starts: Any, seq_len: int, wanted: Results
) -> tuple[dict[str, Callable[[], object]], str]:
    """What is timed for one size, each with its results checked, and the name of the yardstick."""
    count = host_starts.size
    starts, numbers = module.asarray(host_starts), module.arange(count)
    out = module.empty((count, seq_len), np.int64), module.empty((count, seq_len), np.int64)
    bad = module.asarray(np.array([0, 2**63 - 1]))
    num_rows = tokens.size // seq_len - 1
    order: dict[str, Any] = {"row_step": 1, "num_rows": num_rows, "key": _KEY, "origin": 0, "stride": seq_len}

    def permute_then_rows() -> Results:
        return rows(tokens, permute(numbers, num_rows, _KEY) * seq_len, seq_len, out=out)

    found: dict[str, Callable[[], Results]] = {
        "rows": lambda: rows(tokens, starts, seq_len, out=out),
        "rows, ids checked": lambda: rows(tokens, starts, seq_len, out=out, vocab_size=_VOCAB_SIZE, bad=bad),
        "permute, rows": permute_then_rows,
        "shuffled_rows": lambda: shuffled_rows(tokens, 0, count, seq_len=seq_len, out=out, **order),
        "gather": lambda: gather(tokens, starts, seq_len),
    }
    if module is np:
        windows = torch.from_numpy(tokens.view(np.int16)).unfold(0, seq_len + 1, 1)  # the ids fit
        torch_starts = torch.from_numpy(host_starts)

        def torch_gather() -> Results:
            read = windows.index_select(0, torch_starts).long()
            return read[:, :-1].contiguous().numpy(), read[:, 1:].contiguous().numpy()

        found["torch gather"] = torch_gather
    for name, run in found.items():
        for array in out:
            array.fill(-1)
        for result, expected in zip(run(), wanted, strict=True):
            if not bool((result == module.asarray(expected)).all()):
                raise SystemExit(f"{name} is wrong at {count} x {seq_len} on {module.__name__}")
    if int(bad[0]) != 0:
        raise SystemExit(f"{int(bad[0])} good ids were counted as bad at {count} x {seq_len} on {module.__name__}")
    if module is np:
        return dict(found), "gather"
    moved_bytes = count * ((seq_len + 1) * tokens.itemsize + 2 * seq_len * 8)
    source = module.zeros(moved_bytes // 2, np.uint8)  # a copy moves each byte twice
    target = module.empty_like(source)
    return {**found, "copy": lambda: module.copyto(target, source)}, "copy"


if __name__ == "__main__":
    typer.run(main)
