"""What surrounds every call of ours to CUDA: the device, the thread's capture mode, and whose error it is that we meet.

Capture mode: while a CUDA graph is captured with torch's default settings, calls such as a look at an event, in any
thread and for any stream, end the capture with an error. Ours have nothing to do with what is captured, so our threads,
and the trainer's while it is inside the loader, are in the mode "relaxed", which permits them.

Faults: a kernel that fails, such as one with a device-side assert, leaves a context in which every later call fails, in
whoever's code it is. Where a call of ours meets that first, its error says so.
"""

import ctypes
import functools
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from dali_pipes.errors import BackendError, DaliPipesError

_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED

_MODEL = "It is not an error of the loader, which only met it first: CUDA reports a failed kernel at a later call. "
_RERUN = "Run again with CUDA_LAUNCH_BLOCKING=1 to see which kernel it was"
_INDEX = f"{_MODEL}The usual cause is an index out of range in the model, such as a token id or a label. {_RERUN}"
_MEMORY = f"{_MODEL}The usual cause is a kernel of the model that reads or writes outside its memory. {_RERUN}"
_FAULTS = {
    "device-side assert triggered": _INDEX,
    "an illegal memory access was encountered": _MEMORY,
    "misaligned address": _MEMORY,
    "an illegal instruction was encountered": _MEMORY,
    "operation not supported on global/shared address space": _MEMORY,
    "invalid program counter": _MEMORY,
    "hardware stack error": _MEMORY,
    "unspecified launch failure": _MEMORY,
    "the launch timed out and was terminated": f"{_MODEL}A kernel ran longer than the driver allows",
    "uncorrectable ECC error encountered": "The memory of the GPU is faulty. Exclude this GPU and restart the job",
    "uncorrectable NVLink error detected during the execution": "A link between GPUs failed. Restart the job",
}
"""What CUDA says, in the words that CuPy, torch and DALI all repeat, of errors after which a context is of no use."""


class OnDevice:
    """While entered, a device is the current one of this thread, and captures elsewhere do not mind its calls.

    An error after which the context is of no use leaves it as a `BackendError` that names the cause.
    """

    def __init__(self, cupy: Any, number: int) -> None:
        self._device = cupy.cuda.Device(number)

    def __enter__(self) -> Self:
        try:
            self._device.__enter__()
        except RuntimeError as error:
            name_fault(error, self._device.id)
            raise
        self._mode = exchange_capture_mode(_RELAXED)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        exchange_capture_mode(self._mode)
        self._device.__exit__(kind, error, traceback)
        if error is not None:
            name_fault(error, self._device.id)


def adopt_thread(cupy: Any, number: int) -> None:
    """The same for good, in a thread of ours. Without a device its next call would wake device 0, too."""
    cupy.cuda.Device(number).use()
    exchange_capture_mode(_RELAXED)


def name_fault(error: BaseException, device: int) -> None:
    """Raise `BackendError` from an error after which the device is of no use to the process; else return."""
    if not isinstance(error, RuntimeError) or isinstance(error, DaliPipesError):
        return
    text = str(error)
    for words, cause in _FAULTS.items():
        if words in text:
            raise BackendError(f"cuda:{device} failed and this process cannot use it any more: {words}. {cause}") from (
                error
            )


def exchange_capture_mode(mode: int) -> int:
    """Set the calling thread's capture mode; returns the one before. Needs no CUDA context and makes none."""
    swapped = ctypes.c_int(mode)
    _driver_call()(ctypes.byref(swapped))
    return swapped.value


@functools.cache
def _driver_call() -> Callable[..., int]:
    """The driver's function, which CuPy lacks. It keeps Python's lock, for it is shorter than to give that away."""
    try:
        function: Callable[..., int] = ctypes.PyDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
    except OSError:  # without a driver nothing is captured
        return lambda mode: 0
    return function
