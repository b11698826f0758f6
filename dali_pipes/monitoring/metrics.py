"""Metric names of a loader, for TensorBoard and Prometheus.

    data_wait_seconds                                                       `LoaderStats.metrics()`
    dali_pipes_data_wait_seconds_total{rank="0"} 1.25                       `LoaderStats.prometheus()`

Units are seconds, bytes, and ratios (0 to 1). Counters only rise while a loader lives. A new metric is one line here.
"""

import re
from collections.abc import Mapping
from operator import attrgetter
from typing import Literal, NamedTuple

from dali_pipes.errors import ConfigError


class Metric(NamedTuple):
    name: str
    kind: Literal["counter", "gauge"]
    source: str
    """Attribute of `LoaderStats`."""
    meaning: str


METRICS = (
    Metric("batches", "counter", "batches", "Batches delivered."),
    Metric("tokens", "counter", "tokens", "Positions in the delivered batches, including padding."),
    Metric("wall_seconds", "counter", "wall_s", "Time in the training loop, including waits."),
    Metric("data_wait_seconds", "counter", "data_wait_s", "Time that the trainer waited in next()."),
    Metric("data_wait_ratio", "gauge", "data_wait_ratio", "data_wait_seconds divided by wall_seconds."),
    Metric("tokens_per_second", "gauge", "tokens_per_s", "tokens divided by wall_seconds."),
    Metric("ready_blocks", "gauge", "queue_depth", "Blocks that are ready: read ahead, or in DALI's queue."),
    Metric("reader_threads", "gauge", "num_threads", "Threads that read ahead."),
    Metric("prefetch_depth", "gauge", "prefetch_queue_depth", "Blocks to have ready, apart from those being read."),
    Metric("block_batches", "gauge", "batches_per_run", "Batches in a block."),
    Metric("blocks", "counter", "block_times.blocks", "Blocks read."),
    Metric("read_retries", "counter", "read_retries", "Reads that were retried."),
    Metric("plan_seconds", "counter", "block_times.plan_s", "Time that reader threads spent planning rows."),
    Metric("read_seconds", "counter", "block_times.read_s", "Time that reader threads spent reading tokens."),
    Metric("kernels_seconds", "counter", "block_times.kernels_s", "Time spent on building the fields of batches."),
    Metric(
        "kernels_in_trainer_seconds",
        "counter",
        "block_times.in_trainer_s",
        "Part of kernels_seconds that the trainer's thread spent.",
    ),
    Metric(
        "reader_wait_seconds",
        "counter",
        "block_times.wait_s",
        "Time that the trainer's thread waited for reader threads.",
    ),
    Metric("pinned_bytes", "gauge", "memory.pinned_bytes", "Pinned host memory held."),
    Metric("device_bytes", "gauge", "memory.device_bytes", "GPU memory held, without DALI's."),
    Metric("dali_bytes", "gauge", "memory.dali_bytes", "GPU memory of blocks in DALI's queue or in use."),
    Metric("cache_hits", "counter", "cache.hits", "Requested chunks that were in the cache of decoded chunks."),
    Metric("cache_misses", "counter", "cache.misses", "Requested chunks that had to be decoded."),
    Metric("cache_hit_ratio", "gauge", "cache.hit_rate", "cache_hits divided by all requested chunks."),
    Metric("cache_bytes", "gauge", "cache.num_bytes", "Size of the cache of decoded chunks."),
    Metric("cache_limit_bytes", "gauge", "cache.most_bytes", "Size limit of the cache of decoded chunks."),
    Metric("cache_fetched_bytes", "counter", "cache.fetched_bytes", "Bytes fetched or decoded for the node's cache."),
    Metric("cache_evictions", "counter", "cache.evictions", "Entries evicted from the node's cache."),
    Metric("cache_damaged", "counter", "cache.damaged", "Entries of the node's cache that failed verification."),
    Metric("decoded_corpus_bytes", "gauge", "cache.all_bytes", "Size of the corpus when all of it is decoded."),
)
"""Those of `cache` exist only for formats that are decoded."""

_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


def values_of(stats: object, *, has_cache: bool) -> dict[Metric, float]:
    """The values in a `LoaderStats`, in the order of `METRICS`."""
    known = [metric for metric in METRICS if has_cache or not metric.source.startswith("cache.")]
    return {metric: float(attrgetter(metric.source)(stats)) for metric in known}


def exposition(values: Mapping[Metric, float], labels: Mapping[str, str]) -> str:
    """Prometheus' text format, version 0.0.4. Raises `ConfigError` for an invalid label name."""
    for name in labels:
        if not _LABEL.fullmatch(name):
            raise ConfigError(
                f"label {name!r}: not a valid label name; use letters, digits, and _, without a leading digit or __"
            )
    pairs = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    lines = []
    for metric, value in values.items():
        name = f"dali_pipes_{metric.name}{'_total' * (metric.kind == 'counter')}"
        lines += [f"# HELP {name} {metric.meaning}", f"# TYPE {name} {metric.kind}", f"{name}{{{pairs}}} {value!r}"]
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
