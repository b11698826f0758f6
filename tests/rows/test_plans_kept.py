"""A block's plan is made once: by the thread that reads it, not again when a loader hands the block out."""

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from row_oracle import END, write_documents
from streams import loader_stream, take

from dali_pipes import TokenLoader
from dali_pipes.rows.windows import WindowRows, Windows
from dali_pipes.schedule import Blocks, Position, Schedule, StepRange
from dali_pipes.schedule import plans as row_plan
from dali_pipes.schedule.plans import PlanCache

Made = Counter[tuple[StepRange, bool]]
"""How often a plan was made, by its steps and whether that was in the main thread."""


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    """Plans that are made; they are of fewer rows, so that there are many of them."""
    counts: Made = Counter()
    real = row_plan.plan_steps

    def counted(schedule: Schedule, steps: StepRange) -> row_plan.Plan:
        counts[steps, threading.current_thread() is threading.main_thread()] += 1
        return real(schedule, steps)

    monkeypatch.setattr(row_plan, "plan_steps", counted)
    monkeypatch.setattr(row_plan, "PLAN_ROWS", 12)
    return counts


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("plans") / "corpus"
    draw = random.Random(4)
    write_documents(folder, [[draw.randint(1, 8) for _ in range(draw.randint(0, 12))] + [END] for _ in range(600)])
    return str(folder)


@pytest.mark.parametrize("rows", ["stream", "pack"])
@pytest.mark.parametrize("skip_steps", [(), ((2, 4), (5, 6), (30, 33))])
@pytest.mark.parametrize(
    ("num_threads", "prefetch_queue_depth", "batches_per_run"),
    [
        (1, 1, 1),
        (2, 32, 1),
        (20, 5, 3),
        (48, 2, 20),
        *(pytest.param(*how, marks=pytest.mark.slow) for how in [(2, 2, 1), (2, 64, 3), (12, 2, 1), (48, 2, 2)]),
    ],
)
def test_a_loader_makes_each_plan_once(
    corpus: str,
    made: Made,
    rows: str,
    skip_steps: tuple[tuple[int, int], ...],
    num_threads: int,
    prefetch_queue_depth: int,
    batches_per_run: int,
) -> None:
    """Through two epochs, of rows that are put together from pieces."""
    how: dict[str, Any] = {"rows": rows, "skip_steps": skip_steps, "num_threads": num_threads}
    how |= {"prefetch_queue_depth": prefetch_queue_depth, "batches_per_run": batches_per_run}
    if rows == "pack":
        how["window_documents"] = 100
    outputs = ("input_ids", "position_ids")
    with TokenLoader(
        corpus=corpus, dtype="uint16", eos_id=END, device="cpu", seq_len=16, batch_size=2, outputs=outputs, **how
    ) as loader:
        made.clear()
        take(loader_stream(loader), 150)
        assert loader.epoch > 0
    again = {steps: count for (steps, _), count in made.items() if count > 1}
    assert again == {}
    assert [steps for steps, in_main in made if in_main] == []


def order_of_calls(
    blocks: Blocks, at_work: list[StepRange], num_threads: int, queue_depth: int, draw: random.Random
) -> Iterator[StepRange]:
    """The steps of calls: each block's when a thread plans it, and again when it is handed out.

    Threads take blocks in order, as they are read ahead, and any of those at work may be the next to come to its plan.

    at_work: what threads still work on from the place before, and later from this one
    """
    newest, hurry = draw.random(), draw.random()
    asked = started = handed_out = 0
    planned: set[StepRange] = set()
    while handed_out < 80:
        if len(at_work) < num_threads and started <= asked + num_threads:
            at_work.append(steps_of(blocks, started))
            started += 1
        elif asked < handed_out + queue_depth and steps_of(blocks, asked) in planned:
            asked += 1
        elif at_work and not (handed_out < asked and draw.random() < hurry):
            steps = at_work.pop(-1 if draw.random() < newest else draw.randrange(len(at_work)))
            planned.add(steps)
            yield steps
        elif handed_out < asked:
            yield steps_of(blocks, handed_out)
            handed_out += 1


def steps_of(blocks: Blocks, number: int) -> StepRange:
    steps = blocks.steps(number)
    assert steps is not None
    return steps


@settings(max_examples=examples(10))
@given(
    num_threads=st.sampled_from([1, 2, 12, 40]),
    queue_depth=st.sampled_from([1, 2, 32]),
    batches_per_run=st.integers(1, 4),
    batch_size=st.integers(1, 5),
    num_rows=st.sampled_from([7, 40, 1000]),
    skip=st.lists(st.integers(0, 12), unique=True, max_size=4).map(sorted),
    seed=st.integers(0, 10**6),
)
def test_in_whatever_order_threads_come_to_their_plans(
    num_threads: int,
    queue_depth: int,
    batches_per_run: int,
    batch_size: int,
    num_rows: int,
    skip: list[int],
    seed: int,
) -> None:
    """Short epochs, steps that are left out, and a restart elsewhere while blocks are on their way."""
    skip_steps = tuple((first, first + 1, epoch) for epoch in (1, 2, 1000, 1001) for first in skip)
    schedule = Schedule(WindowRows(Windows(0, num_rows, 8, 8, 8 * num_rows)), batch_size, skip_steps=skip_steps)
    draw = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(row_plan, "PLAN_ROWS", 12)
        counts: Counter[StepRange] = Counter()
        real = row_plan.plan_steps

        def counted(schedule: Schedule, steps: StepRange) -> row_plan.Plan:
            counts[steps] += 1
            return real(schedule, steps)

        patch.setattr(row_plan, "plan_steps", counted)
        cache = PlanCache(schedule, batches_per_run, num_threads=num_threads, queue_depth=queue_depth)
        at_work: list[StepRange] = []
        for epoch in (0, 1000, 2000):
            blocks = Blocks(schedule, batches_per_run, schedule.normalize(Position(epoch, 0)))
            for steps in order_of_calls(blocks, at_work, num_threads, queue_depth, draw):
                plan = cache.plan(steps)
                assert plan.steps == steps
                assert plan.row_ids.tolist() == schedule.rows(steps).tolist()
            assert {steps: count for steps, count in counts.items() if count > 1 and steps.epoch >= epoch} == {}


def test_plans_of_other_steps_are_made_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of the same steps once: threads that want them wait for the one that makes them."""
    schedule = Schedule(WindowRows(Windows(0, 240, 8, 8, 8 * 240)), 2)
    both = threading.Barrier(2)
    made: list[StepRange] = []
    real = row_plan.plan_steps

    def plan_steps(schedule: Schedule, steps: StepRange) -> row_plan.Plan:
        made.append(steps)
        both.wait(30)  # until another thread makes a plan, too
        return real(schedule, steps)

    monkeypatch.setattr(row_plan, "plan_steps", plan_steps)
    monkeypatch.setattr(row_plan, "PLAN_ROWS", 12)
    cache = PlanCache(schedule, 3, num_threads=4)
    wanted = [StepRange(0, 0, first, 3) for first in (0, 3, 6, 9)]
    with ThreadPoolExecutor(4) as pool:
        plans = list(pool.map(cache.plan, wanted))
    assert [plan.row_ids.tolist() for plan in plans] == [schedule.rows(steps).tolist() for steps in wanted]
    assert len(made) == 2
