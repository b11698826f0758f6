"""Ids that are decoded chunk by chunk: the stream is the same as that of the plain ids, and what is kept is bounded."""

import itertools
import linecache
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.corpus.corpus import Corpus
from dali_pipes.corpus.data_file import DataFile
from dali_pipes.errors import CorpusReadError
from dali_pipes.storage import decoded_cache as chunks_module
from dali_pipes.storage.decoded_cache import ChunkCache

Ids = npt.NDArray[Any]


def decoded_file(
    path: Path, chunks: list[Ids], calls: list[int] | None = None, decode: Callable[[int], Ids] | None = None
) -> DataFile:
    def from_list(chunk: int) -> Ids:
        if calls is not None:
            calls.append(chunk)
        return chunks[chunk]

    extents = [[number, len(chunk)] for number, chunk in enumerate(chunks) if len(chunk)]
    return DataFile(
        path,
        "flat",
        0,
        np.dtype(np.uint16),
        0,
        np.array(extents, np.int64).reshape(-1, 2),
        b"",
        decode=decode or from_list,
    )


def plain_file(path: Path, ids: Ids) -> DataFile:
    ids.tofile(path)
    return DataFile(path, "flat", ids.nbytes, ids.dtype, 0, np.array([[0, len(ids)]], np.int64), b"")


@given(
    lengths=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=4),
    plain=st.lists(st.booleans(), min_size=4, max_size=4),
    places=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 30)), min_size=1, max_size=20),
    most_bytes=st.sampled_from([0, 10, 1 << 20]),
)
def test_pieces_are_those_of_the_plain_stream(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[int]],
    plain: list[bool],
    places: list[tuple[int, int]],
    most_bytes: int,
) -> None:
    folder, at = tmp_path_factory.mktemp("files"), 0
    files: list[DataFile] = []
    for number, counts in enumerate(lengths):
        ids = np.arange(at, at + sum(counts), dtype=np.uint16)
        at += len(ids)
        path = folder / str(number)
        chunks = np.split(ids, np.cumsum(counts)[:-1])
        is_plain = plain[number] and len(ids)
        files.append(plain_file(path, ids) if is_plain else decoded_file(path, chunks))
    with Corpus(files, cache_bytes=most_bytes) as corpus:
        assert corpus.num_tokens == at
        pieces = [(place % (at + 1), count) for place, count in places]
        starts = np.array([start for start, _ in pieces])
        counts = np.minimum([count for _, count in pieces], at - starts)
        targets = np.cumsum(counts) - counts
        out = np.full(int(counts.sum()), 60000, np.uint16)
        corpus.read_pieces(starts, counts, targets, out)
        expected = [np.arange(start, start + count) for start, count in zip(starts, counts, strict=True)]
        assert out.tolist() == np.concatenate(expected).tolist()
        for position in range(at):
            place = corpus.locate(position)
            file = [file.path for file in files].index(place.file)
            assert place.offset + sum(map(sum, lengths[:file])) == position


def test_a_chunk_is_decoded_once_for_all_rows_of_a_read(tmp_path: Path) -> None:
    calls: list[int] = []
    chunks = [np.arange(100, dtype=np.uint16), np.arange(100, 200, dtype=np.uint16)]
    with Corpus([decoded_file(tmp_path / "a", chunks, calls)], cache_bytes=0) as corpus:
        out = np.empty((40, 4), np.uint16)
        starts = np.random.default_rng(0).permutation(40) * 4
        corpus.read_rows(starts, out)
        assert (out == starts[:, None] + np.arange(4)).all()
        assert sorted(calls) == [0, 1]
        stats = corpus.cache_stats()
        assert stats is not None
        assert (stats.hits, stats.misses) == (0, 2)


def test_what_is_kept_is_bounded_and_the_least_recently_used_goes() -> None:
    cache, calls = ChunkCache(most_bytes=300), []

    def decode(chunk: int) -> Ids:
        calls.append(chunk)
        return np.zeros(50, np.uint16)  # 100 bytes

    for chunk in (0, 1, 2, 0, 3, 0, 1):
        cache.get(0, chunk, decode)
        assert cache.stats().num_bytes <= 300
    assert calls == [0, 1, 2, 3, 1]
    assert cache.stats().hit_rate == 2 / 7
    cache.clear()
    assert cache.stats().num_bytes == 0


def test_threads_that_need_a_chunk_wait_for_the_one_that_decodes_it() -> None:
    cache, calls, started, go_on = ChunkCache(), [], threading.Event(), threading.Event()

    def decode(chunk: int) -> Ids:
        calls.append(chunk)
        started.set()
        go_on.wait()
        return np.arange(5, dtype=np.uint16)

    results: list[Ids] = []
    threads = [threading.Thread(target=lambda: results.append(cache.get(0, 7, decode))) for _ in range(4)]
    for thread in threads:
        thread.start()
    started.wait()
    go_on.set()
    for thread in threads:
        thread.join()
    assert len(results) == 4
    assert calls == [7]


def test_an_error_reaches_whoever_asked_and_the_next_one_tries_again() -> None:
    cache, calls = ChunkCache(), []

    def decode(chunk: int) -> Ids:
        calls.append(chunk)
        if len(calls) == 1:
            raise CorpusReadError("gone")
        return np.arange(5, dtype=np.uint16)

    with pytest.raises(CorpusReadError, match="gone"):
        cache.get(0, 0, decode)
    assert cache.get(0, 0, decode).tolist() == [0, 1, 2, 3, 4]


class Interrupts:
    """Raises KeyboardInterrupt before one of the lines of a module that a function comes to, counted from 0."""

    def __init__(self, module: ModuleType, at: int) -> None:
        self._file, self._left = str(module.__file__), at
        self._last: dict[FrameType, int] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> "Interrupts | None":
        if frame.f_code.co_filename != self._file:
            return None
        last, self._last[frame] = self._last.get(frame, 0), frame.f_lineno
        line = linecache.getline(self._file, frame.f_lineno).lstrip()
        # At the end of a `with`, Python takes no signal before the lock is released.
        if event == "line" and not (line.startswith("with ") and last > frame.f_lineno):
            self._left -= 1
            if self._left < 0:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


def interrupted(function: Callable[[], object], at: int) -> bool:
    """Call a function and interrupt it before one of its lines; False if it has no more than `at` of them."""
    traced = sys.gettrace()
    try:
        sys.settrace(Interrupts(chunks_module, at))
        function()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(traced)
    return False


def in_thread(cache: ChunkCache, chunk: int, decode: Callable[[int], Ids], found: list[Ids]) -> threading.Thread:
    """One that asks for a chunk and puts it into `found`, and does not keep the tests alive if it waits for ever."""
    thread = threading.Thread(target=lambda: found.append(cache.get(0, chunk, decode)), daemon=True)
    thread.start()
    return thread


def test_an_interrupt_at_any_line_leaves_no_chunk_that_nobody_decodes() -> None:
    """Ctrl-C before each line that decodes a chunk, keeps it and drops others: it can be had, and sums are right."""

    def decode(chunk: int) -> Ids:
        return np.full(50, chunk, np.uint16)  # 100 bytes

    for at in itertools.count():
        cache, found = ChunkCache(most_bytes=250), list[Ids]()
        for chunk in range(2):
            cache.get(0, chunk, decode)
        was_interrupted = interrupted(partial(cache.get, 0, 2, decode), at)
        assert cache.stats().num_bytes == 100 * len(cache._kept), f"interrupted before line {at}"
        for chunk in (2, 3, 1, 2):
            in_thread(cache, chunk, decode, found).join()
        assert [int(ids[0]) for ids in found] == [2, 3, 1, 2], f"interrupted before line {at}"
        assert cache.stats().num_bytes == 200
        if not was_interrupted:
            break
    assert at > 15


def test_an_interrupt_of_one_that_waits_reaches_nobody_else() -> None:
    """Before any line that it comes to, and some that it does not."""
    started, go_on = threading.Event(), threading.Event()

    def decode(chunk: int) -> Ids:
        started.set()
        go_on.wait()
        return np.arange(5)

    for at in range(16):
        cache, found = ChunkCache(), list[Ids]()
        started.clear()
        go_on.clear()
        threads = [in_thread(cache, 7, decode, found) for _ in range(3)]
        started.wait()
        threads.append(threading.Timer(0.001, go_on.set))  # or this one would wait for ever where it does wait
        threads[-1].start()
        interrupted(partial(cache.get, 0, 7, decode), at)
        for thread in threads:
            thread.join()
        assert len(found) == 3, f"interrupted before line {at}"


class CountedSteps(OrderedDict[tuple[int, int], Any]):
    """Counts the keys that somebody has walked over."""

    steps = 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for key in super().__iter__():
            self.steps += 1
            yield key


@pytest.mark.parametrize("room", [3, 1000, 10**9])
def test_to_keep_one_more_looks_at_few_others(room: int) -> None:
    """However many are kept, with room for more of them or without."""
    ids = np.zeros(50, np.uint16)
    cache = ChunkCache(most_bytes=room * ids.nbytes)
    cache._kept = counted = CountedSteps()
    for chunk in range(3000):
        cache.get(0, chunk, lambda _: ids)
        assert counted.steps <= 2
        counted.steps = 0
    assert len(counted) == min(room, 3000)


@pytest.mark.parametrize("now", [np.zeros(3, np.uint16), np.zeros(4, np.int32)])
def test_a_chunk_that_is_not_what_it_was_at_opening(tmp_path: Path, now: Ids) -> None:
    file = decoded_file(tmp_path / "a", [np.zeros(4, np.uint16)], decode=lambda chunk: now)
    with (
        Corpus([file]) as corpus,
        pytest.raises(CorpusReadError, match=r"a: chunk 0 holds \d .*expected 4 "),
    ):
        corpus.tokens(0, 4)
