"""Copies to a GPU: on a stream of their own, ahead of the trainer; the order of calls on a stand-in for CUDA."""

import contextlib
import os
import queue
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sample_datasets import Augmented, items_of

from dali_pipes import SampleLoader
from dali_pipes.samples.device import ToGpu, staged
from dali_pipes.samples.fetch import Request
from dali_pipes.samples.workers import _DeadWorker, _message


class FakeStream:
    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_event(self, event: "FakeEvent") -> None:
        self.log.append(f"{self.name} waits for copy {event.number}")


class FakeEvent:
    made = 0

    def __init__(self, log: list[str]) -> None:
        self.log, self.number = log, FakeEvent.made
        FakeEvent.made += 1

    def record(self, stream: FakeStream) -> None:
        self.log.append(f"copy {self.number} on {stream.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    @contextlib.contextmanager
    def on_stream(stream: FakeStream) -> Iterator[None]:
        calls.append(f"on {stream.name}")
        yield
        calls.append(f"off {stream.name}")

    def used_on(tensor: torch.Tensor, stream: FakeStream) -> None:
        calls.append(f"{int(tensor[0])} is used on {stream.name}")

    monkeypatch.setattr(FakeEvent, "made", 0)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: FakeStream(calls, "side"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: FakeEvent(calls))
    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(calls, "trainer"))
    monkeypatch.setattr(torch.Tensor, "record_stream", used_on)
    return calls


def test_the_order_of_calls(log: list[str]) -> None:
    """One batch ahead; the trainer's stream waits for the copy, and the memory is known to be used there."""
    fetched = ((Request(0, [n], [n], (0, n + 1)), {"image": torch.full((1,), n), "name": "a"}) for n in range(3))
    batches = [batch for _, batch in staged(fetched, ToGpu(torch.device("cpu"), pin=False))]
    assert [batch["image"].tolist() for batch in batches] == [[0], [1], [2]]
    assert log == [
        *["on side", "copy 0 on side", "off side"],
        *["on side", "copy 1 on side", "off side"],
        *["trainer waits for copy 0", "0 is used on trainer"],
        *["on side", "copy 2 on side", "off side"],
        *["trainer waits for copy 1", "1 is used on trainer"],
        *["trainer waits for copy 2", "2 is used on trainer"],
    ]


def test_waiting_for_pinned_batches() -> None:
    """They come from torch's own thread, which only runs where there is a GPU."""
    reading, writing = os.pipe()
    iterator = SimpleNamespace(
        _pin_memory=True, _data_queue=queue.Queue(), _workers=[SimpleNamespace(sentinel=reading)]
    )
    iterator._data_queue.put("a batch")
    assert _message(lambda: iterator, 0.01) == (True, "a batch")
    assert _message(lambda: iterator, 0.01) == (False, None)
    os.close(writing)  # as a process that has ended
    with pytest.raises(_DeadWorker):
        _message(lambda: iterator, 0.01)
    os.close(reading)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch does not see a GPU")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_batches_on_a_gpu(num_workers: int) -> None:
    """Those of the CPU, and they stay while the loader goes on."""
    expected = list(SampleLoader(Augmented(64), 4, True, device="cpu"))
    with SampleLoader(Augmented(64), 4, True, num_workers=num_workers) as loader:
        assert loader.device.type == "cuda"
        held: list[dict[str, Any]] = list(loader)
        assert all(batch["draws"].device == loader.device for batch in held)
        torch.cuda.synchronize()
        assert items_of(held) == items_of(expected)
        for one, other in zip(held, expected, strict=True):
            assert torch.equal(one["draws"].cpu(), other["draws"])
        more = list(loader)
        assert torch.equal(held[0]["draws"].cpu(), expected[0]["draws"])
        assert len(more) == len(held)
