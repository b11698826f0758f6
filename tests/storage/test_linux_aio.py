"""Reads in one system call give the bytes and the errors that reads one by one give."""

import ctypes
import errno
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes.corpus import Corpus, open_corpus
from dali_pipes.errors import CorpusReadError
from dali_pipes.storage.linux_aio import MOST_READS, BatchReader, BatchReaders


@pytest.fixture(params=["batch", "one by one"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs both ways: with the kernel's batches and as on a machine that has none."""
    monkeypatch.setattr("dali_pipes.storage.batched_reads.READERS", BatchReaders())
    if request.param == "one by one":
        monkeypatch.setattr(BatchReader, "create", classmethod(lambda cls: None))
    else:
        reader = BatchReader.create()
        if reader is None:
            pytest.skip("this kernel offers no native AIO")
        reader.close()
    return str(request.param)


@settings(max_examples=examples(18), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_equals_the_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 80), min_size=1, max_size=9).filter(lambda s: sum(s) > 12))
    dtype = data.draw(st.sampled_from(["uint8", "uint16", "uint32", "int64"]))
    folder = tmp_path_factory.mktemp("data")
    tokens = np.arange(sum(sizes)) % 251
    for number, part in enumerate(np.split(tokens, np.cumsum(sizes)[:-1])):
        part.astype(dtype).tofile(folder / f"s_{number}.bin")
    length = data.draw(st.integers(1, 12))
    starts = np.array(data.draw(st.lists(st.integers(0, len(tokens) - length), min_size=1, max_size=700)))
    out = np.zeros((len(starts), length), dtype)
    with open_corpus(folder, dtype=dtype) as corpus:
        corpus.read_rows(starts, out)
    assert np.array_equal(out, tokens[starts[:, None] + np.arange(length)])


def spread(corpus: Corpus, rows: int, length: int) -> tuple[Any, Any]:
    starts = np.linspace(0, corpus.num_tokens - length, rows).astype(np.int64)
    return starts, np.zeros((rows, length), corpus.dtype)


def read_three_times(folder: Path) -> None:
    with open_corpus(folder) as corpus:
        for _ in range(3):
            starts, out = spread(corpus, 40, 7)
            corpus.read_rows(starts, out)
            assert np.array_equal(out, starts[:, None] + np.arange(7))


def test_more_rows_than_one_call_takes(tmp_path: Path) -> None:
    np.arange(60_000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with open_corpus(tmp_path) as corpus:
        starts, out = spread(corpus, 3 * MOST_READS + 5, 7)
        corpus.read_rows(starts, out)
    assert np.array_equal(out, starts[:, None] + np.arange(7))


def test_a_truncated_file_is_one_error_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    np.arange(60_000, dtype=np.uint16).tofile(path)
    with open_corpus(tmp_path) as corpus:
        starts, out = spread(corpus, 40, 7)
        corpus.read_rows(starts, out)
        os.truncate(path, 50_001)
        with pytest.raises(CorpusReadError, match=r"a\.bin: ends early: .*14 bytes at byte [\d,]+, got \d+"):
            corpus.read_rows(starts, out)


def test_many_threads_at_once(tmp_path: Path) -> None:
    tokens = np.arange(60_000, dtype=np.uint16)
    tokens.tofile(tmp_path / "a.bin")
    with open_corpus(tmp_path) as corpus, ThreadPoolExecutor(8) as threads:

        def read(seed: int) -> bool:
            starts = np.random.default_rng(seed).integers(0, 59_000, 300)
            out = np.zeros((300, 31), np.uint16)
            corpus.read_rows(starts, out)
            return np.array_equal(out, starts[:, None] + np.arange(31))

        assert all(threads.map(read, range(200)))


def test_a_forked_child_reads_too(tmp_path: Path, run_script: Callable[..., Any]) -> None:
    np.arange(60_000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    done = run_script(
        """
        import os, sys, numpy as np
        from dali_pipes import open_corpus
        corpus = open_corpus(sys.argv[1])
        starts, out = np.arange(0, 5000, 10), np.zeros((500, 5), np.uint16)
        corpus.read_rows(starts, out)
        child = os.fork()
        out[:] = 0
        corpus.read_rows(starts, out)
        right = (out == starts[:, None] + np.arange(5)).all()
        if child == 0:
            os._exit(0 if right else 1)
        assert right
        assert os.waitpid(child, 0)[1] == 0
        corpus.read_rows(starts, out)
        """,
        tmp_path / "a.bin",
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_later_corpora_use_the_same_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """To make one, and above all to destroy one, takes longer than to open a corpus."""
    np.arange(60_000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    calls = []
    system_call = BatchReader._system_call

    def counted(self: BatchReader, number: int, *arguments: Any, **how: Any) -> int:
        calls.append({self._setup: "setup", self._destroy: "destroy"}.get(number, "read"))
        return system_call(self, number, *arguments, **how)

    monkeypatch.setattr(BatchReader, "_system_call", counted)
    for _ in range(3):
        with open_corpus(tmp_path) as corpus:
            starts, out = spread(corpus, 40, 7)
            corpus.read_rows(starts, out)
    assert (calls.count("setup"), calls.count("destroy")) == ((1, 0) if way == "batch" else (0, 0))


def test_only_some_idle_readers_are_kept(way: str) -> None:
    readers = BatchReaders()
    lent = [reader for reader in (readers.borrow() for _ in range(BatchReaders.MOST_IDLE + 3)) if reader is not None]
    for reader in lent:
        readers.give_back(reader)
    kept = [readers.borrow() for _ in range(BatchReaders.MOST_IDLE)]
    assert all(reader in lent for reader in kept) if way == "batch" else not lent


def test_a_kernel_that_refuses_later_is_asked_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    np.arange(60_000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    calls = []

    def refuse(self: BatchReader, *arguments: Any, waits: bool = True) -> Any:
        calls.append(threading.get_ident())
        raise OSError(errno.EINVAL, "refused")

    monkeypatch.setattr(BatchReader, "read", refuse)
    read_three_times(tmp_path)
    assert len(calls) == (2 if way == "batch" else 0), "with and without waiting"


@settings(max_examples=examples(18), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_disk_is_asked_for_all_that_is_not_in_memory_first(
    tmp_path_factory: pytest.TempPathFactory, way: str, data: st.DataObject
) -> None:
    """Pieces that a read without waiting did not give, or gave in part, at any places of a batch."""
    if way == "one by one":
        return
    path = tmp_path_factory.mktemp("data") / "a.bin"
    np.arange(60_000, dtype=np.uint16).tofile(path)
    read, events = BatchReader.read, []

    def partly(self: BatchReader, *where: Any, waits: bool = True) -> Any:
        _, addresses, size, offsets = where
        sizes = np.broadcast_to(size, len(offsets))
        results = read(self, *where).copy()
        if waits:
            events.append(("waits", sorted(offsets.tolist())))
            return results
        for place in data.draw(st.sets(st.integers(0, len(offsets) - 1))):
            results[place] = data.draw(st.sampled_from([-errno.EAGAIN, 0, sizes[place] - 1]))
            np.frombuffer(memoryview_at(addresses[place], sizes[place]), np.uint8)[-1] ^= 255
        cold = offsets[results != sizes]
        events.append(("does not wait", sorted(cold.tolist())))
        return results

    def advised(descriptor: int, offset: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        events.append(("advice", [offset]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchReader, "read", partly)
        patch.setattr(os, "posix_fadvise", advised)
        with open_corpus(path) as corpus:
            starts, out = spread(corpus, data.draw(st.integers(8, 300)), 7)
            corpus.read_rows(starts, out)
            assert np.array_equal(out, starts[:, None] + np.arange(7))
    while events:
        kind, cold = events.pop(0)
        assert kind == "does not wait"
        assert sorted(offset for kind, (offset,) in (events.pop(0) for _ in cold) if kind == "advice") == cold
        if cold:
            assert events.pop(0) == ("waits", cold)


def memoryview_at(address: int, size: int) -> Any:
    return (ctypes.c_char * int(size)).from_address(int(address))


def test_a_file_system_that_cannot_read_without_waiting_is_asked_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    np.arange(60_000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    read, calls = BatchReader.read, []

    def refuse(self: BatchReader, *arguments: Any, waits: bool = True) -> Any:
        calls.append(waits)
        if not waits:
            raise OSError(errno.EOPNOTSUPP, "refused")
        return read(self, *arguments)

    monkeypatch.setattr(BatchReader, "read", refuse)
    read_three_times(tmp_path)
    assert calls == ([False, True, True, True] if way == "batch" else [])


def test_files_that_are_not_in_memory(tmp_path: Path) -> None:
    """Written, dropped from the page cache, read: as far as the file system drops anything."""
    path = tmp_path / "a.bin"
    np.arange(600_000, dtype=np.uint32).tofile(path)
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    with open_corpus(path, dtype="uint32") as corpus:
        for rows in (8, 256, 700):
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            starts, out = spread(corpus, rows, 1025)
            corpus.read_rows(starts, out)
            assert np.array_equal(out, starts[:, None] + np.arange(1025))
    os.close(descriptor)


def test_readers_are_lent_to_one_thread_each(way: str) -> None:
    readers = BatchReaders()
    one, other = readers.borrow(), readers.borrow()
    if way == "one by one":
        assert one is other is None
        return
    assert one is not None
    assert other is not None
    assert one is not other
    readers.give_back(one)
    assert readers.borrow() is one
    readers.give_back(one)
    readers.forget()
    assert readers.borrow() is not one
