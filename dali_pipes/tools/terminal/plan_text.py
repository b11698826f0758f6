"""What `plan` shows: the report, and what to do about steps that stay uneven."""

from rich.text import Text

from dali_pipes.rows.plan_report import PlanReport
from dali_pipes.rows.step_costs import EVEN
from dali_pipes.tools.terminal.console import output


def show_plan(report: PlanReport) -> None:
    """The table of the report, and how balanced steps compare with the best order."""
    lines = repr(report).split("\n")
    if report.cost_percentiles == ():
        lines.append("the rows are fewer than one step of all ranks: there is nothing to balance")
    elif report.even_steps is not None and report.sorted_cost_ratio is not None:
        lines.append(
            f"{report.even_steps:.2%} of the steps have a ratio of at most {EVEN}; in random order, "
            f"{report.unbalanced_even_steps:.2%}"
        )
        lines.append(
            f"in the best order of each window for these ranks, the ratio is {report.sorted_cost_ratio:.3f}, and "
            f"{report.sorted_even_steps:.2%} of the steps are even"
        )
        if report.sorted_cost_ratio > EVEN:
            lines.append("advice: increase window_documents, so that a window has more rows of similar cost")
    for line in lines:
        output().print(Text(line), soft_wrap=True)
