"""What `shuffle` shows: a table of the orders, how to read each figure, and what to do."""

from rich.text import Text

from dali_pipes.runtime.messages import counted
from dali_pipes.tools.reports import OrderFigures, ShuffleReport
from dali_pipes.tools.terminal.console import output

_MOST_FROM_ONE_BLOCK = 0.1
"""Share of a step's rows from one block from which the advice is to mix more."""


def show_shuffle(report: ShuffleReport) -> None:
    """A line for each order and for each figure, and the advice for the configured order."""
    table: list[tuple[str, ...]] = [("order", "distance", "one block", "one file", "correlation", "blocks read")]
    table += [_line(figures) for figures in report.orders]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    looked_at = f"first {counted(report.steps, 'step')} of {counted(report.step_rows, 'row')}"
    of_corpus = f"{counted(report.corpus_blocks, 'block')} of about 2 million tokens in the corpus"
    lines = [f"{looked_at}; {of_corpus}, shuffle_window = {report.shuffle_window:,}"]
    for name, *figures in table:
        cells = [name.ljust(widths[0]), *(text.rjust(width) for text, width in zip(figures, widths[1:], strict=True))]
        lines.append("  ".join(cells))
    meanings = {
        "distance": "between consecutive rows, as a part of their corpus. A full shuffle has about 29%; near 0%, rows "
        "of a step are alike",
        "one block": f"largest part of a step from one block. Above {_MOST_FROM_ONE_BLOCK:.0%}, steps differ in what "
        "they are about: raise shuffle_window or the rows of a step",
        "one file": f"largest part of a step from one file. The largest file has {report.largest_file:.1%} of the "
        "tokens; a step should not have much more",
        "correlation": "of the positions of consecutive rows. 0 is shuffled; above 0.1, training drifts through the "
        "corpus",
        "blocks read": "by these steps. With a remote or compressed corpus, fewer cost less",
        "advice": _advice(report),
    }
    lines += [f"{name}: {meaning}" for name, meaning in meanings.items()]
    for line in lines:
        output().print(Text(line), soft_wrap=True)


def _line(figures: OrderFigures) -> tuple[str, ...]:
    windows = "" if figures.windows is None else f", {counted(figures.windows, 'window')}"
    return (
        f"{figures.order}{windows}{' (configured)' if figures.is_configured else ''}",
        "unknown" if figures.distance is None else f"{figures.distance:.2%}",
        f"{figures.from_one_block:.2%}",
        f"{figures.from_one_file:.2%}",
        "unknown" if figures.correlation is None else f"{figures.correlation:+.3f}",
        f"{figures.blocks:,}",
    )


def _advice(report: ShuffleReport) -> str:
    """One sentence or two for the configured order."""
    by_name = {figures.order: figures for figures in report.orders}
    configured = next(figures for figures in report.orders if figures.is_configured)
    by_chance = by_name["rows"].from_one_block
    if configured.order == "sequential":
        return "rows are not shuffled. Fit for evaluation; to train, remove shuffle = False"
    if configured.order == "rows":
        return 'a full shuffle. If the corpus is remote or compressed, compare with order = "blocks"'
    if configured.windows == 1:
        return (
            'the whole corpus is one window, so order = "blocks" shuffles as well as "rows" and reads as far apart; '
            "a smaller shuffle_window reads neighbors together"
        )
    if configured.from_one_block > max(_MOST_FROM_ONE_BLOCK, 1.5 * by_chance):
        return (
            f"one block gives {configured.from_one_block:.1%} of a step. Raise shuffle_window above "
            f"{report.shuffle_window:,}, or use more rows in a step than {report.step_rows:,}"
        )
    return (
        f"a good shuffle: one block gives {configured.from_one_block:.1%} of a step, {by_chance:.1%} in a full shuffle"
    )
