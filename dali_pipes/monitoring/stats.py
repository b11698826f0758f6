"""What a loader measured: how long the trainer waited for data, where block time went, and what to change."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Self

from dali_pipes.monitoring.display import ShownAsTable, Table
from dali_pipes.monitoring.metrics import exposition, values_of

MOST_THREADS = 256
"""That may read ahead."""

RATED_BATCHES = 20
"""Batches before which there is no rating: the first ones wait for cold files, kernels and models being compiled."""
RATED_BODY_S = 1e-4
"""Mean seconds of work on a batch below which nobody trains: a loop that only counts or times batches."""


@dataclass
class BlockTimes:
    """Seconds the reader threads and the block source spent, summed over blocks."""

    blocks: int = 0
    plan_s: float = 0.0
    read_s: float = 0.0
    kernels_s: float = 0.0
    wait_s: float = 0.0
    """The trainer's thread waited for a reader thread: the part of `data_wait_s` that planning and reading cost."""

    def add(self, other: "BlockTimes") -> None:
        """Add another thread's."""
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)


@dataclass(frozen=True)
class MemoryHeld:
    """Bytes that a loader on a GPU holds, by its own account; all 0 on the CPU.

    `dali_bytes` counts blocks in the queue, and blocks of any loader on the device that a consumer holds or may still
    be reading. What DALI's pool keeps beyond that is not known here.
    """

    pinned_bytes: int = 0
    device_bytes: int = 0
    dali_bytes: int = 0


@dataclass(frozen=True)
class CacheStats:
    """What was asked of the decoded chunks of a corpus; a chunk is asked for once for all rows of a block."""

    hits: int
    misses: int
    """Chunks that had to be decoded."""
    num_bytes: int
    """Bytes of the chunks that are kept now."""
    most_bytes: int
    """Bytes that may be kept."""
    all_bytes: int
    """Bytes that the corpus takes when all of it is decoded."""

    @property
    def hit_rate(self) -> float:
        """Share of the chunks asked for that were there, 0 before the first."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


@dataclass(frozen=True)
class BlockLimits:
    """What keeps a block from having more batches than it has."""

    epoch_steps: int | None = None
    """Steps of an epoch, which no block goes beyond; None: not known yet."""
    batch_bytes: int = 0
    """What a batch counts for in `max_bytes`."""
    max_bytes: int | None = None
    """The setting `max_block_bytes`."""

    def more_batches(self, now: int) -> str:
        """The settings that give blocks more batches than they have `now`; empty where none does."""
        wanted = 2 * now if self.epoch_steps is None else min(2 * now, self.epoch_steps)
        if wanted <= now:
            return ""
        needed = wanted * self.batch_bytes
        room = f" and max_block_bytes = {needed}" if self.max_bytes is not None and needed > self.max_bytes else ""
        return f"set batches_per_run = {wanted}{room} (now {now})"


@dataclass(frozen=True, repr=False)
class LoaderStats(ShownAsTable):
    """A snapshot, which prints as a small table; seconds are wall-clock.

    `data_wait_s` is the time the trainer spent inside `next()`. `wall_s` counts from asking for the first batch of an
    epoch to the last batch handed out, over all epochs run so far; time between epochs is not in it.
    """

    batches: int
    tokens: int
    wall_s: float
    data_wait_s: float
    queue_depth: int
    """Blocks that are ready now: read ahead, or in DALI's prefetch queue."""
    block_times: BlockTimes = field(default_factory=BlockTimes)
    device: str = "cpu"
    placement: str = "host"
    placement_reason: str = ""
    memory: MemoryHeld = field(default_factory=MemoryHeld)
    engine: str = "dali"
    """"dali", or "direct" on a machine without DALI: batches are the same, taken from the block source itself."""
    cache: CacheStats | None = None
    """Of the decoded chunks; None where the files of the corpus are read as they lie."""
    read_retries: int = 0
    """Reads that failed for a reason that may pass, and were tried again."""

    rank: int = 0
    num_threads: int = 1
    """Threads that read ahead."""
    batches_per_run: int = 1
    """Batches in a block, as set or chosen."""
    block_limits: BlockLimits = field(default_factory=BlockLimits)

    @property
    def tokens_per_s(self) -> float:
        """Tokens handed out per second of `wall_s`."""
        return self.tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def data_wait_ratio(self) -> float:
        """Share of `wall_s` that the trainer waited for data, 0 to 1."""
        return self.data_wait_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def data_wait_pct(self) -> float:
        """Share of `wall_s` that the trainer waited for data, in per cent."""
        return 100.0 * self.data_wait_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def is_rated(self) -> bool:
        """Whether there is enough to rate: 20 batches, and a trainer that works between calls of `next()`."""
        return self.batches >= RATED_BATCHES and self.wall_s - self.data_wait_s >= RATED_BODY_S * self.batches

    @property
    def rating(self) -> str:
        """Below 1 % data wait excellent, below 5 % good, below 20 % fair, else poor; "not rated" before `is_rated`."""
        if not self.is_rated:
            return "not rated"
        for limit, name in ((1.0, "excellent"), (5.0, "good"), (20.0, "fair")):
            if self.data_wait_pct < limit:
                return name
        return "poor"

    @property
    def advice(self) -> str:
        """The largest part of the wait and the setting to change, where the rating is fair or poor; else empty."""
        if self.rating not in ("fair", "poor"):
            return ""
        times = self.block_times
        rest_s = self.data_wait_s - times.wait_s - times.kernels_s
        more_batches = self.block_limits.more_batches(self.batches_per_run)
        all_steps = (
            f"a block has all {self.batches_per_run} steps of an epoch already, and only more data makes it larger"
        )
        if max(times.wait_s, times.kernels_s) < rest_s:
            return f"most of it goes into handing out blocks, whatever their size: {more_batches or all_steps}"
        if times.wait_s < times.kernels_s:
            if self.device != "cpu":
                return f"most of it goes into queueing kernels, block by block: {more_batches or all_steps}"
            return (
                'most of it is widening and labelling on the CPU: set device = "cuda" where there is a GPU; without '
                "one, leave a core free (torch.set_num_threads) and drop outputs that are not used"
            )
        if times.read_s < times.plan_s:
            larger_rows = "a larger seq_len makes fewer rows of the same tokens"
            return f"most of it is planning rows: {f'{more_batches}; ' if more_batches else ''}{larger_rows}"
        cache = self.cache
        if cache is not None and cache.hit_rate < 0.9 and cache.all_bytes > cache.most_bytes:
            return (
                f"the same chunks are decoded again and again: the corpus takes {cache.all_bytes} bytes decoded, "
                f"decoded_cache_bytes = {cache.most_bytes} are kept, hit rate {100 * cache.hit_rate:.0f} %: set "
                f"decoded_cache_bytes = {cache.all_bytes} or eager = true, or convert the corpus to a flat format"
            )
        more_threads = min(2 * self.num_threads, MOST_THREADS)
        if more_threads == self.num_threads:
            return f"most of it is reading, by {self.num_threads} threads: move the corpus to a faster disk"
        return (
            f"most of it is reading: set num_threads = {more_threads} (now {self.num_threads}), or move the corpus to "
            "a faster disk"
        )

    def since(self, before: Self) -> Self:
        """What was measured between an earlier snapshot of the same loader and this one."""
        cache = self.cache
        if cache is not None and before.cache is not None:
            cache = replace(cache, hits=cache.hits - before.cache.hits, misses=cache.misses - before.cache.misses)
        earlier = vars(before.block_times)
        return replace(
            self,
            batches=self.batches - before.batches,
            tokens=self.tokens - before.tokens,
            wall_s=self.wall_s - before.wall_s,
            data_wait_s=self.data_wait_s - before.data_wait_s,
            block_times=BlockTimes(**{name: now - earlier[name] for name, now in vars(self.block_times).items()}),
            cache=cache,
        )

    def metrics(self) -> dict[str, float]:
        """Flat figures by name, for TensorBoard and the like; `metrics.METRICS` says what each is.

        for name, value in loader.stats().metrics().items():
            writer.add_scalar(f"data/{name}", value, step)
        """
        return {metric.name: value for metric, value in values_of(self, has_cache=self.cache is not None).items()}

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """The same figures in Prometheus' text format 0.0.4, to be served or written for node_exporter's textfiles.

        Every sample has a label `rank`, and `labels`, which may replace it. Two loaders of a process belong into two
        files. Raises `ConfigError` for what cannot be the name of a label.
        """
        return exposition(values_of(self, has_cache=self.cache is not None), {"rank": str(self.rank), **(labels or {})})

    def wait_line(self) -> str:
        """`data_wait_pct` and its rating: `0.3 % of 41.0 s: excellent`."""
        return f"{self.data_wait_pct:.1f} % of {self.wall_s:.1f} s: {self.rating}"

    def rating_line(self) -> str:
        """One line for a log: `data wait 0.3 % of 41.0 s: excellent`, with the advice where there is one."""
        line = f"data wait {self.wait_line()}"
        return f"{line} ({self.advice})" if self.advice else line

    def _table(self) -> Table:
        blocks = f"{self.queue_depth:,} ready, of {self.batches_per_run:,} batches each"
        rows = [
            ("batches", f"{self.batches:,} (rank {self.rank})"),
            ("tokens", f"{self.tokens:,}, {self.tokens_per_s:,.0f} a second"),
            ("data wait", self.wait_line()),
            *([("advice", self.advice)] if self.advice else []),
            ("blocks", f"{blocks}; {self.num_threads} reader thread{'s' * (self.num_threads > 1)}"),
            ("device", f"{self.device}, placement {self.placement}"),
        ]
        if self.cache is not None:
            rows.append(("cache", f"hit rate {100 * self.cache.hit_rate:.0f} %, {self.cache.num_bytes:,} bytes kept"))
        if self.read_retries:
            rows.append(("reads", f"{self.read_retries:,} tried again"))
        return Table("LoaderStats", rows)
