"""What `mixture` shows."""

from rich.text import Text

from dali_pipes.runtime.messages import printable
from dali_pipes.tools.reports import MixturePlan
from dali_pipes.tools.terminal.console import output


def show_mixture(plan: MixturePlan) -> None:
    """A line for each source, for each stage, and for each source that is used up."""
    report = plan.report
    table = [("source", "weight", "share", "tokens", "rows", "passes", "rows left")]
    for use in report.sources:
        about = "" if use.is_exact else "~"
        left = "no limit" if use.rows_left is None else f"{about}{use.rows_left:,}"
        table.append(
            (
                printable(use.name),
                f"{use.weight:.2%}",
                f"{about}{use.share:.2%}",
                f"{about}{use.tokens:,}",
                f"{use.rows:,}",
                f"{about}{use.passes:.3g}",
                left,
            )
        )
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [f"after {report.place:,} rows, {report.tokens:,} tokens"]
    for name, *figures in table:
        cells = [name.ljust(widths[0]), *(f.rjust(width) for f, width in zip(figures, widths[1:], strict=True))]
        lines.append("  ".join(cells))
    for stage in plan.stages:
        weights = ", ".join(f"{printable(name)} {weight:.2%}" for name, weight in stage.weights.items())
        lines.append(f"from token {stage.tokens:,}, row {stage.place:,}: {weights}")
    for lengths in plan.lengths:
        lines.append(
            f"from token {lengths.tokens:,}: optimizer steps of {lengths.global_batch:,} rows x {lengths.seq_len:,} "
            "tokens"
        )
    for source in plan.exhausted:
        lines.append(
            f"{printable(source.name)} leaves at token {source.place * plan.seq_len:,}, row {source.place:,}: "
            f"{source.rows_used:,} of {source.cap:,} rows used"
        )
    if not all(use.is_exact for use in report.sources):
        lines.append("~ estimated: rows hold documents")
    for line in lines:
        output().print(Text(line), soft_wrap=True)
