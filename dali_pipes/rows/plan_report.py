"""`PlanReport`: what packing, padding and balance make of the documents of an epoch."""

from dataclasses import asdict, dataclass
from typing import Any

from dali_pipes.monitoring.display import ShownAsTable, Table
from dali_pipes.runtime.messages import counted


@dataclass(frozen=True, repr=False)
class PlanReport(ShownAsTable):
    """What an epoch's plan makes of the documents, over all ranks; every figure is exact.

    Tokens in rows and `dropped_tokens` add up to `tokens`.
    """

    epoch: int
    documents: int
    """Including empty ones, and every copy that `keep` makes of one."""
    tokens: int
    """Those that fill-in-the-middle adds, too."""
    rows: int
    """With `batch_tokens`, batches."""
    padding_tokens: int
    fill: float
    """Fraction of the positions that hold tokens, 0 to 1. With length buckets, each row counts as wide as its bucket;
    a batch with rows of two buckets is as wide as the larger one, so it has more padding than this."""
    dropped_documents: int
    dropped_tokens: int
    """Tokens of dropped documents, and the cut ends of truncated ones."""
    split_documents: int
    truncated_documents: int
    removed_documents: int = 0
    """Documents that `keep` drops; no other figure counts them."""
    extra_copies: int = 0
    """Copies that `keep` adds; every other figure counts each copy."""
    cost_ratio: float | None = None
    """With `balance`: cost of the most expensive rank of each step, divided by the mean over the ranks; the sums over
    all whole steps, so 1.04 is a loss of 4%."""
    worst_cost_ratio: float | None = None
    """The same of the worst step."""
    even_steps: float | None = None
    """Share of the whole steps in which that ratio is at most 1.05, 0 to 1."""
    unbalanced_cost_ratio: float | None = None
    """`cost_ratio` of the same rows in a random order."""
    unbalanced_worst_cost_ratio: float | None = None
    unbalanced_even_steps: float | None = None
    sorted_cost_ratio: float | None = None
    """`cost_ratio` of the same rows with those of each window in the best order for exactly these steps. What remains
    comes from the rows of a window; a larger `window_documents` reduces it."""
    sorted_even_steps: float | None = None
    cost_percentiles: tuple[float, ...] | None = None
    """The ratios that 0%, 1%, ..., 100% of the whole steps do not exceed; () without whole steps."""
    unbalanced_cost_percentiles: tuple[float, ...] | None = None

    def as_dict(self) -> dict[str, Any]:
        """JSON-serializable."""
        return asdict(self)

    def _table(self) -> Table:
        dropped = f"{self.dropped_tokens:,} tokens, {counted(self.dropped_documents, 'document')}"
        rows = [
            ("rows", f"{self.rows:,}, {self.fill:.2%} full"),
            ("documents", f"{self.documents:,}, {self.tokens:,} tokens"),
            ("padding", f"{self.padding_tokens:,} tokens"),
            ("dropped", dropped),
            ("cut", f"{self.split_documents:,} split, {self.truncated_documents:,} truncated"),
        ]
        if self.removed_documents or self.extra_copies:
            removed = counted(self.removed_documents, "document")
            rows.append(("keep", f"{removed} removed, copies added: {self.extra_copies:,}"))
        if self.cost_ratio is not None:
            rows.append(
                ("cost", f"highest / mean of the ranks {self.cost_ratio:.3f}, worst {self.worst_cost_ratio:.3f}")
            )
            random = f"{self.unbalanced_cost_ratio:.3f}, worst {self.unbalanced_worst_cost_ratio:.3f}"
            rows.append(("unbalanced", random))
        return Table(f"PlanReport of epoch {self.epoch:,}", rows)
