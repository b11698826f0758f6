"""A batch never changes after it was handed out, whatever stream reads it and however late.

Each rule has a test that takes the rule away and sees the data go wrong, so these tests can fail.
"""

import contextlib
import ctypes
import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import gpu_stand_in
import numpy as np
import pytest
import torch
from held import wait_for
from oracle import IntArray, epoch_batches, same
from readers_at_once import EagerReaders
from streams import loader_stream, oracle_stream, take

from dali_pipes import TokenLoader
from dali_pipes.engine import block_source as source
from dali_pipes.placement import cuda as device
from dali_pipes.placement import loans
from dali_pipes.placement.host import HostPlacement
from dali_pipes.runtime.threads import ReaderThreads

PLACEMENTS = ("host", "device", "pinned")
ORDER: dict[str, Any] = {"batch_size": 3, "seq_len": 4}


def make(corpus: Any, placement: str, **settings: Any) -> TokenLoader:
    merged = {"batches_per_run": 2, "num_threads": 2, "prefetch_queue_depth": 2, **ORDER, **settings}
    return TokenLoader(corpus=corpus.pattern, dtype="uint32", device="cuda", placement=placement, **merged)


def read_later(gpu: gpu_stand_in.StandInGpu, handle: int, tensor: torch.Tensor, into: list[IntArray]) -> None:
    """Queue a read of a tensor's memory behind what a stream has to do; the tensor may be dropped at once."""
    address, shape = tensor.data_ptr(), tuple(tensor.shape)
    assert tensor.is_contiguous()

    def read() -> None:
        values = np.empty(shape, np.int64)
        ctypes.memmove(values.ctypes.data, address, values.nbytes)
        into.append(values)

    gpu.stream(handle).enqueue(read)


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_held_batches_stay_as_they_were(
    gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], placement: str, depth: int
) -> None:
    corpus = counting(600)
    with make(corpus, placement, prefetch_queue_depth=depth) as loader:
        held = take(loader_stream(loader), 90)
    expected = take(oracle_stream(corpus.tokens, **ORDER), 90)
    assert all(same(batch, wanted) for batch, wanted in zip(held, expected, strict=True))


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("vocab_size", [None, 300])
def test_a_dropped_loader_needs_no_collection(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], placement: str, vocab_size: int | None
) -> None:
    """Neither in mid-epoch nor after an error."""
    corpus = counting(600)
    gc.disable()
    try:
        loader = make(corpus, placement, vocab_size=vocab_size)
        parts = [weakref.ref(part) for part in (loader, loader._stream, loader._source, loader._source.placement)]
        with contextlib.nullcontext() if vocab_size is None else pytest.raises(ValueError, match="vocab_size"):
            take(loader, 40)
        del loader
        wait_for(lambda: not any(part() for part in parts))
        assert [part() for part in parts] == [None] * 4
    finally:
        gc.enable()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_what_a_user_writes_reaches_no_later_batch(
    gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], placement: str
) -> None:
    corpus = counting(600)
    with make(corpus, placement) as loader:
        for batch, wanted in zip(take(loader_stream(loader), 90), oracle_stream(corpus.tokens, **ORDER), strict=False):
            assert same(batch, wanted)
            for tensor in batch.values():
                tensor.fill_(-1)
    with make(corpus, placement) as loader:
        for batch, wanted in zip(loader, epoch_batches(corpus.tokens, **ORDER), strict=True):
            assert same(batch, wanted)
            batch["input_ids"].fill_(-1)
            batch["labels"].fill_(-1)


def run_slow_consumer(
    gpu: gpu_stand_in.StandInGpu, loader: TokenLoader, steps: int, streams: list[int]
) -> list[IntArray]:
    """Queue a read of every batch, drop it, go on; the reads run at the very end, or when something waits for them."""
    gpu.eager = False
    read: list[list[IntArray]] = [[] for _ in range(steps)]
    batches = loader_stream(loader)
    for number, stream in zip(range(steps), itertools.cycle(streams)):
        gpu.consumer = stream
        read_later(gpu, stream, next(batches)["input_ids"], read[number])
    for stream in set(streams):
        gpu.stream(stream).run()
    return [parts[0] for parts in read]


@pytest.mark.parametrize("readers", [ReaderThreads, None])
@pytest.mark.parametrize("streams", [[0], [7], [7, 0, 8], [7, 7, 7, 8]])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_consumer_far_behind_reads_what_it_was_given(
    late_gpu: gpu_stand_in.StandInGpu,
    counting: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    placement: str,
    streams: list[int],
    readers: Any,
) -> None:
    """Batches are dropped as soon as their work is queued, which runs hundreds of steps later, on changing streams."""
    corpus = counting(600)
    monkeypatch.setattr(source, "ReaderThreads", readers or EagerReaders)
    with make(corpus, placement) as loader:
        got = run_slow_consumer(late_gpu, loader, 200, streams)
    expected = take(oracle_stream(corpus.tokens, **ORDER), 200)
    assert all(np.array_equal(values, wanted["input_ids"]) for values, wanted in zip(got, expected, strict=True))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_consumer_behind_outlives_the_loader(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], placement: str
) -> None:
    corpus = counting(600)
    late_gpu.eager, late_gpu.consumer = False, 7
    read: list[IntArray] = []
    with make(corpus, placement) as loader:
        batch = next(iter(loader))
    read_later(late_gpu, 7, batch["labels"], read)
    del batch
    with make(corpus, placement) as other:  # its blocks settle what the first loader's left
        take(loader_stream(other), 40)
    late_gpu.stream(7).run()
    assert np.array_equal(read[0], next(epoch_batches(corpus.tokens, **ORDER))["labels"])


def test_blocks_are_given_back_when_their_consumer_has_passed(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any]
) -> None:
    corpus = counting(6000)
    late_gpu.eager, late_gpu.consumer = False, 7
    with make(corpus, "device", prefetch_queue_depth=1) as loader:
        batches = iter(loader)
        take(batches, 60)
        behind = loader.stats().memory.dali_bytes
        block = 2 * 3 * 4 * 8 * 2
        assert behind >= 28 * block, "nothing has run on the consumer's stream, so nothing may be given back"
        late_gpu.stream(7).run()
        take(batches, 2)
        late_gpu.stream(7).run()
        take(batches, 2)
        assert loader.stats().memory.dali_bytes <= 4 * block


def without_waiting_for_copies(patch: pytest.MonkeyPatch) -> None:
    """A staging buffer filled again before the copy out of it has run."""
    real = HostPlacement.prepare

    def prepare(self: Any, slot: Any, times: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(device.Gpu, "wait", lambda self, event: None)
            real(self, slot, times)

    patch.setattr(HostPlacement, "prepare", prepare)


def without_loans(patch: pytest.MonkeyPatch) -> None:
    """DALI's memory given back when the last tensor is dropped, not when its reader has passed."""
    patch.setattr(loans.Loans, "_record", lambda self, stream: self._cupy.cuda.Event(disable_timing=True))


def without_telling_other_streams(patch: pytest.MonkeyPatch) -> None:
    """A batch for another stream than the block's: not made ready for it, nor kept until it has passed."""
    real = loans.Loans.hand_out
    patch.setattr(loans.Loans, "hand_out", lambda self, loan, stream: loan.streams or real(self, loan, stream))


def with_the_event_before_the_copy(patch: pytest.MonkeyPatch) -> None:
    """An event that says nothing about the copy."""
    real = HostPlacement._fill

    real_record = device.Gpu.record

    def fill(self: Any, slot: Any, steps: Any, arrays: Any) -> None:
        copied = slot.arrays["copied"]
        self.gpu.record(copied)

        def record(gpu: Any, event: Any, stream: int | None = None) -> None:
            if event is not copied:
                real_record(gpu, event, stream)

        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(device.Gpu, "record", record)
            real(self, slot, steps, arrays)

    patch.setattr(HostPlacement, "_fill", fill)


def without_holding_back(patch: pytest.MonkeyPatch, which: str) -> None:
    """Kernels that do not wait for the copy of their tokens, or copies that do not wait for the kernels before."""
    real = device.Gpu.hold_back

    def hold_back(self: Any, stream: int, event: Any) -> None:
        if stream != getattr(self, which):
            real(self, stream, event)

    patch.setattr(device.Gpu, "hold_back", hold_back)


@pytest.mark.parametrize(
    ("which", "prompt", "right"),
    [("neither", False, True), ("neither", True, True), ("stream", False, False), ("copies", True, False)],
)
def test_copies_and_kernels_wait_for_each_other(
    late_gpu: gpu_stand_in.StandInGpu,
    counting: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    which: str,
    prompt: bool,
    right: bool,
) -> None:
    """Two buffers, copied to and read in turns on two streams: the copies run at once, or as late as kernels allow."""
    corpus = counting(600)
    monkeypatch.setattr(source, "ReaderThreads", EagerReaders)
    if which != "neither":
        without_holding_back(monkeypatch, which)
    with make(corpus, "host", prefetch_queue_depth=3) as loader:
        assert loader._built.gpu is not None
        late_gpu.stream(loader._built.gpu.copies).is_prompt = prompt
        got = take(loader_stream(loader), 100)
    expected = take(oracle_stream(corpus.tokens, **ORDER), 100)
    assert all(same(batch, wanted) for batch, wanted in zip(got, expected, strict=True)) == right


@pytest.mark.parametrize(
    ("take_away", "streams"),
    [
        (without_waiting_for_copies, [7]),
        (with_the_event_before_the_copy, [7]),
        (without_loans, [7]),
        (without_telling_other_streams, [7, 8]),
    ],
)
def test_without_its_rule_the_data_goes_wrong(
    late_gpu: gpu_stand_in.StandInGpu,
    counting: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
    take_away: Callable[[pytest.MonkeyPatch], None],
    streams: list[int],
) -> None:
    corpus = counting(600)
    monkeypatch.setattr(source, "ReaderThreads", EagerReaders)
    take_away(monkeypatch)
    with make(corpus, "host") as loader:
        got = run_slow_consumer(late_gpu, loader, 200, streams)
    expected = take(oracle_stream(corpus.tokens, **ORDER), 200)
    assert not all(np.array_equal(values, wanted["input_ids"]) for values, wanted in zip(got, expected, strict=True))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_another_stream_waits_for_the_block_and_not_for_the_consumer(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], placement: str
) -> None:
    """A block taken on a stream that is far behind is ready elsewhere before that stream has done its work."""
    corpus = counting(600)
    late_gpu.eager, late_gpu.consumer = False, 7
    read: list[IntArray] = []
    with make(corpus, placement) as loader:
        late_gpu.stream(7).enqueue(lambda: None)
        batches = iter(loader)
        next(batches)
        late_gpu.consumer = 8
        read_later(late_gpu, 8, next(batches)["input_ids"], read)
        late_gpu.stream(8).run()
        assert late_gpu.stream(7).ran == 0
        assert np.array_equal(read[0], take(epoch_batches(corpus.tokens, **ORDER), 2)[1]["input_ids"])


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_loader_s_streams_have_the_highest_priority_on_its_device(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], placement: str
) -> None:
    corpus = counting(600)
    before = set(late_gpu.streams)
    with TokenLoader(corpus=corpus.pattern, dtype="uint32", device="cuda:1", placement=placement, **ORDER) as loader:
        take(iter(loader), 3)
        new = [stream for handle, stream in late_gpu.streams.items() if handle not in before and handle >= 1000]
        assert new
        assert {(stream.priority < -5, stream.device) for stream in new} == {(True, 1)}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_static_buffers_keep_their_addresses(
    gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], placement: str
) -> None:
    corpus = counting(600)
    addresses = set()
    with make(corpus, placement, static_buffers=True) as loader:
        for batch, wanted in zip(take_one_by_one(loader, 90), oracle_stream(corpus.tokens, **ORDER), strict=False):
            assert same(batch, wanted)
            addresses.add(tuple(tensor.data_ptr() for tensor in batch.values()))
    assert len(addresses) == 1


def take_one_by_one(loader: TokenLoader, count: int) -> Any:
    """Batches that are valid until the next one, so they must not be collected first."""
    return itertools.islice(loader_stream(loader), count)


def test_static_buffers_on_the_cpu(counting: Callable[..., Any]) -> None:
    corpus = counting(600)
    order: dict[str, Any] = {**ORDER, "drop_last": False}
    addresses = set()
    with TokenLoader(
        corpus=corpus.pattern, dtype="uint32", device="cpu", outputs=("labels",), static_buffers=True, **order
    ) as loader:
        for batch, wanted in zip(loader, epoch_batches(corpus.tokens, **order), strict=True):
            assert same(batch, {"labels": wanted["labels"]})
            addresses.add(batch["labels"].data_ptr())
    assert len(addresses) == 1


@pytest.mark.parametrize("ordered", [True, False])
def test_static_buffers_wait_for_the_stream_that_read_them(
    late_gpu: gpu_stand_in.StandInGpu, counting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, ordered: bool
) -> None:
    """A graph on one stream may still read the last batch when the next one is asked for on another stream."""
    if not ordered:
        monkeypatch.setattr(loans.Loans, "order", lambda self, before, after: None)
    corpus = counting(600)
    read: list[IntArray] = []
    with make(corpus, "host", static_buffers=True) as loader:
        batches = iter(loader)
        for number in range(20):
            late_gpu.consumer = 7 + number % 2
            read_later(late_gpu, late_gpu.consumer, next(batches)["input_ids"], read)
    for handle in (7, 8):
        late_gpu.stream(handle).run()
    expected = take(epoch_batches(corpus.tokens, **ORDER), 20)
    right = all(np.array_equal(values, wanted["input_ids"]) for values, wanted in zip(read, expected, strict=True))
    assert right == ordered
