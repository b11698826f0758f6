"""Statistics of a `SampleLoader`: how long the trainer waited for samples."""

from dataclasses import dataclass

from dali_pipes.monitoring.display import ShownAsTable, Table


@dataclass(frozen=True, repr=False)
class SampleStats(ShownAsTable):
    """A snapshot of a loader's statistics, which prints as a small table. Seconds are wall-clock time.

    `data_wait_s` is the time that the trainer spent in `next()`. `wall_s` is the time from the request for the first
    batch of a `for` loop to its last delivered batch, summed over all loops.
    """

    batches: int
    samples: int
    wall_s: float
    data_wait_s: float
    num_workers: int = 0
    device: str = "cpu"
    rank: int = 0

    @property
    def samples_per_s(self) -> float:
        """Delivered samples per second of `wall_s`."""
        return self.samples / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def data_wait_ratio(self) -> float:
        """Share of `wall_s` that the trainer spent waiting for samples, 0 to 1."""
        return self.data_wait_s / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def data_wait_pct(self) -> float:
        """`data_wait_ratio` in percent."""
        return 100.0 * self.data_wait_ratio

    def metrics(self) -> dict[str, float]:
        """Values by metric name, with the names of `LoaderStats.metrics()`."""
        return {
            "batches": float(self.batches),
            "samples": float(self.samples),
            "wall_seconds": self.wall_s,
            "data_wait_seconds": self.data_wait_s,
            "data_wait_ratio": self.data_wait_ratio,
            "samples_per_second": self.samples_per_s,
        }

    def _table(self) -> Table:
        rows = [
            ("batches", f"{self.batches:,} (rank {self.rank})"),
            ("samples", f"{self.samples:,}, {self.samples_per_s:,.0f} per second"),
            ("data wait", f"{self.data_wait_pct:.1f}% of {self.wall_s:.1f} s"),
            ("workers", f"{self.num_workers:,}"),
            ("device", self.device),
        ]
        return Table("SampleStats", rows)
