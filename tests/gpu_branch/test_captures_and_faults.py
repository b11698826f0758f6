"""What a loader does to the CUDA graphs of its process, and what a failed kernel of the model does to the loader."""

import itertools
import threading
from typing import Any

import gpu_stand_in
import pytest
import torch
from streams import loader_stream

from dali_pipes import TokenLoader
from dali_pipes.errors import BackendError
from dali_pipes.loader import batches
from dali_pipes.placement import cuda, on_device

PLACEMENTS = ("host", "device", "pinned")


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("rows", ["stream", "pack"])
def test_no_call_ends_a_capture_elsewhere(
    gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any], placement: str, rows: str
) -> None:
    """Built, used, left in mid-epoch, moved and closed: neither its threads nor the trainer's inside it."""
    settings = settings | {"rows": rows, "eos_id": 7, "batches_per_run": 2, "vocab_size": 1000}
    with TokenLoader(**settings, device="cuda", placement=placement) as loader:
        batches = loader_stream(loader)
        for _ in range(30):
            batch = next(batches)
        state = loader.state_dict()
        loader.load_state_dict(state)
        next(iter(loader))
    del batches, batch, loader
    assert gpu.captures_ended == []
    event = cuda.Gpu(0).event()
    gpu.query_event(event.ptr)
    assert gpu.captures_ended == [threading.current_thread().name], "the trainer's thread is as it was before"


def test_the_mode_of_the_trainer_s_thread_is_put_back(late_gpu: gpu_stand_in.StandInGpu) -> None:
    one = cuda.Gpu(1)
    late_gpu.exchange_capture_mode(1)
    with one.on_device():
        assert late_gpu.exchange_capture_mode(gpu_stand_in.RELAXED) == gpu_stand_in.RELAXED
        with pytest.raises(KeyError), one.on_device():
            raise KeyError
    assert late_gpu.exchange_capture_mode(0) == 1
    assert late_gpu.current_device == 0


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("fault", [700, 710])
def test_a_failed_kernel_of_the_model_is_named_as_such(
    late_gpu: gpu_stand_in.StandInGpu, settings: dict[str, Any], placement: str, fault: int
) -> None:
    words = {700: "an illegal memory access was encountered", 710: "device-side assert triggered"}[fault]
    with TokenLoader(**settings, device="cuda:1", placement=placement, batches_per_run=2, repeat=True) as loader:
        batches = iter(loader)
        next(batches)
        late_gpu.fault = fault
        with pytest.raises(BackendError, match=f"cuda:1 .*{words}.*CUDA_LAUNCH_BLOCKING=1") as caught:
            list(itertools.islice(batches, 100))
    assert "not an error of the loader" in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert late_gpu.trims == 0, "DALI is not asked to free memory that CUDA cannot free any more"
    late_gpu.fault = 0


@pytest.mark.parametrize(
    "text",
    [
        "CUDA error: device-side assert triggered\nCompile with `TORCH_USE_CUDA_DSA` to enable it.",  # torch
        "Critical error:\nCUDA runtime API error cudaErrorAssert (710):\ndevice-side assert triggered",  # DALI
        "CUDA_ERROR_ASSERT: device-side assert triggered",  # CuPy, of the driver
    ],
)
def test_every_library_s_words_are_known(text: str) -> None:
    with pytest.raises(BackendError, match=r"cuda:3 .*device-side assert"):
        on_device.name_fault(RuntimeError(text), 3)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("cudaErrorNotReady: device not ready"),
        BackendError("cuda:0 failed: device-side assert triggered"),
        ValueError("device-side assert triggered"),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_stay_as_they_are(error: BaseException) -> None:
    on_device.name_fault(error, 0)


def test_torch_may_meet_a_failed_kernel_first(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter(["CUDA error: device-side assert triggered", "CUDA error: out of memory"])

    def as_tensor(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError(next(errors))

    monkeypatch.setattr(torch, "as_tensor", as_tensor)
    with pytest.raises(BackendError, match=r"cuda:1 .*device-side assert"):
        batches.on_gpu(None, 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        batches.on_gpu(None, 1)
