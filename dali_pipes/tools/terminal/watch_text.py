"""What `watch` shows: the figures of a run, the shares of its sources, and its last warnings."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dali_pipes.runtime.messages import printable
from dali_pipes.tools.reports import RunNow
from dali_pipes.tools.terminal.console import output

_BAR = 24
_HIGH_WAIT = 0.05


def show_run(now: RunNow) -> None:
    """Print the figures once."""
    output().print(run_table(now))


def run_table(now: RunNow, waiting: str = "") -> RenderableType:
    """The figures as a table. waiting: a line below it"""
    table = Table.grid(padding=(0, 2))
    for name, value in _facts(now):
        table.add_row(Text(name, style="dim"), value)
    parts: list[RenderableType] = [table]
    if now.shares:
        shares = Table.grid(padding=(0, 2))
        for name, share in sorted(now.shares.items(), key=lambda each: -each[1]):
            bar = Text("#" * round(share * _BAR), style="cyan")
            shares.add_row(Text(printable(name), overflow="fold"), f"{share:.1%}", bar)
        parts += [Text("shares of the rows", style="dim"), shares]
    parts += [Text(f"warning: {printable(text)}", style="yellow") for text in now.warnings]
    if waiting:
        parts.append(Text(waiting, style="dim"))
    return Group(*parts)


def _facts(now: RunNow) -> list[tuple[str, Text]]:
    facts: list[tuple[str, Text]] = []
    for name, value, form in (
        ("step", now.step, ",.0f"),
        ("epoch", now.epoch, ",.0f"),
        ("tokens/s", now.tokens_per_second, ",.0f"),
        ("data wait", now.data_wait_ratio, ".2%"),
        ("ready blocks", now.ready_blocks, ",.0f"),
        ("loss", now.loss, ".4g"),
        ("MFU", now.mfu, ".1%"),
    ):
        if value is not None:
            is_high = name == "data wait" and value >= _HIGH_WAIT
            facts.append((name, Text(format(value, form), style="bold red" if is_high else "bold")))
        elif name == "MFU" and now.model_flops_per_s is not None:
            facts.append(
                (name, Text(f"peak not known; {now.model_flops_per_s / 1e12:.3g} model TFLOP/s", style="bold"))
            )
    return facts or [("lines", Text(f"{now.lines:,}"))]
