"""What torch modes are on at one `next()` changes no batch: not that one, and not the others of its block."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from kinds import KINDS, settings_of
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

from dali_pipes import TokenLoader

Load = Callable[..., TokenLoader]


@contextlib.contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def _both(one: Any, other: Any) -> Iterator[None]:
    with one, other:
        yield


class Doubling(TorchFunctionMode):
    """Changes what every function of torch returns."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result * 2 if type(result) is torch.Tensor and function is not torch.Tensor.mul else result


MODES: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "no gradients": torch.no_grad,
    "a default device": default_device,
    "a device around": lambda: torch.device("meta"),
    "a default type": default_dtype,
    "fake tensors": FakeTensorMode,
    "a function mode": Doubling,
    "autocast": lambda: torch.autocast("cpu"),
    "inference, then fake tensors": lambda: _both(torch.inference_mode(), FakeTensorMode()),
}


def _values(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: value.tolist() if isinstance(value, torch.Tensor) else value for name, value in batch.items()}


def _train_on(batch: dict[str, Any]) -> None:
    """What an inference tensor refuses: to be kept for a backward pass, and to be written to."""
    weight = torch.ones(200, 1, requires_grad=True)
    torch.autograd.grad(torch.nn.functional.embedding(batch["input_ids"], weight).sum(), weight)
    for tensor in batch.values():
        if isinstance(tensor, torch.Tensor):
            assert type(tensor) is torch.Tensor
            assert tensor.device.type == "cpu"
            assert tensor.dtype in (torch.int64, torch.int32)
            assert not tensor.is_inference()
            assert not tensor.requires_grad
            tensor.fill_(-1)


EVERYWHERE = ("inference", "a default device", "fake tensors")
OFTEN = ("inference", "a default device")
CASES = [
    pytest.param(
        engine, kind, mode, marks=[] if mode in OFTEN or kind in ("windows", "static buffers") else pytest.mark.slow
    )
    for engine in ("dali", "direct")
    for kind in KINDS
    for mode in MODES
    if mode in EVERYWHERE or kind in ("windows", "static buffers")
    if engine == ("dali" if "graph" in kind else "direct") or (engine, kind) == ("dali", "windows")
]


@pytest.mark.parametrize(("engine", "kind", "mode"), CASES, indirect=["engine"])
def test_a_mode_at_one_batch(counting: Callable[..., Any], load: Load, engine: str, kind: str, mode: str) -> None:
    """At the first of a block, at one in the middle, at the first of an epoch, and around the loader's making."""
    settings = settings_of(kind)
    corpus = counting(1500, dtype="uint16", vocab_size=11)
    plain = load(corpus, **settings, batches_per_run=4)
    expected = [_values(batch) for _ in range(2) for batch in plain]
    with MODES[mode]():
        loader = load(corpus, **settings, batches_per_run=4)
    found = []
    for epoch in range(2):
        with MODES[mode]() if epoch else contextlib.nullcontext():
            batches = iter(loader)
        for number in range(len(expected) // 2):
            with MODES[mode]() if number in (0, 2, 3, 9) else contextlib.nullcontext():
                batch = next(batches)
            found.append(_values(batch))
            _train_on(batch)
        assert next(batches, None) is None
    assert found == expected


@pytest.mark.parametrize("mode", MODES)
def test_positions_of_a_row(counting: Callable[..., Any], load: Load, mode: str) -> None:
    loader = load(counting(1500, dtype="uint16"), **settings_of("shared rows"))
    expected = loader.row_positions().tolist()
    with MODES[mode]():
        found = loader.row_positions()
    assert found.tolist() == expected
