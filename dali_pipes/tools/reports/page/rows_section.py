"""The section on rows: fill, padding, what is dropped and cut, documents a row, and rows that grow."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from dali_pipes.loader.plan_reports import plan_reports
from dali_pipes.rows.plan_report import PlanReport
from dali_pipes.rows.step_costs import EVEN, PERCENTILES
from dali_pipes.runtime.messages import counted
from dali_pipes.tools.reports.page import charts
from dali_pipes.tools.reports.page.opened_run import OpenedRun
from dali_pipes.tools.reports.page.row_figures import RowFigures, figures_of, joined
from dali_pipes.tools.reports.page.section import (
    Chart,
    Column,
    DataTable,
    Fact,
    Legend,
    Part,
    Section,
    Unit,
    Value,
    table_of,
)
from dali_pipes.tools.reports.step_report import step_report

_SAMPLE_ROWS = 4096
_MOST_STEPS = 64
_MOST_PLANNED = 5_000_000
"""Documents of an epoch that are planned for exact figures; with more, only a plan that is cached is used."""
_BINS = 20

_STEPS = (
    Column("step", "step"),
    Column("num_rows", "rows"),
    Column("padding_rows", "padding rows"),
    Column("width", "positions per row"),
    Column("tokens", "tokens"),
    Column("padding", "padding"),
    Column("documents", "documents"),
    Column("num_files", "files"),
)
_LENGTHS = (
    Column("tokens", "from token"),
    Column("row", "from row"),
    Column("seq_len", "seq_len"),
    Column("global_batch", "global_batch"),
)
_PLAN: dict[str, tuple[str, Unit]] = {
    "rows": ("rows of the epoch", "number"),
    "documents": ("documents", "number"),
    "tokens": ("tokens", "number"),
    "fill": ("fill", "share"),
    "padding_tokens": ("padding", "number"),
    "dropped_documents": ("dropped documents", "number"),
    "dropped_tokens": ("dropped tokens", "number"),
    "split_documents": ("split documents", "number"),
    "truncated_documents": ("truncated documents", "number"),
}
_PLAN_WITH_KEEP: dict[str, tuple[str, Unit]] = {
    "removed_documents": ("documents removed by keep", "number"),
    "extra_copies": ("copies added by keep", "number"),
}
_PLAN_WITH_BALANCE: dict[str, tuple[str, Unit]] = {
    "cost_ratio": ("cost of the most expensive rank, divided by the mean", "number"),
    "worst_cost_ratio": ("the same in the worst step", "number"),
    "even_steps": ("steps in which it is at most 1.05", "share"),
    "unbalanced_cost_ratio": ("in random order: cost of the most expensive rank, divided by the mean", "number"),
    "unbalanced_worst_cost_ratio": ("in random order: the same in the worst step", "number"),
    "unbalanced_even_steps": ("in random order: steps in which it is at most 1.05", "share"),
    "sorted_cost_ratio": ("in the best order of each window: cost of the most expensive rank / mean", "number"),
    "sorted_even_steps": ("in the best order of each window: steps in which it is at most 1.05", "share"),
}


def rows_section(run: OpenedRun) -> Section:
    """Plans a sample of rows, and the whole epoch where its documents are not too many. Reads no tokens."""
    schedule = run.built.schedule
    first = schedule.step_number(run.base)
    most = min(_MOST_STEPS, -(-_SAMPLE_ROWS // schedule.global_rows))
    steps = range(first, first + schedule.steps(run.base, run.epoch, most=most))
    about = f"The sample is the first {counted(len(steps), 'step')} of epoch {run.epoch}, over all ranks."
    return Section("rows", "Rows", about, (_sample(run, steps), *_plans(run), *_growth(run)))


def _sample(run: OpenedRun, steps: range) -> Part:
    figures = joined([figures_of(run.plan(step), run.cutters) for step in steps])
    records = [
        step_report(run.built, run.config, run.cutters, step, run.epoch, run.base, all_ranks=True, most=0).as_dict()
        for step in run.steps
    ]
    padding = int(figures.widths.sum() - figures.tokens.sum())
    facts = [
        Fact("sampled_rows", "rows in the sample", Value(len(figures.tokens))),
        Fact("sampled_fill", "fill", Value(float(figures.tokens.sum() / figures.widths.sum()), "share"), True),
        Fact("sampled_padding", "padding", Value(padding), True),
    ]
    if figures.documents is not None:
        facts.append(Fact("documents_a_row", "documents per row", Value(float(figures.documents.mean())), True))
    tables = (table_of("steps", "Steps, over all ranks", _STEPS, records),)
    return Part("", facts=tuple(facts), charts=tuple(_charts(figures)), tables=tables)


def _charts(figures: RowFigures) -> Iterator[Chart]:
    if figures.tokens.min() < figures.widths.max():
        counts, _ = np.histogram(figures.fill, _BINS, (0, 1))
        labels = [f"{100 * edge // _BINS}%" for edge in range(_BINS)]
        yield Chart(
            "fill",
            "Fill of rows",
            charts.bars(labels, counts.tolist(), xlabel="share of positions with a token (at least)", ylabel="rows"),
            f"{counts[-1] / counts.sum():.1%} of the rows are at least {100 - 100 // _BINS}% full.",
            is_sample=True,
        )
    if figures.documents is not None:
        yield _documents(figures.documents)


def _documents(documents: npt.NDArray[np.int64]) -> Chart:
    most = int(documents.max())
    width = max(1, -(-(most + 1) // 24))
    counts = np.bincount(documents // width)
    labels = [str(number * width) for number in range(len(counts))]
    return Chart(
        "documents_a_row",
        "Documents per row",
        charts.bars(labels, counts.tolist(), xlabel=f"documents{', at least' * (width > 1)}", ylabel="rows"),
        f"A row contains tokens of {documents.min():,} to {most:,} documents, {documents.mean():.1f} on average.",
        is_sample=True,
    )


def _plans(run: OpenedRun) -> Iterator[Part]:
    """The whole epoch of documents, exact: one part for each source that makes rows of them."""
    for name, reports in plan_reports(run.built, run.config).items():
        pass_number = run.epoch if run.built.mixture is None else 0
        report = reports.known(pass_number)
        key, heading = ("plan", "Plan of the epoch") if not name else (f"plan.{name}", f"Plan of {name}, first pass")
        if report is None and reports.num_documents <= _MOST_PLANNED:
            report = reports.report(pass_number)
        if report is None:
            note = (
                f"These figures need a plan of all {reports.num_documents:,} documents, which does not exist yet. "
                "Call loader.plan_report() to create it."
            )
            yield Part(key, heading, notes=(note,))
        else:
            shown = dict(_PLAN)
            if report.removed_documents or report.extra_copies:
                shown |= _PLAN_WITH_KEEP
            if report.cost_ratio is not None:
                shown |= _PLAN_WITH_BALANCE
            facts = [Fact(each, label, Value(getattr(report, each), unit)) for each, (label, unit) in shown.items()]
            yield Part(key, heading, tuple(facts), tuple(_costs(report)))


def _costs(report: PlanReport) -> Iterator[Chart]:
    """How evenly the ranks share the cost of the steps, where that is balanced."""
    if not (report.cost_percentiles and report.unbalanced_cost_percentiles):
        return
    percent = range(PERCENTILES)
    courses = {
        'balance = "cost"': (percent, report.cost_percentiles),
        "in random order": (percent, report.unbalanced_cost_percentiles),
    }
    yield Chart(
        "step_costs",
        "Cost of the most expensive rank of each step, divided by the mean",
        charts.lines(courses, xlabel="% of steps", ylabel="highest / mean", from_zero=False),
        f"With balance, {report.even_steps:.1%} of the steps have a ratio of at most {EVEN}, and the worst step has "
        f"{report.worst_cost_ratio:.3f}. In random order, {report.unbalanced_even_steps:.1%} do, and the worst step "
        f"has {report.unbalanced_worst_cost_ratio:.3f}.",
        tuple(Legend(name, number) for number, name in enumerate(courses)),
    )


def _growth(run: OpenedRun) -> Iterator[Part]:
    """How rows and optimizer steps grow in the epoch."""
    curriculum = run.built.schedule.curriculum
    if curriculum is None:
        return
    segments = curriculum.segments(run.epoch)
    tokens = [curriculum.tokens_before(run.epoch, segment.row) for segment in segments]
    records = [{**segment._asdict(), "tokens": at} for segment, at in zip(segments, tokens, strict=True)]
    drawn = []
    end = [*tokens, tokens[-1] + max(1, tokens[-1] // 4)]
    for key, title in (("seq_len", "Row length"), ("global_batch", "Rows per optimizer step")):
        values = [record[key] for record in records]
        drawn.append(
            Chart(
                key,
                title,
                charts.lines({key: (end, [*values, values[-1]])}, xlabel="tokens of the run", ylabel=key, steps=True),
                f"{key} goes from {values[0]:,} to {values[-1]:,} in {counted(len(values), 'stage')}.",
            )
        )
    yield Part("growth", "Curriculum", charts=tuple(drawn), tables=(_lengths(records),))


def _lengths(records: list[dict[str, int]]) -> DataTable:
    return table_of("lengths", "Row lengths and batch sizes", _LENGTHS, records)
