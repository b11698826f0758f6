"""What a loader measured: how long the trainer waited for data, where block time went, and what to change."""

from dataclasses import dataclass, field


@dataclass
class BlockTimes:
    """Seconds the reader threads and the block source spent, summed over blocks."""

    blocks: int = 0
    plan_s: float = 0.0
    read_s: float = 0.0
    kernels_s: float = 0.0


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
class LoaderStats:
    """A snapshot; seconds are wall-clock. `data_wait_s` is the time the trainer spent inside `next()`.

    `wall_s` counts from asking for the first batch of an epoch to the last batch handed out, over all epochs run so
    far; time between epochs is not in it.
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

    @property
    def tokens_per_s(self) -> float:
        """Tokens handed out per second of `wall_s`."""
        return self.tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def data_wait_pct(self) -> float:
        """Share of `wall_s` that the trainer waited for data, in per cent."""
        return 100.0 * self.data_wait_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def rating(self) -> str:
        """Below 1 % data wait excellent, below 5 % good, below 20 % fair, else poor."""
        for limit, name in ((1.0, "excellent"), (5.0, "good"), (20.0, "fair")):
            if self.data_wait_pct < limit:
                return name
        return "poor"

    @property
    def advice(self) -> str:
        """What to change when the rating is not good; empty when it is."""
        if self.rating in ("excellent", "good"):
            return ""
        times = self.block_times
        largest = max(times.plan_s, times.read_s, times.kernels_s)
        if largest == 0.0 or self.queue_depth > 1:
            return "blocks are ready, but small: raise batches_per_run so that one DALI run delivers more batches"
        cache = self.cache
        if (
            largest == times.read_s
            and cache is not None
            and cache.hit_rate < 0.9
            and cache.all_bytes > cache.most_bytes
        ):
            return (
                f"the same chunks are decoded again and again: the corpus takes {cache.all_bytes} bytes decoded, "
                f"decoded_cache_bytes = {cache.most_bytes} are kept, hit rate {100 * cache.hit_rate:.0f} %: raise "
                "decoded_cache_bytes, set eager = true, or convert the corpus to a flat format"
            )
        if largest == times.read_s:
            return "most block time is reading: raise num_threads, or move the corpus to a faster disk or into memory"
        if largest == times.kernels_s:
            return "most block time is widening and labelling on the CPU: use a GPU, or leave the loader a free core"
        return "most block time is planning: rows are very short; raise seq_len or batches_per_run"

    def rating_line(self) -> str:
        """One line for a log: `data wait 0.3 % of 41.0 s: excellent`, with the advice where there is one."""
        line = f"data wait {self.data_wait_pct:.1f} % of {self.wall_s:.1f} s: {self.rating}"
        return f"{line} ({self.advice})" if self.advice else line
