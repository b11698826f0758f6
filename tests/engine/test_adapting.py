"""A loader whose threads and depth change while it runs: the same batches, and less waiting."""

import itertools
import os
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import epoch_batches
from profiles import examples
from streams import all_same, loader_stream, oracle_stream, take

from dali_pipes import TokenLoader
from dali_pipes.corpus import Corpus
from dali_pipes.engine import build, read_ahead
from dali_pipes.engine.read_ahead import Autotune
from dali_pipes.monitoring.stats import ReadAhead
from dali_pipes.runtime.cpus import numa_node
from dali_pipes.schedule import plans

T = 8
Load = Callable[..., TokenLoader]
FIVE = [ReadAhead(1, 1), ReadAhead(2, 2), ReadAhead(3, 2), ReadAhead(5, 4), ReadAhead(7, 5)]


class Wandering(Autotune):
    """Changes its mind after any block."""

    def __init__(self, seed: int, *, is_direct: bool) -> None:
        super().__init__(FIVE, adapts_threads=True, cpus=2, is_direct=is_direct)
        self.draw, self.used = random.Random(seed), Counter[ReadAhead]()

    def add(self, wait_s: float, work_s: float, cpu_share: float = 0.0) -> None:
        assert min(wait_s, work_s, cpu_share) >= 0.0
        self.used[self.now] += 1
        if self.draw.random() < 0.3:
            self._use(self.draw.randrange(len(FIVE)))


def readers() -> set[threading.Thread]:
    """Those of other loaders may end later, and those that ask for remote data stay."""
    return {thread for thread in threading.enumerate() if "dali_pipes-reader" in thread.name}


@settings(max_examples=examples(12), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10**6),
    per_run=st.integers(1, 4),
    drop_last=st.booleans(),
    engine=st.sampled_from(["direct", "direct", "dali"]),
    is_slow=st.booleans(),
)
def test_batches_are_the_same_and_every_block_is_read_once(
    counting: Callable[..., Any], load: Load, seed: int, per_run: int, drop_last: bool, engine: str, is_slow: bool
) -> None:
    """Through epochs, and after a resume, whatever changes when; no plan is made twice, either."""
    others = readers()
    corpus = counting(401, 200)
    planned: Counter[Any] = Counter()
    read_rows, plan_steps, draw = Corpus.read_rows, plans.plan_steps, random.Random(seed)

    def counted(schedule: Any, steps: Any) -> plans.Plan:
        planned[steps] += 1
        return plan_steps(schedule, steps)

    def late(corpus: Corpus, *arguments: Any) -> None:
        time.sleep(draw.choice((0.0, 0.0, 0.002)))
        read_rows(corpus, *arguments)

    def choose(config: Any, *, is_direct: bool, **others: Any) -> Autotune:
        return Wandering(seed, is_direct=is_direct)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "choose_read_ahead", choose)
        patch.setattr(plans, "plan_steps", counted)
        patch.setattr(plans, "PLAN_ROWS", 12)
        if is_slow:
            patch.setattr(Corpus, "read_rows", late)
        shape: dict[str, Any] = {"batch_size": 2, "seq_len": T, "drop_last": drop_last}
        with load(corpus, batches_per_run=per_run, engine=engine, **shape) as loader:
            for epoch in range(3):
                assert all_same(loader, epoch_batches(corpus.tokens, epoch=epoch, **shape))
            tune = loader._source.autotune
            assert isinstance(tune, Wandering)
            blocks = loader.stats().block_times.blocks
            handed_out = loader._source.delivered
            most = FIVE[-1].num_threads + FIVE[-1].prefetch_queue_depth
            assert handed_out <= blocks <= handed_out + most + 1
            assert max(planned.values()) == 1
            loader.load_state_dict({**loader.state_dict(), "epoch": 7, "rows": 20})
            assert all_same(loader, epoch_batches(corpus.tokens, epoch=7, first_row=20, **shape))
            assert loader.stats().num_threads == tune.now.num_threads
            assert per_run > 2 or len(tune.used) > 1
    assert readers() <= others


def test_a_slow_disk_gets_more_threads_until_nobody_waits(
    counting: Callable[..., Any], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By times of a model: a read takes 20 ms, and the trainer 4 ms for a block. Two threads cannot keep up, eight
    can.
    """
    monkeypatch.setattr(build, "cpus_of_a_rank", lambda *others: 8)
    others = readers()
    corpus = counting(4001)
    add = Autotune.add

    def modelled(tune: Autotune, wait_s: float, work_s: float, cpu_share: float) -> None:
        add(tune, max(0.0, 0.02 / tune.now.num_threads - 0.004), 0.004)

    loader = load(corpus, batch_size=2, seq_len=T, batches_per_run=1, engine="direct", repeat=True)
    monkeypatch.setattr(Autotune, "add", modelled)
    first, batches = loader.stats(), loader_stream(loader)
    assert (first.num_threads, first.prefetch_queue_depth, first.autotune) == (2, 4, "adapting")
    expected = oracle_stream(corpus.tokens, batch_size=2, seq_len=T)
    for batch, wanted in itertools.islice(zip(batches, expected, strict=False), 1_000):
        assert (batch["input_ids"] == wanted["input_ids"]).all()
    stats = loader.stats()
    assert (stats.num_threads, stats.prefetch_queue_depth) == (8, 16)
    assert len(readers() - others) == 8
    assert [(change.before.num_threads, change.after.num_threads) for change in stats.changes] == [(2, 4), (4, 8)]
    assert "reader threads 2 -> 4" in str(stats)
    assert "num_threads" not in stats.advice
    assert loader.state_dict().keys() == load(corpus, batch_size=2, seq_len=T, num_threads=2).state_dict().keys()


def test_numbers_are_kept(counting: Callable[..., Any], load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the trainer waits; nothing is even counted."""
    monkeypatch.setattr(read_ahead, "WINDOW_S", 0.0)
    loader = load(counting(801), batch_size=2, seq_len=T, batches_per_run=1, num_threads=3, prefetch_queue_depth=5)
    take(loader_stream(loader), 200)
    stats = loader.stats()
    assert (stats.num_threads, stats.prefetch_queue_depth, stats.autotune, stats.changes) == (3, 5, "fixed", ())


def test_a_limit_on_threads_ends_no_run(
    counting: Callable[..., Any], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = counting(801)
    monkeypatch.setattr(
        build, "choose_read_ahead", lambda config, *, is_direct, **others: Wandering(5, is_direct=is_direct)
    )
    loader = load(corpus, batch_size=2, seq_len=T, batches_per_run=1)
    batches = loader_stream(loader)
    expected = list(epoch_batches(corpus.tokens, batch_size=2, seq_len=T))

    def no_start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    got = take(batches, 1)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_start)
        got += take(batches, 39)
    got += take(batches, 10)
    assert len(got) == len(expected)
    assert all((one["input_ids"] == wanted["input_ids"]).all() for one, wanted in zip(got, expected, strict=True))


def test_readers_are_where_the_process_is_bound(
    counting: Callable[..., Any], load: Load, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On the CPU that a launcher has left to the process, and as many as suit it; the node of that CPU is named."""
    all_cpus = os.sched_getaffinity(0)
    mine = max(all_cpus)
    for number, cpus in enumerate(("900-901", f"{mine}", "")):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{cpus}\n")
    monkeypatch.setattr(build, "numa_node", lambda cpus: numa_node(cpus, tmp_path))
    seen: list[set[int]] = []
    read_rows = Corpus.read_rows

    def watched(corpus: Corpus, *arguments: Any) -> None:
        seen.append(os.sched_getaffinity(0))
        read_rows(corpus, *arguments)

    monkeypatch.setattr(Corpus, "read_rows", watched)
    os.sched_setaffinity(0, {mine})
    try:
        loader = load(counting(801), batch_size=2, seq_len=T, batches_per_run=1)
        take(loader, 40)
    finally:
        os.sched_setaffinity(0, all_cpus)
    stats = loader.stats()
    assert stats.numa_node == "1"
    assert "NUMA node 1" in str(stats)
    assert stats.num_threads == 1
    assert seen
    assert all(cpus == {mine} for cpus in seen)


@pytest.mark.parametrize(("ranks", "threads"), [("1", 2), ("64", 1), (None, 2), ("many", 2)])
def test_ranks_of_a_node_share_its_cpus(
    counting: Callable[..., Any], load: Load, monkeypatch: pytest.MonkeyPatch, ranks: str | None, threads: int
) -> None:
    """Two threads read rows of documents and short rows; one reads others, whose batches the trainer's thread makes."""
    monkeypatch.setattr(build, "usable_cpus", lambda: set(range(64)))
    monkeypatch.setattr(build, "numa_node", lambda cpus: None)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if ranks is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
    corpus = counting(8001, vocab_size=11)
    assert load(corpus, batch_size=2, seq_len=T, rows="pack", eos_id=10).stats().num_threads == threads
    assert load(corpus, batch_size=2, seq_len=T).stats().num_threads == threads
    assert load(corpus, batch_size=1, seq_len=2_000).stats().num_threads == 1
