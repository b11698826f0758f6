"""The section on the order: where rows come from, how well they are shuffled, and what each rank gets."""

import numpy as np

from dali_pipes.runtime.messages import counted
from dali_pipes.tools.reports.page import charts
from dali_pipes.tools.reports.page.opened_run import OpenedRun
from dali_pipes.tools.reports.page.row_figures import figures_of
from dali_pipes.tools.reports.page.section import Chart, Column, DataTable, Fact, Part, Section, Value, table_of
from dali_pipes.tools.reports.shuffle_report import ShuffleReport, shuffle_of
from dali_pipes.tools.reports.step_report import ranks_of

JUDGED_STEPS = 64
"""First steps of epoch 0 that the figures look at, as those of `dali-pipes shuffle`."""
_POINTS = 1000
_MOST_RANKS = 64

_ORDERS = (
    Column("order", "order", "text"),
    Column("distance_tokens", "tokens between neighbors"),
    Column("distance", "of the corpus", "share"),
    Column("from_one_block", "from one block, per step", "share"),
    Column("from_one_file", "from one file, per step", "share"),
    Column("correlation", "correlation"),
    Column("blocks", "blocks read"),
)
_RANKS = (Column("rank", "rank"), Column("rows", "rows"), Column("tokens", "tokens"), Column("padding", "padding"))


def order_section(run: OpenedRun) -> Section:
    """Plans the first steps in each order; reads no tokens."""
    if run.config.split == "validation":
        about = "The loader always reads the validation split in the order of the corpus."
        return Section("order", "Order", about, (Part("", tables=(_ranks(run),)),))
    report = shuffle_of(run.config, run.built.corpora, JUDGED_STEPS)
    return Section("order", "Order", parts=(_shuffle(report, _ranks(run)),))


def _shuffle(report: ShuffleReport, ranks: DataTable) -> Part:
    configured = next(figures for figures in report.orders if figures.is_configured)
    _, places, positions = next(course for course in report.courses if course[0] == configured.order)
    every = -(-len(places) // _POINTS)
    chart = Chart(
        "order",
        "Where rows come from",
        charts.points(
            (places[::every] / report.step_rows).tolist(),
            positions[::every].tolist(),
            xlabel="step",
            ylabel="position in the corpus",
        ),
        f"Positions of {counted(len(places[::every]), 'row')} in the corpus, over the steps of epoch 0, with the order "
        f"{configured.order}. Evenly spread points show a good shuffle; a line shows the order of the files.",
        is_sample=True,
    )
    rows = [{**vars(figures), "order": figures.order + " (used)" * figures.is_configured} for figures in report.orders]
    table = table_of("orders", f"Figures of the first {counted(report.steps, 'step')} in each order", _ORDERS, rows)
    facts = (
        Fact("order", "order", Value(configured.order, "text")),
        Fact("step_rows", "rows per step, all ranks", Value(report.step_rows)),
        Fact("corpus_blocks", "blocks in the corpus", Value(report.corpus_blocks)),
        Fact("largest_file", "largest file", Value(report.largest_file, "share")),
    )
    return Part("", facts=facts, charts=(chart,), tables=(ranks, table))


def _ranks(run: OpenedRun) -> DataTable:
    """What each rank gets in the steps asked for."""
    size = run.built.schedule.world_size
    rows, tokens, positions = (np.zeros(size, np.int64) for _ in range(3))
    for step in run.steps:
        plan = run.plan(step)
        figures = figures_of(plan, run.cutters)
        ranks = ranks_of(plan, size, len(figures.tokens))
        rows += np.bincount(ranks, figures.tokens > 0, size).astype(np.int64)
        tokens += np.bincount(ranks, figures.tokens, size).astype(np.int64)
        positions += np.bincount(ranks, figures.widths, size).astype(np.int64)
    records = [
        {"rank": rank, "rows": rows[rank].item(), "tokens": tokens[rank].item(), "padding": left}
        for rank, left in enumerate((positions - tokens).tolist())
    ]
    shown = ", ".join(f"{step:,}" for step in run.steps)
    return table_of("ranks", f"Tokens of each rank in steps {shown}", _RANKS, records, most=_MOST_RANKS, is_narrow=True)
