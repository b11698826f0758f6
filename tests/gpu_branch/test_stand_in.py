"""The stand-in plays CuPy as it is: what the package calls exists there, under that name and with those arguments."""

import inspect
import weakref
from typing import Any

import gpu_stand_in
import numpy as np
import pytest

from dali_pipes.placement import cuda as device
from dali_pipes.placement import loans

CALLED = [  # everything that dali_pipes/placement/cuda.py and operators/ take from CuPy
    "RawModule",
    "ascontiguousarray",
    "cuda.Device",
    "cuda.Event",
    "cuda.Stream",
    "cuda.memory.OutOfMemoryError",
    "cuda.runtime.CUDARuntimeError",
    "cuda.MemoryPointer",
    "cuda.UnownedMemory",
    "cuda.runtime.check_status",
    "cuda.runtime.eventQuery",
    "cuda.runtime.eventRecord",
    "cuda.runtime.getDeviceCount",
    "cuda.runtime.hostRegister",
    "cuda.runtime.hostUnregister",
    "cuda.runtime.memGetInfo",
    "cuda.runtime.memcpyAsync",
    "cuda.runtime.memcpyDefault",
    "cuda.runtime.pointerGetAttributes",
    "cuda.runtime.streamWaitEvent",
    "empty",
    "get_default_memory_pool",
    "get_default_pinned_memory_pool",
    "ndarray",
]


def find(root: Any, dotted: str) -> Any:
    for name in dotted.split("."):
        root = getattr(root, name)
    return root


@pytest.mark.parametrize("dotted", CALLED)
def test_every_name_is_in_cupy_and_in_the_stand_in(dotted: str) -> None:
    cupy = pytest.importorskip("cupy")
    find(cupy, dotted)
    with gpu_stand_in.installed():
        import cupy as stand_in

        find(stand_in, dotted)


def test_the_arguments_are_those_of_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    runtime = cupy.cuda.runtime
    assert "dst, intptr_t src, size_t size, int kind, intptr_t stream" in runtime.memcpyAsync.__doc__
    assert "eventRecord(intptr_t event, intptr_t stream)" in runtime.eventRecord.__doc__
    assert "streamWaitEvent(intptr_t stream, intptr_t event" in runtime.streamWaitEvent.__doc__
    assert runtime.memcpyDefault == 4
    assert "hostRegister(intptr_t ptr, size_t size, unsigned int flags)" in runtime.hostRegister.__doc__
    assert "UnownedMemory(intptr_t ptr, size_t size, owner, int device_id=-1)" in cupy.cuda.UnownedMemory.__doc__
    assert "__init__(shape, dtype=float, memptr=None" in cupy.ndarray.__doc__
    assert "block (bool)" in cupy.cuda.Event.__doc__
    assert "disable_timing (bool)" in cupy.cuda.Event.__doc__
    assert "non_blocking (bool)" in cupy.cuda.Stream.__doc__
    assert {"done", "record", "synchronize"} <= set(dir(cupy.cuda.Event))
    assert {"synchronize", "__enter__", "__exit__"} <= set(dir(cupy.cuda.Stream))
    assert issubclass(cupy.cuda.memory.OutOfMemoryError, MemoryError)
    assert {"__cuda_array_interface__", "data", "nbytes"} <= set(dir(cupy.ndarray))
    cupyx = pytest.importorskip("cupyx")
    assert list(inspect.signature(cupyx.empty_pinned).parameters)[:2] == ["shape", "dtype"]


def test_a_wrong_order_of_operations_shows() -> None:
    """The stand-in itself: late operations see what was written since, and freed memory is poison."""
    with gpu_stand_in.installed("late") as gpu:
        one = device.Gpu(0)
        staging, target = one.empty_pinned((4,), np.int64), one.empty((4,), np.int64)
        staging[:] = 1
        one.copy(target, staging)
        copied = one.event()
        one.record(copied)
        assert not one.passed(copied)
        staging[:] = 2  # too early
        one.wait(copied)
        assert one.passed(copied)
        assert gpu.asnumpy(target).tolist() == [2, 2, 2, 2]
        one.copy(target, staging)
        del staging  # too early
        assert gpu.asnumpy(target).tolist() == [np.frombuffer(bytes([gpu_stand_in.POISON] * 8), np.int64)[0]] * 4


def test_lent_memory_is_what_torch_wants() -> None:
    """The object that torch builds a tensor over names the memory, not a copy of it, and types as NumPy writes them."""
    output = type("Output", (), {"__cuda_array_interface__": _as_dali_says(4096)})
    lent = loans._Lent(output)
    assert lent.__cuda_array_interface__ == {
        "shape": (6, 4),
        "typestr": "<i8",
        "data": (4096, False),
        "version": 2,
        "strides": None,
    }
    part = lent[2:5]
    assert part.__cuda_array_interface__ == {
        **lent.__cuda_array_interface__,
        "shape": (3, 4),
        "data": (4096 + 2 * 4 * 8, False),
    }
    held = weakref.ref(lent)
    del lent
    assert held() is not None, "a part holds the whole, whose end is what gives the block back"
    del part
    assert held() is None


def _as_dali_says(address: int) -> dict[str, Any]:
    return {"typestr": "=q", "shape": (6, 4), "data": (address, False), "version": 2, "strides": None}
