"""Which device, with which words where it cannot be had."""

import sys
from collections.abc import Callable
from typing import Any

import gpu_stand_in
import pytest
import torch

from dali_pipes import LoaderConfig, TokenLoader, build_pipeline
from dali_pipes.errors import BackendError
from dali_pipes.loader import batches, token_loader
from dali_pipes.placement import cuda, selection
from dali_pipes.runtime.messages import say_once


@pytest.mark.parametrize(
    ("requested", "devices", "current", "local_rank", "expected"),
    [
        ("cpu", 2, 0, 1, None),
        ("auto", 2, 0, None, 0),
        ("auto", 2, 0, 1, 1),
        ("cuda", 2, 0, None, 0),
        ("cuda", 2, 0, 1, 1),
        ("cuda", 8, 3, 5, 3),  # the process has chosen, by torch.cuda.set_device or CUDA's own
        ("cuda", 1, 0, 3, 0),  # the launcher shows each process one device alone
        ("cuda:1", 2, 0, 0, 1),
        ("cuda:0", 2, 1, 1, 0),
    ],
)
def test_device(
    monkeypatch: pytest.MonkeyPatch,
    requested: str,
    devices: int,
    current: int,
    local_rank: int | None,
    expected: int | None,
) -> None:
    monkeypatch.setattr(cuda, "cuda_driver_present", lambda: True)
    monkeypatch.setattr(cuda, "visible_devices", lambda: (devices, current))
    assert selection.choose_device(requested, local_rank)[0] == expected


@pytest.mark.parametrize(("requested", "local_rank"), [("cuda:7", None), ("cuda", 5), ("auto", 5)])
def test_a_device_that_is_not_visible(monkeypatch: pytest.MonkeyPatch, requested: str, local_rank: int | None) -> None:
    monkeypatch.setattr(cuda, "cuda_driver_present", lambda: True)
    monkeypatch.setattr(cuda, "visible_devices", lambda: (2, 0))
    with pytest.raises(BackendError, match=r"cuda:[57] .*2 devices are visible"):
        selection.choose_device(requested, local_rank)


def test_a_torch_that_cannot_use_the_device(monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> None:
    """A build for the CPU beside a CuPy that works: a few lines later it would have an error without an explanation."""
    with gpu_stand_in.installed():
        monkeypatch.setattr(token_loader, "cuda_problem", batches.cuda_problem)  # the real one
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        with TokenLoader(**settings, device="auto") as on_cpu:
            assert on_cpu.stats().placement == "host"
            assert "torch" in on_cpu.summary()
            assert "does not see a GPU" in on_cpu.summary()
            assert len(list(on_cpu)) == len(on_cpu)
        with pytest.raises(BackendError, match=r'device = "cuda:0" .*torch .*"cpu"'):
            TokenLoader(**settings, device="cuda:0")
        build_pipeline(LoaderConfig(**settings, device="cuda", quiet=True))  # for whoever needs no torch


def test_no_cupy_and_no_device_are_one_clear_error_each(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        with pytest.raises(BackendError, match=r'CuPy .* pip install "dali-pipes\[cuda12\]"'):
            TokenLoader(**settings, device="cuda")
    with gpu_stand_in.installed() as gpu:
        gpu.devices = 0
        with pytest.raises(BackendError, match=r'device = "cuda" .*"cpu"'):
            TokenLoader(**settings, device="cuda")
        sys.modules["cupy"].cuda.runtime.getDeviceCount = _fails
        with pytest.raises(BackendError, match=r"\(no driver\)"):
            TokenLoader(**settings, device="cuda")
        with TokenLoader(**settings, device="auto") as fallen_back:
            assert "no driver" in fallen_back.stats().placement_reason
            assert fallen_back.stats().device == "cpu"


def _fails() -> int:
    raise gpu_stand_in.CudaRuntimeError("no driver")


def test_what_was_chosen_is_said_once(
    settings: dict[str, Any], capfd: pytest.CaptureFixture[str], counting: Callable[..., Any]
) -> None:
    say_once.cache_clear()
    with gpu_stand_in.installed():
        for _ in range(2):
            TokenLoader(**settings, device="cuda").close()
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.count("placement device: the corpus of 1.88e-07 GiB fits in 10% of 16 GiB free on cuda:0") == 1
    with gpu_stand_in.installed():
        TokenLoader(**settings, device="cuda", rank=1, world_size=2).close()
    assert capfd.readouterr().err == "", "one rank speaks for all"
