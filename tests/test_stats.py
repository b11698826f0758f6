from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dali_pipes import TokenLoader
from dali_pipes.stats import BlockTimes, CacheStats, LoaderStats


def make(wait_s: float, **times: Any) -> LoaderStats:
    queue_depth = times.pop("queue_depth", 0)
    return LoaderStats(
        batches=10,
        tokens=1000,
        wall_s=100.0,
        data_wait_s=wait_s,
        queue_depth=queue_depth,
        block_times=BlockTimes(**times),
    )


@pytest.mark.parametrize(
    ("wait_s", "rating"),
    [(0, "excellent"), (0.99, "excellent"), (1, "good"), (4.9, "good"), (5, "fair"), (19.9, "fair"), (20, "poor")],
)
def test_rating(wait_s: float, rating: str) -> None:
    assert make(wait_s).rating == rating
    assert bool(make(wait_s).advice) == (rating in ("fair", "poor"))
    assert rating in make(wait_s).rating_line()


def test_advice_names_the_setting_to_change() -> None:
    assert "num_threads" in make(50, read_s=3, plan_s=1).advice
    assert "GPU" in make(50, kernels_s=3).advice
    assert "seq_len" in make(50, plan_s=3).advice
    cache = CacheStats(hits=5, misses=5, num_bytes=10, most_bytes=10, all_bytes=100)
    assert "decoded_cache_bytes = 10" in replace(make(50, read_s=3), cache=cache).advice
    assert "eager" in replace(make(50, read_s=3), cache=cache).advice
    for kept in (replace(cache, hits=500), replace(cache, most_bytes=100)):
        assert "num_threads" in replace(make(50, read_s=3), cache=kept).advice
    assert "batches_per_run" in make(50, read_s=3, queue_depth=3).advice


def test_rates() -> None:
    assert (make(7).tokens_per_s, make(7).data_wait_pct) == (10.0, 7.0)
    empty = LoaderStats(batches=0, tokens=0, wall_s=0.0, data_wait_s=0.0, queue_depth=0)
    assert (empty.tokens_per_s, empty.data_wait_pct, empty.rating) == (0.0, 0.0, "excellent")


def test_a_loader_counts_what_it_hands_out(counting: Callable[..., Any]) -> None:
    corpus = counting(401)
    with TokenLoader(
        corpus=corpus.pattern, dtype="uint32", batch_size=4, seq_len=8, device="cpu", drop_last=False
    ) as loader:
        assert (loader.stats().batches, loader.stats().queue_depth) == (0, 0)
        iterator = iter(loader)
        next(iterator)
        assert (loader.stats().batches, loader.stats().tokens) == (1, 32)
        for _ in iterator:
            pass
        stats = loader.stats()
        assert (stats.batches, stats.tokens) == (13, 50 * 8)
        assert 0 < stats.data_wait_s <= stats.wall_s
        assert stats.block_times.blocks >= 1
        assert stats.block_times.read_s > 0
        assert (stats.device, stats.placement, stats.engine) == ("cpu", "host", "dali")
