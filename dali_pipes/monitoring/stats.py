"""Statistics of a loader: how long the trainer waited for data, why, and which setting to change."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Self

from dali_pipes.monitoring.display import ShownAsTable, Table
from dali_pipes.monitoring.metrics import exposition, values_of

MOST_THREADS = 256
"""Limit of `num_threads`."""

RATED_BATCHES = 20
"""Batches before the first rating: the first ones wait for cold files and for kernels and models to compile."""
RATED_BODY_S = 1e-4
"""Mean seconds of work per batch that a training loop exceeds; below, the loop only counts or times batches."""

_MOST_SOURCES = 8
"""Sources of a mixture that a table names."""
_MOST_CHANGES = 4
"""Changes of threads and depth that a table shows."""


AutotuneState = Literal["fixed", "adapting", "no gain", "at limit"]


class ReadAhead(NamedTuple):
    """How much is read ahead."""

    num_threads: int
    """Reader threads."""
    prefetch_queue_depth: int
    """Blocks to have ready, apart from those that threads work on."""


class ReadAheadChange(NamedTuple):
    """A change that the loader has made where settings are "auto"."""

    run_s: float
    """Seconds of the run in which the trainer worked or waited for blocks."""
    before: ReadAhead
    after: ReadAhead
    reason: str

    def __str__(self) -> str:
        names = {"num_threads": "reader threads", "prefetch_queue_depth": "depth"}
        changed = [
            f"{names[name]} {old} -> {new}"
            for name, old, new in zip(ReadAhead._fields, self.before, self.after, strict=True)
            if old != new
        ]
        return f"{', '.join(changed)} after {self.run_s:.1f} s: {self.reason}"


@dataclass
class BlockTimes:
    """Seconds that the reader threads and the block source spent, summed over blocks."""

    blocks: int = 0
    plan_s: float = 0.0
    read_s: float = 0.0
    kernels_s: float = 0.0
    """Building inputs, labels and other outputs, on a GPU queueing the kernels for it."""
    in_trainer_s: float = 0.0
    """The part of `kernels_s` that the trainer's thread spent: on a CPU to widen plain rows, on a GPU all of it."""
    wait_s: float = 0.0
    """Wait of the trainer's thread for a reader thread: the part of `data_wait_s` due to planning and reading."""

    def add(self, other: "BlockTimes") -> None:
        """Add the times of another thread."""
        self.blocks += other.blocks
        self.plan_s += other.plan_s
        self.read_s += other.read_s
        self.kernels_s += other.kernels_s
        self.in_trainer_s += other.in_trainer_s
        self.wait_s += other.wait_s


@dataclass(frozen=True)
class MemoryHeld:
    """Bytes that a loader on a GPU holds, as it counts them; all 0 on the CPU.

    `dali_bytes` counts blocks in the queue, and blocks of any loader on the device that a consumer holds or may still
    be reading. Further memory in DALI's pool is not included.
    """

    pinned_bytes: int = 0
    device_bytes: int = 0
    dali_bytes: int = 0


@dataclass(frozen=True)
class CacheStats:
    """Use of the cache of decoded chunks, or of the node cache; a block requests each chunk that it needs once.

    Of the cache of the node, `num_bytes` and `most_bytes` are those of the node, and the rest is of this process.
    """

    hits: int
    misses: int
    """Chunks that had to be decoded, and parts of the corpus that were not in the node cache."""
    num_bytes: int
    """Bytes in the cache now."""
    most_bytes: int
    """Limit of the cache in bytes."""
    all_bytes: int
    """Bytes of the corpus when all of it is decoded."""
    fetched_bytes: int = 0
    """Bytes of ids that this process fetched or decoded for the node cache."""
    evictions: int = 0
    """Entries that this process evicted from the node cache."""
    damaged: int = 0
    """Entries of the node cache that failed verification and were fetched again."""
    folder: str = ""
    """Folder of the node cache; empty: the cache is in the memory of this process."""
    setting: str = "decoded_cache_bytes"
    """The setting that limits it."""

    @classmethod
    def sum(cls, parts: Iterable["CacheStats | None"]) -> "CacheStats | None":
        """The statistics of several caches as one; None if there are none."""
        known = [part for part in parts if part is not None]
        if not known:
            return None
        counts = ("hits", "misses", "all_bytes", "fetched_bytes", "evictions", "damaged")
        caches = {part.folder or number: part for number, part in enumerate(known)}.values()  # one for each folder
        return replace(
            known[0],
            **{name: sum(getattr(part, name) for part in known) for name in counts},
            num_bytes=sum(part.num_bytes for part in caches),
            most_bytes=sum(part.most_bytes for part in caches),
        )

    @property
    def hit_rate(self) -> float:
        """Share of requested chunks that were in the cache; 0 before the first request."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


@dataclass(frozen=True)
class BlockLimits:
    """What limits the number of batches in a block."""

    epoch_steps: int | None = None
    """Steps of an epoch, which a block does not exceed; None if not known yet."""
    batch_bytes: int = 0
    """Bytes of a batch, as counted for `max_bytes`."""
    max_bytes: int | None = None
    """The setting `max_block_bytes`."""

    def more_batches(self, now: int) -> str:
        """The settings that give blocks more batches than `now`; empty if that is not possible."""
        wanted = 2 * now if self.epoch_steps is None else min(2 * now, self.epoch_steps)
        if wanted <= now:
            return ""
        needed = wanted * self.batch_bytes
        room = f" and max_block_bytes = {needed}" if self.max_bytes is not None and needed > self.max_bytes else ""
        return f"set batches_per_run = {wanted}{room} (now {now})"


@dataclass(frozen=True, repr=False)
class LoaderStats(ShownAsTable):
    """A snapshot of a loader's statistics, which prints as a small table. Seconds are wall-clock time.

    `data_wait_s` is the time that the trainer spent in `next()`. `wall_s` runs from the request for the first batch of
    an epoch to its last delivered batch, summed over epochs; time between epochs is not included.
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
    """Cache of decoded chunks; None for formats that are not decoded."""
    read_retries: int = 0
    """Reads that failed with a transient error and were retried."""
    source_rows: Mapping[str, int] = field(default_factory=dict)
    """Rows of the run that each source of a mixture has given, over all ranks and epochs; empty without a mixture."""

    rank: int = 0
    num_threads: int = 1
    """Reader threads now."""
    prefetch_queue_depth: int = 1
    """Blocks to have ready now, apart from those that threads work on."""
    autotune: AutotuneState = "fixed"
    """Whether the number of threads adapts: "fixed" if it was set; "adapting" if it grows while the trainer waits;
    "no gain" if more threads did not help, or could not; "at limit" if it does not grow further."""
    changes: tuple[ReadAheadChange, ...] = ()
    """The last changes of threads and depth, oldest first."""
    numa_node: str | None = None
    """Number of the NUMA node that the process is bound to, as are its reader threads and host memory. None: it may use
    several, or the machine has only one."""
    reads: str = "calls"
    """The setting `reads`."""
    batches_per_run: int = 1
    """Batches in a block, as set or chosen automatically."""
    block_limits: BlockLimits = field(default_factory=BlockLimits)

    @property
    def tokens_per_s(self) -> float:
        """Delivered tokens per second of `wall_s`."""
        return self.tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def data_wait_ratio(self) -> float:
        """Share of `wall_s` that the trainer waited for data, 0 to 1."""
        return self.data_wait_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def data_wait_pct(self) -> float:
        """Share of `wall_s` that the trainer waited for data, in percent."""
        return 100.0 * self.data_wait_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def is_rated(self) -> bool:
        """Whether there is enough to rate: 20 batches, and work between the calls of `next()`."""
        return self.batches >= RATED_BATCHES and self.wall_s - self.data_wait_s >= RATED_BODY_S * self.batches

    @property
    def rating(self) -> str:
        """Data wait below 1% is excellent, below 5% good, below 20% fair, else poor; "not rated" before `is_rated`."""
        if not self.is_rated:
            return "not rated"
        for limit, name in ((1.0, "excellent"), (5.0, "good"), (20.0, "fair")):
            if self.data_wait_pct < limit:
                return name
        return "poor"

    @property
    def advice(self) -> str:
        """The largest part of the wait and the setting to change, if the rating is fair or poor; otherwise empty.

        Also empty while the number of reader threads still adapts to a wait for them.
        """
        if self.rating not in ("fair", "poor"):
            return ""
        times = self.block_times
        in_trainer_s = times.in_trainer_s
        rest_s = self.data_wait_s - times.wait_s - in_trainer_s
        more_batches = self.block_limits.more_batches(self.batches_per_run)
        all_steps = (
            f"a block already has all {self.batches_per_run:,} steps of an epoch, so only more data makes blocks larger"
        )
        if max(times.wait_s, in_trainer_s) < rest_s:
            return f"most of it is the fixed cost of each block: {more_batches or all_steps}"
        if times.wait_s < in_trainer_s and self.device != "cpu":
            return f"most of it is launching kernels for each block: {more_batches or all_steps}"
        if times.wait_s >= in_trainer_s and self.autotune == "adapting":
            return ""
        if times.wait_s < in_trainer_s or (
            self.device == "cpu" and max(times.read_s, times.plan_s) < times.kernels_s - in_trainer_s
        ):
            return (
                'most of it is building inputs and labels on the CPU: set device = "cuda" if there is a GPU; otherwise '
                "leave a core free (torch.set_num_threads) and remove outputs that are not used"
            )
        if times.read_s < times.plan_s:
            larger_rows = "a larger seq_len means fewer rows to plan"
            return f"most of it is planning rows: {f'{more_batches}; ' if more_batches else ''}{larger_rows}"
        cache = self.cache
        if cache is not None and cache.hit_rate < 0.9 and cache.all_bytes > cache.most_bytes:
            if cache.folder:
                return (
                    f"the same parts of the corpus are fetched or decoded repeatedly: the corpus takes "
                    f"{cache.all_bytes:,} bytes, but the cache in {cache.folder} holds {cache.most_bytes:,} bytes (hit "
                    f"rate {cache.hit_rate:.0%}): set {cache.setting} = {cache.all_bytes}, or lower shuffle_window"
                )
            return (
                f"the same chunks are decoded repeatedly: the decoded corpus takes {cache.all_bytes:,} bytes, and the "
                f"cache holds {cache.most_bytes:,} (hit rate {cache.hit_rate:.0%}): set decoded_cache_bytes = "
                f"{cache.all_bytes} or eager = true, or convert the corpus to a flat format"
            )
        faster = "move the corpus to a faster disk"
        if self.reads == "calls" and cache is None:
            faster += ', or set reads = "mapped" if the disk is local'
        more_threads = min(2 * self.num_threads, MOST_THREADS)
        if more_threads == self.num_threads:
            return f"most of it is reading, with {self.num_threads} threads: {faster}"
        if self.autotune == "no gain":
            return f"most of it is reading, and more than {self.num_threads} reader threads do not help: {faster}"
        return f"most of it is reading: set num_threads = {more_threads} (now {self.num_threads}), or {faster}"

    def since(self, before: Self) -> Self:
        """The statistics between an earlier snapshot of the same loader and this one."""
        cache = self.cache
        if cache is not None and before.cache is not None:
            counts = ("hits", "misses", "fetched_bytes", "evictions", "damaged")
            earlier_cache = before.cache
            cache = replace(cache, **{name: getattr(cache, name) - getattr(earlier_cache, name) for name in counts})
        earlier = vars(before.block_times)
        return replace(
            self,
            batches=self.batches - before.batches,
            tokens=self.tokens - before.tokens,
            wall_s=self.wall_s - before.wall_s,
            data_wait_s=self.data_wait_s - before.data_wait_s,
            block_times=BlockTimes(**{name: now - earlier[name] for name, now in vars(self.block_times).items()}),
            cache=cache,
            source_rows={name: rows - before.source_rows.get(name, 0) for name, rows in self.source_rows.items()},
        )

    def metrics(self) -> dict[str, float]:
        """Values by metric name, for TensorBoard and similar tools; `metrics.METRICS` describes them.

        for name, value in loader.stats().metrics().items():
            writer.add_scalar(f"data/{name}", value, step)
        """
        return {metric.name: value for metric, value in values_of(self, has_cache=self.cache is not None).items()}

    def prometheus(self, labels: Mapping[str, str] | None = None) -> str:
        """The same values in Prometheus' text format 0.0.4, for a server or node_exporter's textfile collector.

        Every sample has a label `rank` and the given `labels`, which may override it. Write two loaders of a process to
        two files. Raises `ConfigError` for an invalid label name.
        """
        return exposition(values_of(self, has_cache=self.cache is not None), {"rank": str(self.rank), **(labels or {})})

    def wait_line(self) -> str:
        """`data_wait_pct` and its rating: `0.3% of 41.0 s: excellent`."""
        return f"{self.data_wait_pct:.1f}% of {self.wall_s:.1f} s: {self.rating}"

    def rating_line(self) -> str:
        """One line for a log, `data wait 0.3% of 41.0 s: excellent`, followed by the advice, if any."""
        line = f"data wait {self.wait_line()}"
        return f"{line} ({self.advice})" if self.advice else line

    def _table(self) -> Table:
        blocks = f"{self.queue_depth:,} ready, {self.batches_per_run:,} batch{'es' * (self.batches_per_run > 1)} each"
        node = "" if self.numa_node is None else f", NUMA node {self.numa_node}"
        rows = [
            ("batches", f"{self.batches:,} (rank {self.rank})"),
            ("tokens", f"{self.tokens:,}, {self.tokens_per_s:,.0f} per second"),
            ("data wait", self.wait_line()),
            *([("advice", self.advice)] if self.advice else []),
            ("blocks", f"{blocks}; {self.num_threads} reader thread{'s' * (self.num_threads > 1)}"),
            *(("adapted", str(change)) for change in self.changes[-_MOST_CHANGES:]),
            ("device", f"{self.device}, placement {self.placement}{node}"),
        ]
        if self.cache is not None:
            rows.append(("cache", f"hit rate {self.cache.hit_rate:.0%}, {self.cache.num_bytes:,} bytes"))
            if self.cache.folder:
                damaged = f", {self.cache.damaged:,} damaged" if self.cache.damaged else ""
                counts = f"{self.cache.fetched_bytes:,} bytes fetched, {self.cache.evictions:,} evicted{damaged}"
                rows.append(("node cache", f"{self.cache.folder}: {counts}"))
        total = sum(self.source_rows.values())
        if total:
            shares = [f"{name} {count / total:.1%}" for name, count in self.source_rows.items()]
            more = f" and {len(shares) - _MOST_SOURCES:,} more" if len(shares) > _MOST_SOURCES else ""
            rows.append(("sources", f"{', '.join(shares[:_MOST_SOURCES])}{more} of {total:,} rows"))
        if self.read_retries:
            rows.append(("reads", f"{self.read_retries:,} retried"))
        return Table("LoaderStats", rows)
