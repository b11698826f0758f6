"""Reading ahead in a thread, for datasets that define a method `read_items(items)`.

Such a dataset does not use random numbers and is thread-safe, so it does not need worker processes. `EncodedFiles`,
which `graph=` decodes, is one.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

from dali_pipes.runtime.threads import ReaderThreads, Task
from dali_pipes.samples.fetch import Fetch, Request


class ReadAhead:
    """One thread that makes the batches of requests, in order, `depth` of them ahead."""

    def __init__(self, fetch: Fetch, depth: int) -> None:
        self._fetch, self._depth = fetch, depth
        self._threads: ReaderThreads | None = None

    def batches(self, requests: Iterator[Request]) -> Iterator[tuple[Request, Any]]:
        """Each request with its batch or `Failure`."""
        if self._threads is None or not self._threads.are_alive:  # as in a forked process
            self._threads = ReaderThreads(1)
        threads, sent = self._threads, deque[tuple[Request, Task[Any]]]()
        try:
            for request in requests:
                sent.append((request, threads.submit(self._fetch.__getitem__, request)))
                if len(sent) > self._depth:
                    yield sent[0][0], threads.result(sent.popleft()[1])
            while sent:
                yield sent[0][0], threads.result(sent.popleft()[1])
        finally:
            for _, future in sent:
                future.cancel()

    def close(self) -> None:
        """End the thread after what it does now."""
        if self._threads is not None:
            self._threads.stop()
            self._threads = None
