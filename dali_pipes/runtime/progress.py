"""A progress bar for what may take long: on stderr, only if that is a terminal, and only once it has taken a second."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

SHOWN_AFTER_S = 1.0


class ProgressBar:
    """A bar whose total may grow. Safe for several threads; never blocks. It first appears when something is done."""

    def __init__(self, text: str, *, in_bytes: bool = False) -> None:
        self._text, self._in_bytes = text, in_bytes
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self._total = self._done = 0
        self._bar: Any = None

    def expect(self, more: int) -> None:
        """So much more is to be done than was known."""
        with self._lock:
            self._total += more

    def advance(self, done: int, note: str = "") -> None:
        """So much has just been done; the note is shown behind the bar."""
        with self._lock:
            self._done += done
            if self._bar is None and time.monotonic() - self._begin >= SHOWN_AFTER_S and sys.stderr.isatty():
                self._show()
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=self._done, total=self._total, note=note)

    def close(self) -> None:
        """Take the bar away; idempotent."""
        with self._lock:
            if self._bar is not None:
                self._bar.stop()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        columns = Progress.get_default_columns()
        if self._in_bytes:
            columns = (*columns, DownloadColumn(), TransferSpeedColumn())
        # Held before it starts: Ctrl-C may come in between, and `close` has to take it away.
        self._bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True), transient=True)
        self._bar.add_task(self._text, note="")
        self._bar.start()


@contextlib.contextmanager
def progress_bar(text: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """A function that takes how much of `total` has just been done. The bar is gone when the block is left."""
    bar = ProgressBar(text, in_bytes=in_bytes)
    bar.expect(total)
    try:
        yield bar.advance
    finally:
        bar.close()
