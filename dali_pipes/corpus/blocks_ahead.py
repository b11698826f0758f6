"""Blocks that a run needs soon are put into the cache of the node by separate threads, a few at a time.

    window 3, where the run stands     window 4
    7 2 9 0                            5 1 8 3         blocks that are wanted, in this order
          9                              ...           those that are not there yet: one after the other

Processes of a node want the same blocks in the same order: each skips those that another one is fetching. Where there
is no room, or a read fails, all of it stops until the run has moved on: the reads that need a block raise the error.
"""

import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from dali_pipes.runtime.threads import ReaderThreads
from dali_pipes.storage.node_cache import FETCHES_AHEAD, Ahead


class BlocksAhead:
    """The blocks of one corpus that are fetched ahead. Safe for several threads; no method waits for a fetch.

    make: puts one block into the cache, as `NodeCache.make_ahead`
    """

    def __init__(self, make: Callable[[int], Ahead]) -> None:
        self._make = make
        self._lock = threading.Lock()  # of the rest
        self._queue: deque[int] = deque()
        self._on_the_way: set[int] = set()
        self._owner: Callable[[], object] = lambda: None
        self._threads: ReaderThreads | None = None
        self._running, self._closed = 0, False

    def want(self, blocks: Sequence[int], owner: object) -> None:
        """Fetch these from now on, in this order, instead of what is left of those before, while `owner` exists.

        A fetch holds all that it reads with, and another one is always under way: who drops a loader would not stop it.
        """
        with self._lock:
            if self._closed:
                return
            self._queue, self._on_the_way, self._owner = deque(blocks), set(blocks), weakref.ref(owner)
            if self._threads is None or not self._threads.are_alive:
                try:
                    self._threads, self._running = ReaderThreads(FETCHES_AHEAD), 0
                except (RuntimeError, MemoryError):  # a limit on threads ends no run: batches fetch what they need
                    self._queue.clear()
                    self._on_the_way.clear()
                    return
            while self._running < min(FETCHES_AHEAD, len(blocks)):
                self._threads.submit(self._fetch_all)
                self._running += 1

    def is_on_the_way(self, block: int) -> bool:
        """Whether a block that was wanted has not come yet, but may, here or in another process."""
        return block in self._on_the_way

    def close(self) -> None:
        """Fetch nothing more. Waits for the fetches under way. Idempotent."""
        with self._lock:
            self._closed = True
            self._queue.clear()
            threads = self._threads
        if threads is not None:
            threads.stop()

    def _fetch_all(self) -> None:
        while self._fetch_next():
            pass

    def _fetch_next(self) -> bool:
        """Fetch one block; False if there is none left that anyone wants."""
        with self._lock:
            queue, on_the_way = self._queue, self._on_the_way
            if not queue or self._owner() is None or self._threads is None or not self._threads.are_alive:
                self._running -= 1
                return False
            block = queue.popleft()
        try:
            found = self._make(block)
        except Exception:  # whoever needs the block reads it, too, and raises at the right batch
            found = Ahead.NO_ROOM
        with self._lock:
            if found is Ahead.NO_ROOM:
                queue.clear()
                on_the_way.clear()
            elif found is Ahead.THERE:
                on_the_way.discard(block)
        return True
