"""Reads of ids through the cache of the node, block by block: see `block_grid`.

pieces            block 7 ×2      block 3           block 9 ×1
in the cache      copied                            copied
on the way                        only the pieces are read, as without a cache, while there are bytes to spare
not there                         fetched, by this process or by the one that is already fetching it
no room                           only the pieces are read, as without a cache

Blocks are on the way from a little before they are needed (`BlocksAhead`). Those that are read in pieces all the same,
at a start with an empty cache above all, are transferred twice in part: at most `_SPARE_PART` of the corpus.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.block_grid import BlockGrid, Int64Array
from dali_pipes.corpus.blocks_ahead import BlocksAhead
from dali_pipes.monitoring.stats import CacheStats
from dali_pipes.runtime.threads import ReaderThreads, Task
from dali_pipes.storage.cache_entries import Content, entry_of
from dali_pipes.storage.eviction import Entry
from dali_pipes.storage.linux_aio import runs_of_equal
from dali_pipes.storage.node_cache import Ahead, NodeCache

Read: TypeAlias = Callable[[Int64Array, Int64Array, Int64Array, npt.NDArray[Any]], None]

_FETCHES = 8
"""Blocks that are fetched at the same time; a block of 8 MiB keeps a line busy for long."""
_SPARE_PART = 100
"""Processes of a node together read this part of the corpus in pieces of blocks that are on the way."""


class _Pieces(NamedTuple):
    """Runs of ids: where in the corpus, how many, and where in the output they go; and the block of each."""

    positions: Int64Array
    lengths: Int64Array
    targets: Int64Array
    blocks: Int64Array

    def at(self, which: Any) -> "_Pieces":
        return _Pieces(*(column[which] for column in self))


class BlockReads:
    """Reads of one corpus. Safe for several threads.

    key:     of the content of the corpus
    read:    reads pieces without the cache, as `Corpus.read_pieces`
    sharers: processes of the node that read this corpus
    """

    def __init__(
        self, cache: NodeCache, grid: BlockGrid, key: str, dtype: np.dtype[Any], read: Read, sharers: int
    ) -> None:
        self._cache, self._grid, self._key, self._dtype, self._read = cache, grid, key, dtype, read
        self._lock = threading.Lock()  # of the next one, and of the bytes to spare
        self._threads: ReaderThreads | None = None
        self._all_bytes = (grid.end - grid.first) * dtype.itemsize
        self._spare_bytes = self._all_bytes // _SPARE_PART // sharers
        self._ahead = BlocksAhead(self._make_ahead)

    def read(self, positions: Int64Array, lengths: Int64Array, targets: Int64Array, out: npt.NDArray[Any]) -> None:
        """As `Corpus.read_pieces`. Only this thread writes to `out`."""
        pieces, uncached = self._cut(positions, lengths, targets)
        view, size = out.data.cast("B"), self._dtype.itemsize
        missing: list[tuple[Entry, _Pieces]] = []
        for here in _by_block(pieces):
            entry = self._entry(block := int(here.blocks[0]))
            found = self._cache.find(entry)
            if found is None and self._ahead.is_on_the_way(block) and self._spare(int(here.lengths.sum()) * size):
                uncached.append(here)
            elif found is None:
                missing.append((entry, here))
            elif not _copied(found, entry, here, view, size):
                uncached.append(here)
        if missing:
            uncached += self._fetched(missing, view)
        if uncached:
            columns = _Pieces(*(np.concatenate(column) for column in zip(*uncached, strict=True)))
            self._cache.add(self._key, fetched_bytes=int(columns.lengths.sum()) * size)
            self._read(*columns[:3], out)

    def fetch_ahead(self, blocks: Sequence[int], owner: object) -> None:
        """Put blocks into the cache from now on, as far as there is room, while `owner` exists. Does not block."""
        self._ahead.want(blocks, owner)

    def stats(self) -> CacheStats:
        """Does not block for long."""
        return self._cache.stats(self._key, self._all_bytes)

    def close(self) -> None:
        """End the threads; the cache belongs to the loader. Idempotent."""
        self._ahead.close()
        if self._threads is not None:
            self._threads.stop()

    def _cut(self, positions: Int64Array, lengths: Int64Array, targets: Int64Array) -> tuple[_Pieces, list[_Pieces]]:
        """The pieces in blocks, block by block; and those outside of all blocks."""
        inside, outside = [], []
        left = _Pieces(positions, lengths, targets, self._grid.blocks_of(positions)).at(lengths > 0)
        while len(left.blocks):
            is_inside = (left.blocks >= 0) & (left.blocks < self._grid.count) & (left.positions < self._grid.end)
            if not is_inside.all():
                outside.append(left.at(~is_inside))
                left = left.at(is_inside)
            _, ends = self._grid.spans(left.blocks)
            sizes = np.minimum(left.lengths, ends - left.positions)
            inside.append(left._replace(lengths=sizes))
            longer = left.lengths > sizes
            left, sizes = left.at(longer), sizes[longer]
            positions = left.positions + sizes
            # After a lookahead the next block goes on in its middle.
            left = _Pieces(positions, left.lengths - sizes, left.targets + sizes, self._grid.blocks_of(positions))
        if not inside:
            empty = np.zeros(0, np.int64)
            return _Pieces(empty, empty, empty, empty), outside
        pieces = _Pieces(*(np.concatenate(column) for column in zip(*inside, strict=True)))
        return pieces.at(np.argsort(pieces.blocks, kind="stable")), outside

    def _entry(self, block: int) -> Entry:
        begins, ends = self._grid.spans(np.array([block]))
        begin, end = int(begins[0]), int(ends[0])
        return entry_of("b", self._key, begin, end, (end - begin) * self._dtype.itemsize)

    def _fetched(self, missing: list[tuple[Entry, _Pieces]], view: memoryview) -> list[_Pieces]:
        """Copy pieces of blocks that other threads fetch, a few ahead. Returns those that there was no room for."""
        with self._lock:
            if self._threads is None or not self._threads.are_alive:
                self._threads = ReaderThreads(_FETCHES)
            threads = self._threads
        left: list[_Pieces] = []
        waiting: deque[Task[Any]] = deque()
        try:
            for entry, _ in missing[:_FETCHES]:
                waiting.append(threads.submit(self._fetch, entry))
            for at, (entry, here) in enumerate(missing):
                found = threads.result(waiting.popleft())
                if at + _FETCHES < len(missing):
                    waiting.append(threads.submit(self._fetch, missing[at + _FETCHES][0]))
                if found is None or not _copied(found, entry, here, view, self._dtype.itemsize):
                    left.append(here)
        finally:
            for future in waiting:
                if not future.cancel():
                    future.add_done_callback(_let_go)
        return left

    def _fetch(self, entry: Entry) -> Content | None:
        return self._cache.find_or_make(entry, partial(self._bytes_of, entry))

    def _make_ahead(self, block: int) -> Ahead:
        entry = self._entry(block)
        if entry.begin == entry.end:  # of empty documents: nobody asks for it
            return Ahead.THERE
        return self._cache.make_ahead(entry, partial(self._bytes_of, entry))

    def _bytes_of(self, entry: Entry) -> memoryview:
        ids = np.empty(entry.end - entry.begin, self._dtype)
        self._read(np.array([entry.begin]), np.array([len(ids)]), np.zeros(1, np.int64), ids)
        return ids.data.cast("B")

    def _spare(self, num_bytes: int) -> bool:
        """Whether this many bytes, which will be read again, may be read now; if so, they count as used."""
        with self._lock:
            is_left = num_bytes <= self._spare_bytes
            self._spare_bytes -= num_bytes * is_left
        return is_left


def _by_block(pieces: _Pieces) -> Iterator[_Pieces]:
    if len(pieces.blocks):
        for first, count in zip(*(column.tolist() for column in runs_of_equal(pieces.blocks)), strict=True):
            yield pieces.at(slice(first, first + count))


def _copied(found: Content, entry: Entry, pieces: _Pieces, view: memoryview, size: int) -> bool:
    """Whether pieces of an entry could be copied to their places in `view`. Closes it."""
    columns = zip(pieces.positions.tolist(), pieces.lengths.tolist(), pieces.targets.tolist(), strict=True)
    with found:
        return all(
            found.read((position - entry.begin) * size, view[target * size : (target + length) * size])
            for position, length, target in columns
        )


def _let_go(future: "Task[Any]") -> None:
    if future.exception() is None and (found := future.result()) is not None:
        found.close()
