"""Endless streams: what a loader should hand out from any place on, and what it does hand out."""

import itertools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
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


def check_every_resume(load: Callable[[], Any], resumed: Callable[[], Any] | None = None, epochs: int = 1) -> list[Any]:
    """From each state of a run, a new loader goes on with the batch that came next. Returns the states.

    resumed: makes those loaders, if not as `load` does
    """
    batches = []
    with load() as loader:
        states = [loader.state_dict()]
        for _ in range(epochs):
            for batch in loader:
                batches.append({name: tensor.numpy() for name, tensor in batch.items()})
                states.append(loader.state_dict())
    assert batches
    for step, (state, expected) in enumerate(zip(states[:-1], batches, strict=True)):
        with (resumed or load)() as loader:
            loader.load_state_dict(json.loads(json.dumps(state)))
            found = next(iter(loader))
            assert found.keys() == expected.keys()
            assert same(found, expected), step
    return states


def check_resumes_on_other_ranks(load: Callable[..., Any]) -> None:
    """Each step of a run of one rank with 2 rows is that of new loaders of two ranks with a row each, which resume.

    load: with other settings. Fields have an entry for each row, and `row_ids` are the third of them.
    """
    with load(rank=0, world_size=1) as loader:
        expected = [_rows(batch) for batch in take(loader_stream(loader), len(loader) + 2)]
    state = None
    for step, wanted in enumerate(expected):
        ranks = [load(batch_size=1, rank=rank, world_size=2) for rank in (0, 1)]
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(json.loads(json.dumps(state)))
        assert [row for rank in ranks for row in _rows(next(iter(rank))) if row[2] >= 0] == wanted, step
        state = ranks[0].state_dict()
        assert ranks[1].state_dict() == state
        for rank in ranks:
            rank.close()


def _rows(batch: Any) -> list[tuple[Any, ...]]:
    return list(zip(*(tensor.tolist() for tensor in batch.values()), strict=True))


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
