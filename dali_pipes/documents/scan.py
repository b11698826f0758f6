"""One pass over a corpus for the places of one id, at about the speed of reading it.

tokens    7 8 E 9 | E E 5            chunks, each read and compared by one of several threads
places        2     4 5              end id: a document ends after each, at 3, 5 and 6
offsets   0   3     5 6   7
"""

import os
from collections import deque
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus import Corpus
from dali_pipes.runtime.progress import progress_bar
from dali_pipes.runtime.threads import ReaderThreads

Int64Array = npt.NDArray[np.int64]

CHUNK_BYTES = 2 << 20
"""What a thread reads and compares at a time: small enough to be still in the cache when it is compared."""
MOST_THREADS = 8

_FIRST_CAPACITY = 1 << 16  # offsets


class Delimiter(NamedTuple):
    """The id that separates documents: it is the last of its document ("end") or the first ("start")."""

    kind: Literal["end", "start"]
    token_id: int


def scan_offsets(corpus: Corpus, delimiter: Delimiter) -> Int64Array:
    """Offsets of the documents, int64 (D + 1,), read-only, rising. Reads the whole corpus; blocks.

    The id is one that `corpus.dtype` can hold. Memory: the offsets, and one chunk and its places for each thread and
    one more. Raises what `Corpus.read_rows` raises.
    """
    chunk = max(1, min(corpus.num_tokens, CHUNK_BYTES // corpus.dtype.itemsize))
    firsts = range(0, corpus.num_tokens, chunk)
    threads = min(MOST_THREADS, os.cpu_count() or 1, len(firsts))
    ring = [(np.empty((1, chunk), corpus.dtype), np.empty(chunk, np.bool_)) for _ in range(threads + 1)]
    wanted = corpus.dtype.type(delimiter.token_id)  # compared in the file's width: an int64 would widen every chunk
    after = 1 if delimiter.kind == "end" else 0

    def cuts(number: int) -> Int64Array:
        tokens, is_wanted = ring[number % len(ring)]
        first = firsts[number]
        part = tokens[:, : min(chunk, corpus.num_tokens - first)]
        corpus.read_rows([first], part)
        np.equal(part[0], wanted, out=is_wanted[: part.size])
        found: Int64Array = np.flatnonzero(is_wanted[: part.size])
        found += first + after
        return found

    offsets = _Growing()
    readers = ReaderThreads(threads)
    # A chunk is requested when the one that had its memory before is done.
    coming = deque(readers.submit(cuts, number) for number in range(min(len(ring), len(firsts))))
    try:
        with progress_bar("finding documents", corpus.num_tokens * corpus.dtype.itemsize, in_bytes=True) as advance:
            for number in range(len(firsts)):
                offsets.extend(coming.popleft().result())
                if number + len(ring) < len(firsts):
                    coming.append(readers.submit(cuts, number + len(ring)))
                advance(chunk * corpus.dtype.itemsize)
    finally:
        for future in coming:
            future.cancel()
        readers.stop()
    return offsets.finish(corpus.num_tokens)


class _Growing:
    """Rising offsets from 0 on, in one array that grows in place: joining parts would need twice the memory."""

    def __init__(self) -> None:
        self._array: Int64Array = np.zeros(_FIRST_CAPACITY, np.int64)
        self._count = 1

    def extend(self, more: Int64Array) -> None:
        if len(more) and more[0] == 0:  # a start id that is the corpus's first token
            more = more[1:]
        count = self._count + len(more)
        if count > len(self._array):
            self._array.resize(max(count, 2 * len(self._array)), refcheck=False)
        self._array[self._count : count] = more
        self._count = count

    def finish(self, end: int) -> Int64Array:
        """All offsets, with `end` as the last; nothing can be added any more."""
        if self._array[self._count - 1] != end:
            self.extend(np.array([end]))
        self._array.resize(self._count, refcheck=False)
        self._array.flags.writeable = False
        return self._array
