"""Time of `segments` with all outputs, compared with `rows` of the same size and, on a GPU, a plain copy.

Tokens are uint16 and piece lengths log-normal, as in a packed batch; pieces are contiguous in the tokens, as the loader
reads them, or scattered. The copy moves as many bytes as `segments` reads and writes. See `benchmarks/README.md`.
"""

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np
import typer
from numpy.typing import NDArray
from operator_timing import measure, modules, report

from dali_pipes.operators import rows, segments
from dali_pipes.operators.segments import OUTPUTS

_VOCAB_SIZE = 32_000
_SIGMA = 1.2  # of the logarithm of a length


class Tables(NamedTuple):
    """Arguments of `segments`, by name."""

    row_offsets: NDArray[np.int64]
    piece_starts: NDArray[np.int64]
    piece_lengths: NDArray[np.int64]
    piece_ends: NDArray[np.int64]


def main(
    quick: Annotated[bool, typer.Option("--quick", help="tiny sizes, only to check that it runs")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="samples per alternative")] = 15,
) -> None:
    """Check every result, measure, print a table; the last line is one JSON line."""
    num_tokens = 50_000 if quick else 100_000_000
    sizes = [(3, 100, 20)] if quick else [(4, 32_768, 400), (4, 32_768, 20), (64, 2048, 400)]
    tokens = np.random.default_rng(0).integers(0, _VOCAB_SIZE, num_tokens, np.uint16)
    entries = []
    for module in modules():
        there = module.asarray(tokens)
        for count, seq_len, median in sizes:
            for place in ("side by side", "anywhere"):
                tables = pack(num_tokens, count, seq_len, median, side_by_side=place == "side by side")
                case = f"{count} x {seq_len}, {tables.piece_starts.size} pieces {place}"
                alternatives, baseline = _alternatives(module, there, tables, seq_len, case)
                timed = measure(module, alternatives, baseline, 3 if quick else rounds)
                shape = {"case": case, "rows": count, "seq_len": seq_len, "pieces": tables.piece_starts.size}
                entries += [shape | entry for entry in timed]
    report("segments", entries)


def pack(num_tokens: int, count: int, seq_len: int, median: int, *, side_by_side: bool) -> Tables:
    """Rows of pieces that fill them but for the last, which as often as not is left out."""
    generator = np.random.default_rng(median)
    lengths: list[int] = []
    offsets = [0]
    for _ in range(count):
        left = seq_len
        while left:
            length = min(left, 1 + int(generator.lognormal(np.log(median), _SIGMA)))
            left -= length
            if left or generator.random() < 0.5:
                lengths.append(length)
        offsets.append(len(lengths))
    sizes = np.array(lengths)
    starts = np.cumsum(sizes) - sizes if side_by_side else generator.integers(0, num_tokens - seq_len, sizes.size)
    return Tables(np.array(offsets), starts, sizes, starts + sizes)


def _alternatives(
    module: Any, tokens: Any, tables: Tables, seq_len: int, case: str
) -> tuple[dict[str, Callable[[], object]], str]:
    """What is timed for one size, with its results checked, and the name of the yardstick."""
    count = tables.row_offsets.size - 1
    there: dict[str, Any] = {name: module.asarray(table) for name, table in tables._asdict().items()}
    there |= {"tokens": tokens, "seq_len": seq_len}
    out = segments(**there, outputs=OUTPUTS)
    for name, expected in _one_by_one(module, tokens, tables, seq_len).items():
        if not bool((out[name] == expected).all()):
            raise SystemExit(f"{name} of segments are wrong at {case} on {module.__name__}")
    starts = module.asarray(np.random.default_rng(1).integers(0, tokens.size - seq_len, count))
    both = module.empty((count, seq_len), np.int64), module.empty((count, seq_len), np.int64)
    two = {name: out[name] for name in ("input_ids", "labels")}
    types: dict[str, Any] = {"index_dtype": np.int32, "mask_dtype": np.bool_}
    narrow = segments(**there, outputs=OUTPUTS, **types)
    for name, array in narrow.items():
        if not bool((array == out[name]).all()):
            raise SystemExit(f"{name} of segments, int32 and bool, are wrong at {case} on {module.__name__}")
    found: dict[str, Callable[[], object]] = {
        "segments, all outputs": lambda: segments(**there, outputs=OUTPUTS, out=out),
        "segments, all, int32 and bool": lambda: segments(**there, outputs=OUTPUTS, out=narrow, **types),
        "segments, inputs and labels": lambda: segments(**there, outputs=tuple(two), out=two),
        "rows": lambda: rows(tokens, starts, seq_len, out=both),
    }
    if module is np:
        return found, "rows"
    moved_bytes = sum(array.nbytes for array in out.values()) + count * seq_len * tokens.itemsize
    source = module.zeros(moved_bytes // 2, np.uint8)  # a copy moves each byte twice
    target = module.empty_like(source)
    return {**found, "copy": lambda: module.copyto(target, source)}, "rows"


def _one_by_one(module: Any, tokens: Any, tables: Tables, seq_len: int) -> dict[str, Any]:
    """The outputs with a value a position, piece after piece."""
    count = tables.row_offsets.size - 1
    wanted = {name: module.zeros((count, seq_len), np.int64) for name in OUTPUTS[:-2]}
    wanted["labels"].fill(-100)
    for row in range(count):
        place = 0
        for number, piece in enumerate(range(tables.row_offsets[row], tables.row_offsets[row + 1]), 1):
            start, length = int(tables.piece_starts[piece]), int(tables.piece_lengths[piece])
            here = row, slice(place, place + length)
            wanted["input_ids"][here] = tokens[start : start + length]
            wanted["labels"][row, place : place + length - 1] = tokens[start + 1 : start + length]
            wanted["position_ids"][here] = module.arange(length)
            wanted["segment_ids"][here] = number
            wanted["attention_mask"][here] = 1
            wanted["loss_mask"][row, place : place + length - 1] = 1
            place += length
    return wanted


if __name__ == "__main__":
    typer.run(main)
