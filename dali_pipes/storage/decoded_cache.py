"""Cache of decoded ids: row groups or compressed shards are decoded a chunk at a time, and the last ones kept.

    file       chunk 0, 1000 ids     chunk 1, 700 ids     chunk 2, 1000 ids
    a row      .................[ids 1650 to 1750 of the file]
                                from chunk 1              from chunk 2

A chunk is the smallest part that its format can decode. Rows of a shuffled epoch come from all over a corpus, so
decoded chunks are kept up to a number of bytes, and one thread decodes a chunk while others that need it wait.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import numpy.typing as npt

from dali_pipes.monitoring.stats import CacheStats

Ids: TypeAlias = npt.NDArray[Any]

DEFAULT_CACHE_BYTES = 1 << 30
_LOOK_AGAIN_S = 0.5


class _Chunk:
    """Ids that one thread decodes and others may wait for."""

    def __init__(self) -> None:
        self.ids: Ids | None = None
        self.error: BaseException | None = None
        # Not a future or an event: an interrupt inside of those leaves them half set.
        self._done: SimpleQueue[None] = SimpleQueue()

    def wake(self) -> None:
        """Wake the threads that wait; calling it twice is harmless."""
        self._done.put(None)

    def wait(self) -> Ids:
        """The ids as soon as they are decoded. Raises the error of decoding."""
        while not self._is_done():
            try:
                # An interrupt between this line and `wake` takes away what wakes the others: they look again.
                with contextlib.suppress(Empty):
                    self._done.get(timeout=_LOOK_AGAIN_S)
            finally:
                if self._is_done():  # else only this thread was interrupted, or it waits for long
                    self.wake()
        if self.ids is None:
            assert self.error is not None
            raise self.error
        return self.ids

    def _is_done(self) -> bool:
        return self.ids is not None or self.error is not None


class ChunkCache:
    """The chunks used last, up to `most_bytes` (and always the last one). Thread-safe.

    all_bytes: size of all chunks of the corpus
    """

    def __init__(self, most_bytes: int = DEFAULT_CACHE_BYTES, all_bytes: int = 0) -> None:
        self._most_bytes, self._all_bytes = most_bytes, all_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int], _Chunk] = OrderedDict()
        self._sizes: dict[tuple[int, int], int] = {}
        self._num_bytes = self._hits = self._misses = 0

    def get(self, file: int, chunk: int, decode: Callable[[int], Ids]) -> Ids:
        """The ids of a chunk of a file, from `decode(chunk)` if they are not cached. Blocks while they are decoded.

        Raises what `decode` raises, in every thread that waits for it; the next call tries again.
        """
        key = file, chunk
        with self._lock:
            known = self._kept.get(key)
            if known is not None:
                self._hits += 1
                self._kept.move_to_end(key)
        if known is not None:
            return known.wait()
        mine = _Chunk()
        try:  # an interrupt at any line must not leave a chunk that never gets decoded
            with self._lock:
                known = self._kept.setdefault(key, mine)
                if known is mine:
                    self._misses += 1
                else:
                    self._hits += 1
            if known is not mine:
                return known.wait()
            ids = mine.ids = decode(chunk)
            mine.wake()
            with self._lock:
                if self._kept.get(key) is mine:  # else the cache was cleared meanwhile
                    self._sizes[key] = ids.nbytes
                    self._num_bytes += ids.nbytes
                    self._evict(key)
            return ids
        except BaseException as error:
            mine.error = error
            mine.wake()
            with self._lock:
                if self._kept.get(key) is mine:
                    del self._kept[key]
                self._sizes = {key: size for key, size in self._sizes.items() if key in self._kept}
                self._num_bytes = sum(self._sizes.values())
            raise

    def clear(self) -> None:
        """Drop all chunks; threads that use or decode one keep it."""
        with self._lock:
            self._kept.clear()
            self._sizes.clear()
            self._num_bytes = 0

    def stats(self) -> CacheStats:
        """Does not block."""
        return CacheStats(self._hits, self._misses, self._num_bytes, self._most_bytes, self._all_bytes)

    def _evict(self, last: tuple[int, int]) -> None:
        """Drop the least recently used chunks, looking only at these and at chunks that are being decoded."""
        going, left = [], self._num_bytes
        for key in self._kept:
            if left <= self._most_bytes:
                break
            if key != last and key in self._sizes:  # not one that is being decoded
                going.append(key)
                left -= self._sizes[key]
        for key in going:
            del self._kept[key]
            self._num_bytes -= self._sizes.pop(key)
