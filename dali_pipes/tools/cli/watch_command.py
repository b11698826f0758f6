"""The command `dali-pipes watch`: follows the log of a run in the terminal, also over ssh. Ctrl-C ends it.

dali-pipes watch runs/stats.jsonl
"""

import contextlib
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from dali_pipes.runtime.messages import counted, printable
from dali_pipes.tools import reports, terminal
from dali_pipes.tools.cli.endings import errors_as_one_line
from dali_pipes.tools.cli.flags import FLAG, Json

_POLL_S = 0.5


def watch(
    log: Annotated[
        Path, typer.Argument(help="Log of a run: one JSON object per line, such as the result of stats().metrics().")
    ],
    once: Annotated[
        bool, typer.Option("--once/--no-once", metavar=FLAG, show_default=False, help="Print the figures and exit.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Follow a run: tokens per second, data wait, step, epoch, shares of sources, and warnings. Ctrl-C stops it.

    With --json, prints the figures once.
    """
    with errors_as_one_line():
        followed = reports.FollowedLog(log)
        followed.poll()
        if once or as_json:
            terminal.show(followed.now(), terminal.show_run, as_json=as_json)
            return
        with contextlib.suppress(KeyboardInterrupt), Live(console=terminal.output(), auto_refresh=False) as live:
            changed = time.monotonic()
            while True:
                now = followed.now()
                age = round(time.monotonic() - changed)
                waiting = f"{printable(str(log))}: last line {counted(age, 'second')} ago; Ctrl-C stops"
                live.update(terminal.run_table(now, waiting), refresh=True)
                time.sleep(_POLL_S)
                if followed.poll():
                    changed = time.monotonic()
