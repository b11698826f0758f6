import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes import TokenLoader
from dali_pipes.monitoring.stats import (
    AutotuneState,
    BlockLimits,
    BlockTimes,
    CacheStats,
    LoaderStats,
    ReadAhead,
    ReadAheadChange,
)


def make(waited_s: float, **times: Any) -> LoaderStats:
    queue_depth = times.pop("queue_depth", 0)
    return LoaderStats(
        batches=100,
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
        ({"wait_s": 40, "kernels_s": 30, "read_s": 10}, 'device = "cuda"'),
        ({"wait_s": 10, "kernels_s": 30, "in_trainer_s": 30}, 'device = "cuda"'),
        ({"wait_s": 10, "kernels_s": 30, "in_trainer_s": 30, "device": "cuda:0"}, "batches_per_run = 16 (now 8)"),
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


@pytest.mark.parametrize(
    ("limits", "advice"),
    [
        (BlockLimits(16, 10, 160), "set batches_per_run = 16 (now 8)"),
        (BlockLimits(15, 10, 150), "set batches_per_run = 15 (now 8)"),
        (BlockLimits(None, 10, 159), "set batches_per_run = 16 and max_block_bytes = 160 (now 8)"),
        (BlockLimits(9, 10, 80), "set batches_per_run = 9 and max_block_bytes = 90 (now 8)"),
        (BlockLimits(8, 10, 80), "all 8 steps"),
    ],
)
def test_advice_on_larger_blocks_is_within_what_limits_them(limits: BlockLimits, advice: str) -> None:
    stats = replace(make(50), batches_per_run=8, block_limits=limits)
    assert advice in stats.advice
    assert ("set " in stats.advice) == advice.startswith("set ")
    planning = replace(stats, block_times=BlockTimes(wait_s=40, plan_s=3, read_s=1)).advice
    assert "planning" in planning
    assert (advice in planning) == advice.startswith("set")
    assert "seq_len" in planning


CAUSES = (BlockTimes(), BlockTimes(wait_s=40, plan_s=3, read_s=1), BlockTimes(wait_s=40, plan_s=1, read_s=3))


@settings(max_examples=examples(18), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_following_the_advice_changes_what_it_names(counting: Callable[..., Any], data: st.DataObject) -> None:
    """Set to the value that it gives, in a loader that is built anew."""
    draw = data.draw
    corpus = counting(draw(st.sampled_from([200, 400, 3000])), vocab_size=11)
    chosen: dict[str, Any] = {
        "batch_size": draw(st.integers(1, 7)),
        "seq_len": draw(st.sampled_from([4, 8])),
        "drop_last": draw(st.booleans()),
        "num_threads": draw(st.sampled_from([1, 2, 200, 256, "auto"])),
        "batches_per_run": draw(st.sampled_from([None, "auto"]) | st.integers(1, 600)),
        "rows": draw(st.sampled_from(["stream", "pack"])),
        "max_block_bytes": draw(st.sampled_from([1, 2_000, 20_000, 64 << 20])),
        "corpus": corpus.pattern,
    }
    world_size = draw(st.integers(1, 2))
    chosen |= {"dtype": "uint32", "eos_id": 10, "device": "cpu", "quiet": True, "rank": 0, "world_size": world_size}

    def measured(**more: Any) -> LoaderStats:
        with TokenLoader(**{**chosen, **more}) as loader:
            len(loader)  # rows of documents are all counted then
            return replace(
                loader.stats(), batches=100, wall_s=100.0, data_wait_s=50.0, block_times=draw(st.sampled_from(CAUSES))
            )

    before = measured()
    named = {name: int(value) for name, value in re.findall(r"(\w+) = (\d+)", before.advice)}
    if not named:
        limits = before.batches_per_run == before.block_limits.epoch_steps, before.num_threads == 256
        assert any(limits) or before.autotune == "adapting"
        return
    after = measured(**named)
    for name in named.keys() - {"max_block_bytes"}:
        assert getattr(after, name) == named[name] > getattr(before, name)


@pytest.mark.parametrize("cause", [{"read_s": 3}, {"plan_s": 3}, {"kernels_s": 30}])
def test_no_advice_while_threads_adapt_to_the_wait(cause: dict[str, float]) -> None:
    """A wait for something else gets its advice, and so does any wait once more threads do not help."""
    states: tuple[AutotuneState, ...] = ("fixed", "adapting", "no gain", "at limit")
    by_state = {
        state: replace(make(50, wait_s=40, **cause), autotune=state, num_threads=4, batches_per_run=8)
        for state in states
    }
    assert [bool(stats.advice) for stats in by_state.values()] == [True, False, True, True]
    assert "advice" not in str(by_state["adapting"])
    assert by_state["adapting"].rating == "poor"
    assert "batches_per_run = 16" in replace(by_state["adapting"], block_times=BlockTimes(wait_s=1)).advice
    advice = {state: stats.advice for state, stats in by_state.items()}
    assert "prefetch_queue_depth" not in "".join(advice.values())
    if "read_s" in cause:
        assert "num_threads" not in advice["no gain"]
        assert "num_threads = 8 (now 4)" in advice["at limit"] == advice["fixed"]
        assert re.search(r"\b4\b", advice["no gain"])
    else:
        assert "set num_threads" not in advice["at limit"]
        assert advice["no gain"] == advice["at limit"] == advice["fixed"]


def test_mapped_reads_are_advised_where_they_may_help() -> None:
    """Not where they are used, and not for files that are decoded."""
    reading = make(50, wait_s=40, read_s=3)
    for threads in (4, 256):
        stats = replace(reading, num_threads=threads, autotune="no gain")
        assert 'reads = "mapped"' in stats.advice
        assert "reads =" not in replace(stats, reads="mapped").advice
        assert "reads =" not in replace(stats, cache=replace(HALF_DECODED, hits=500)).advice


def test_changes_and_the_node_are_in_the_table() -> None:
    changes = tuple(
        ReadAheadChange(number + 0.25, ReadAhead(2, 2**number), ReadAhead(2 + number % 2, 2 ** (number + 1)), "reason")
        for number in range(6)
    )
    stats = replace(make(0.5), changes=changes, numa_node="17")
    lines = str(stats).splitlines()
    assert [line.split()[0] for line in lines[5:9]] == ["adapted"] * 4
    assert all(part in lines[8] for part in ("2 -> 3", "32 -> 64", "5.2 s", "reason"))
    assert "2 -> 2" not in lines[5]
    assert "17" in lines[9]
    assert lines[9].split()[0] == "device"
    assert stats.since(stats).changes == changes
    assert "17" not in str(replace(stats, numa_node=None))


def test_what_happened_since_an_earlier_snapshot() -> None:
    before = replace(make(50, read_s=40, wait_s=40, blocks=2), cache=HALF_DECODED)
    after = replace(
        before,
        batches=150,
        tokens=1500,
        wall_s=200.0,
        data_wait_s=56.0,
        queue_depth=2,
        block_times=BlockTimes(blocks=7, plan_s=1.0, read_s=40.5, kernels_s=0.5, wait_s=44.0),
        cache=replace(HALF_DECODED, hits=105, num_bytes=7),
    )
    recent = after.since(before)
    assert (recent.batches, recent.tokens, recent.wall_s, recent.data_wait_pct) == (50, 500, 100.0, 6.0)
    assert recent.block_times == BlockTimes(blocks=5, plan_s=1.0, read_s=0.5, kernels_s=0.5, wait_s=4.0)
    assert recent.cache == replace(HALF_DECODED, hits=100, misses=0, num_bytes=7)
    assert recent.queue_depth == 2
    assert "planning" in recent.advice, "the cause of now, not of the run"


def test_rates() -> None:
    assert (make(7).tokens_per_s, make(7).data_wait_pct) == (10.0, 7.0)
    empty = LoaderStats(batches=0, tokens=0, wall_s=0.0, data_wait_s=0.0, queue_depth=0)
    assert (empty.tokens_per_s, empty.data_wait_pct, empty.rating) == (0.0, 0.0, "not rated")


@given(st.integers(0, 1000), st.floats(0, 1e4), st.floats(0, 1e4))
def test_nothing_is_rated_before_there_is_something_to_rate(batches: int, wait_s: float, body_s: float) -> None:
    """Not the first batches, and no loop without a trainer in it, which waits all the time."""
    stats = replace(make(wait_s), batches=batches, wall_s=wait_s + body_s)
    is_rated = batches >= 20 and (stats.wall_s - stats.data_wait_s) / batches >= 100e-6
    assert (stats.rating == "not rated") == (not is_rated)
    assert is_rated or not stats.advice
    assert stats.rating_line().startswith(
        f"data wait {stats.data_wait_pct:.1f}% of {stats.wall_s:.1f} s: {stats.rating}"
    )


def test_a_snapshot_prints_as_a_small_table() -> None:
    stats = replace(make(0.5, queue_depth=3), batches_per_run=8, tokens=20_217_856, rank=2, num_threads=2)
    expected = [
        "LoaderStats",
        "  batches    100 (rank 2)",
        "  tokens     20,217,856, 202,179 per second",
        "  data wait  0.5% of 100.0 s: excellent",
        "  blocks     3 ready, 8 batches each; 2 reader threads",
        "  device     cpu, placement host",
    ]
    assert str(stats).splitlines() == repr(stats).splitlines() == expected
    more = str(replace(stats, data_wait_s=50.0, cache=HALF_DECODED, read_retries=4)).splitlines()
    assert [line.split()[0] for line in more[4:5] + more[-2:]] == ["advice", "cache", "reads"]
    assert "num_threads" in more[4] or "batches_per_run" in more[4]
    page = replace(stats, device="<&>")._repr_html_()
    assert "&lt;&amp;&gt;, placement host</td>" in page
    assert page.count("<tr>") == 5


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
        assert (stats.device, stats.placement, stats.engine) == ("cpu", "host", "direct")
