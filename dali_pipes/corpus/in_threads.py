"""One task a shard, side by side in threads, with a bar for the user who waits for longer than a second."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")

_MOST_THREADS = 8
_FEWEST_BYTES = 16 << 20  # below that in all, or that in each, threads cost more than they give
_FEWEST_BYTES_EACH = 256 << 10
_QUIET_S = 1.0


def in_threads(what: str, work: Callable[[Task], Result], tasks: Sequence[Task], sizes: Sequence[int]) -> list[Result]:
    """`work` of each task, in order. Blocks; raises what the first task that fails raises, and stops the rest.

    what:  named beside the bar, which is drawn on a terminal only
    sizes: bytes of each task's data
    """
    total = sum(sizes)
    if total < max(_FEWEST_BYTES, _FEWEST_BYTES_EACH * len(tasks)) or len(tasks) < 2:
        return [work(task) for task in tasks]
    results: list[Result] = []
    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as threads, _Bar(what, total) as bar:
        try:
            for result, size in zip(threads.map(work, tasks), sizes, strict=True):
                results.append(result)
                bar.advance(size)
        except BaseException:
            threads.shutdown(wait=False, cancel_futures=True)
            raise
    return results


class _Bar:
    def __init__(self, what: str, total_bytes: int) -> None:
        self._what, self._total = what, total_bytes
        self._done = 0
        self._begun = time.monotonic()
        self._progress: Any = None

    def __enter__(self) -> "_Bar":
        return self

    def advance(self, size: int) -> None:
        self._done += size
        if self._progress is None and time.monotonic() - self._begun > _QUIET_S and sys.stderr.isatty():
            self._start()
        if self._progress is not None:
            self._progress.update(self._task, completed=self._done)

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

        columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
        self._progress = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._progress.add_task(self._what, total=self._total)
        self._progress.start()

    def __exit__(self, *exception: object) -> None:
        if self._progress is not None:
            self._progress.stop()
