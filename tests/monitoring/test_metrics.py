"""The figures of a loader as TensorBoard and Prometheus take them, the latter as its own client reads them."""

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from dali_pipes.errors import ConfigError
from dali_pipes.monitoring.metrics import METRICS
from dali_pipes.monitoring.stats import BlockTimes, CacheStats, LoaderStats, MemoryHeld

STATS = LoaderStats(
    batches=10,
    tokens=10**17,
    wall_s=100.0,
    data_wait_s=7.5,
    queue_depth=2,
    block_times=BlockTimes(blocks=3, plan_s=0.25, read_s=1.5, kernels_s=0.125, wait_s=0.5),
    memory=MemoryHeld(pinned_bytes=1, device_bytes=2, dali_bytes=3),
    cache=CacheStats(hits=3, misses=1, num_bytes=10, most_bytes=20, all_bytes=30),
    rank=5,
)


def test_metrics() -> None:
    found = STATS.metrics()
    assert found["data_wait_seconds"] == 7.5
    assert found["data_wait_ratio"] == 0.075
    assert found["cache_hit_ratio"] == 0.75
    assert found["read_seconds"] == 1.5
    assert all(type(value) is float for value in found.values())
    without = replace(STATS, cache=None).metrics()
    assert {name for name in found if name not in without} == {m.name for m in METRICS if m.source.startswith("cache.")}


def test_every_figure_has_a_name() -> None:
    def numbers(owner: Any, prefix: str = "") -> set[str]:
        return {f"{prefix}{f.name}" for f in fields(owner) if isinstance(getattr(owner, f.name), int | float)}

    parts = {"block_times.": STATS.block_times, "memory.": STATS.memory, "cache.": STATS.cache}
    expected = numbers(STATS) - {"rank"}
    for prefix, part in parts.items():
        expected |= numbers(part, prefix)
    assert expected <= {metric.source for metric in METRICS}
    assert len({metric.name for metric in METRICS}) == len(METRICS)


def test_a_summary_writer_takes_them() -> None:
    class SummaryWriter:
        """TensorBoard's, as far as it is used here."""

        def __init__(self) -> None:
            self.scalars: dict[tuple[str, int], float] = {}

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            assert isinstance(scalar_value, float)
            self.scalars[tag, global_step] = scalar_value

    writer = SummaryWriter()
    for name, value in STATS.metrics().items():
        writer.add_scalar(f"data/{name}", value, 12)
    assert writer.scalars["data/tokens", 12] == 10**17


LABELS = st.dictionaries(st.from_regex(r"[a-zA-Z][a-zA-Z0-9_]{0,8}", fullmatch=True), st.text(max_size=20), max_size=3)


@given(LABELS)
def test_prometheus_reads_what_was_measured(labels: dict[str, str]) -> None:
    families = list(text_string_to_metric_families(STATS.prometheus(labels)))
    samples = {sample.name: sample for family in families for sample in family.samples}
    values = STATS.metrics()
    assert len(samples) == len(values) == len(families)
    for metric, family in zip(METRICS, families, strict=True):
        (sample,) = family.samples
        assert sample.name == f"dali_pipes_{metric.name}" + ("_total" if metric.kind == "counter" else "")
        assert (family.type, family.documentation) == (metric.kind, metric.meaning)
        assert sample.value == values[metric.name]
        assert sample.labels == {"rank": "5", **labels}


@pytest.mark.parametrize("name", ["", "0rank", "__name__", "a-b", "a\n", "é"])
def test_a_label_that_prometheus_would_refuse(name: str) -> None:
    with pytest.raises(ConfigError, match="label"):
        STATS.prometheus({name: "x"})
