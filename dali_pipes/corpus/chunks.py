"""Ids that have to be decoded: files of row groups or compressed shards, decoded a chunk at a time, the last ones kept.

    file       chunk 0, 1000 ids     chunk 1, 700 ids     chunk 2, 1000 ids
    a row      .................[ids 1650 to 1750 of the file]
                                from chunk 1              from chunk 2

A chunk is what its format can decode by itself. Rows of a shuffled epoch come from all over a corpus, so what is
decoded is kept up to a number of bytes, and one thread decodes a chunk while others that need it wait.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeAlias

import numpy.typing as npt

from dali_pipes.stats import CacheStats

Ids: TypeAlias = npt.NDArray[Any]

DEFAULT_CACHE_BYTES = 1 << 30


class ChunkCache:
    """The chunks used last, up to `most_bytes` (and always the very last one). Safe for several threads.

    all_bytes: what all chunks there are would take
    """

    def __init__(self, most_bytes: int = DEFAULT_CACHE_BYTES, all_bytes: int = 0) -> None:
        self._most_bytes, self._all_bytes = most_bytes, all_bytes
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[int, int], Future[Ids]] = OrderedDict()
        self._sizes: dict[tuple[int, int], int] = {}
        self._num_bytes = self._hits = self._misses = 0

    def get(self, file: int, chunk: int, decode: Callable[[int], Ids]) -> Ids:
        """The ids of a chunk of a file, from `decode(chunk)` if they are not kept. Blocks while they are decoded.

        Raises what `decode` raises, in every thread that waits for it; the next call tries again.
        """
        key = file, chunk
        with self._lock:
            known = self._kept.get(key)
            if known is None:
                self._misses += 1
                self._kept[key] = mine = Future[Ids]()
            else:
                self._hits += 1
                self._kept.move_to_end(key)
        if known is not None:
            return known.result()
        try:
            ids = decode(chunk)
        except BaseException as error:
            with self._lock:
                if self._kept.get(key) is mine:
                    del self._kept[key]
            mine.set_exception(error)
            raise
        mine.set_result(ids)
        with self._lock:
            if self._kept.get(key) is mine:  # else the cache was cleared meanwhile
                self._sizes[key] = ids.nbytes
                self._num_bytes += ids.nbytes
                self._evict(key)
        return ids

    def clear(self) -> None:
        """Keep nothing; chunks that others use or decode now stay theirs."""
        with self._lock:
            self._kept.clear()
            self._sizes.clear()
            self._num_bytes = 0

    def stats(self) -> CacheStats:
        """Does not block."""
        return CacheStats(self._hits, self._misses, self._num_bytes, self._most_bytes, self._all_bytes)

    def _evict(self, last: tuple[int, int]) -> None:
        for key in list(self._kept):
            if self._num_bytes <= self._most_bytes:
                return
            if key != last and key in self._sizes:  # not one that is being decoded
                del self._kept[key]
                self._num_bytes -= self._sizes.pop(key)
