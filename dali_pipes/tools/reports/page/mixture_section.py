"""The section on a mixture: what was asked for and what sources get over the run, and how weights change."""

from collections.abc import Sequence

from dali_pipes.runtime.messages import counted
from dali_pipes.schedule.mixture_report import MixtureReport
from dali_pipes.tools.reports.mixture_plan import MixturePlan, plan_of_mixture
from dali_pipes.tools.reports.page import charts
from dali_pipes.tools.reports.page.opened_run import OpenedRun
from dali_pipes.tools.reports.page.section import Chart, Column, Fact, Legend, Part, Section, Value, table_of

_USES = (
    Column("name", "source", "text"),
    Column("weight", "asked", "share"),
    Column("share", "achieved", "share"),
    Column("tokens", "tokens"),
    Column("rows", "rows"),
    Column("passes", "passes"),
    Column("rows_left", "rows left"),
)
_EXHAUSTED = (Column("name", "source", "text"), Column("tokens", "leaves at token"), Column("rows_used", "rows used"))
_MOST_STAGES = 32


def mixture_section(run: OpenedRun) -> Section:
    """By arithmetic, up to the end of the first epoch; with a state, with the weights that it records. Reads no tokens.

    Raises `ConfigError` for a mixture that exceeds `max_epochs`.
    """
    mixture = run.built.mixture
    assert mixture is not None
    plan = plan_of_mixture(mixture, run.built.schedule.curriculum, run.config.row_len, with_course=True)
    report = plan.report
    facts = (
        Fact("place", "rows", Value(report.place)),
        Fact("tokens", "tokens", Value(report.tokens)),
        Fact("num_sources", "sources", Value(len(report.sources))),
        Fact("num_stages", "stages", Value(len(plan.stages))),
    )
    uses = [vars(use) for use in report.sources]
    tables = [table_of("sources", "Sources, up to the end of the epoch", _USES, uses, most=len(uses))]
    if len(plan.stages) > 1:
        names = [use.name for use in report.sources]
        columns = (Column("tokens", "from token"), *(Column(name, name, "share") for name in names))
        stages = [{"tokens": stage.tokens, **stage.weights} for stage in plan.stages]
        tables.append(table_of("stages", "Weights", columns, stages, most=_MOST_STAGES))
    if plan.exhausted:
        left = [{**source._asdict(), "tokens": source.place * plan.seq_len} for source in plan.exhausted]
        tables.append(table_of("exhausted", "Sources that reach max_epochs", _EXHAUSTED, left))
    is_exact = all(use.is_exact for use in report.sources)
    about = "" if is_exact else "Rows contain whole documents or pieces, so tokens and passes are estimates."
    return Section("mixture", "Mixture", about, (Part("", "", facts, _charts(plan), tuple(tables)),))


def _charts(plan: MixturePlan) -> tuple[Chart, ...]:
    if not plan.course:
        return ()
    uses = sorted(plan.report.sources, key=lambda use: -use.tokens)
    shown = [use.name for use in uses[: charts.SERIES]]
    legend = tuple(Legend(name, number) for number, name in enumerate(shown))
    tokens = [report.place * plan.seq_len for report in plan.course]
    shares = {name: (tokens, _course(plan.course, name, "share")) for name in shown}
    asked = {name: (tokens, _course(plan.course, name, "weight")) for name in shown}
    passes = {name: (tokens, _course(plan.course, name, "passes")) for name in shown}
    most = max(plan.report.sources, key=lambda use: use.passes)
    largest, others = uses[0], uses[charts.SERIES :]
    rest = sum(use.share for use in others)
    not_drawn = f" {counted(len(others), 'more source')} not drawn, {rest:.1%} in total." if others else ""
    return (
        Chart(
            "shares",
            "Share of tokens so far",
            charts.lines(shares, asked=asked, xlabel="tokens of the run", ylabel="share", as_shares=True),
            f"Solid lines are shares of the tokens so far; dashed lines are the weights. {largest.name} has the most, "
            f"{largest.share:.1%} of {counted(plan.report.tokens, 'token')}.{not_drawn}",
            legend,
        ),
        Chart(
            "passes",
            "Passes over each source",
            charts.lines(passes, xlabel="tokens of the run", ylabel="passes"),
            f"{most.name} has the most passes: {most.passes:.3g}.",
            legend,
        ),
    )


def _course(course: Sequence[MixtureReport], name: str, figure: str) -> list[float]:
    """A figure of one source at each point."""
    return [next(getattr(use, figure) for use in report.sources if use.name == name) for report in course]
