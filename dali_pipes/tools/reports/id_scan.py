"""Look at the ids of a corpus, at all of them or in places, in parallel threads and in memory of a few chunks.

corpus    |----------|----------|----------|-----|        spans, each read and looked at by one of several threads
               ^ an id out of range    ^ cannot be read from here to the end of its span
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
    """What to look at: `length` ids from each of `firsts` (rising) on, fewer where the corpus ends before."""

    firsts: Sequence[int]
    length: int


class Fault(NamedTuple):
    """A place where something is wrong."""

    position: int
    value: int
    """The id; ids that were not looked at where there is a reason."""
    reason: str = ""
    """Why the id cannot be read."""


class Expected(NamedTuple):
    """`token_id` is what the ids at `positions` (P,), rising, should be."""

    positions: Int64Array
    token_id: int


@dataclass
class Faults:
    """The first `MOST_LISTED` by position, and how many there are."""

    first: list[Fault] = field(default_factory=list)
    count: int = 0

    def extend(self, more: Sequence[Fault], count: int) -> None:
        self.first.extend(more[: MOST_LISTED - len(self.first)])
        self.count += count


@dataclass
class IdScan:
    """What was seen. `smallest` and `largest` are None where nothing could be read."""

    looked_at: int = 0
    smallest: int | None = None
    largest: int | None = None
    largest_position: int | None = None
    out_of_range: Faults = field(default_factory=Faults)
    unexpected: Faults = field(default_factory=Faults)
    """Ids that are not what `Expected` says."""
    unreadable: Faults = field(default_factory=Faults)
    """One for a span: what follows in it was not looked at."""


def sample_spans(num_tokens: int) -> Spans:
    """Places spread evenly over a corpus, its first and last ids among them; all of a small one."""
    if num_tokens <= SAMPLE_PLACES * SAMPLE_IDS:
        return Spans(range(0, num_tokens, SAMPLE_IDS), SAMPLE_IDS)
    room = num_tokens - SAMPLE_IDS
    return Spans([place * room // (SAMPLE_PLACES - 1) for place in range(SAMPLE_PLACES)], SAMPLE_IDS)


def all_spans(corpus: Corpus) -> Spans:
    """The whole corpus, in chunks that stay in a core's cache."""
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
    """Read `spans` and find the smallest and largest id and what is wrong. Blocks.

    Wrong: an id below 0 or at or above `vocab_size`, one that is not as `expected`, and what cannot be read, which
    raises nothing here. `advance(ids)` is called in this thread as spans are done.
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
    # A span is asked for when the one that had its memory before is done.
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
    """What can be seen of a span that cannot be read whole: the ids before the first that cannot."""
    readable, failure = 0, None
    unknown = length  # ids from `readable` on among which is the first that cannot be read
    while unknown:
        half = -(-unknown // 2)
        try:
            corpus.tokens(first + readable, half)
            readable, unknown = readable + half, unknown - half
        except CorpusError as error:
            failure, unknown = error, half if half < unknown else 0
    scan = _seen(first, corpus.tokens(first, readable), vocab_size, expected)
    if failure is not None:  # else the file has come back meanwhile
        faults = scan.out_of_range if isinstance(failure, TokenRangeError) else scan.unreadable
        faults.extend([Fault(first + readable, length - readable, str(failure))], 1)
    return scan


def _add(scan: IdScan, part: IdScan) -> None:
    scan.looked_at += part.looked_at
    if part.largest is not None and part.smallest is not None:
        scan.smallest = part.smallest if scan.smallest is None else min(scan.smallest, part.smallest)
        if scan.largest is None or part.largest > scan.largest:
            scan.largest, scan.largest_position = part.largest, part.largest_position
    for name in ("out_of_range", "unexpected", "unreadable"):
        faults: Faults = getattr(part, name)
        getattr(scan, name).extend(faults.first, faults.count)
