"""No thread, process, descriptor or memory of a loader is left once it is closed or dropped."""

import ctypes
import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from held import Held, descriptors, threads, wait_for
from oracle import epoch_batches
from streams import all_same, take

from dali_pipes import LoaderConfig, TokenLoader, build_pipeline

T = 8
SETTINGS: dict[str, Any] = {"dtype": "uint32", "device": "cpu", "batch_size": 2, "seq_len": T, "batches_per_run": 2}


def resident_bytes() -> int:
    """Memory of this process, without what malloc keeps though nobody holds it, which depends on how threads end."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture
def corpus(counting: Callable[..., Any], engine: str) -> Any:
    """Three files; DALI has been used once before, so that what it keeps for the whole process is there already."""
    corpus = counting(300, 300, 201)
    with TokenLoader(corpus=corpus.pattern, **SETTINGS) as loader:
        take(loader, 3)
    del loader
    gc.collect()
    return corpus


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
@pytest.mark.parametrize("used", ["not at all", "an iterator alone", "one batch", "an epoch", "an error"])
def test_after_close(corpus: Any, used: str) -> None:
    """At once: no collection of garbage is needed."""
    before = Held.now()
    gc.disable()
    try:
        vocab_size: dict[str, Any] = {"vocab_size": 100} if used == "an error" else {}
        loader = TokenLoader(corpus=corpus.pattern, **SETTINGS, num_threads=3, prefetch_queue_depth=4, **vocab_size)
        iterator = iter(loader)
        if used == "one batch":
            next(iterator)
        elif used == "an epoch":
            assert len(list(iterator)) == 50
        elif used == "an error":
            with pytest.raises(ValueError, match="vocab_size"):
                list(iterator)
        loader.close()
        assert not before.left()
    finally:
        gc.enable()


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_after_with_and_an_exception(corpus: Any) -> None:
    before = Held.now()

    def train() -> None:
        with TokenLoader(corpus=corpus.pattern, **SETTINGS) as loader:
            for _ in loader:
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    assert not before.left()


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
@pytest.mark.parametrize("used", ["not at all", "one batch", "an epoch", "an iterator in mid-epoch"])
def test_after_garbage_collection(corpus: Any, used: str) -> None:
    before = Held.now()
    loader = TokenLoader(corpus=corpus.pattern, **SETTINGS, num_threads=3, prefetch_queue_depth=4)
    iterator = None
    if used == "one batch":
        take(loader, 1)
    elif used == "an epoch":
        assert len(list(loader)) == 50
    elif used == "an iterator in mid-epoch":
        iterator = iter(loader)
        next(iterator)
    is_alive = weakref.ref(loader)
    del loader, iterator
    gc.collect()
    assert is_alive() is None
    assert not before.left()


def used_up(loader: TokenLoader) -> None:
    for _ in loader:
        pass


def left_early(loader: TokenLoader) -> None:
    for _ in loader:
        break


def failed(loader: TokenLoader) -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        used_up(loader)


def failed_unseen(loader: TokenLoader) -> None:
    """An error has been met after good blocks, and nobody has asked for it."""
    iterator = iter(loader)
    next(iterator)
    stream = loader._stream

    def has_met_it() -> bool:
        assert stream._queue is not None
        stream._fill(stream._queue)
        return stream._error is not None or stream._queue.in_flight == stream._queue.depth

    wait_for(has_met_it)
    next(iterator)


def resumed(loader: TokenLoader) -> None:
    state = loader.state_dict()
    take(loader, 3)
    loader.load_state_dict(state)
    take(loader, 2)


USES: dict[str, Callable[[TokenLoader], None]] = {
    "never iterated": lambda loader: None,
    "an iterator alone": lambda loader: print(iter(loader)),
    "left early": left_early,
    "used up": used_up,
    "an error": failed,
    "an error that nobody met": failed_unseen,
    "resumed": resumed,
    "asked about": lambda loader: print(len(loader), loader, loader.stats(), loader.summary(), loader.locate(0, 0)),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "static": {"static_buffers": True},
    "pack": {"rows": "pack", "eos_id": 10, "window_documents": 7},
    "buckets": {"rows": "pad", "eos_id": 10, "length_buckets": [2, 4]},
    "graph": {"graph": dict},
    "ranges": {"nvtx": True},
    "shares": {"context_parallel": (0, 2)},
}


# Every use, every kind; all of them together are slow.
CASES = [
    pytest.param(
        engine,
        use,
        kind,
        marks=[] if kind == "plain" or use in ("left early", "an error that nobody met") else pytest.mark.slow,
    )
    for engine, kinds in {"dali": ("plain", "graph"), "direct": (kind for kind in KINDS if kind != "graph")}.items()
    for kind in kinds
    for use in USES
    # DALI raises in the frames of the caller, which the error then holds: that takes a collection.
    if (engine, use) != ("dali", "an error that nobody met")
]


@pytest.mark.parametrize(("engine", "use", "kind"), CASES, indirect=["engine"])
def test_a_loader_that_is_dropped_needs_no_collection(
    corpus: Any, counting: Callable[..., Any], engine: str, use: str, kind: str
) -> None:
    """All that holds threads, files and memory goes with the last name for it, however the loader was used."""
    if "error" not in use:
        corpus = counting(300, 300, 201, vocab_size=11, name="few")
    elif kind in ("pack", "buckets"):
        corpus = counting(300, 300, 201, vocab_size=101, name="some")  # an id in every third row or so is refused
    settings = {**SETTINGS, **KINDS[kind], "quiet": True, "shuffle": "error" not in use, "num_threads": 3}
    if "error" in use:
        settings |= {"vocab_size": 100, "prefetch_queue_depth": 16}
    before = Held.now()
    gc.disable()
    try:
        loader = TokenLoader(corpus=corpus.pattern, **settings)
        parts: dict[str, Callable[[], object]] = {
            "loader": weakref.ref(loader),
            "stream": weakref.ref(loader._stream),
            "source": weakref.ref(loader._source),
            "placement": weakref.ref(loader._source.placement),
            "schedule": weakref.ref(loader._schedule),
            "corpus": weakref.ref(loader.corpus),
        }
        USES[use](loader)
        del loader
        wait_for(lambda: not any(part() for part in parts.values()))  # a thread may be about to end its read
        assert [name for name, part in parts.items() if part() is not None] == []
        assert not before.left()
    finally:
        gc.enable()


def use_a_loader(corpus: Any, number: int) -> None:
    """Of every five, two are closed, one ends with an error, two are abandoned variables of a long-lived program."""
    kind = ("closed", "with", "error", "in mid-epoch", "an iterator")[number % 5]
    vocab_size = 100 if kind == "error" else None
    settings = {**SETTINGS, "prefetch_queue_depth": 1 + number % 4, "vocab_size": vocab_size}
    loader = TokenLoader(corpus=corpus.pattern, **settings, num_threads=1 + number % 3)
    if kind == "closed":
        take(loader, number % 7)
        loader.close()
    elif kind == "with":
        with loader:
            take(loader, 1)
    elif kind == "error":
        with pytest.raises(ValueError, match="vocab_size"):
            list(loader)
    elif kind == "in mid-epoch":
        assert len(take(loader, 1 + number % 7)) == 1 + number % 7
    else:
        next(iter(loader))


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
@pytest.mark.parametrize("count", [50, pytest.param(10_000, marks=pytest.mark.slow)])
def test_many_loaders(corpus: Any, count: int) -> None:
    """Memory is looked at from loader 500 on: what libraries keep for the whole process is there by then.

    DALI keeps a dead reference of 140 bytes to each pipeline that the garbage collector ended, and now and then a table
    of a library doubles, 2 MB at once; a leak would be seen in most of the differences.
    """
    before = Held.now()
    most_threads, memory = 0, []
    for number in range(count):
        use_a_loader(corpus, number)
        if number % 10 == 9:
            gc.collect()
        most_threads = max(most_threads, len(threads() - before.threads))
        if number >= 500 and number % 500 == 0:
            memory.append(resident_bytes())
    gc.collect()
    wait_for(lambda: threads() <= before.threads)
    gc.collect()  # a loader that a thread was reading for at the first one
    assert not before.left()
    assert most_threads < 100
    if memory:
        assert np.median(np.diff(memory)) < 500 * 200, memory  # bytes a loader
        assert memory[-1] - memory[0] < 8 << 20, memory


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_fifty_epochs_broken_off_in_one_loader(corpus: Any) -> None:
    """Every new epoch reuses the threads and the queue that are there."""
    with TokenLoader(corpus=corpus.pattern, **SETTINGS, num_threads=2, prefetch_queue_depth=4) as loader:
        take(loader, 5)
        during = threads()
        for _ in range(50):
            take(loader, 3)
        assert len(threads()) <= len(during) + 2  # a reader that had not been needed yet may have started
        assert all_same(
            ({name: batch[name] for name in ("input_ids", "labels")} for batch in loader),
            epoch_batches(corpus.tokens, batch_size=2, seq_len=T, epoch=51),
        )


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_fifty_errors_in_one_loader(corpus: Any) -> None:
    """A queue that was dropped after an error is gone, with its threads."""
    with TokenLoader(corpus=corpus.pattern, **SETTINGS, vocab_size=700, shuffle=False) as loader:
        with pytest.raises(ValueError, match="vocab_size"):
            list(loader)
        during = Held.now()
        for _ in range(50):
            loader.load_state_dict({**loader.state_dict(), "epoch": 0, "rows": 80})
            with pytest.raises(ValueError, match="vocab_size"):
                list(loader)
        gc.collect()
        assert len(threads()) <= len(during.threads) + 2  # the threads of the queue are other ones by now
        assert not descriptors() - during.descriptors


def test_a_loader_that_could_not_be_built(corpus: Any) -> None:
    before = Held.now()
    for wrong in ({"batch_size": 10**6}, {"seq_len": 10**6}, {"corpus": corpus.pattern + "x"}, {"dtype": "int64"}):
        with pytest.raises(ValueError, match=r"."):
            TokenLoader(**{"corpus": corpus.pattern, **SETTINGS, **wrong})
    gc.collect()
    assert not before.left()


def test_the_pipeline_alone(counting: Callable[..., Any]) -> None:
    corpus = counting(801)
    build_pipeline(LoaderConfig(corpus=corpus.pattern, **SETTINGS)).build()
    gc.collect()
    before = Held.now()
    for _ in range(3):
        pipe = build_pipeline(LoaderConfig(corpus=corpus.pattern, **SETTINGS))
        pipe.build()
        pipe.run()
        del pipe
        gc.collect()
    assert not before.left()


def test_a_pipeline_that_is_dropped_needs_no_collection(counting: Callable[..., Any]) -> None:
    """What it takes blocks from lives as long as it does, and no longer."""
    config = LoaderConfig(corpus=counting(801).pattern, **SETTINGS)
    build_pipeline(config).build()
    gc.collect()
    before = Held.now()
    gc.disable()
    try:
        pipe = build_pipeline(config)
        pipe.build()
        pipe.run()
        source = weakref.ref(pipe._block_source)
        assert source() is not None
        del pipe
        wait_for(lambda: source() is None)
        assert source() is None
        assert not before.left()
    finally:
        gc.enable()


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_batches_outlive_the_loader_and_hold_no_thread(corpus: Any) -> None:
    before = Held.now()
    loader = TokenLoader(corpus=corpus.pattern, **SETTINGS)
    batches = take(loader, 4)
    del loader
    gc.collect()
    assert not before.left()
    expected = take(epoch_batches(corpus.tokens, batch_size=2, seq_len=T), 4)
    assert all_same(batches, expected)
