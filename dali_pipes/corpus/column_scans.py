"""Threads and a progress bar for what has to be read at opening to know how long the rows are."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any, Self, TypeVar

from dali_pipes.readers import ReaderThreads

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

_MOST_THREADS = 8
_PATIENCE_S = 1.0
"""A bar is shown for what takes longer."""


class ColumnScans:
    """Work on many chunks at once, of one file or of several. A context manager; leaving it ends the threads.

    title: what the bar says is being done
    """

    def __init__(self, title: str) -> None:
        self._progress = _LateProgress(title)
        self._lock = threading.Lock()
        self._pools: dict[str, ReaderThreads] = {}
        self._futures: set[Future[Any]] = set()

    def for_files(self, function: Callable[[_Item], _Result], files: Iterable[_Item]) -> list[_Result]:
        """What `function` returns for each file, in order. It may call `for_chunks`. Blocks."""
        return self._run("files", [(function, (file,)) for file in files])

    def for_chunks(self, function: Callable[[int], _Result], sizes: Sequence[int]) -> list[_Result]:
        """What `function` returns for chunks 0, 1, ..., in order. Blocks.

        sizes: of each chunk in bytes, for the bar. Raises what `function` raises for the first chunk that fails.
        """
        self._progress.expect(sum(sizes))

        def one(chunk: int) -> _Result:
            result = function(chunk)
            self._progress.advance(sizes[chunk])
            return result

        return self._run("chunks", [(one, (chunk,)) for chunk in range(len(sizes))])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        for future in list(self._futures):
            future.cancel()
        for pool in self._pools.values():
            pool.stop()
        self._progress.close()

    def _run(self, kind: str, tasks: Sequence[tuple[Callable[..., _Result], tuple[Any, ...]]]) -> list[_Result]:
        if len(tasks) == 1:
            function, arguments = tasks[0]
            return [function(*arguments)]
        with self._lock:
            if kind not in self._pools:
                # Files wait for their chunks, so the two have threads of their own.
                cores = min(_MOST_THREADS, os.cpu_count() or 1)
                self._pools[kind] = ReaderThreads(_MOST_THREADS if kind == "files" else cores)
            futures = [self._pools[kind].submit(function, *arguments) for function, arguments in tasks]
            self._futures.update(futures)
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            with self._lock:
                self._futures.difference_update(futures)


class _LateProgress:
    """A bar of bytes on standard error, from `_PATIENCE_S` on and on a terminal only. Safe for several threads."""

    def __init__(self, title: str) -> None:
        self._title, self._begin = title, time.monotonic()
        self._lock = threading.Lock()
        self._expected = self._done = 0
        self._stack = contextlib.ExitStack()
        self._bar: Callable[[int, int], None] | None = None

    def expect(self, more: int) -> None:
        with self._lock:
            self._expected += more

    def advance(self, more: int) -> None:
        with self._lock:
            self._done += more
            if self._bar is None and time.monotonic() - self._begin > _PATIENCE_S and sys.stderr.isatty():
                self._bar = self._show()
            if self._bar is not None:
                self._bar(self._done, self._expected)

    def close(self) -> None:
        self._stack.close()

    def _show(self) -> Callable[[int, int], None]:
        from rich.console import Console
        from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

        columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
        progress = self._stack.enter_context(Progress(*columns, console=Console(stderr=True), transient=True))
        task = progress.add_task(self._title)
        return lambda done, expected: progress.update(task, completed=done, total=expected)
