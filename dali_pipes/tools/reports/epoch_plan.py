"""The plan of an epoch of documents, for the command `plan` and the page: `plan_epoch`. Reads no tokens."""

from contextlib import closing
from pathlib import Path

from dali_pipes.config import LoaderConfig
from dali_pipes.config.validators import shown
from dali_pipes.errors import ConfigError
from dali_pipes.loader.batch_origin import built_on_cpu
from dali_pipes.loader.plan_reports import plan_reports
from dali_pipes.rows.plan_report import PlanReport
from dali_pipes.rows.step_costs import EVEN, PERCENTILES
from dali_pipes.runtime.optional import optional_package


def plan_epoch(config: LoaderConfig, epoch: int, source: str | None = None) -> PlanReport:
    """As `TokenLoader.plan_report`, of any epoch; of a source of a mixture, of any pass.

    Rank and world size must be in `config`. Blocks to open the corpora and to plan the epoch. Raises as `TokenLoader`,
    and `ConfigError` for rows that are not made of documents, and for a wrong epoch, or a wrong or missing source.
    """
    if epoch < 0:
        raise ConfigError(f"--epoch {epoch}: epochs are numbered from 0; use 0 or more")
    with closing(built_on_cpu(config)) as built:
        reports = plan_reports(built, config)
        name = source or ""
        if name in reports:
            return reports[name].report(epoch)
        if not reports:
            raise ConfigError(
                'plan requires rows made from documents: set rows = "pack" or "pad"; found rows = "stream"'
            )
        if config.mixture is None:
            raise ConfigError(f"--source {source}: this configuration reads one corpus; remove --source")
        given = "plan of a mixture needs --source" if source is None else f"--source {source}"
        raise ConfigError(f'{given}: expected a source with rows = "pack" or "pad", one of {shown(list(reports))}')


def check_plot(config: LoaderConfig) -> None:
    """Raise `ConfigError` where there is nothing to draw."""
    if config.balance is None:
        raise ConfigError(
            '--plot draws how evenly ranks share the cost of steps, which requires balance = "cost"; set it, or remove '
            "--plot"
        )


def plot_plan(report: PlanReport, path: Path) -> None:
    """Write a figure of all steps by the cost of the most expensive rank, divided by the mean: balanced and not.

    The suffix of `path` is the format. Raises `BackendError` without matplotlib, and `ConfigError` for a format that it
    does not write, and for a report without whole steps of balanced rows.
    """
    with optional_package("matplotlib", "demo", purpose="to plot a plan"):
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogFormatter
    if not (report.cost_percentiles and report.unbalanced_cost_percentiles):
        raise ConfigError(f"--plot: epoch {report.epoch:,} does not have a whole step of balanced rows to draw")
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    percent = range(PERCENTILES)
    axes.plot(percent, report.unbalanced_cost_percentiles, label="in random order")
    axes.plot(percent, report.cost_percentiles, label='balance = "cost"', linewidth=2.5)
    axes.axhline(EVEN, color="black", linestyle=":", linewidth=1, label=f"{EVEN}")
    axes.set(xlabel="% of steps", ylabel="cost of the most expensive rank / mean", yscale="log", xlim=(0, 100))
    for each in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        each(LogFormatter(labelOnlyBase=False))
    axes.legend(loc="upper left")
    if path.suffix.removeprefix(".") not in figure.canvas.get_supported_filetypes():
        raise ConfigError(f"--plot {path}: expected a name that ends in .png, .svg, or .pdf")
    figure.savefig(path)
