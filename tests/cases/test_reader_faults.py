"""Reads that fail for a while or for good, and reader threads that are killed: data, or one error, soon."""

import ctypes
import errno
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from oracle import epoch_batches
from streams import all_same, take

from dali_pipes import TokenLoader
from dali_pipes.corpus import Corpus
from dali_pipes.errors import CorpusReadError
from dali_pipes.runtime import threads as readers
from dali_pipes.storage import retries as read_retries
from dali_pipes.storage.linux_aio import BatchReader

T = 4
Load = Callable[..., TokenLoader]
ORDER: dict[str, Any] = {"batch_size": 10, "seq_len": T, "shuffle": False}


class Outage:
    """While it is on, every read beyond the first 2000 bytes of a file fails, by whichever call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_on = False
        self.failures = 0
        self.ends_after = 10**9
        lock, preadv, read = threading.Lock(), os.preadv, BatchReader.read

        def fails(offset: int) -> bool:
            with lock:
                if not self.is_on or offset < 2000:
                    return False
                self.failures += 1
                self.is_on = self.failures < self.ends_after
                return True

        def failing_preadv(descriptor: int, buffers: Any, offset: int, *flags: Any) -> int:
            if fails(offset):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return preadv(descriptor, buffers, offset, *flags)

        def failing_read(
            reader: BatchReader, descriptors: Any, addresses: Any, count: Any, offsets: Any, **how: Any
        ) -> Any:
            if how:  # only a read that waits for a disk can fail
                raise OSError(errno.EOPNOTSUPP, "this file system cannot read without waiting")
            results = read(reader, descriptors, addresses, count, offsets).copy()
            results[[fails(offset) for offset in offsets.tolist()]] = -errno.EIO
            return results

        monkeypatch.setattr(os, "preadv", failing_preadv)
        monkeypatch.setattr(BatchReader, "read", failing_read)
        monkeypatch.setattr(read_retries, "_FIRST_WAIT_S", 0.0)


@pytest.mark.parametrize("ends_after", [1, 3, 25])
def test_an_outage_that_passes(
    counting: Callable[..., Any], load: Load, engine: str, monkeypatch: pytest.MonkeyPatch, ends_after: int
) -> None:
    """Is seen in the figures alone."""
    corpus = counting(200 * T, 200 * T + 1)
    loader = load(corpus, batches_per_run=2, read_retries=30, **ORDER)
    outage = Outage(monkeypatch)
    outage.is_on, outage.ends_after = True, ends_after
    assert all_same(loader, epoch_batches(corpus.tokens, **ORDER))
    assert loader.stats().read_retries == outage.failures == ends_after


def test_an_outage_that_lasts(
    counting: Callable[..., Any], load: Load, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The good batches, one error, and the same loader goes on where they ended when the data is there again."""
    corpus = counting(400 * T + 1)
    expected = list(epoch_batches(corpus.tokens, **ORDER))
    loader = load(corpus, batches_per_run=1, num_threads=1, prefetch_queue_depth=1, **ORDER)
    outage = Outage(monkeypatch)
    outage.is_on = True
    batches: list[Any] = []
    for retries in (4, 8):
        with pytest.raises(CorpusReadError, match=r"shard_000\.bin: .* \d+ bytes at byte .* \(tried 5 times\)"):
            batches.extend(loader)
        assert loader.stats().read_retries >= retries  # blocks ahead are tried again too
        assert all_same(batches, expected[:12])
        assert loader.state_dict()["rows"] == 120
        loader.load_state_dict(loader.state_dict())
    outage.is_on = False
    assert all_same(loader, expected[12:])
    assert all_same(loader, epoch_batches(corpus.tokens, epoch=1, **ORDER))


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
@pytest.mark.parametrize("taken", [1, 4])
def test_an_epoch_that_was_left_is_not_gone_back_to(
    counting: Callable[..., Any], load: Load, engine: str, monkeypatch: pytest.MonkeyPatch, taken: int
) -> None:
    """An error in the first batch of the next one: the `for` behind it begins that, not the rest of the one before."""
    corpus = counting(400 * T + 1)
    loader = load(corpus, batches_per_run=2, **ORDER)
    assert len(take(loader, taken)) == taken
    state = loader.state_dict()
    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "read_rows", lambda *arguments: 1 // 0)
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                next(iter(loader))
            assert (loader.epoch, loader.state_dict()) == (1, state)
    assert all_same(loader, epoch_batches(corpus.tokens, epoch=1, **ORDER))
    assert loader.state_dict()["epoch"] == 2


@pytest.mark.parametrize(
    ("raised", "seen", "message"),
    [
        (MemoryError("no more"), MemoryError, "no more"),
        (SystemExit(0), RuntimeError, r"a task of a reader thread raised SystemExit\(0\)"),
        (KeyboardInterrupt(), KeyboardInterrupt, "^$"),
        (GeneratorExit(), GeneratorExit, "^$"),
        (TimeoutError("slow"), TimeoutError, "slow"),
    ],
)
def test_what_a_task_raises_is_told(
    counting: Callable[..., Any],
    load: Load,
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
    raised: BaseException,
    seen: type[BaseException],
    message: str,
) -> None:
    """To the trainer, who must not end as if all was well; the loader goes on afterwards."""
    corpus = counting(400 * T + 1)
    loader = load(corpus, batches_per_run=1, **ORDER)
    read_rows = Corpus.read_rows

    def failing(corpus: Corpus, starts: Any, *others: Any) -> None:
        if 200 * T in np.asarray(starts):
            raise raised
        read_rows(corpus, starts, *others)

    batches: list[Any] = []
    with monkeypatch.context() as patch:
        patch.setattr(Corpus, "read_rows", failing)
        with pytest.raises(seen, match=message):
            batches.extend(loader)
    assert len(batches) <= 20
    loader.load_state_dict(loader.state_dict())
    assert all_same([*batches, *loader], epoch_batches(corpus.tokens, **ORDER))


def kill_a_reader(spared: set[threading.Thread]) -> bool:
    """Raise SystemExit in a reader thread that is not among the spared ones, whatever it does."""
    for thread in threading.enumerate():
        if thread.name.startswith("dali_pipes-reader-") and thread.ident is not None and thread not in spared:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))
            return True
    return False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("num_threads", [1, 3])
def test_a_reader_thread_that_dies(
    counting: Callable[..., Any], load: Load, engine: str, monkeypatch: pytest.MonkeyPatch, num_threads: int
) -> None:
    """Idle or at work, as from a debugger or a watchdog: an error soon, or nobody notices."""
    monkeypatch.setattr(readers, "_ALIVE_S", 0.1)
    corpus = counting(400 * T + 1)
    of_other_tests = set(threading.enumerate())
    loader = load(corpus, batches_per_run=1, num_threads=num_threads, **ORDER)
    expected = list(epoch_batches(corpus.tokens, **ORDER))
    errors = 0
    for moment in range(4):
        loader.load_state_dict({**loader.state_dict(), "epoch": 0, "rows": 0})
        iterator = iter(loader)
        batches = take(iterator, 5)
        time.sleep(0.004 * moment)
        assert kill_a_reader(of_other_tests)
        try:
            batches += iterator
        except RuntimeError:
            errors += 1
            loader.load_state_dict(loader.state_dict())
            batches += loader
        assert all_same(batches, expected)
    assert errors or num_threads > 1
