"""A simulated world of 16,384 ranks: together they have every row once, and none needs more memory for the others."""

import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracle import epoch_batches, same

from dali_pipes import TokenLoader
from dali_pipes.config import LoaderConfig
from dali_pipes.engine.build import TARGET_BLOCK_TOKENS, batches_per_run
from dali_pipes.rows.document_rows import DocumentRows, RowMode
from dali_pipes.rows.length_buckets import LengthBuckets
from dali_pipes.rows.windows import WindowRows, split_windows
from dali_pipes.schedule import PADDING, Schedule, StepRange
from dali_pipes.schedule.plans import Plan, PlanCache, plan_steps

WORLD_SIZE = 16384
T = 16
BUCKETS = (4, 8, T)


def documents(mode: RowMode, count: int, window: int, *, buckets: bool) -> DocumentRows:
    lengths = np.random.default_rng(2).integers(1, T + 1, count)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    widths = LengthBuckets(np.array(BUCKETS)) if buckets else None
    options: dict[str, Any] = {"long_documents": "split", "window_documents": window, "shuffle": True, "seed": 7}
    return DocumentRows(offsets, T, mode=mode, **options, buckets=widths)


def make(rows: str, count: int = 25_000, window: int = 9_000, **settings: Any) -> Schedule:
    """The schedule of rank 0 of 16,384 with one row each a step, over `count` windows or documents."""
    settings = {"batch_size": 1, "world_size": WORLD_SIZE, **settings}
    if rows == "stream":
        return Schedule(WindowRows(split_windows(count * T + 1, T), seed=7), **settings)
    mode: RowMode = "pack" if rows == "pack" else "pad"
    return Schedule(documents(mode, count, window, buckets=rows == "buckets"), **settings)


def plans(schedule: Schedule, step: int) -> list[Plan]:
    """What each of the ranks plans for a step."""
    steps = StepRange(1, 0, step, 1)
    return [plan_steps(replace(schedule, rank=rank), steps) for rank in range(schedule.world_size)]


def pieces_of(of_ranks: list[Plan]) -> list[tuple[int, int]]:
    """First token and tokens of all pieces that ranks have in a step."""
    found = []
    for plan in of_ranks:
        assert plan.pieces is not None
        found += list(zip(plan.pieces.starts.tolist(), plan.pieces.lengths.tolist(), strict=True))
    return found


@pytest.mark.parametrize("rows", ["stream", "pack"])
def test_the_union_of_all_ranks_is_the_epoch(rows: str) -> None:
    """Of 2,048. A whole step, and the last, partial one, which does not divide evenly and is padded."""
    ranks = 2048
    schedule = make(rows, 5_000 if rows == "pack" else 3_100, 1_100, drop_last=False, world_size=ranks)
    total = schedule.rows_known(1)
    assert schedule.steps(0, 1) == 2
    whole, partial = plans(schedule, 0), plans(schedule, 1)
    ids = np.concatenate([plan.row_ids for plan in whole + partial])
    assert np.array_equal(ids, np.concatenate((np.arange(total), np.full(2 * ranks - total, PADDING))))
    if isinstance(schedule.interleave, DocumentRows):
        offsets = schedule.interleave.offsets.tolist()
        assert sorted(pieces_of(whole + partial)) == [(begin, end - begin) for begin, end in pairwise(offsets)]
    else:
        real = [plan for plan in whole + partial if plan.row_ids[0] != PADDING]
        assert sorted(int(plan.starts[0]) for plan in real) == list(range(0, total * T, T))


def test_every_rank_has_the_width_of_the_longest_row() -> None:
    """In a last step that most ranks have no row in."""
    schedule = make("buckets", WORLD_SIZE + 40, drop_last=False)
    of_ranks = plans(schedule, 1)
    pieces = pieces_of(of_ranks)
    assert len(set(pieces)) == 40
    longest = max(length for _, length in pieces)
    width = min(bucket for bucket in BUCKETS if bucket >= longest)
    assert {int(plan.widths[0]) for plan in of_ranks if plan.widths is not None} == {width}


@pytest.mark.parametrize("rows", ["stream", "pack"])
def test_without_the_partial_step(rows: str) -> None:
    schedule = make(rows, 40_000)
    total = schedule.rows_known(0)
    assert schedule.steps(0, 0) == total // WORLD_SIZE < -(-total // WORLD_SIZE)
    for step in range(schedule.steps(0, 0)):
        steps = StepRange(0, 0, step, 1)
        ids = np.concatenate([replace(schedule, rank=rank).rows(steps) for rank in range(WORLD_SIZE)])
        assert np.array_equal(ids, np.arange(step * WORLD_SIZE, (step + 1) * WORLD_SIZE))


@pytest.mark.parametrize("rows", ["pack", "pad", "buckets"])
def test_windows_of_large_steps_are_planned_once(monkeypatch: pytest.MonkeyPatch, rows: str) -> None:
    """Steps of 16,384 rows span tens of windows. Only those of the first step are planned before that is known."""
    planned: list[int] = []
    real = DocumentRows._make_plan

    def counted(self: DocumentRows, epoch: int, window: int) -> Any:
        planned.append(window)
        return real(self, epoch, window)

    monkeypatch.setattr(DocumentRows, "_make_plan", counted)
    schedule = make(rows, 120_000, 1000, rank=WORLD_SIZE - 1)
    plan_steps(schedule, StepRange(0, 0, 0, 1))
    of_first = set(planned)
    assert len(of_first) > 16
    planned.clear()
    for step in (1, 2):
        plan_steps(schedule, StepRange(0, 0, step, 1))
    assert len(planned) > 30
    assert len(set(planned)) == len(planned)
    assert not of_first & set(planned)


def test_a_first_batch_waits_for_the_plans_of_its_own_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 1,024 ranks with batches of 4 are of 16 steps, not of the 128 that one rank has."""
    planned = []
    real = DocumentRows._make_plan

    def counted(self: DocumentRows, epoch: int, window: int) -> Any:
        planned.append(window)
        return real(self, epoch, window)

    monkeypatch.setattr(DocumentRows, "_make_plan", counted)
    config = LoaderConfig(corpus="tokens", batch_size=4, seq_len=2048)
    alone = make("pack", 300_000, batch_size=4, world_size=1)
    assert batches_per_run(config, alone, TARGET_BLOCK_TOKENS) == 128
    schedule = make("pack", 300_000, batch_size=4, world_size=1024)
    steps = batches_per_run(config, schedule, TARGET_BLOCK_TOKENS)
    assert steps == 16
    planned.clear()
    PlanCache(schedule, steps).plan(StepRange(0, 0, 0, steps))
    assert isinstance(schedule.interleave, DocumentRows)
    needed = schedule.interleave.mark(0, steps * schedule.global_rows - 1).window + 1
    assert set(planned) <= set(range(needed))
    assert schedule.rows_known(0) > 2 * steps * schedule.global_rows


@pytest.mark.parametrize("rank", [0, 7232, WORLD_SIZE - 1])
def test_a_loader_of_one_of_them(tmp_path: Path, rank: int) -> None:
    tokens = np.arange(40_000 * 4 + 1)
    tokens.astype(np.uint32).tofile(tmp_path / "tokens.bin")
    order: dict[str, Any] = {"batch_size": 1, "seq_len": 4, "rank": rank, "world_size": WORLD_SIZE, "drop_last": False}
    outputs = ("input_ids", "labels", "row_ids")
    with TokenLoader(corpus=str(tmp_path), dtype="uint32", device="cpu", outputs=outputs, **order) as loader:
        assert len(loader) == 3
        for batch, expected in zip(loader, epoch_batches(tokens, **order), strict=True):
            assert same(batch, expected)


def peak_bytes(rows: str, world_size: int) -> int:
    """Of planning for one rank until all together have planned 65,536 rows, what is kept included."""
    schedule = make(rows, 140_000, 4_000, batch_size=4, world_size=world_size)
    tracemalloc.start()
    try:
        cache = PlanCache(replace(schedule, rank=world_size - 1), 1)
        for step in range(65536 // schedule.global_rows):
            cache.plan(StepRange(0, 0, step, 1))
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rows", ["stream", "pack", "buckets"])
def test_memory_does_not_grow_with_the_ranks(rows: str) -> None:
    """A step has 65,536 rows here: 512 KiB for an array of their numbers alone."""
    alone = peak_bytes(rows, 64)
    assert peak_bytes(rows, WORLD_SIZE) < alone + 200_000
