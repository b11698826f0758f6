"""Ctrl-C at any line of `next()`, `close()` and `load_state_dict()`; other threads that ask, or close, meanwhile."""

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from at_lines import AtLine, Line, lines_of

from dali_pipes import TokenLoader
from dali_pipes.engine.block_source import BlockSource
from dali_pipes.errors import CorpusError, LoaderClosedError

Load = Callable[..., TokenLoader]
PACKED = {"rows": "pack", "eos_id": 0, "window_documents": 20}
PIECES = {"eos_id": 0, "outputs": ("input_ids", "labels", "row_ids", "position_ids")}
BATCHES = 9


@pytest.fixture(params=[{}, PACKED, PIECES], ids=["windows", "packed", "pieces"])
def make(
    request: pytest.FixtureRequest, counting: Callable[..., Any], load: Load, monkeypatch: pytest.MonkeyPatch
) -> Callable[[], TokenLoader]:
    """Makes loaders of a dozen batches an epoch, as on a machine without DALI, which has no lines of ours."""
    monkeypatch.setitem(sys.modules, "nvidia.dali", None)
    corpus = counting(400, 401, dtype="uint16", vocab_size=7)  # documents of 7 tokens

    def make() -> TokenLoader:
        settings = {"batch_size": 4, "seq_len": 16, "batches_per_run": 2, "num_threads": 2, "repeat": True}
        return load(corpus, quiet=True, **settings, **request.param)

    return make


@pytest.fixture
def reader_threads() -> Callable[[], list[threading.Thread]]:
    """Those that this test has started and that live."""
    before = set(threading.enumerate())
    return lambda: [t for t in threading.enumerate() if t not in before and t.name.startswith("dali_pipes")]


def place(loader: TokenLoader) -> tuple[int, int]:
    state = loader.state_dict()
    return state["epoch"], state["rows"]


def rows_of(batches: list[dict[str, Any]]) -> list[tuple[list[int], list[list[int]]]]:
    return [(batch["row_ids"].tolist(), batch["input_ids"].tolist()) for batch in batches]


class Expected:
    """Of a run that nothing cuts into: rows of batches, places before each and behind the last, and the lines."""

    def __init__(self, make: Callable[[], TokenLoader]) -> None:
        loader = make()
        self.states = [loader.state_dict()]
        batches = []
        iterator = iter(loader)
        for _ in range(2 * BATCHES):
            batches.append(next(iterator))
            self.states.append(loader.state_dict())
        self.rows = rows_of(batches)
        self.places = [(state["epoch"], state["rows"]) for state in self.states]
        loader.close()
        again = make()
        iterator = iter(again)  # held, since an interrupt while it is let go goes nowhere
        self.lines = lines_of(lambda: [next(iterator) for _ in range(BATCHES)])
        again.close()


def take(loader: TokenLoader, count: int) -> list[dict[str, Any]]:
    iterator = iter(loader)
    return [next(iterator) for _ in range(count)]


def train(loader: TokenLoader, batches: list[dict[str, Any]]) -> None:
    """Until something ends it, at the latest this."""
    for batch in loader:
        batches.append(batch)
        if len(batches) == 2 * BATCHES:
            loader.close()


def some(lines: list[Line], share: float) -> list[Line]:
    """Of many lines a few, always the same; share 1: all."""
    return lines if share == 1 else random.Random(7).sample(lines, round(len(lines) * share))


SHARES = [0.02, pytest.param(1, marks=pytest.mark.slow)]


def test_another_thread_asks_for_state_and_figures(make: Callable[[], TokenLoader]) -> None:
    """It gets them at any moment, and the trainer does not notice."""
    expected = Expected(make)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(5):
            loader = make()
            ended = threading.Event()
            told: list[tuple[int, int]] = []

            def ask(loader: TokenLoader, ended: threading.Event, told: list[tuple[int, int]]) -> None:
                while not ended.is_set():
                    told.append(place(loader))
                    assert loader.stats().batches <= BATCHES
                    assert repr(loader)

            with ThreadPoolExecutor(1) as pool:
                asking = pool.submit(ask, loader, ended, told)
                try:
                    batches = take(loader, BATCHES)
                    while not told:
                        time.sleep(0)
                finally:
                    ended.set()
            asking.result()
            assert rows_of(batches) == expected.rows[:BATCHES]
            assert set(told) <= set(expected.places)
            assert told == sorted(told)
            assert place(loader) == expected.places[BATCHES]
            loader.close()
    finally:
        sys.setswitchinterval(interval)


def test_next_closes_what_another_thread_could_not(
    make: Callable[[], TokenLoader],
    reader_threads: Callable[[], list[threading.Thread]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`close()` comes while `next()` waits for a block: it returns, and `next()` stops the threads as it ends."""
    loader = make()
    reading, go_on = threading.Event(), threading.Event()

    def held(source: BlockSource, *given: Any) -> Any:
        reading.set()
        go_on.wait()
        return prepare(source, *given)

    prepare = BlockSource._prepare
    monkeypatch.setattr(BlockSource, "_prepare", held)
    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(train, loader, [])
        reading.wait()
        while loader._stream._gate.acquire(blocking=False):  # until `next()` has it
            loader._stream._gate.release()
        loader.close()
        go_on.set()
        assert isinstance(training.exception(), LoaderClosedError)
    assert reader_threads() == []
    with pytest.raises(CorpusError, match="closed"):
        loader.corpus.tokens(0, 1)


def test_another_thread_closes(
    make: Callable[[], TokenLoader], reader_threads: Callable[[], list[threading.Thread]]
) -> None:
    """Whatever the other one is at."""
    expected = Expected(make)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(20):
            loader = make()
            batches: list[dict[str, Any]] = []
            with ThreadPoolExecutor(1) as pool:
                training = pool.submit(train, loader, batches)
                while len(batches) < number % 5 and not training.done():
                    time.sleep(0)
                loader.close()
            assert isinstance(training.exception(), LoaderClosedError)
            assert rows_of(batches) == expected.rows[: len(batches)]
            assert reader_threads() == []
    finally:
        sys.setswitchinterval(interval)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupt_in_close(
    make: Callable[[], TokenLoader], reader_threads: Callable[[], list[threading.Thread]]
) -> None:
    """Another `close()` does the rest."""
    loader = make()
    take(loader, 3)
    lines = [line for line in lines_of(loader.close) if "/corpus/" not in line[0] and "/storage/" not in line[0]]
    assert len(lines) > 20
    for line in some(lines, 0.5):
        loader = make()
        take(loader, 3)
        with AtLine(line, interrupt), contextlib.suppress(KeyboardInterrupt):
            loader.close()
        loader.close()
        assert reader_threads() == [], line
        with pytest.raises(CorpusError, match="closed"):
            loader.corpus.tokens(0, 1)


def test_an_interrupt_while_a_state_is_loaded(make: Callable[[], TokenLoader]) -> None:
    """The loader stands where it stood, or where the state says, in every respect; no iterator goes on elsewhere."""
    expected = Expected(make)
    loader = make()
    take(loader, 3)
    lines = lines_of(lambda: loader.load_state_dict(expected.states[7]))
    in_loader = [line for line in lines if line[0].endswith("loader.py")]
    for line in [*in_loader, *some(lines, 0.02)]:
        loader = make()
        iterator = iter(loader)
        for _ in range(3):
            next(iterator)
        with AtLine(line, interrupt), contextlib.suppress(KeyboardInterrupt):
            loader.load_state_dict(expected.states[7])
        at = expected.places.index(place(loader))
        assert at in (3, 7)
        try:
            batches = [next(iterator) for _ in range(2)]
        except LoaderClosedError:
            batches = []
        assert rows_of(batches) == expected.rows[at : at + len(batches)], line
        at += len(batches)
        loader.load_state_dict(loader.state_dict())
        assert rows_of(take(loader, 2)) == expected.rows[at : at + 2], line
        loader.close()


@pytest.mark.parametrize("share", SHARES)
def test_an_interrupt_in_next(make: Callable[[], TokenLoader], share: float) -> None:
    """The state counts the batches that were handed out, and no other."""
    expected = Expected(make)
    for line in some(expected.lines, share):
        loader = make()
        batches: list[dict[str, Any]] = []
        iterator = iter(loader)
        with AtLine(line, interrupt), contextlib.suppress(KeyboardInterrupt):
            while len(batches) < BATCHES:
                batches.append(next(iterator))
        assert place(loader) == expected.places[len(batches)], line
        loader.load_state_dict(loader.state_dict())
        batches += take(loader, 2)
        assert rows_of(batches) == expected.rows[: len(batches)], line
        loader.close()
