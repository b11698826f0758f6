"""Threads and a progress bar for columns that have to be read at opening to find the lengths of rows."""

import contextvars
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from typing import Any, Self, TypeVar

from dali_pipes.runtime.progress import ProgressBar
from dali_pipes.runtime.threads import ReaderThreads, Task

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

LARGE_TABLE_BYTES = 1 << 20
"""Tables of at least this size are read in parallel: with small ones, threads mostly wait for the interpreter lock."""
_MOST_THREADS = 8
_MOST_WAITING_THREADS = 32
_FEWEST_BYTES_EACH = 64 << 10  # handing less than that to another thread costs more than reading it


class ColumnScans:
    """Work on many chunks in parallel, of one file or of several. A context manager; leaving it ends the threads.

    title: of the progress bar
    """

    def __init__(self, title: str) -> None:
        self._progress = ProgressBar(title, in_bytes=True)
        self._lock = threading.Lock()
        self._pools: dict[str, ReaderThreads] = {}
        self._futures: set[Task[Any]] = set()
        self._ended = False

    def for_files(
        self, function: Callable[[_Item], _Result], files: Iterable[_Item], *, waits: bool = False
    ) -> list[_Result]:
        """What `function` returns for each file, in order. It may call `for_chunks`. Blocks.

        waits: it mostly waits for a network, so more threads run it
        """
        return self._run("objects" if waits else "files", [(function, (file,)) for file in files])

    def for_chunks(self, function: Callable[[int], _Result], sizes: Sequence[int]) -> list[_Result]:
        """What `function` returns for chunks 0, 1, ..., in order. Blocks.

        sizes: of each chunk in bytes, for the bar. Raises what `function` raises for the first chunk that fails.
        """
        self._progress.expect(sum(sizes))
        is_little = sum(sizes) < _FEWEST_BYTES_EACH * len(sizes)

        def one(chunk: int) -> _Result:
            result = function(chunk)
            self._progress.advance(sizes[chunk])
            return result

        if is_little:
            return [one(chunk) for chunk in range(len(sizes))]
        return self._run("chunks", [(one, (chunk,)) for chunk in range(len(sizes))])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._ended = True  # a file that is being opened in a thread may come to its chunks only now
            pools, futures = dict(self._pools), list(self._futures)
        for future in futures:
            future.cancel()
        for kind in ("objects", "files", "chunks"):  # the former may wait for the latter
            if kind in pools:
                pools[kind].stop()
        self._progress.close()

    def _run(self, kind: str, tasks: Sequence[tuple[Callable[..., _Result], tuple[Any, ...]]]) -> list[_Result]:
        if len(tasks) == 1:
            function, arguments = tasks[0]
            return [function(*arguments)]
        with self._lock:
            if self._ended:
                raise CancelledError("the scans were canceled: one of them failed or was interrupted")
            if kind not in self._pools:
                # Files wait for their chunks, so each kind has separate threads.
                counts = {"objects": _MOST_WAITING_THREADS, "files": _MOST_THREADS}
                self._pools[kind] = ReaderThreads(counts.get(kind, min(_MOST_THREADS, os.cpu_count() or 1)))
            # The threads read files with the retries that are in use here.
            futures = [
                self._pools[kind].submit(contextvars.copy_context().run, function, *arguments)
                for function, arguments in tasks
            ]
            self._futures.update(futures)
        try:
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            with self._lock:
                self._futures.difference_update(futures)
