"""Names of what a loader measures, for TensorBoard and Prometheus.

    data_wait_seconds                                                       `LoaderStats.metrics()`
    dali_pipes_data_wait_seconds_total{rank="0"} 1.25                       `LoaderStats.prometheus()`

Seconds, bytes and ratios (0 to 1); counters only rise in the life of a loader. A new figure is one line of `METRICS`.
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
    """Where it is in a `LoaderStats`."""
    meaning: str


METRICS = (
    Metric("batches", "counter", "batches", "Batches handed out."),
    Metric("tokens", "counter", "tokens", "Positions of the batches handed out, padding included."),
    Metric("wall_seconds", "counter", "wall_s", "Time in the training loop, waiting included."),
    Metric("data_wait_seconds", "counter", "data_wait_s", "Time the trainer spent waiting inside next()."),
    Metric("data_wait_ratio", "gauge", "data_wait_ratio", "Share of wall_seconds that is data_wait_seconds."),
    Metric("tokens_per_second", "gauge", "tokens_per_s", "Tokens handed out per second of wall_seconds."),
    Metric("ready_blocks", "gauge", "queue_depth", "Blocks that are ready, read ahead or in DALI's queue."),
    Metric("reader_threads", "gauge", "num_threads", "Threads that read ahead."),
    Metric("block_batches", "gauge", "batches_per_run", "Batches in a block."),
    Metric("blocks", "counter", "block_times.blocks", "Blocks read."),
    Metric("read_retries", "counter", "read_retries", "Reads that were tried again."),
    Metric("plan_seconds", "counter", "block_times.plan_s", "Time of reader threads spent planning rows."),
    Metric("read_seconds", "counter", "block_times.read_s", "Time of reader threads spent reading tokens."),
    Metric(
        "kernels_seconds", "counter", "block_times.kernels_s", "Time of the trainer's thread spent on token kernels."
    ),
    Metric(
        "reader_wait_seconds", "counter", "block_times.wait_s", "Time the trainer's thread waited for reader threads."
    ),
    Metric("pinned_bytes", "gauge", "memory.pinned_bytes", "Pinned host memory held."),
    Metric("device_bytes", "gauge", "memory.device_bytes", "GPU memory held, DALI's apart."),
    Metric("dali_bytes", "gauge", "memory.dali_bytes", "GPU memory of blocks in DALI's queue and in use."),
    Metric("cache_hits", "counter", "cache.hits", "Decoded chunks that were still there when asked for."),
    Metric("cache_misses", "counter", "cache.misses", "Chunks that had to be decoded."),
    Metric("cache_hit_ratio", "gauge", "cache.hit_rate", "Share of the chunks asked for that were there."),
    Metric("cache_bytes", "gauge", "cache.num_bytes", "Decoded chunks that are kept."),
    Metric("cache_limit_bytes", "gauge", "cache.most_bytes", "Decoded chunks that may be kept."),
    Metric("decoded_corpus_bytes", "gauge", "cache.all_bytes", "The corpus when all of it is decoded."),
)
"""Those of `cache` exist for corpora that have to be decoded."""

_LABEL = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*")


def values_of(stats: object, *, has_cache: bool) -> dict[Metric, float]:
    """The figures of a `LoaderStats`, in the order of `METRICS`."""
    known = [metric for metric in METRICS if has_cache or not metric.source.startswith("cache.")]
    return {metric: float(attrgetter(metric.source)(stats)) for metric in known}


def exposition(values: Mapping[Metric, float], labels: Mapping[str, str]) -> str:
    """Prometheus' text format, version 0.0.4. Raises `ConfigError` for what cannot be the name of a label."""
    for name in labels:
        if not _LABEL.fullmatch(name):
            raise ConfigError(f"{name!r} is no name for a label: letters, digits and _, no digit or __ in front")
    pairs = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    lines = []
    for metric, value in values.items():
        name = f"dali_pipes_{metric.name}{'_total' * (metric.kind == 'counter')}"
        lines += [f"# HELP {name} {metric.meaning}", f"# TYPE {name} {metric.kind}", f"{name}{{{pairs}}} {value!r}"]
    return "\n".join(lines) + "\n"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
