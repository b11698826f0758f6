"""Fewer batches than the queue is deep, and errors in mid-epoch: no hang, no lost batch, one message."""

import errno
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from oracle import epoch_batches
from streams import all_same, oracle_stream, take

from dali_pipes import TokenLoader
from dali_pipes.corpus import Corpus
from dali_pipes.errors import ConfigError, CorpusReadError, LoaderClosedError
from dali_pipes.operators.rows import widen_rows
from dali_pipes.placement import cpu

T = 4
Load = Callable[..., TokenLoader]
DEPTHS = (1, 2, 6, 16)


def test_no_batch_at_all_is_refused_when_building(counting: Callable[..., Any], load: Load, engine: str) -> None:
    corpus = counting(4 * T + 1)
    with pytest.raises(ConfigError, match=r"4 rows .* 5 rows.*drop_last = False"):
        load(corpus, batch_size=5, seq_len=T)
    with pytest.raises(ConfigError, match=r"17 tokens.*seq_len = 17 reads 18"):
        load(corpus, batch_size=1, seq_len=17)
    loader = load(corpus, batch_size=1, seq_len=16, prefetch_queue_depth=16)
    assert len(list(loader)) == 1


@pytest.mark.parametrize(
    ("engine", "depth"), [*(("dali", depth) for depth in DEPTHS), ("direct", 6)], indirect=["engine"]
)
@pytest.mark.parametrize(("num_threads", "per_run"), [(1, 1), (8, 1), (2, None)])
def test_fewer_batches_than_the_queue_is_deep(
    counting: Callable[..., Any], load: Load, engine: str, depth: int, num_threads: int, per_run: int | None
) -> None:
    """One, two and three batches an epoch, over seven epochs, with and without an early end."""
    corpus = counting(12 * T + 1)
    for batch_size in (12, 6, 4):
        order: dict[str, Any] = {"batch_size": batch_size, "seq_len": T}
        loader = load(corpus, prefetch_queue_depth=depth, num_threads=num_threads, batches_per_run=per_run, **order)
        for epoch in range(6):
            count = 1 if epoch % 3 == 2 else 12 // batch_size
            assert all_same(take(loader, count), take(epoch_batches(corpus.tokens, epoch=epoch, **order), count))
            assert loader.epoch == epoch + 1
        assert all_same(loader, epoch_batches(corpus.tokens, epoch=6, **order))
        loader.close()


class Failing:
    """Makes reads of the corpus fail from some row of the file order on, or for one row alone."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, position: int, error: BaseException) -> None:
        self.is_on = True
        read_rows = Corpus.read_rows

        def failing(corpus: Corpus, starts: Any, *others: Any) -> None:
            if self.is_on and position in np.asarray(starts):
                raise error
            read_rows(corpus, starts, *others)

        monkeypatch.setattr(Corpus, "read_rows", failing)


def batches_until(loader: TokenLoader, kind: type[BaseException]) -> tuple[list[Any], BaseException]:
    """Batches up to an error that comes once; the iterator is over after it."""
    batches: list[Any] = []
    iterator = iter(loader)
    with pytest.raises(kind) as caught:
        batches.extend(iterator)
    with pytest.raises(StopIteration):
        next(iterator)
    return batches, caught.value


ERRORS = {
    "I/O error": OSError(errno.EIO, "Input/output error"),
    "corpus error": CorpusReadError("a.bin: gone"),
    "memory": MemoryError("no more"),
    "interrupt": KeyboardInterrupt(),
}


@pytest.mark.parametrize(
    ("engine", "error", "depth", "at"),
    [
        *(("dali", "I/O error", depth, 3) for depth in DEPTHS),
        *(("dali", error, 6, 3) for error in ERRORS if error != "I/O error"),
        *(
            pytest.param("dali", error, depth, 3, marks=pytest.mark.slow)
            for error in ERRORS
            for depth in DEPTHS
            if error != "I/O error" and depth != 6
        ),
        *(("direct", error, 2, 3) for error in ERRORS),
        *((engine, "I/O error", 2, at) for engine in ("dali", "direct") for at in (0, 1, 9)),
    ],
    indirect=["engine"],
)
def test_the_good_batches_come_first_then_the_error(
    counting: Callable[..., Any],
    load: Load,
    engine: str,
    monkeypatch: pytest.MonkeyPatch,
    error: str,
    depth: int,
    at: int,
) -> None:
    """The error is the source's own; the state stands behind the last good batch, and the loader goes on from there."""
    raised = ERRORS[error]
    corpus = counting(20 * T + 1)
    order: dict[str, Any] = {"batch_size": 2, "seq_len": T, "shuffle": False}
    expected = list(epoch_batches(corpus.tokens, **order))
    loader = load(corpus, batches_per_run=1, prefetch_queue_depth=depth, **order)
    failing = Failing(monkeypatch, position=2 * at * T, error=raised)
    batches, caught = batches_until(loader, type(raised))
    assert str(caught) == str(raised)
    if isinstance(raised, Exception):
        assert len(batches) == at
    else:  # whoever interrupts does not wait for what is in the queue
        assert len(batches) <= at
    assert all_same(batches, expected[: len(batches)])
    state = loader.state_dict()
    assert (state["epoch"], state["rows"]) == (0, 2 * len(batches))

    again = load(corpus, batches_per_run=1, **order)  # another loader, with the same bad file
    again.load_state_dict(state)
    batches, _ = batches_until(again, type(raised))
    assert all_same(batches, expected[state["rows"] // 2 : state["rows"] // 2 + len(batches)])
    failing.is_on = False
    again.load_state_dict(state)
    assert all_same(again, expected[state["rows"] // 2 :])
    loader.load_state_dict(state)
    assert all_same(loader, expected[state["rows"] // 2 :])
    assert all_same(loader, epoch_batches(corpus.tokens, epoch=1, **order))
    del loader, again
    gc.collect()
    assert all_same(load(corpus, **order), expected)


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize(("engine", "depth"), [("dali", 6), ("direct", 1), ("direct", 6)], indirect=["engine"])
def test_a_file_truncated_in_mid_epoch(
    counting: Callable[..., Any], load: Load, engine: str, depth: int, resume: bool
) -> None:
    """The data is unplugged: an error that names the file, never zeros; put back, the run goes on.

    Also without loading the state: only who leaves a `for` by himself is done with its epoch.
    """
    corpus = counting(140 * T + 1)
    content = corpus.files[0].read_bytes()
    order: dict[str, Any] = {"batch_size": 2, "seq_len": T, "shuffle": False}
    expected = list(epoch_batches(corpus.tokens, **order))
    loader = load(corpus, batches_per_run=1, prefetch_queue_depth=depth, num_threads=1, **order)
    iterator = iter(loader)
    batches = take(iterator, 3)
    os.truncate(corpus.files[0], 80 * T * 4 + 2)  # of row 80 half a token is left
    with pytest.raises(CorpusReadError, match=r"shard_000\.bin") as caught:
        batches.extend(iterator)
    assert isinstance(caught.value, OSError)
    assert len(batches) == 39  # the last label of row 79 is the first token of row 80
    assert all_same(batches, expected[:39])
    corpus.files[0].write_bytes(content)
    assert (loader.epoch, loader.step) == (0, 39)
    if resume:
        loader.load_state_dict(loader.state_dict())
    assert all_same(loader, expected[39:])


@pytest.mark.parametrize("how", ["removed", "truncated", "longer"])
def test_a_file_changed_before_its_first_read(counting: Callable[..., Any], load: Load, engine: str, how: str) -> None:
    corpus = counting(100 * T, 40 * T + 1)
    order: dict[str, Any] = {"batch_size": 2, "seq_len": T, "shuffle": False}
    loader = load(corpus, batches_per_run=1, prefetch_queue_depth=1, num_threads=1, **order)
    iterator = iter(loader)
    batches = take(iterator, 3)
    if how == "removed":
        corpus.files[1].unlink()
    else:
        os.truncate(corpus.files[1], 4 * (40 * T if how == "truncated" else 40 * T + 2))
    with pytest.raises(CorpusReadError, match=r"shard_001\.bin"):
        batches.extend(iterator)
    assert len(batches) == 49
    assert all_same(batches, take(epoch_batches(corpus.tokens, **order), 49))


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_an_error_in_the_loop_body_is_the_trainers_own(counting: Callable[..., Any], load: Load, engine: str) -> None:
    """It passes through untouched, and the loader is as usable as after a `break`."""
    corpus = counting(40 * T + 1)
    order: dict[str, Any] = {"batch_size": 2, "seq_len": T}
    loader = load(corpus, batches_per_run=3, **order)

    def train() -> None:
        for number, _ in enumerate(loader):
            if number == 4:
                raise ZeroDivisionError("in the model")

    for epoch in range(3):
        with pytest.raises(ZeroDivisionError, match="in the model") as caught:
            train()
        assert (loader.state_dict()["epoch"], loader.state_dict()["rows"]) == (2 * epoch, 10)
        assert caught.value.__context__ is None
        assert all_same(loader, epoch_batches(corpus.tokens, epoch=2 * epoch + 1, **order))  # the traceback still lives


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_an_iterator_may_move_between_threads(counting: Callable[..., Any], load: Load, engine: str) -> None:
    """One thread at a time: begun in one, gone on with in others, ended in the first."""
    corpus = counting(60 * T + 1)
    order: dict[str, Any] = {"batch_size": 2, "seq_len": T}
    loader = load(corpus, batches_per_run=2, repeat=True, **order)
    iterator = iter(loader)
    batches = take(iterator, 5)
    for _ in range(4):
        thread = threading.Thread(target=lambda: batches.extend(take(iterator, 9)))
        thread.start()
        thread.join()
    batches += take(iterator, 5)
    assert all_same(batches, take(oracle_stream(corpus.tokens, **order), 46))


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_closing_inside_the_loop(counting: Callable[..., Any], load: Load, engine: str) -> None:
    """The next batch is refused by name; closing again, also by garbage collection and `with`, changes nothing."""
    corpus = counting(40 * T + 1)
    loader = load(corpus, batch_size=2, seq_len=T, batches_per_run=2)
    iterator = iter(loader)
    (batch,) = take(iterator, 1)
    kept = batch["input_ids"].clone()
    loader.close()
    loader.close()
    with loader:
        pass
    with pytest.raises(LoaderClosedError):
        next(iterator)
    for use in (lambda: iter(loader), lambda: loader.load_state_dict(loader.state_dict())):
        with pytest.raises(LoaderClosedError):
            use()
    assert loader.state_dict()["rows"] == 2
    assert batch["input_ids"].equal(kept)


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_closing_while_another_thread_waits_for_a_batch(
    counting: Callable[..., Any], load: Load, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer's shutdown hook runs where it likes: the waiting thread gets LoaderClosedError, or its batch."""
    corpus = counting(40 * T + 1)
    read_rows = Corpus.read_rows
    is_reading, may_go_on = threading.Event(), threading.Event()

    def slow(corpus: Corpus, starts: Any, *others: Any) -> None:
        if is_reading.is_set() or 20 * T in np.asarray(starts):
            is_reading.set()
            may_go_on.wait()
        read_rows(corpus, starts, *others)

    monkeypatch.setattr(Corpus, "read_rows", slow)
    loader = load(corpus, batch_size=2, seq_len=T, batches_per_run=1, shuffle=False)
    errors: list[BaseException] = []

    def consume() -> None:
        try:
            list(loader)
        except BaseException as error:
            errors.append(error)

    consumer = threading.Thread(target=consume)
    consumer.start()
    is_reading.wait()
    closer = threading.Thread(target=loader.close)
    closer.start()
    time.sleep(0.05)
    may_go_on.set()
    closer.join()
    consumer.join()
    assert [type(error).__name__ for error in errors] == ["LoaderClosedError"], errors


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_closing_in_a_signal_handler_or_callback_of_the_same_thread(
    counting: Callable[..., Any], load: Load, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM on a cluster: its handler closes the loader while `next()` is under way in the same thread."""
    corpus = counting(40 * T + 1)
    loader = load(corpus, batch_size=2, seq_len=T, batches_per_run=1, shuffle=False)
    read_rows = Corpus.read_rows
    sent = threading.Event()

    def slow(corpus: Corpus, starts: Any, *others: Any) -> None:
        if 20 * T in np.asarray(starts) and not sent.is_set():
            time.sleep(0.05)  # for the main thread to wait for this very block
            sent.set()
            signal.raise_signal(signal.SIGUSR1)
            time.sleep(0.05)
        read_rows(corpus, starts, *others)

    monkeypatch.setattr(Corpus, "read_rows", slow)
    previous = signal.signal(signal.SIGUSR1, lambda *_: loader.close())
    try:
        batches: list[Any] = []
        with pytest.raises(LoaderClosedError):
            batches.extend(iter(loader))
        assert 0 < len(batches) < 20
    finally:
        signal.signal(signal.SIGUSR1, previous)


@pytest.mark.parametrize("at", range(5))
def test_an_error_where_the_trainer_makes_batches(
    counting: Callable[..., Any], load: Load, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """Such as too little memory for them: the next `for` goes on after the last good batch of the epoch."""
    corpus = counting(20 * T + 1)
    order: dict[str, Any] = {"batch_size": 2, "seq_len": T}
    expected = list(epoch_batches(corpus.tokens, **order))
    made: list[int] = []

    def failing(*given: Any) -> None:
        made.append(at)
        if len(made) == at + 1:
            raise MemoryError("no more")
        widen_rows(*given)

    monkeypatch.setattr(cpu, "widen_rows", failing)
    monkeypatch.setattr(cpu, "_GROUP_BATCHES", 2)
    loader = load(corpus, engine="direct", batches_per_run=6, **order)
    batches, _ = batches_until(loader, MemoryError)
    assert len(batches) == 2 * at
    assert all_same([*batches, *loader], expected)
    assert (loader.epoch, loader.step) == (1, 0)
