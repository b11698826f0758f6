"""Section 5's promises about reading: ahead, in threads, once, into buffers that are kept."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
from held import children
from oracle import epoch_batches
from streams import all_same, loader_stream, take

from dali_pipes import TokenLoader
from dali_pipes.corpus import Corpus

T = 8
Load = Callable[..., TokenLoader]


@pytest.mark.parametrize(
    ("engine", "depth"),
    [("dali", 1), ("dali", 6), ("direct", 1), ("direct", 2), ("direct", 6)],
    indirect=["engine"],
)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("per_run", [1, 4])
def test_every_block_is_read_once(
    counting: Callable[..., Any], load: Load, engine: str, depth: int, num_threads: int, per_run: int
) -> None:
    """However deep the queue and many the threads: what is read beyond the batches asked for is what is ahead."""
    corpus = counting(500, 301)
    loader = load(
        corpus, batch_size=2, seq_len=T, batches_per_run=per_run, num_threads=num_threads, prefetch_queue_depth=depth
    )
    batches = take(loader_stream(loader), 150)
    assert len(batches) == 150
    blocks_used = 150 // 50 * -(-50 // per_run)
    blocks_read = loader.stats().block_times.blocks
    assert blocks_used <= blocks_read <= blocks_used + depth + num_threads + 1


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_the_trainers_thread_reads_nothing(
    counting: Callable[..., Any], load: Load, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even while it waits for a block, nor after a resume or an epoch border."""
    corpus = counting(500, 301)
    loader = load(corpus, batch_size=2, seq_len=T, batches_per_run=3)
    readers: set[int] = set()
    read_rows = Corpus.read_rows

    def watched(corpus: Corpus, starts: Any, *others: Any) -> None:
        readers.add(threading.get_ident())
        read_rows(corpus, starts, *others)

    monkeypatch.setattr(Corpus, "read_rows", watched)
    assert all_same(loader, epoch_batches(corpus.tokens, batch_size=2, seq_len=T))
    take(loader, 20)
    loader.load_state_dict({**loader.state_dict(), "epoch": 4, "rows": 30})
    assert all_same(loader, epoch_batches(corpus.tokens, batch_size=2, seq_len=T, epoch=4, first_row=30))
    assert readers
    assert threading.get_ident() not in readers


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_as_many_threads_as_were_asked_for(counting: Callable[..., Any], load: Load, num_threads: int) -> None:
    """num_threads readers, none before the first batch, none after close."""

    def readers() -> set[threading.Thread]:
        return {thread for thread in threading.enumerate() if "dali_pipes" in thread.name} - of_other_tests

    of_other_tests: set[threading.Thread] = set()
    of_other_tests = readers()

    corpus = counting(801)
    loader = load(corpus, batch_size=2, seq_len=T, batches_per_run=1, num_threads=num_threads)
    assert not readers()
    take(loader_stream(loader), 120)
    assert 1 <= len(readers()) <= num_threads
    loader.close()
    assert not readers()


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_no_child_process(counting: Callable[..., Any], load: Load, engine: str) -> None:
    before = children()  # other tests may have left a process that goes with this one, as multiprocessing does
    loader = load(counting(801), batch_size=2, seq_len=T)
    take(loader, 5)
    assert children() <= before


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_stats_count_what_was_handed_out(counting: Callable[..., Any], load: Load, engine: str) -> None:
    """Exact counts over an epoch border, a partial batch and a break; waits within the wall time."""
    corpus = counting(43 * T + 1)
    loader = load(corpus, batch_size=4, seq_len=T, drop_last=False, batches_per_run=3)
    assert (loader.stats().batches, loader.stats().tokens, loader.stats().wall_s) == (0, 0, 0.0)
    for number, batch in enumerate(loader, 1):
        rows = 4 * number if number < 11 else 43
        stats = loader.stats()
        assert (stats.batches, stats.tokens) == (number, rows * T)
        assert len(batch["labels"]) == (4 if number < 11 else 3)
        assert 0.0 <= stats.data_wait_s <= stats.wall_s
        assert stats.queue_depth >= 0
    take(loader, 2)
    stats = loader.stats()
    assert (stats.batches, stats.tokens) == (13, (43 + 8) * T)
    assert stats.engine == engine
    assert 0.0 <= stats.data_wait_pct <= 100.0
    assert stats.tokens_per_s == pytest.approx(stats.tokens / stats.wall_s)
    assert stats.rating_line().startswith("data wait ")
    times = stats.block_times
    assert times.blocks >= 5
    assert min(times.plan_s, times.read_s, times.kernels_s) > 0.0
