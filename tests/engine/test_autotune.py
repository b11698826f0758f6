"""Threads and depth where they are "auto": what they may be, and that they follow the wait for data.

The readers are played: what takes how long is known, so nothing here has a clock or a thread.
"""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes import LoaderConfig
from dali_pipes.engine.read_ahead import (
    BUSY,
    MOST_AHEAD_BYTES,
    MOST_AUTO_DEPTH,
    MOST_AUTO_THREADS,
    SHORT_ROW_BYTES,
    Autotune,
    blocks_on_their_way,
    choose_read_ahead,
    rungs,
)
from dali_pipes.monitoring.stats import ReadAhead

SHAPE = {"corpus": "x", "batch_size": 1, "seq_len": 1}
auto_or = st.just("auto") | st.integers(1, 64)


@given(
    threads=auto_or,
    depth=auto_or,
    cpus=st.integers(1, 300),
    is_direct=st.booleans(),
    row_bytes=st.none() | st.integers(1, 1 << 16),
    reads=st.sampled_from(["calls", "mapped"]),
    block_bytes=st.integers(1, 1 << 31),
    delivered_bytes=st.integers(0, 1 << 31),
    blocks=st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), max_size=300),
)
def test_whatever_happens_the_limits_hold(
    threads: int | str,
    depth: int | str,
    cpus: int,
    is_direct: bool,
    row_bytes: int | None,
    reads: str,
    block_bytes: int,
    delivered_bytes: int,
    blocks: list[tuple[float, float]],
) -> None:
    """A number stays as it was given; "auto" stays within cores, memory and a fixed most, and starts small."""
    config = LoaderConfig(**SHAPE, num_threads=threads, prefetch_queue_depth=depth, reads=reads)
    sizes = {"block_bytes": block_bytes, "delivered_bytes": delivered_bytes}
    tune = choose_read_ahead(config, cpus=cpus, is_direct=is_direct, plain_row_bytes=row_bytes, **sizes)
    first = tune.now
    assert threads == "auto" or first.num_threads == threads
    is_short = row_bytes is not None and row_bytes < SHORT_ROW_BYTES and reads == "calls"
    has_one = cpus == 1 or (row_bytes is not None and not is_short and depth != 1)
    assert threads != "auto" or first.num_threads == (1 if has_one else 2)
    assert depth == "auto" or first.prefetch_queue_depth == depth
    if depth == "auto" and not is_direct:
        queue_bytes = first.prefetch_queue_depth * delivered_bytes
        assert first.prefetch_queue_depth == 2 or (first.prefetch_queue_depth <= 4 and queue_bytes <= 64 << 20)
    assert first == (first.num_threads, first.prefetch_queue_depth)
    for wait_s, work_s in blocks:
        tune.add(wait_s, work_s)
        now = tune.now
        assert threads != "auto" or now.num_threads <= min(MOST_AUTO_THREADS, max(4, 2 * cpus))
        assert threads == "auto" or now.num_threads == threads
        assert depth != "auto" or now.prefetch_queue_depth <= MOST_AUTO_DEPTH
        assert (depth == "auto" and is_direct) or now.prefetch_queue_depth == first.prefetch_queue_depth
        assert now.num_threads >= first.num_threads
        assert now.prefetch_queue_depth >= first.prefetch_queue_depth
        in_flight = blocks_on_their_way(now, is_direct=is_direct)
        assert tune.blocks == in_flight <= tune.most_blocks
        assert now == first or in_flight * block_bytes <= MOST_AHEAD_BYTES
        assert (tune.state == "fixed") == (threads != "auto")
    at = first
    for change in tune.changes if len(tune.changes) < 20 else ():
        assert change.before == at != change.after
        at = change.after
    assert len(tune.changes) == 20 or at == tune.now


class Readers:
    """Reader threads that take `latency_s` for a block, apart from what they share: a device of `device_s` a block.

    `add` is what a block source tells; `work_s` of the trainer comes before each block.
    """

    def __init__(self, tune: Autotune, *, latency_s: float, device_s: float, rng: random.Random, jitter: float) -> None:
        self.tune, self.latency_s, self.device_s, self.rng, self.jitter = tune, latency_s, device_s, rng, jitter
        self.now = self.device_free = self.asked = 0.0
        self.free = [0.0] * tune.now.num_threads  # when each thread is
        self.ready: deque[float] = deque()  # when each block on its way is
        self.waited_s = 0.0

    def varied(self, seconds: float) -> float:
        return seconds * (1 + self.jitter * (2 * self.rng.random() - 1))

    def _ask(self) -> None:
        while len(self.ready) < self.tune.blocks:
            begin = max(self.now, heapq.heappop(self.free))
            read = begin + self.varied(self.latency_s)
            self.device_free = max(self.device_free, begin) + self.device_s
            end = max(read, self.device_free)
            heapq.heappush(self.free, end)
            self.ready.append(end)

    def block(self, work_s: float) -> float:
        """One block, for which the trainer waits that long."""
        work_s = self.varied(work_s)
        self.now += work_s
        while len(self.free) < self.tune.now.num_threads:
            heapq.heappush(self.free, self.now)
        while len(self.free) > self.tune.now.num_threads:
            heapq.heappop(self.free)
        self._ask()
        wait_s = max(0.0, self.ready.popleft() - self.now)
        self.now += wait_s
        self.waited_s += wait_s
        self.tune.add(wait_s, work_s)
        return wait_s


def tuned(cpus: int = 8) -> Autotune:
    return choose_read_ahead(LoaderConfig(**SHAPE), cpus=cpus, is_direct=True, block_bytes=1 << 20, delivered_bytes=1)


def blocks_until(readers: Readers, seconds: float, work_s: float) -> Iterator[float]:
    end = readers.now + seconds
    while readers.now < end:
        yield readers.block(work_s)


@settings(max_examples=examples(15), deadline=None)
@given(
    latency_s=st.floats(0.02, 0.3),
    work_share=st.floats(0.05, 0.9),
    cpus=st.sampled_from([1, 2, 4, 16, 64]),
    jitter=st.sampled_from([0.0, 0.02, 0.2]),
    seed=st.integers(0, 1000),
)
def test_waiting_that_threads_can_hide_goes_away(
    latency_s: float, work_share: float, cpus: int, jitter: float, seed: int
) -> None:
    """Reads with a latency and a trainer that works: it ends without waiting, or with as many threads as there may be.

    And it stays as it is then, unless some threads take as long as the trainer, give or take: chance may then call for
    more.
    """
    tune = tuned(cpus)
    work_s = latency_s * work_share
    readers = Readers(tune, latency_s=latency_s, device_s=0.0, rng=random.Random(seed), jitter=jitter)
    for _ in blocks_until(readers, 10 + 150 * latency_s, work_s):
        pass
    settled, before, waited_s = tune.now, readers.now, readers.waited_s
    for _ in blocks_until(readers, 10 + 150 * latency_s, work_s):
        pass
    is_close = any(0.8 <= threads * work_share <= 1.3 for threads in (1, 2, 4, 8, 16, 32))
    assert tune.now == settled or (jitter > 0.0 and is_close and tune.now > settled)
    share = (readers.waited_s - waited_s) / (readers.now - before)
    at_most = settled.num_threads == min(32, max(4, 2 * cpus))
    assert not at_most or tune.state == "at limit" or share < 0.02
    assert share < (0.04 if jitter else 0.02) or at_most, (share, settled)
    needed = latency_s / work_s
    assert at_most or settled.num_threads <= max(2, 4 * needed), "no more than are useful"
    # The share waited in a first attempt may be that of a queue that had just been filled.
    assert sum(change.after < change.before for change in tune.changes) <= 2


@settings(max_examples=examples(15), deadline=None)
@given(
    device_s=st.floats(0.005, 0.2),
    work_share=st.floats(0.0, 0.7),
    jitter=st.sampled_from([0.0, 0.02]),
    seed=st.integers(0, 1000),
    cpus=st.sampled_from([1, 2, 16]),
)
def test_no_more_threads_where_they_gain_nothing(
    device_s: float, work_share: float, jitter: float, seed: int, cpus: int
) -> None:
    """A device at its limit, such as a disk or the only core, also for a trainer without any work: one attempt, and
    back to the start for good."""
    tune = tuned(cpus)
    first = tune.now
    readers = Readers(tune, latency_s=0.0, device_s=device_s, rng=random.Random(seed), jitter=jitter)
    for _ in blocks_until(readers, 20 + 200 * device_s, work_share * device_s):
        pass
    assert tune.now == first
    assert tune.state == "no gain"
    assert [change.after > change.before for change in tune.changes] == [True, False]


@given(
    cpus=st.integers(1, 16),
    busy=st.floats(BUSY + 0.01, 1.0),
    idle=st.floats(0.0, BUSY - 0.01),
    work_s=st.floats(0.0, 0.01),
)
def test_no_attempt_while_each_cpu_has_a_thread_that_does_not_wait_for_a_disk(
    cpus: int, busy: float, idle: float, work_s: float
) -> None:
    tune = tuned(cpus)
    for _ in range(2_000):
        tune.add(0.01, work_s, busy)
    assert cpus > 2 or tune.changes == ()
    assert all(change.before.num_threads < cpus for change in tune.changes if change.after > change.before)
    assert cpus > 2 or tune.state == "no gain"
    changes = len(tune.changes)
    for _ in range(2_000):
        tune.add(0.01, work_s, idle)  # a part of the corpus that is not in memory
    assert cpus > 2 or len(tune.changes) > changes


def test_the_trainers_thread_needs_a_cpu_where_it_makes_the_batches() -> None:
    """On two CPUs, no thread is added to one that does not wait for a disk; short rows have two from the start."""
    for row_bytes, threads in ((8194, 1), (2050, 2), (None, 2)):
        sizes = {"block_bytes": 1 << 20, "delivered_bytes": 1 << 22}
        config = LoaderConfig(**SHAPE)
        tune = choose_read_ahead(config, cpus=2, is_direct=True, plain_row_bytes=row_bytes, **sizes)
        for _ in range(2_000):
            tune.add(0.01, 0.001, 1.0)
        assert (tune.changes, tune.state) == ((), "no gain")
        assert tune.now.num_threads == threads
        for _ in range(2_000):
            tune.add(0.01, 0.001, 0.01)
        assert len(tune.changes) > 0


def test_a_trainer_that_never_waits_changes_nothing() -> None:
    tune = tuned()
    for number in range(10_000):
        tune.add(0.0001 if number % 7 == 0 else 0.0, 0.01)
    assert tune.changes == ()
    assert tune.state == "adapting"


def test_reading_that_becomes_slow_later() -> None:
    """Hours of good data, then a disk with ten times the latency: more threads, until nobody waits."""
    tune = tuned()
    readers = Readers(tune, latency_s=0.01, device_s=0.0, rng=random.Random(1), jitter=0.02)
    for _ in blocks_until(readers, 600, 0.02):
        pass
    assert list(tune.changes) == []
    readers.latency_s = 0.1
    for _ in blocks_until(readers, 30, 0.02):
        pass
    assert tune.now.num_threads == 8
    assert sum(blocks_until(readers, 10, 0.02)) < 0.1
    assert tune.changes[-1].after == tune.now
    assert all(600 <= change.run_s < 630 for change in tune.changes)


def test_another_attempt_once_the_trainer_waits_twice_as_much() -> None:
    """And after a time without waiting, at any share."""
    tune = tuned()

    def some(share: float, seconds: float = 5.0) -> int:
        before = len(tune.changes)
        for _ in range(int(seconds / 0.01)):
            tune.add(0.01 * share, 0.01 * (1 - share))
        return len(tune.changes) - before

    assert some(0.1) == 2, "one attempt, and back"
    assert some(0.1) == some(0.19) == 0
    states: list[str] = [tune.state]
    assert some(0.22) == 2
    assert some(0.0, 30.0) == 0
    assert [*states, tune.state] == ["no gain", "adapting"]
    assert some(0.1) == 2


@pytest.mark.parametrize("pause_s", [3.0, 300.0])
@pytest.mark.parametrize("every", [37, 400])
def test_pauses_of_the_trainer_are_not_its_work(pause_s: float, every: int) -> None:
    """Checkpoints and validations between blocks hide neither a wait nor a gain."""
    tune = tuned(cpus=4)
    readers = Readers(tune, latency_s=0.1, device_s=0.0, rng=random.Random(2), jitter=0.1)
    for number in range(4000):
        if number % every == every - 1:
            readers.now += pause_s
            work_s = pause_s
            wait_s = 0.0
            tune.add(wait_s, work_s)
        else:
            readers.block(0.02)
    assert tune.now.num_threads == 8


def test_blocks_that_dali_asks_for_in_one_go() -> None:
    """Its queue takes all that are ready, so that there is no work before most of them."""
    tune = choose_read_ahead(LoaderConfig(**SHAPE), cpus=16, is_direct=False, block_bytes=1, delivered_bytes=1)
    first = tune.now
    for _ in range(2000):
        for number in range(4):
            tune.add(0.0004 if number == 0 else 0.0, 0.2 if number == 0 else 0.00001)
    assert tune.now == first
    assert tune.changes == ()
    assert first.prefetch_queue_depth == 4


@given(
    first=st.tuples(st.integers(1, 40), st.integers(1, 20)),
    more=st.tuples(st.integers(0, 40), st.integers(0, 20)),
    most_blocks=st.integers(0, 100),
    is_direct=st.booleans(),
)
def test_each_setting_has_up_to_twice_of_the_one_before(
    first: tuple[int, int], more: tuple[int, int], most_blocks: int, is_direct: bool
) -> None:
    most = ReadAhead(first[0] + more[0], first[1] + more[1])
    found = rungs(ReadAhead(*first), most, most_blocks, is_direct=is_direct)
    assert found[0] == first
    for before, after in itertools.pairwise(found):
        assert before != after
        assert all(old <= new <= min(2 * old, limit) for old, new, limit in zip(before, after, most, strict=True))
        assert blocks_on_their_way(after, is_direct=is_direct) <= most_blocks
    last = found[-1]
    longer = ReadAhead(*(min(2 * now, limit) for now, limit in zip(last, most, strict=True)))
    assert last == most or blocks_on_their_way(longer, is_direct=is_direct) > most_blocks


def test_the_start_of_a_run_is_not_judged() -> None:
    """Cold files and first compilations; and again after a restart."""
    tune = tuned()
    for _ in range(3):
        tune.restart()
        for _ in range(tune.blocks + 1):
            tune.add(10.0, 0.0)
        assert tune.changes == ()


def test_blocks_that_come_together_are_counted_together() -> None:
    """Threads that wait for a disk may end at the same moment: half a round would be a wrong rate."""
    tune = tuned()
    while len(tune.changes) < 2:
        tune.add(0.0625, 0.0)
        tune.add(0.0, 0.0)
    assert "32 blocks a second, 32 before" in tune.changes[-1].reason
