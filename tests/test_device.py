"""The GPU placements, as far as a machine without a GPU can show: the same batches as the CPU placement.

CuPy is played by NumPy here, so this checks arithmetic and the order of calls (a staging buffer is refilled only after
the event behind its copy), not streams. The kernels have their own tests in tests/operators; tests/gpu runs on a card.
"""

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import pytest
from oracle import epoch_batches

from dali_pipes import LoaderConfig, device
from dali_pipes.corpus import open_corpus
from dali_pipes.errors import BackendError
from dali_pipes.pipeline import make_schedule, resolve_ranks
from dali_pipes.schedule import Position
from dali_pipes.source import BlockInfo, BlockSource


class DeviceArray(np.ndarray):
    """An array that can only be filled the way a CuPy array is."""

    def set(self, values: Any, stream: Any = None) -> None:
        assert stream is not None, "a copy on the default stream"
        np.copyto(self, values)
        stream.log.append("copy")


class Event:
    def __init__(self, disable_timing: bool) -> None:
        self.log: list[str] | None = None

    def record(self, stream: Any) -> None:
        self.log = stream.log
        stream.log.append("record")

    def synchronize(self) -> None:
        if self.log is not None:
            self.log.append("wait")


class Stream(nullcontext[Any]):
    def __init__(self, non_blocking: bool) -> None:
        super().__init__()
        assert non_blocking
        self.log: list[str] = []

    def synchronize(self) -> None:
        self.log.append("synchronize")


class Device(nullcontext[Any]):
    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.id = number

    def __enter__(self) -> Self:
        return self


FREE_BYTES = 10_000


def empty(shape: Any, dtype: Any) -> Any:
    return np.empty(shape, dtype).view(DeviceArray)


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = SimpleNamespace(
        getDeviceCount=lambda: 2, memGetInfo=lambda: (FREE_BYTES, 2 * FREE_BYTES), CUDARuntimeError=RuntimeError
    )
    stand_in = SimpleNamespace(
        cuda=SimpleNamespace(Device=Device, Stream=Stream, Event=Event, runtime=runtime),
        empty=empty,
        asarray=lambda array: array.view(DeviceArray),
    )
    monkeypatch.setattr(device, "require_cupy", lambda: stand_in)
    monkeypatch.setattr(device, "cuda_driver_present", lambda: True)
    monkeypatch.setattr(device, "empty_pinned", lambda shape, dtype: np.full(shape, 7, dtype))


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("kind", [device.HostPlacement, device.DevicePlacement])
@pytest.mark.parametrize("drop_last", [True, False])
@pytest.mark.parametrize("label_shift", [True, False])
@pytest.mark.parametrize("dtype", ["uint8", "uint16", "int32", "uint32", "int64"])
def test_batches_equal_the_oracle(
    counting: Callable[..., Any], kind: Any, drop_last: bool, label_shift: bool, dtype: str
) -> None:
    corpus_files = counting(30, 71, dtype=dtype)
    config = LoaderConfig(
        corpus=corpus_files.pattern, dtype=dtype, batch_size=3, seq_len=4, drop_last=drop_last, rank=1, world_size=2
    )
    corpus = open_corpus(config.corpus, dtype=dtype)
    schedule = make_schedule(config, corpus)
    placement = kind(corpus, schedule, 0, label_shift=label_shift, vocab_size=None)
    source = BlockSource(
        corpus,
        schedule,
        placement,
        outputs=("input_ids", "labels", "row_ids"),
        batches_per_run=2,
        num_threads=1,
        endless=True,
    )
    source.restart(Position(0, 0))
    got: list[Any] = [[], [], []]
    for number in range(-(-schedule.steps() // 2) * 2):
        for column, array in zip(got, source(BlockInfo(number, 0)), strict=True):
            column.append(np.array(array[0]))
    expected = [
        batch
        for epoch in range(2)
        for batch in epoch_batches(
            corpus_files.tokens,
            batch_size=3,
            seq_len=4,
            epoch=epoch,
            drop_last=drop_last,
            rank=1,
            world_size=2,
            label_shift=label_shift,
        )
    ]
    for name, column in zip(("input_ids", "labels", "row_ids"), got, strict=True):
        assert np.array_equal(np.concatenate(column), np.concatenate([batch[name] for batch in expected]))
    log = placement.stream.log
    source.close()
    corpus.close()
    if kind is device.HostPlacement:
        # Every copy is followed by its event, and there are fewer buffers than copies: some were waited for and reused.
        assert [entry for entry in log if entry != "wait"] == ["copy", "record"] * (
            len(log) // 2 - log.count("wait") // 2
        )
        assert log.count("wait") >= log.count("copy") - 4


@pytest.mark.usefixtures("cupy")
def test_placement_auto_follows_the_free_memory(counting: Callable[..., Any]) -> None:
    small = open_corpus(counting(100, dtype="uint16", name="small").pattern, dtype="uint16")
    large = open_corpus(counting(60_000, dtype="uint16", name="large").pattern, dtype="uint16")
    assert device.choose_placement("auto", 0, small)[0] == "device"
    assert device.choose_placement("auto", 0, large)[0] == "host"
    assert device.choose_placement("host", 0, small)[0] == "host"
    with pytest.raises(BackendError, match=r"the corpus takes .* free"):
        device.choose_placement("device", 0, large)


@pytest.mark.usefixtures("cupy")
def test_device_choice() -> None:
    assert device.choose_device("cpu", None)[0] is None
    assert device.choose_device("auto", None)[0] == 0
    assert device.choose_device("cuda", 1)[0] == 1
    assert device.choose_device("cuda:1", 0)[0] == 1
    with pytest.raises(BackendError, match=r"cuda:7 .* 2 device"):
        device.choose_device("cuda:7", None)


def test_ranks_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LoaderConfig(corpus="x", batch_size=1, seq_len=1)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert (resolve_ranks(config).rank, resolve_ranks(config).world_size) == (0, 1)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert (resolve_ranks(config).rank, resolve_ranks(config).world_size) == (3, 4)
    explicit = config.replace(rank=0, world_size=2)
    assert resolve_ranks(explicit) == explicit
