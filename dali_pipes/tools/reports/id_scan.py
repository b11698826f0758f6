"""Scan the ids of a corpus, all of them or a sample, in parallel threads and with memory for a few chunks.

corpus    |----------|----------|----------|-----|        spans, each scanned by one of several threads
               ^ an id out of range    ^ cannot be read from here to the end of its span, chunk or file
"""

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus import Corpus
from dali_pipes.errors import CorpusError, TokenRangeError
from dali_pipes.runtime.threads import ReaderThreads
from dali_pipes.tools.reports.problem import MOST_LISTED

Int64Array = npt.NDArray[np.int64]

CHUNK_BYTES = 2 << 20
MOST_THREADS = 8
SAMPLE_PLACES = 64
SAMPLE_IDS = 16384


class Spans(NamedTuple):
    """What to scan: `length` ids from each of `firsts` (rising), fewer at the end of the corpus."""

    firsts: Sequence[int]
    length: int


class Fault(NamedTuple):
    """A place where something is wrong."""

    position: int
    value: int
    """The id; with a reason, the number of ids that were not scanned."""
    reason: str = ""
    """Why the ids cannot be read."""


class Expected(NamedTuple):
    """The ids at `positions` (P,), rising, should be `token_id`."""

    positions: Int64Array
    token_id: int


@dataclass
class Faults:
    """The first `MOST_LISTED` by position, and the total number."""

    first: list[Fault] = field(default_factory=list)
    count: int = 0

    def extend(self, more: Sequence[Fault], count: int) -> None:
        self.first.extend(more[: MOST_LISTED - len(self.first)])
        self.count += count


@dataclass
class IdScan:
    """The result of a scan. `smallest` and `largest` are None if nothing could be read."""

    looked_at: int = 0
    smallest: int | None = None
    largest: int | None = None
    largest_position: int | None = None
    out_of_range: Faults = field(default_factory=Faults)
    unexpected: Faults = field(default_factory=Faults)
    """Ids that differ from `Expected`."""
    unreadable: Faults = field(default_factory=Faults)
    """One per span and chunk, or file that is not in chunks: the rest of it was not scanned."""


def sample_spans(num_tokens: int) -> Spans:
    """Places spread evenly over a corpus, including its first and last ids; all of a small corpus."""
    if num_tokens <= SAMPLE_PLACES * SAMPLE_IDS:
        return Spans(range(0, num_tokens, SAMPLE_IDS), SAMPLE_IDS)
    room = num_tokens - SAMPLE_IDS
    return Spans([place * room // (SAMPLE_PLACES - 1) for place in range(SAMPLE_PLACES)], SAMPLE_IDS)


def all_spans(corpus: Corpus) -> Spans:
    """The whole corpus, in chunks that fit a core's cache."""
    length = CHUNK_BYTES // corpus.dtype.itemsize
    return Spans(range(0, corpus.num_tokens, length), length)


def scan_ids(
    corpus: Corpus,
    spans: Spans,
    *,
    vocab_size: int | None = None,
    expected: Expected | None = None,
    advance: Callable[[int], None] = lambda done: None,
) -> IdScan:
    """Read `spans` and find the smallest id, the largest id, and faults. Blocks.

    Faults are ids below 0 or at or above `vocab_size`, ids that differ from `expected`, and ids that cannot be read,
    which does not raise here. `advance(ids)` is called in this thread as spans are done.
    """
    firsts, length = spans
    threads = max(1, min(MOST_THREADS, os.cpu_count() or 1, len(firsts)))
    ring = [np.empty((1, min(length, corpus.num_tokens)), corpus.dtype) for _ in range(threads + 1)]
    scan = IdScan()

    def look(number: int) -> IdScan:
        first = firsts[number]
        ids = ring[number % len(ring)][:, : min(length, corpus.num_tokens - first)]
        try:
            corpus.read_rows([first], ids)
            return _seen(first, ids[0], vocab_size, expected)
        except CorpusError:
            return _seen_in_part(corpus, first, ids.size, vocab_size, expected)

    readers = ReaderThreads(threads)
    # A span is submitted once the previous user of its memory is done.
    coming = deque(readers.submit(look, number) for number in range(min(len(ring), len(firsts))))
    try:
        for number, first in enumerate(firsts):
            _add(scan, coming.popleft().result())
            if number + len(ring) < len(firsts):
                coming.append(readers.submit(look, number + len(ring)))
            advance(min(length, corpus.num_tokens - first))
    finally:
        for future in coming:
            future.cancel()
        readers.stop()
    return scan


def _seen(first: int, ids: npt.NDArray[Any], vocab_size: int | None, expected: Expected | None) -> IdScan:
    if not len(ids):
        return IdScan()
    at = int(ids.argmax())
    largest = int(ids[at])
    smallest = int(ids.min())
    scan = IdScan(len(ids), smallest, largest, first + at)
    if smallest < 0 or (vocab_size is not None and largest >= vocab_size):
        is_bad = ids < 0
        if vocab_size is not None and largest >= vocab_size:
            is_bad |= ids >= vocab_size
        scan.out_of_range.extend(*_faults(first, ids, np.flatnonzero(is_bad)))
    if expected is not None:
        begin, end = np.searchsorted(expected.positions, [first, first + len(ids)])
        places = expected.positions[begin:end] - first
        scan.unexpected.extend(*_faults(first, ids, places[ids[places] != expected.token_id]))
    return scan


def _faults(first: int, ids: npt.NDArray[Any], places: npt.NDArray[np.intp]) -> tuple[list[Fault], int]:
    return [Fault(first + int(place), int(ids[place])) for place in places[:MOST_LISTED]], len(places)


def _seen_in_part(corpus: Corpus, first: int, length: int, vocab_size: int | None, expected: Expected | None) -> IdScan:
    """Scan what can be read of a span that cannot be read completely."""
    scan, end = IdScan(), first + length
    while first < end:
        readable, failure = _readable(corpus, first, end - first)
        _add(scan, _seen(first, corpus.tokens(first, readable), vocab_size, expected))
        if failure is None:  # the file has become readable again
            break
        at = first + readable
        first = min(end, _next_part(corpus, at))
        faults = scan.out_of_range if isinstance(failure, TokenRangeError) else scan.unreadable
        faults.extend([Fault(at, first - at, str(failure))], 1)
    return scan


def _readable(corpus: Corpus, first: int, length: int) -> tuple[int, CorpusError | None]:
    """How many ids can be read from `first` on, and why no more."""
    readable, failure = 0, None
    unknown = length  # the first unreadable id is among this many after `readable`
    while unknown:
        half = -(-unknown // 2)
        try:
            corpus.tokens(first + readable, half)
            readable, unknown = readable + half, unknown - half
        except CorpusError as error:
            failure, unknown = error, half if half < unknown else 0
    return readable, failure


def _next_part(corpus: Corpus, position: int) -> int:
    """Where the next chunk begins, which may be sound; of ids that are stored as they are, the next file."""
    starts, numbers = corpus.extents
    extent = int(np.searchsorted(starts, position, side="right"))
    if not corpus.needs_decoding:
        extent = int(np.searchsorted(numbers, numbers[extent - 1], side="right"))
    return int(starts[extent])


def _add(scan: IdScan, part: IdScan) -> None:
    scan.looked_at += part.looked_at
    if part.largest is not None and part.smallest is not None:
        scan.smallest = part.smallest if scan.smallest is None else min(scan.smallest, part.smallest)
        if scan.largest is None or part.largest > scan.largest:
            scan.largest, scan.largest_position = part.largest, part.largest_position
    for name in ("out_of_range", "unexpected", "unreadable"):
        faults: Faults = getattr(part, name)
        getattr(scan, name).extend(faults.first, faults.count)
