"""Reads that fail for a reason that may pass: tried again, counted one by one, raised once; all others at once."""

import atexit
import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from held import open_files
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples
from table_files import list_array, table_of, write_parquet

from dali_pipes.corpus import open_corpus
from dali_pipes.errors import CorpusReadError
from dali_pipes.storage import retries as read_retries
from dali_pipes.storage.linux_aio import BatchReader
from dali_pipes.storage.retries import ReadRetries, StoreError

PASSING = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.ENETDOWN, errno.ECONNRESET, errno.ENOTCONN]
LASTING = [errno.EBADF, errno.EACCES, errno.ENOENT, errno.EISDIR, errno.EPERM, errno.ENXIO]
OF_EVERY_FAMILY = [
    "nanogpt/train.bin",
    "llmc/gpt2_val_000000.bin",
    "npy/gpt2_u16.npy",
    "megatron/gpt2_text_document",
    "parquet/tokens_list_i32.parquet",
    "arrow/tokens_file.arrow",
    "hf/tokens",
    "mds/tokens_u16",
    "mds/concat_bytes_i64",
    "litdata/gpt2_numpy_u16",
    "datatrove/gpt2",
]


@pytest.fixture(params=["batch", "one by one"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "one by one":
        monkeypatch.setattr(BatchReader, "create", classmethod(lambda cls: None))
    elif (reader := BatchReader.create()) is None:
        pytest.skip("this kernel offers no native AIO")
    else:
        reader.close()
    return str(request.param)


class Storage:
    """Makes reads fail: each, by its place in a file, as many times in a row as `plan` says when it is first seen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, plan: Callable[[], int], number: Callable[[], int]) -> None:
        self.failures = self.reopened = 0
        self._left: dict[Any, int] = {}
        self._plan, self._number, self._lock = plan, number, threading.Lock()
        preadv, read, dup2 = os.preadv, BatchReader.read, os.dup2

        def failing_preadv(descriptor: int, buffers: Any, offset: int, *flags: Any) -> int:
            error = self._draw(descriptor, offset)
            if error:
                raise OSError(error, os.strerror(error))
            return preadv(descriptor, buffers, offset, *flags)

        def failing_read(
            reader: BatchReader, descriptors: Any, addresses: Any, count_bytes: Any, offsets: Any, **how: Any
        ) -> Any:
            if how:  # only a read that waits for a disk can fail
                raise OSError(errno.EOPNOTSUPP, "this file system cannot read without waiting")
            results = read(reader, descriptors, addresses, count_bytes, offsets).copy()
            files = np.broadcast_to(descriptors, len(offsets))
            for at, (descriptor, offset) in enumerate(zip(files.tolist(), offsets.tolist(), strict=True)):
                results[at] = -self._draw(descriptor, offset) or results[at]
            return results

        def counted_dup2(*arguments: Any, **options: Any) -> int:
            self.reopened += 1
            return dup2(*arguments, **options)

        monkeypatch.setattr(os, "preadv", failing_preadv)
        monkeypatch.setattr(BatchReader, "read", failing_read)
        monkeypatch.setattr(os, "dup2", counted_dup2)
        monkeypatch.setattr(read_retries, "_FIRST_WAIT_S", 0.0)

    def _draw(self, descriptor: int, offset: int) -> int:
        """An error number, or 0."""
        with self._lock:
            key = descriptor, offset
            left = self._left[key] if key in self._left else self._plan()
            self._left[key] = left - 1
            if left <= 0:
                return 0
            self.failures += 1
            return self._number()


def everything(path: Path, **options: Any) -> tuple[list[int], list[int] | None, int]:
    """Ids, offsets of documents, and how many reads were tried again."""
    with open_corpus(path, **options) as corpus:
        starts = np.arange(0, corpus.num_tokens - 100, 97)
        rows = np.empty((len(starts), 100), corpus.dtype)
        corpus.read_rows(starts, rows)
        offsets = corpus.document_offsets
        return rows.ravel().tolist(), None if offsets is None else offsets.tolist(), corpus.read_retries


@pytest.mark.parametrize("name", OF_EVERY_FAMILY)
def test_what_passes_changes_nothing_and_is_counted(
    samples: Path, monkeypatch: pytest.MonkeyPatch, way: str, name: str
) -> None:
    """From the opening on; as many tries again as there were failures, whatever thread reads."""
    monkeypatch.setenv("DALI_PIPES_CACHE", "/proc/no cache")  # so that all is read each time
    options = {"dtype": "int64"} if "concat_bytes" in name else {}
    ids, offsets, none = everything(samples / name, **options)
    assert none == 0
    random = np.random.default_rng(sum(map(ord, name)))
    storage = Storage(monkeypatch, lambda: max(0, int(random.integers(-3, 5))), lambda: int(random.choice(PASSING)))
    assert everything(samples / name, **options) == (ids, offsets, storage.failures)
    assert storage.failures


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plan=st.lists(st.integers(0, 4), min_size=1, max_size=40),
    errors=st.lists(st.sampled_from(PASSING), min_size=1, max_size=10),
    rows=st.integers(1, 40),
)
def test_any_failures_of_any_rows(
    tmp_path_factory: pytest.TempPathFactory, way: str, plan: list[int], errors: list[int], rows: int
) -> None:
    path = tmp_path_factory.mktemp("data") / "a.bin"
    np.arange(20_000, dtype=np.uint16).tofile(path)
    starts = np.random.default_rng(rows).permutation(20_000 - 9)[:rows]
    with pytest.MonkeyPatch.context() as patch, open_corpus(path) as corpus:
        reads, numbers = iter(plan), iter(errors)
        used: list[int] = []

        def number() -> int:
            used.append(next(numbers, errno.EIO))
            return used[-1]

        storage = Storage(patch, lambda: next(reads, 0), number)
        out = np.zeros((rows, 9), np.uint16)
        corpus.read_rows(starts, out)
        assert np.array_equal(out, starts[:, None] + np.arange(9))
        assert corpus.read_retries == storage.failures == sum(plan[:rows])
        assert storage.reopened == sum(number in (errno.ESTALE, errno.ENOTCONN) for number in used)


@pytest.mark.parametrize("retries", [0, 1, 4])
def test_what_lasts_is_raised_once_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, retries: int
) -> None:
    np.arange(20_000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with open_corpus(tmp_path, read_retries=retries) as corpus:
        is_down = [True]
        Storage(monkeypatch, lambda: 10**9 * is_down[0], lambda: errno.EIO)
        monkeypatch.setattr(read_retries, "_FIRST_WAIT_S", 0.05)
        waits: list[float] = []
        corpus._retries._ended = SimpleNamespace(  # type: ignore[assignment]
            wait=lambda seconds: waits.append(seconds), is_set=lambda: False, set=lambda: None
        )
        out = np.zeros((20, 9), np.uint16)
        tried = rf" \(tried {retries + 1} times\)" if retries else ""
        with pytest.raises(CorpusReadError, match=rf"a\.bin: cannot read 18 bytes at byte 400: .*error{tried}$"):
            corpus.read_rows(np.arange(20) * 10 + 200, out)
        assert corpus.read_retries == retries
        assert np.allclose(waits, [0.05, 0.2, 0.8, 3.2][:retries])
        is_down[0] = False
        corpus.read_rows(np.arange(20) * 10 + 1000, out)
        assert np.array_equal(out, np.arange(20)[:, None] * 10 + 1000 + np.arange(9))


def test_an_error_holds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """Descriptors are given back as soon as it is gone, without a search for garbage."""
    np.arange(20_000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    corpus = open_corpus(tmp_path)
    corpus.tokens(0, 10)
    Storage(monkeypatch, lambda: 10**9, lambda: errno.EIO)
    gc.collect()
    assert open_files(tmp_path)
    gc.disable()
    try:
        for rows in (1, 20):
            try:
                corpus.read_rows(np.arange(rows), np.zeros((rows, 9), np.uint16))
            except CorpusReadError:
                continue
        pool = weakref.ref(corpus._pool)
        corpus.close()
        del corpus
        assert pool() is None
        assert not open_files(tmp_path)
    finally:
        gc.enable()


@pytest.mark.parametrize("number", LASTING)
def test_other_errors_are_raised_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, number: int
) -> None:
    np.arange(20_000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with open_corpus(tmp_path) as corpus:
        Storage(monkeypatch, lambda: 1, lambda: number)
        with pytest.raises(CorpusReadError, match=rf"a\.bin: cannot read .*: {os.strerror(number)}$"):
            corpus.read_rows(np.arange(20), np.zeros((20, 9), np.uint16))
        assert corpus.read_retries == 0


def test_a_truncated_file_is_not_read_again(tmp_path: Path, way: str) -> None:
    np.arange(20_000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with open_corpus(tmp_path) as corpus:
        corpus.tokens(0, 10)
        os.truncate(tmp_path / "a.bin", 100)
        with pytest.raises(CorpusReadError, match="ends early"):
            corpus.read_rows(np.arange(20) + 1000, np.zeros((20, 9), np.uint16))
        assert corpus.read_retries == 0


def test_a_stale_handle_is_not_exchanged_for_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Of the same size; and one that is gone is told by its own error."""
    path = tmp_path / "a.bin"
    for change in ("replaced", "gone"):
        np.arange(20_000, dtype=np.uint16).tofile(path)
        with open_corpus(path) as corpus, monkeypatch.context() as patch:
            corpus.tokens(0, 10)
            if change == "replaced":
                np.zeros(20_000, np.uint16).tofile(tmp_path / "new")
                os.utime(tmp_path / "new", ns=(10**18, 10**18))
                (tmp_path / "new").replace(path)
            else:
                path.unlink()
            Storage(patch, lambda: 1, lambda: errno.ESTALE)
            expected = "a.bin: .*after it was opened" if change == "replaced" else "No such file .*tried 2 times"
            with pytest.raises(CorpusReadError, match=expected):
                corpus.read_rows(np.arange(20), np.zeros((20, 9), np.uint16))


@pytest.mark.parametrize("call", ["open", "fstat", "stat"])
def test_opening_and_looking_up_are_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """And leave no descriptor behind."""
    path = write_parquet(tmp_path / "a.parquet", table_of([list_array([list(range(500))])]))
    function, left = getattr(os, call), [3]

    def failing(place: Any, *arguments: Any, **options: Any) -> Any:
        if left[0] and (call == "fstat" or str(place) == str(path)):
            left[0] -= 1
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
        return function(place, *arguments, **options)

    monkeypatch.setattr(read_retries, "_FIRST_WAIT_S", 0.0)
    gc.collect()
    corpus = open_corpus([path])
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        assert corpus.tokens(0, 500).tolist() == list(range(500))
    assert (corpus.read_retries, left) == (3, [0])
    corpus.close()
    assert not open_files(tmp_path)
    with pytest.raises(CorpusReadError, match=r"none\.npy"):
        open_corpus(tmp_path / "none.npy")


@pytest.fixture
def waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, threading.Thread, list[str]]]:
    """A corpus, and a thread that waits an hour before it reads from it again; what it ended with."""
    np.arange(20_000, dtype=np.uint16).tofile(tmp_path / "a.bin")
    corpus, ended = open_corpus(tmp_path), []
    monkeypatch.setattr(read_retries, "_FIRST_WAIT_S", 3600.0)
    monkeypatch.setattr(read_retries, "_LONGEST_WAIT_S", 3600.0)
    is_reading = threading.Event()

    def down(*arguments: Any) -> int:
        is_reading.set()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def read() -> None:
        try:
            corpus.tokens(0, 10)
        except CorpusReadError as error:
            ended.append(str(error))

    monkeypatch.setattr(os, "preadv", down)
    thread = threading.Thread(target=read)
    thread.start()
    is_reading.wait()
    time.sleep(0.05)
    yield corpus, thread, ended
    corpus.close()
    thread.join()


def test_closing_ends_a_wait(waiting: tuple[Any, threading.Thread, list[str]]) -> None:
    corpus, thread, ended = waiting
    assert thread.is_alive()
    corpus.close()
    thread.join()
    assert ended[0].endswith("at byte 0: Input/output error")


def test_the_end_of_the_interpreter_ends_a_wait(
    waiting: tuple[Any, threading.Thread, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, thread, ended = waiting
    assert read_retries._at_exit, "nothing is registered before a read waits"
    atexit.unregister(read_retries._end_all)
    atexit.register(read_retries._end_all)
    read_retries._end_all()
    thread.join()
    assert len(ended) == 1


@pytest.mark.parametrize(
    ("busy", "after_s", "waits"),
    [
        (False, 0, [0.05, 0.2, 0.8, 3.2, 3.2]),
        (True, 0, [1, 4, 16, 30, 30]),
        (True, 7, [7, 7, 16, 30, 30]),
        (True, 900, [300, 300, 300, 300, 300]),
    ],
)
def test_a_store_that_asks_for_a_pause_gets_one(
    monkeypatch: pytest.MonkeyPatch, busy: bool, after_s: float, waits: list[float]
) -> None:
    """Spread at random, but never shorter than what it asks for."""
    waited: list[float] = []
    monkeypatch.setattr(read_retries, "_FIRST_WAIT_S", 0.05)
    monkeypatch.setattr(read_retries, "_BUSY_WAIT_S", 1.0)
    retries = ReadRetries(5)
    monkeypatch.setattr(retries._ended, "wait", lambda wait_s: waited.append(wait_s))
    error = StoreError(errno.EIO, "429", busy=busy, after_s=after_s)
    assert [retries.wait(error, tries) for tries in range(1, 7)] == [True] * 5 + [False]
    for wait_s, expected in zip(waited, waits, strict=True):
        assert max(0.5 * expected, min(after_s, 300)) <= wait_s <= 1.5 * expected
    assert len({wait_s / expected for wait_s, expected in zip(waited, waits, strict=True)}) > 1
