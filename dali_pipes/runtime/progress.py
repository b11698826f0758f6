"""A progress bar for long operations, shown after one second: on stderr if that is a terminal, and in notebooks."""

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

SHOWN_AFTER_S = 1.0
_PLACE = threading.Lock()
"""Held while a bar is shown: bars at the same time would draw over each other."""


class ProgressBar:
    """A bar whose total may grow. Thread-safe; never blocks. It first appears when progress is reported, and not while
    another one is shown.
    """

    def __init__(self, text: str, *, in_bytes: bool = False) -> None:
        self._text, self._in_bytes = text, in_bytes
        self._begin = time.monotonic()
        self._lock = threading.Lock()
        self._total = self._done = 0
        self._bar: Any = None
        self._cell: Any = None
        """Where a notebook shows the bar."""
        self._has_place = self._is_closed = False

    def expect(self, more: int) -> None:
        """Add to the total."""
        with self._lock:
            self._total += more

    def advance(self, done: int, note: str = "") -> None:
        """Report progress. The note is shown after the bar."""
        with self._lock:
            self._done += done
            if self._bar is None and not self._is_closed and time.monotonic() - self._begin >= SHOWN_AFTER_S:
                self._show()
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=self._done, total=self._total, note=note)
            if self._cell is not None and not self._is_closed:
                self._cell.draw(self._bar.get_renderable())

    def close(self) -> None:
        """Remove the bar; idempotent. Threads may report progress afterwards, which does nothing."""
        with self._lock:
            self._is_closed = True
            if self._cell is not None:
                self._cell.remove()
            elif self._bar is not None:
                self._bar.stop()
            if self._has_place:
                self._has_place = False
                _PLACE.release()

    def _show(self) -> None:
        """Make the bar, if somebody would see it."""
        is_terminal = sys.stderr.isatty()
        if not is_terminal and "IPython" not in sys.modules:
            return
        from rich.console import Console
        from rich.progress import DownloadColumn, Progress, TextColumn, TransferSpeedColumn

        from dali_pipes.runtime.notebook_output import NotebookOutput, in_notebook

        is_cell = in_notebook()
        if not is_terminal and not is_cell:
            return
        self._has_place = _PLACE.acquire(blocking=False)
        if not self._has_place:
            return
        columns = Progress.get_default_columns()
        if self._in_bytes:
            columns = (*columns, DownloadColumn(), TransferSpeedColumn())
        # Assigned before it starts, so that `close` removes it even if Ctrl-C interrupts the start.
        self._bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=Console(stderr=True), transient=True)
        self._bar.add_task(self._text, note="")
        if is_cell:
            self._cell = NotebookOutput()
        else:
            self._bar.start()


@contextlib.contextmanager
def progress_bar(text: str, total: int, *, in_bytes: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields a function that reports progress towards `total`. The bar is removed at the end of the block."""
    bar = ProgressBar(text, in_bytes=in_bytes)
    bar.expect(total)
    try:
        yield bar.advance
    finally:
        bar.close()
