"""A progress bar for what may take long: on stderr, only if that is a terminal, and only once it has taken a second."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

SHOWN_AFTER_S = 1.0


@contextlib.contextmanager
def progress_bar(text: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """A function that takes how much of `total` has just been done; one thread at a time may call it.

    The bar first appears at one of these calls, and is gone when the block is left. Never blocks.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    columns = Progress.get_default_columns()
    if in_bytes:
        columns = (*columns, DownloadColumn(), TransferSpeedColumn())
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    bar = progress.add_task(text, total=total)
    begin = time.monotonic()

    def advance(done: int) -> None:
        progress.update(bar, advance=done)
        if not progress.live.is_started and time.monotonic() - begin >= SHOWN_AFTER_S:
            progress.start()

    try:
        yield advance
    finally:
        progress.stop()
