"""The batches of the next block are made by a thread: which ones, on which device, and what is left of those unused."""

import gc
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import gpu_stand_in
import pytest
from held import wait_for
from oracle import same
from streams import loader_stream, oracle_stream, take

from dali_pipes import TokenLoader
from dali_pipes.engine import batches_ahead
from dali_pipes.engine.queues import BlockQueue
from dali_pipes.errors import LoaderClosedError, TokenRangeError
from dali_pipes.loader import batches
from dali_pipes.placement.selection import GPU_PLACEMENTS
from dali_pipes.rows import make as rows_of
from dali_pipes.runtime.threads import ReaderThreads, Task

ORDER: dict[str, Any] = {"batch_size": 3, "seq_len": 4}
PLACEMENTS = tuple(GPU_PLACEMENTS)


class HeldBack(ReaderThreads):
    """A thread that works when a test lets it."""

    gate = threading.Event()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Task[Any]:
        def work() -> Any:
            assert self.gate.wait(60)
            return function(*arguments)

        return super().submit(work)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an order by blocks, so that the pool has many windows."""
    monkeypatch.setattr(rows_of, "BLOCK_TOKENS", 48)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Must be set before blocks are taken ahead."""
    monkeypatch.setattr(HeldBack, "gate", threading.Event())
    monkeypatch.setattr(batches_ahead, "ReaderThreads", HeldBack)
    return HeldBack.gate


def make(corpus: Any, placement: str, **settings: Any) -> TokenLoader:
    merged = {"batches_per_run": 4, "num_threads": 2, "prefetch_queue_depth": 2, "vocab_size": 10**6, **ORDER}
    if placement == "pool":
        merged |= {"order": "blocks", "shuffle_window": 2}
    merged |= {"dtype": "uint32", "device": "cuda", "quiet": True}
    return TokenLoader(corpus=corpus.pattern, placement=placement, **merged | settings)


def threads_of_views(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The thread in which each block's batches are made."""
    found: list[str] = []
    real = batches.as_cut

    def as_cut(array: Any, device: int | None) -> Any:
        found.append(threading.current_thread().name)
        return real(array, device)

    monkeypatch.setattr(batches, "as_cut", as_cut)
    return found


def patient(loader: TokenLoader) -> Iterator[Any]:
    """Batches, each of them handed out when the next block has been taken."""
    for batch in loader:
        wait_until_ready(loader)
        yield batch


def wait_until_ready(loader: TokenLoader) -> None:
    """Until the block after the trainer's has been taken, if it was in the queue."""
    future = loader._stream._ahead._future
    if future is not None:
        wait_for(future.done)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_trainer_s_thread_makes_the_first_block_alone(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    """On any device, with the batches of the CPU, and a device of its own that the thread stays on."""
    corpus = counting(600)
    found, devices = threads_of_views(monkeypatch), set()
    real = gpu_stand_in.Pipeline.share_outputs

    def share_outputs(self: Any, stream: int) -> Any:
        devices.add(late_gpu.current_device)
        return real(self, stream)

    monkeypatch.setattr(gpu_stand_in.Pipeline, "share_outputs", share_outputs)
    with make(corpus, placement, device="cuda:1", repeat=True) as loader:
        if placement != "pool":
            expected = take(oracle_stream(corpus.tokens, **ORDER), 48)
        else:
            with make(corpus, "auto", device="cpu", repeat=True, order="blocks", shuffle_window=2) as on_cpu:
                expected = [{name: one.numpy() for name, one in batch.items()} for batch in take(on_cpu, 48)]
        found.clear()
        for number, (batch, wanted) in enumerate(zip(loader, expected, strict=False)):
            assert same(batch, wanted)
            if number % 4 == 0:  # so that the block after the next one is scheduled where the next one is taken
                wait_for(lambda: all(one.done() for one in list(loader._source._pending.values())))
            wait_until_ready(loader)
    outside = [name for name in found if name != threading.main_thread().name]
    assert len(found) >= 2 * 12
    assert len(outside) >= len(found) - 2 * 2, "two arrays a block; the second one may not have been read in time"
    assert devices == {1}
    assert late_gpu.current_device == 0
    assert late_gpu.captures_ended == []


def test_a_slow_thread_is_waited_for(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], gate: threading.Event
) -> None:
    corpus = counting(600)
    with make(corpus, "device") as loader:
        batches = iter(loader)
        assert all(map(same, take(batches, 4), oracle_stream(corpus.tokens, **ORDER)))
        assert loader.stats().queue_depth >= 1
        threading.Timer(0.05, gate.set).start()
        assert all(map(same, batches, itertools.islice(oracle_stream(corpus.tokens, **ORDER), 4, None)))


@pytest.mark.parametrize(("placement", "depth"), [("host", 1), ("device", 2), ("pinned", 4), ("pool", 2)])
def test_no_more_blocks_exist_than_the_queue_is_deep(
    late_gpu: gpu_stand_in.StandInGpu,
    counting: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    placement: str,
    depth: int,
) -> None:
    """Besides the one that the trainer holds, and the one that it has just dropped."""
    alive, most = [0], [0]
    real = gpu_stand_in.DaliTensor.__init__

    def init(self: Any, gpu: Any, shape: Any, typestr: str) -> None:
        real(self, gpu, shape, typestr)
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        weakref.finalize(self.memory, lambda: alive.__setitem__(0, alive[0] - 1))

    monkeypatch.setattr(gpu_stand_in.DaliTensor, "__init__", init)
    with make(counting(600), placement, prefetch_queue_depth=depth, repeat=True, outputs=("input_ids",)) as loader:
        for _ in itertools.islice(loader, 60):
            wait_until_ready(loader)
    assert most[0] <= depth + 2


@pytest.mark.parametrize("how", ["close", "seek", "weights", "drop", "leave"])
def test_a_block_that_nobody_gets_is_given_back(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], gate: threading.Event, how: str
) -> None:
    """Taken or on its way; and what comes next is what the order says."""
    corpus = counting(600)
    for is_taken in (True, False):
        gate.clear()
        gc.collect()
        before = late_gpu.allocated
        loader = make(corpus, "host")
        taken = [next(iter(loader)) for _ in range(1)]
        assert loader._stream._ahead._future is not None
        state = loader.state_dict()
        if is_taken:
            gate.set()
            wait_until_ready(loader)
        else:
            threading.Timer(0.02, gate.set).start()
        if how == "seek":
            loader.load_state_dict({**state, "rows": 21})
            expected = oracle_stream(corpus.tokens, first_row=21, **ORDER)
            assert all(map(same, take(loader_stream(loader), 60), expected))
        elif how == "weights":  # what was read ahead is of another order
            loader._stream.read_again()
            loader.load_state_dict(state)
            expected = oracle_stream(corpus.tokens, first_row=3, **ORDER)
            assert all(map(same, take(loader_stream(loader), 60), expected))
        elif how == "leave":
            assert all(map(same, take(loader_stream(loader), 60), oracle_stream(corpus.tokens, epoch=1, **ORDER)))
        taken.clear()
        if how != "drop":
            loader.close()
        del loader
        wait_for(lambda: late_gpu.allocated == before)  # noqa: B023
        wait_for(lambda: late_gpu.pooled_bytes == 0)


def test_an_error_of_the_thread_is_raised_and_costs_no_batch(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = counting(600)
    failing: list[Exception | None] = [None]
    real = gpu_stand_in.Pipeline.share_outputs

    def share_outputs(self: Any, stream: int) -> Any:
        if failing[0] is not None and threading.current_thread() is not threading.main_thread():
            raise failing[0]
        return real(self, stream)

    monkeypatch.setattr(gpu_stand_in.Pipeline, "share_outputs", share_outputs)
    for error in (RuntimeError("says DALI"), StopIteration()):
        failing[0] = error
        with make(corpus, "device") as loader:
            got: list[Any] = []
            with pytest.raises(RuntimeError, match="DALI"):
                got.extend(loader)  # as far as it comes
            failing[0] = None
            got += take(loader_stream(loader), 60)
        assert len(got) > 60
        assert all(map(same, got, oracle_stream(corpus.tokens, **ORDER)))


def test_a_bad_id_in_a_block_taken_ahead_is_not_handed_out(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any]
) -> None:
    corpus = counting(600)
    with make(corpus, "device", shuffle=False, vocab_size=300) as loader:
        got: list[Any] = []
        with pytest.raises(TokenRangeError, match="300"):
            got.extend(patient(loader))
    assert len(got) == 300 // 4 // 3 // 4 * 4
    assert all(int(batch["labels"].max()) < 300 for batch in got)


def test_a_loader_that_was_closed_makes_nothing(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], gate: threading.Event
) -> None:
    """Closed in another thread while the thread has not begun: DALI is not asked any more."""
    loader = make(counting(600), "device")
    iterator = iter(loader)
    next(iterator)
    queue: BlockQueue | None = loader._stream._queue
    assert queue is not None
    asked: list[int] = []
    queue.take = lambda stream=None: asked.append(1) or []  # type: ignore[method-assign,func-returns-value]
    loader._source.end()
    gate.set()
    future = loader._stream._ahead._future
    assert future is not None
    assert isinstance(future.exception(), LoaderClosedError)
    assert asked == []
    loader.close()
    with pytest.raises(LoaderClosedError):
        next(iterator)


def test_without_threads_to_be_had_the_trainer_s_makes_all(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> Any:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(batches_ahead, "ReaderThreads", refuse)
    found, corpus = threads_of_views(monkeypatch), counting(600)
    with make(corpus, "device") as loader:
        assert all(map(same, take(loader_stream(loader), 80), oracle_stream(corpus.tokens, **ORDER)))
    assert set(found) == {threading.main_thread().name}


def test_a_fork_takes_nothing_and_waits_for_nobody(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], gate: threading.Event
) -> None:
    """The child drops its copy of a loader whose thread is in the middle of a block, and ends."""
    loader = make(counting(600), "device")
    iterator = iter(loader)
    next(iterator)
    child = os.fork()
    if child == 0:
        try:
            with pytest.raises(LoaderClosedError):
                next(iterator)
            loader.close()
            del iterator, loader
        except BaseException:
            os._exit(1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    gate.set()
    assert len(list(iterator)) == len(loader) - 1
    loader.close()
