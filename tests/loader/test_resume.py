"""A state says what was consumed, and a loader that gets one goes on exactly there, as often as one likes."""

import copy
import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import epoch_batches
from profiles import examples
from streams import all_same, loader_stream, oracle_stream, row_ids, take, write_counting

from dali_pipes import TokenLoader
from dali_pipes.corpus import Corpus

T = 4
Load = Callable[..., TokenLoader]


@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize(
    ("engine", "per_run", "depth", "num_threads"),
    [("dali", 3, 2, 2), ("direct", 1, 1, 1), ("direct", 3, 2, 2), ("direct", None, 4, 3)],
    indirect=["engine"],
)
def test_second_resume(
    counting: Callable[..., Any],
    load: Load,
    engine: str,
    drop_last: bool,
    per_run: int | None,
    depth: int,
    num_threads: int,
) -> None:
    """An epoch of 40 batches, stopped and resumed at 7, 12, 12, 20 and 39."""
    corpus = counting(300, 345)  # 161 rows: 40 batches of 4, and a partial one
    order: dict[str, Any] = {"batch_size": 4, "seq_len": T, "drop_last": drop_last}
    how: dict[str, Any] = {"batches_per_run": per_run, "prefetch_queue_depth": depth, "num_threads": num_threads}
    straight = load(corpus, **order)
    steps = len(straight)
    assert steps == (40 if drop_last else 41)
    expected = list(epoch_batches(corpus.tokens, **order))
    state_at_20 = None
    for number, batch in enumerate(straight, 1):
        assert all_same([batch], expected[number - 1 : number])
        if number == 20:
            state_at_20 = straight.state_dict()

    state, at = None, 0
    for stop in (7, 12, 12, 20, 39, steps + 3):
        loader = load(corpus, **order, **how)
        if state is not None:
            loader.load_state_dict(state)
            loader.load_state_dict(state)
            assert loader.state_dict() == state
        assert all_same(
            take(loader_stream(loader), stop - at),
            take(oracle_stream(corpus.tokens, first_row=at * 4, **order), stop - at),
        )
        state = json.loads(json.dumps(loader.state_dict()))
        if stop == 20:
            assert state == state_at_20
        assert loader.config == load(corpus, **order, **how).config
        loader.close()
        at = stop
    assert state is not None
    assert (state["epoch"], state["rows"]) == (1, 12)


def test_second_resume_in_a_new_process(counting: Callable[..., Any], run_script: Callable[..., Any]) -> None:
    """The batches up to 7, then those up to 20 in a process of their own, then the rest: without a seam."""
    corpus = counting(641)
    source = """
        import itertools, json, sys
        from dali_pipes import TokenLoader

        pattern, state = sys.argv[1:]
        tokens = []
        for count in (5, 0, 8):
            with TokenLoader(corpus=pattern, dtype="uint32", batch_size=4, seq_len=4, device="cpu") as loader:
                loader.load_state_dict(json.loads(state))
                tokens += [batch["input_ids"].tolist() for batch in itertools.islice(loader, count)]
                state = json.dumps(loader.state_dict())
        print(json.dumps([tokens, loader.state_dict()]))
    """
    expected = [batch["input_ids"].tolist() for batch in epoch_batches(corpus.tokens, batch_size=4, seq_len=T)]
    settings = {"corpus": corpus.pattern, "dtype": "uint32", "batch_size": 4, "seq_len": T, "device": "cpu"}
    with TokenLoader(**settings) as loader:
        take(loader, 7)
        done = run_script(source, corpus.pattern, json.dumps(loader.state_dict()))
    assert done.returncode == 0, done.stderr
    tokens, state = json.loads(done.stdout)
    assert tokens == expected[7:20]
    with TokenLoader(**settings) as straight, TokenLoader(**settings) as resumed:
        take(straight, 20)
        assert state == straight.state_dict()
        resumed.load_state_dict(state)
        assert [batch["input_ids"].tolist() for batch in resumed] == expected[20:]


@pytest.mark.parametrize(
    ("engine", "depth"), [("dali", 1), ("dali", 2), ("dali", 8), ("direct", 2)], indirect=["engine"]
)
@pytest.mark.parametrize("num_threads", [1, 4])
@pytest.mark.parametrize("per_run", [1, 3, None])
def test_state_follows_consumption(
    counting: Callable[..., Any], load: Load, engine: str, depth: int, num_threads: int, per_run: int | None
) -> None:
    """Whatever has been read ahead by then, the state after batch k leads to batch k + 1."""
    corpus = counting(200, 41)  # 60 rows: 20 batches of 3
    order: dict[str, Any] = {"batch_size": 3, "seq_len": T, "shuffle": True, "seed": 5}
    for is_slow in (False, True):
        loader = load(corpus, prefetch_queue_depth=depth, num_threads=num_threads, batches_per_run=per_run, **order)
        states = [loader.state_dict()]
        iterator = iter(loader)
        assert loader.state_dict() == states[0]
        for number in range(1, 13):
            next(iterator)
            if is_slow:
                _wait_until_read_ahead(loader)
            inside = loader.state_dict()
            from_thread = _in_a_thread(loader.state_dict)
            assert inside == from_thread == loader.state_dict()
            assert inside["rows"] == 3 * number
            states.append(inside)
        other = load(corpus, batches_per_run=2, **order)
        for number, state in enumerate(states):
            other.load_state_dict(state)
            assert all_same(take(other, 2), take(epoch_batches(corpus.tokens, first_row=3 * number, **order), 2))
        loader.close()
        other.close()


def _wait_until_read_ahead(loader: TokenLoader) -> None:
    """Let the readers and the queue get as far ahead as they do."""
    for _ in range(1000):
        ready = loader.stats().queue_depth
        time.sleep(0.001)
        if loader.stats().queue_depth == ready:
            return


def _in_a_thread(call: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(call()))
    thread.start()
    thread.join()
    return results[0]


def test_states_taken_by_another_thread_all_the_time(counting: Callable[..., Any], load: Load) -> None:
    """Every such state follows a whole batch, and they never run backwards or ahead of the trainer."""
    corpus = counting(6001)
    loader = load(corpus, batch_size=3, seq_len=T, batches_per_run=4)
    taken: list[tuple[int, int, int]] = []
    asked_for = 0  # rows the trainer has asked for so far
    stop = threading.Event()

    def watch() -> None:
        while not stop.is_set():
            before = asked_for
            state = loader.state_dict()
            taken.append((before, state["rows"] + state["epoch"] * 1500, asked_for))

    thread = threading.Thread(target=watch)
    thread.start()
    iterator = iter(loader)
    try:
        for number in range(500):
            asked_for += 3
            next(iterator)
            before = len(taken)
            while number % 4 == 0 and len(taken) == before and thread.is_alive():
                time.sleep(0)
    finally:
        stop.set()
        thread.join()
    assert len(taken) > 100
    assert [rows for _, rows, _ in taken] == sorted(rows for _, rows, _ in taken)
    assert all(rows % 3 == 0 and before - 3 <= rows <= after for before, rows, after in taken)


@settings(max_examples=examples(8))
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(lambda sizes: sum(sizes) >= 20),
    seq_len=st.integers(1, 6),
    stride=st.none() | st.integers(1, 9),
    batch_size=st.integers(1, 6),
    drop_last=st.booleans(),
    shuffle=st.booleans(),
    label_shift=st.booleans(),
    saving=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)),
    resuming=st.tuples(st.none() | st.integers(1, 5), st.integers(1, 4), st.integers(1, 3)),
)
def test_every_step_of_two_epochs(
    tmp_path_factory: pytest.TempPathFactory,
    sizes: list[int],
    seq_len: int,
    stride: int | None,
    batch_size: int,
    drop_last: bool,
    shuffle: bool,
    label_shift: bool,
    saving: tuple[int, int, int],
    resuming: tuple[int | None, int, int],
) -> None:
    """Resumed behind every batch, with another block size, queue depth and thread count, the rest is the same."""
    pattern, tokens = write_counting(tmp_path_factory.mktemp("corpus"), sizes)
    order: dict[str, Any] = {"batch_size": batch_size, "seq_len": seq_len, "stride": stride, "drop_last": drop_last}
    order |= {"shuffle": shuffle, "label_shift": label_shift, "seed": sum(sizes)}
    common: dict[str, Any] = {"corpus": pattern, "dtype": "uint32", "device": "cpu", **order}
    names = ("batches_per_run", "prefetch_queue_depth", "num_threads")
    outputs = ("input_ids", "labels", "row_ids")
    hows: list[dict[str, Any]] = [dict(zip(names, values, strict=True)) for values in (saving, resuming)]
    expected = [list(epoch_batches(tokens, epoch=epoch, **order)) for epoch in range(3)]
    stream = [batch for batches in expected for batch in batches]
    if not expected[0]:
        return
    with (
        TokenLoader(**common, outputs=outputs, **hows[0]) as first,
        TokenLoader(**common, outputs=outputs, **hows[1]) as other,
    ):
        states = [first.state_dict()]
        for epoch in range(2):
            for batch in first:
                assert all_same([batch], [stream[len(states) - 1]])
                states.append(first.state_dict())
            assert len(states) == 1 + sum(map(len, expected[: epoch + 1]))
        for number, state in enumerate(states):
            other.load_state_dict(json.loads(json.dumps(state)))
            assert other.state_dict() == state
            rest = min(4 if number % 25 else len(stream), len(stream) - number)
            assert all_same(take(loader_stream(other), rest), stream[number : number + rest])


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_a_state_loaded_inside_the_loop(counting: Callable[..., Any], load: Load, engine: str) -> None:
    """Jumping about in one loader, back and forth and while the queue is full, is as good as a new loader."""
    corpus = counting(401)
    order: dict[str, Any] = {"batch_size": 5, "seq_len": T}
    loader = load(corpus, batches_per_run=2, prefetch_queue_depth=4, **order)
    template = loader.state_dict()
    for epoch, row, count in [(0, 50, 3), (0, 0, 1), (7, 95, 2), (7, 95, 2), (2, 20, 17), (2, 21, 17), (0, 0, 40)]:
        loader.load_state_dict({**template, "epoch": epoch, "rows": row})
        expected = take(oracle_stream(corpus.tokens, epoch=epoch, first_row=row, **order), count)
        assert all_same(take(loader_stream(loader), count), expected)


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_going_on_in_the_same_loader_after_a_break(counting: Callable[..., Any], load: Load, engine: str) -> None:
    """A `for` that was left early ends the epoch, unless its own state is loaded again."""
    corpus = counting(401)
    order: dict[str, Any] = {"batch_size": 5, "seq_len": T}
    loader = load(corpus, batches_per_run=3, **order)
    take(loader, 4)
    assert loader.epoch == 1
    loader.load_state_dict(loader.state_dict())
    assert (loader.epoch, loader.step) == (0, 4)
    assert all_same(loader, epoch_batches(corpus.tokens, first_row=20, **order))
    assert all_same(loader, epoch_batches(corpus.tokens, epoch=1, **order))


def test_a_state_before_any_batch_and_after_the_last(counting: Callable[..., Any], load: Load) -> None:
    corpus = counting(42 * T + 1)
    for drop_last in (True, False):
        loader = load(corpus, batch_size=16, seq_len=T, drop_last=drop_last)
        fresh = loader.state_dict()
        assert (fresh["epoch"], fresh["rows"]) == (0, 0)
        last = list(loader)[-1]
        assert len(last["row_ids"]) == (16 if drop_last else 10)
        ended = loader.state_dict()
        assert ended == {**fresh, "epoch": 1}
        other = load(corpus, batch_size=16, seq_len=T, drop_last=drop_last)
        other.load_state_dict(ended)
        assert (other.epoch, other.step) == (1, 0)
        assert row_ids(take(other, 1)) == list(range(16))


def test_a_state_is_not_aliased(counting: Callable[..., Any], load: Load) -> None:
    """Neither what a loader gives nor what it is given is tied to it afterwards."""
    corpus = counting(401)
    loader = load(corpus, batch_size=5, seq_len=T)
    iterator = iter(loader)
    next(iterator)
    state = loader.state_dict()
    kept = copy.deepcopy(state)
    for value in state.values():
        if isinstance(value, dict):
            value.clear()
    state.clear()
    assert loader.state_dict() == kept
    given = copy.deepcopy(kept)
    other = load(corpus, batch_size=5, seq_len=T)
    other.load_state_dict(given)
    assert given == kept
    given["config"]["seed"] = 99
    given["rows"] = 0
    take(other, 1)
    assert given["rows"] == 0
    assert kept == {**loader.state_dict(), "rows": 5}
    assert other.state_dict() == {**kept, "rows": 10}


def test_a_state_is_small_json(counting: Callable[..., Any], load: Load) -> None:
    """Under 1 KB without loss masks and buckets, whatever the number of files and however long the settings are."""
    for number, shards in enumerate((1, 24, 25, 1000)):
        corpus = counting(*[9] * shards, name=f"data_{number}")
        loader = load(
            corpus,
            batch_size=1,
            seq_len=T,
            stride=3,
            seed=2**64 - 1,
            validation_fraction=0.12345678901234567,
        )
        state = {**loader.state_dict(), "epoch": 10**9, "rows": 10**15}
        text = json.dumps(state)
        assert len(text.encode()) < 1024
        assert json.loads(text) == state
        loader.close()


def test_a_restored_loader_reads_nothing_before_it_is_asked(
    counting: Callable[..., Any], load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Taking, restoring and taking a state again touches no file and starts no thread."""
    corpus = counting(401)
    loader = load(corpus, batch_size=5, seq_len=T)
    state = loader.state_dict()
    threads = set(threading.enumerate())
    monkeypatch.setattr(Corpus, "read_rows", None)
    monkeypatch.setattr(os, "open", None)
    loader.load_state_dict({**state, "epoch": 3, "rows": 60})
    assert loader.state_dict() == {**state, "epoch": 3, "rows": 60}
    assert set(threading.enumerate()) <= threads
