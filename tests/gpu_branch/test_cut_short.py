"""What an interrupt or a failing call leaves behind: no wrong batch later, and the error that came first."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import gpu_stand_in
import pytest
from oracle import same
from streams import loader_stream, oracle_stream, take

from dali_pipes import TokenLoader
from dali_pipes.placement import loans

PLACEMENTS = ("host", "device", "pinned")
ORDER: dict[str, Any] = {"batch_size": 3, "seq_len": 4}


def make(corpus: Any, **settings: Any) -> TokenLoader:
    shape = {"batches_per_run": 2, "prefetch_queue_depth": 2, **ORDER}
    return TokenLoader(corpus=corpus.pattern, dtype="uint32", **shape, **settings)


def interrupted_again_and_again(loader: TokenLoader, corpus: Any, arm: Callable[[int], None]) -> int:
    """Compare batches from saved states on, which interrupts cut short; returns how many of them came.

    `arm` sets up an interrupt for the n-th time that something happens.
    """
    interrupts, done, state = 0, 0, loader.state_dict()
    for number in range(60):
        arm(1 + number % 7)
        expected = oracle_stream(corpus.tokens, epoch=state["epoch"], first_row=state["rows"], **ORDER)
        try:
            for batch, wanted in zip(loader_stream(loader), expected, strict=False):
                assert same(batch, wanted)
                state = loader.state_dict()
                done += 1
                if done % 20 == 0:
                    break
        except KeyboardInterrupt:
            interrupts += 1
        loader.load_state_dict(state)
    assert done > 100
    return interrupts


class InterruptedDeque(deque[Any]):
    """An interrupt right behind an `append`, where CPython looks for signals."""

    left = 0

    def append(self, value: Any) -> None:
        super().append(value)
        if threading.current_thread() is threading.main_thread():  # where Python handles signals
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["cpu", "host", "device", "pinned"])
def test_an_interrupt_puts_no_slot_in_line_twice(counting: Callable[..., Any], place: str) -> None:
    corpus = counting(600)
    with gpu_stand_in.installed("late"):
        settings = {"device": "cpu"} if place == "cpu" else {"device": "cuda", "placement": place}
        with make(corpus, **settings) as loader:
            free = loader._source._free = InterruptedDeque()

            def arm(count: int) -> None:
                free.left = count

            assert interrupted_again_and_again(loader, corpus, arm) > 2
            slots = [id(slot) for slot in free]
            assert len(set(slots)) == len(slots)


@pytest.mark.parametrize("behind", ["the reference", "the name"])
def test_an_interrupt_while_a_block_is_lent(
    counting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, behind: str
) -> None:
    corpus = counting(600)
    left = [0]
    real_reference = loans._LoanReference

    class Reference(real_reference):  # type: ignore[misc, valid-type]
        __slots__ = ()

        def __init__(self, owner: Any, callback: Any) -> None:
            super().__init__(owner, callback)
            if behind == "the reference":
                count_down()

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            if behind == "the name":
                count_down()

    def count_down() -> None:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(loans, "_LoanReference", Reference)
    with gpu_stand_in.installed("late"), make(corpus, device="cuda", placement="host") as loader:

        def arm(count: int) -> None:
            left[0] = count

        assert interrupted_again_and_again(loader, corpus, arm) > 2
        left[0] = 0
        block = 2 * 3 * 4 * 8 * 2
        take(loader, 1)
        assert loader.stats().memory.dali_bytes <= 6 * block


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_error_behind_the_callback_is_the_one_that_is_raised(
    counting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, placement: str
) -> None:
    """DALI copies a block when the callback has returned, and may have no memory for it."""
    corpus = counting(600)
    real, calls = gpu_stand_in.Pipeline.schedule_run, [0]

    def schedule_run(self: Any) -> None:
        real(self)
        calls[0] += 1
        if calls[0] == 4:
            self._ready.pop()
            raise RuntimeError("out of device memory, says DALI")

    monkeypatch.setattr(gpu_stand_in.Pipeline, "schedule_run", schedule_run)
    with gpu_stand_in.installed("late"), make(corpus, device="cuda", placement=placement) as loader:
        got: list[Any] = []
        with pytest.raises(RuntimeError, match="out of device memory, says DALI"):
            got.extend({name: tensor.clone() for name, tensor in batch.items()} for batch in loader)
        assert all(same(*pair) for pair in zip(got, oracle_stream(corpus.tokens, **ORDER), strict=False))
        loader.load_state_dict(loader.state_dict())
        rest = take(loader_stream(loader), 60)
        expected = oracle_stream(corpus.tokens, first_row=3 * len(got), **ORDER)
        assert all(same(*pair) for pair in zip(rest, expected, strict=False))


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_another_device_than_the_current_one(counting: Callable[..., Any], placement: str) -> None:
    """Handle 0 is the default stream of the current device: the stand-in checks which one that is."""
    corpus = counting(600)
    with gpu_stand_in.installed("late") as gpu, make(corpus, device="cuda:1", placement=placement) as loader:
        batches = loader_stream(loader)
        for wanted in take(oracle_stream(corpus.tokens, **ORDER), 60):
            assert same(next(batches), wanted)
        assert gpu.current_device == 0, "the user's own is left as it was"


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_closing_gives_device_memory_back(counting: Callable[..., Any], placement: str) -> None:
    """CuPy keeps freed memory for the stream that it was taken for, and nobody else would get it."""
    corpus = counting(600)
    with gpu_stand_in.installed("late") as gpu:
        for _ in range(3):
            with make(corpus, device="cuda", placement=placement) as loader:
                take(loader, 3)
                stream = loader._built.gpu
                assert stream is not None
            assert gpu.freed_arenas[-1] == stream.stream
