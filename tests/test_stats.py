from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dali_pipes import TokenLoader
from dali_pipes.stats import BlockTimes, CacheStats, LoaderStats


def make(waited_s: float, **times: Any) -> LoaderStats:
    queue_depth = times.pop("queue_depth", 0)
    return LoaderStats(
        batches=10,
        tokens=1000,
        wall_s=100.0,
        data_wait_s=waited_s,
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


HALF_DECODED = CacheStats(hits=5, misses=5, num_bytes=10, most_bytes=10, all_bytes=100)


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"wait_s": 40, "read_s": 3, "plan_s": 1}, "num_threads = 6 (now 3)"),
        ({"wait_s": 40, "read_s": 1, "plan_s": 3}, "batches_per_run = 16 (now 8)"),
        ({"wait_s": 10, "kernels_s": 30}, 'device = "cuda"'),
        ({"wait_s": 10, "kernels_s": 30, "device": "cuda:0"}, "batches_per_run = 16 (now 8)"),
        ({"wait_s": 10, "kernels_s": 10}, "batches_per_run = 16 (now 8)"),  # and 30 in neither
        ({"wait_s": 40, "read_s": 3, "cache": HALF_DECODED}, "decoded_cache_bytes = 100 or eager = true"),
        ({"wait_s": 40, "read_s": 3, "cache": replace(HALF_DECODED, hits=500)}, "num_threads = 6 (now 3)"),
        ({"wait_s": 40, "read_s": 3, "cache": replace(HALF_DECODED, most_bytes=100)}, "num_threads = 6 (now 3)"),
    ],
)
def test_advice_names_the_setting_and_a_value(changes: dict[str, Any], setting: str) -> None:
    names = {"device", "cache"} & set(changes)
    times = BlockTimes(**{name: value for name, value in changes.items() if name not in names})
    stats = replace(make(50), block_times=times, num_threads=3, batches_per_run=8, **{n: changes[n] for n in names})
    assert setting in stats.advice
    assert setting in stats.rating_line()


def test_what_happened_since_an_earlier_snapshot() -> None:
    before = replace(make(50, read_s=40, wait_s=40, blocks=2), cache=HALF_DECODED)
    after = replace(
        before,
        batches=15,
        tokens=1500,
        wall_s=200.0,
        data_wait_s=56.0,
        queue_depth=2,
        block_times=BlockTimes(blocks=7, plan_s=1.0, read_s=40.5, kernels_s=0.5, wait_s=44.0),
        cache=replace(HALF_DECODED, hits=105, num_bytes=7),
    )
    recent = after.since(before)
    assert (recent.batches, recent.tokens, recent.wall_s, recent.data_wait_pct) == (5, 500, 100.0, 6.0)
    assert recent.block_times == BlockTimes(blocks=5, plan_s=1.0, read_s=0.5, kernels_s=0.5, wait_s=4.0)
    assert recent.cache == replace(HALF_DECODED, hits=100, misses=0, num_bytes=7)
    assert recent.queue_depth == 2
    assert "planning" in recent.advice, "the cause of now, not of the run"


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
        assert 0 < stats.block_times.wait_s < stats.data_wait_s
        assert (stats.device, stats.placement, stats.engine) == ("cpu", "host", "dali")
