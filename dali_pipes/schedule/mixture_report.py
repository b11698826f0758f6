"""What a mixture uses of its sources, by arithmetic: at any place of a run, past or future."""

from dataclasses import asdict, dataclass
from typing import Any

from dali_pipes.monitoring.display import ShownAsTable, Table
from dali_pipes.schedule.mixed_rows import MixedRows


@dataclass(frozen=True)
class SourceUse:
    """The rows of one source before some place of the run. Where rows hold documents, figures in tokens, passes and
    rows left are estimates (`is_exact` False).
    """

    name: str
    weight: float
    """Share of the tokens that the weights in force at the place ask for, 0 to 1."""
    share: float
    """Share of the tokens so far that were of this source, 0 to 1."""
    rows: int
    tokens: int
    passes: float
    """Full runs through the source."""
    rows_left: int | None
    """Rows until `max_epochs`; None without it."""
    is_exact: bool


@dataclass(frozen=True, repr=False)
class MixtureReport(ShownAsTable):
    """The use of each source before row `place` of the run, counted over all epochs and ranks: rows of `order_len`
    tokens if `seq_len` is a list.
    """

    place: int
    tokens: int
    """Real tokens before it, without padding."""
    sources: tuple[SourceUse, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return asdict(self)

    def _table(self) -> Table:
        rows = []
        for use in self.sources:
            about = "" if use.is_exact else "about "
            left = "" if use.rows_left is None else f", {about}{use.rows_left:,} rows left"
            used = f"{about}{use.tokens:,} tokens, {about}{use.passes:.3g} passes{left}"
            rows.append((use.name, f"asked {use.weight:.2%}, had {use.share:.2%}: {used}"))
        return Table(f"MixtureReport after {self.place:,} rows, {self.tokens:,} tokens", rows)


def mixture_report(mixture: MixedRows, place: int) -> MixtureReport:
    """The report before a place, or at the end of the order. Plans one window of each source of documents."""
    place = place if mixture.order.end is None else min(place, mixture.order.end)
    counts = dict(zip(mixture.order.names, mixture.order.counts_before(place).tolist(), strict=True))
    weights = mixture.order.weights_at(place)
    means = {name: source.mean_tokens() for name, source in zip(mixture.names, mixture.sources, strict=True)}
    tokens = {name: round(counts[name] * mean) for name, mean in means.items()}
    asked = {name: weights.get(name, 0) * mean for name, mean in means.items()}
    total, all_asked = sum(tokens.values()), sum(asked.values())
    sources = []
    for name, source in zip(mixture.names, mixture.sources, strict=True):
        cap = mixture.caps.get(name)
        sources.append(
            SourceUse(
                name,
                weight=float(asked[name] / all_asked) if all_asked else 0.0,
                share=tokens[name] / total if total else 0.0,
                rows=counts[name],
                tokens=tokens[name],
                passes=counts[name] / source.rows_of_pass(),
                rows_left=None if cap is None else max(0, cap - counts[name]),
                is_exact=source.is_uniform,
            )
        )
    return MixtureReport(place, total, tuple(sources))
