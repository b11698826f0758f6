"""Endless streams: what a loader should hand out from any place on, and what it does hand out."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from oracle import IntArray, epoch_batches, same


def oracle_stream(
    tokens: IntArray, *, epoch: int = 0, first_row: int = 0, **settings: Any
) -> Iterator[dict[str, IntArray]]:
    """Batches from a place in the data order on, epoch after epoch."""
    for number in itertools.count(epoch):
        yield from epoch_batches(tokens, epoch=number, first_row=first_row, **settings)
        first_row = 0


def loader_stream(loader: Any) -> Iterator[Any]:
    """Batches of a loader, one `for` after another."""
    while True:
        yield from loader


def take(stream: Iterable[Any], count: int) -> list[Any]:
    """The next `count` batches; fewer where the stream ends."""
    return list(itertools.islice(stream, count))


def all_same(batches: Iterable[Any], expected: Iterable[dict[str, IntArray]]) -> bool:
    """Whether as many batches were handed out as the oracle has, each equal to its own."""
    pairs = itertools.zip_longest(batches, expected)
    return all(got is not None and want is not None and same(got, want) for got, want in pairs)


def row_ids(batches: Iterable[Any]) -> list[int]:
    """Row numbers of some batches, one after another."""
    return [row for batch in batches for row in batch["row_ids"].tolist()]


def write_counting(folder: Path, sizes: Sequence[int]) -> tuple[str, IntArray]:
    """uint32 files of some sizes in which token i is i: a pattern for them, and all their tokens."""
    tokens = np.arange(sum(sizes), dtype=np.int64)
    ends = np.cumsum(sizes)
    for number, (size, end) in enumerate(zip(sizes, ends, strict=True)):
        tokens[end - size : end].astype(np.uint32).tofile(folder / f"part_{number}.bin")
    return str(folder / "*.bin"), tokens
