"""The one module that owns the GPU: streams, events, pinned and device memory. CUDA is called here and by operators.

Who owns a buffer, which stream writes it, and which event frees it:

    staging     pinned, one a block in flight. A reader thread fills it, a copy on `copies` reads it; it is filled again
                when an event recorded after that copy has passed, for which the reader thread waits.
    tokens      device, two sets (placement "host"). Copies on `copies` write one, and wait for an event recorded after
                the kernels that read it last; kernels on `stream` wait for an event recorded after the copies.
    input_ids, labels, row_ids
                device, one set. The kernels on `stream` write them; DALI copies them into its own memory on the same
                `stream`, so the next block cannot overtake that copy.
    corpus      device (placement "device"), and its loss mask. Copies on `stream` write it once, while loading; kernels
                there read it.
    shared      host memory of the node (placement "pinned"), page-locked by each process. Kernels on `stream` read it
                over the bus; it is unlocked when the stream has been waited for.
    pool        device, two halves (placement "pool"), a window of blocks in each; and pinned buffers, two for each
                thread that loads them. Copies on `copies` write a half, and wait for an event recorded after the
                kernels that read its last window; kernels on `stream` wait for an event recorded after the copies.
    bad ids     two words on the device, written by the kernels; copied on `stream` into a pinned pair a block, which is
                read when the event after that copy has passed.
    blocks      DALI's. A consumer's streams read them. DALI would free one in the order of its own stream, which knows
                nothing of the consumer's, so `loans` holds a block until they have passed.

    tables      where the pieces of a block's rows are: device, one set, and pinned, one a block, used like staging.

Nothing is put on the default stream and nothing waits for the device as a whole; once a loader is built no device
memory is allocated but by DALI. Copies and events are ordered by raw handles, so a consumer's stream may be any
library's.
"""

import contextlib
import ctypes
import mmap
import resource
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import BackendError
from dali_pipes.placement.on_device import OnDevice, adopt_thread, name_fault
from dali_pipes.runtime.optional import optional_package
from dali_pipes.runtime.progress import progress_bar

Array = Any
Event = Any

_PORTABLE, _MAPPED = 1, 2  # cudaHostRegisterPortable, cudaHostRegisterMapped
_LOCK_BYTES = 1 << 30  # at a time, so that progress shows
SUCCESS, NOT_READY = 0, 600  # cudaSuccess, cudaErrorNotReady

_HIGHEST_PRIORITY = -100
"""CUDA takes the nearest that the device has. The model's kernels fill a device; a block's, queued behind them at the
same priority, would wait for all of them, though the next `next()` may need the block."""


def cuda_driver_present() -> bool:
    """Whether the CUDA driver library can be loaded. Creates no CUDA context."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def require_cupy() -> Any:
    """CuPy with at least one visible device. Raises `BackendError` naming what is missing and how to get it."""
    advice = ' to match the CUDA version of the driver, or set device = "cpu"'
    with optional_package("CuPy", "cuda12", "cuda13", purpose='for device = "cuda"', advice=advice):
        import cupy
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BackendError(
            f'device = "cuda" cannot be used: CUDA did not find a usable device ({error}); use device = "cpu"'
        ) from error
    if count == 0:
        raise BackendError('device = "cuda" cannot be used: no GPU is visible to this process; use device = "cpu"')
    return cupy


def cupy_nvtx() -> Any:
    """CuPy's functions for ranges on a profiler's timeline, which need no GPU; None without CuPy."""
    try:
        import cupy
    except ImportError:
        return None
    return cupy.cuda.nvtx if cupy.cuda.nvtx.available else None


def visible_devices() -> tuple[int, int]:
    """How many devices there are, and the number of the current one. Raises `BackendError`, see `require_cupy`."""
    cupy = require_cupy()
    return int(cupy.cuda.runtime.getDeviceCount()), int(cupy.cuda.Device().id)


def free_bytes(device: int) -> int:
    """Free GPU memory in bytes."""
    cupy = require_cupy()
    with OnDevice(cupy, device):
        return int(cupy.cuda.runtime.memGetInfo()[0])


class _Exported:
    """A device array as DALI takes it, naming the stream that writes it: CuPy would name its current one."""

    def __init__(self, array: Array, stream: int) -> None:
        self.shape = array.shape
        given = array.__cuda_array_interface__
        # To older releases of DALI `|b1` is int8, and `?` is bool to all of them.
        typestr = "?" if array.dtype == np.bool_ else given["typestr"]
        self.__cuda_array_interface__ = {**given, "typestr": typestr, "stream": stream}
        self._array = array


class Gpu:
    """One device with its own stream, and all memory that was taken for it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.device_bytes = self.pinned_bytes = 0
        self._cupy = require_cupy()
        with self.on_device():
            self._stream, self._copies, self._handover = (
                self._cupy.cuda.Stream(non_blocking=True, priority=_HIGHEST_PRIORITY) for _ in range(3)
            )
        self.stream: int = self._stream.ptr
        """The raw handle of the stream that work is queued on, as DALI takes it."""
        self.copies: int = self._copies.ptr
        """That of a stream for large copies to the device, which run beside the kernels of the block before."""
        self.handover: int = self._handover.ptr
        """That of a stream which only waits for DALI's blocks: the other may be busy with later ones by then."""

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the device and its stream CuPy's current ones, for this thread."""
        with self.on_device(), self._stream:
            yield

    def on_device(self) -> OnDevice:
        """A context for calls to CUDA and to DALI in this thread."""
        return OnDevice(self._cupy, self.number)  # an object each: one is not for two threads

    def adopt_thread(self) -> None:
        """Prepare a thread that is ours for calls to CUDA."""
        adopt_thread(self._cupy, self.number)

    def empty(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
        """Device memory with any content. Raises `BackendError` if memory runs out."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        with self.current():
            try:
                array = self._cupy.empty(shape, dtype)
            except self._cupy.cuda.memory.OutOfMemoryError as error:
                raise BackendError(
                    f"cuda:{self.number} is out of memory: {size:,} bytes are needed, {free_bytes(self.number):,} "
                    "bytes are free; "
                    'lower batches_per_run or max_block_bytes, or use placement = "host" if the corpus is on the GPU'
                ) from error
        self.device_bytes += size
        return array

    def empty_pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """Page-locked host memory with any content; copies from and to it are asynchronous.

        Slow, and the whole device may wait meanwhile: for when a loader is built, or a slot is made.
        """
        import cupyx

        with self.current():
            try:
                array: npt.NDArray[Any] = cupyx.empty_pinned(shape, dtype)
            except self._cupy.cuda.runtime.CUDARuntimeError as error:
                raise BackendError(
                    f"pinned host memory is exhausted: an array of {np.dtype(dtype)} with shape {shape} does not fit "
                    f"({error}); "
                    "lower num_threads, batches_per_run or max_block_bytes"
                ) from error
        self.pinned_bytes += array.nbytes
        return array

    def page_lock(self, memory: npt.NDArray[np.uint8], locked: list[int]) -> Array:
        """Page-lock host memory (N,) that has its pages alone; returns it as an array that kernels read over the bus.

        Blocks, and shows the progress: it takes a second for some gigabytes. Adds what `unlock` needs to `locked`.
        Raises `BackendError` with the limits if the system refuses.
        """
        address, runtime = memory.ctypes.data, self._cupy.cuda.runtime
        with (
            self.on_device(),
            progress_bar(f"page-locking for cuda:{self.number}", memory.nbytes, in_bytes=True) as done,
        ):
            for begin in range(0, memory.nbytes, _LOCK_BYTES):
                size = -(-min(_LOCK_BYTES, memory.nbytes - begin) // mmap.PAGESIZE) * mmap.PAGESIZE  # whole pages
                try:
                    runtime.hostRegister(address + begin, size, _PORTABLE | _MAPPED)
                except runtime.CUDARuntimeError as error:
                    name_fault(error, self.number)
                    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
                    most = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,} bytes"
                    raise BackendError(
                        f"{memory.nbytes:,} bytes of host memory cannot be page-locked for cuda:{self.number}: CUDA "
                        f"refused after {begin:,} bytes ({error}; RLIMIT_MEMLOCK is {most}); raise the limit "
                        '(ulimit -l), or use placement = "host"'
                    ) from error
                locked.append(address + begin)
                self.pinned_bytes += size
                if int(runtime.pointerGetAttributes(address + begin).devicePointer) != address + begin:
                    raise BackendError(
                        f'cuda:{self.number} cannot read host memory at its own addresses, which placement = "pinned" '
                        'needs; use placement = "host"'
                    )
                done(size)
            cuda = self._cupy.cuda
            pointer = cuda.MemoryPointer(cuda.UnownedMemory(address, memory.nbytes, memory, self.number), 0)
            return self._cupy.ndarray((memory.nbytes,), np.uint8, memptr=pointer)

    def unlock(self, locked: list[int]) -> None:
        """Undo `page_lock`, after the last kernel that reads the memory."""
        with self.on_device():
            while locked:
                self._cupy.cuda.runtime.hostUnregister(locked.pop())

    def free_unused(self) -> None:
        """Return unreferenced memory to the system: CuPy would keep it, a part for each stream."""
        with self.current():
            self._cupy.get_default_memory_pool().free_all_blocks(stream=self._stream)
            self._cupy.get_default_pinned_memory_pool().free_all_blocks()

    def copy(self, target: Array, source: Array, stream: int | None = None) -> None:
        """Queue a copy between a device array and pinned memory, both contiguous and equally long. Does not block."""
        size = source.nbytes
        assert size == target.nbytes
        runtime = self._cupy.cuda.runtime
        handle = self.stream if stream is None else stream
        runtime.memcpyAsync(_address(target), _address(source), size, runtime.memcpyDefault, handle)

    def event(self) -> Event:
        """An event that has passed. A thread that waits for it sleeps instead of spinning."""
        with self.current():
            return self._cupy.cuda.Event(block=True, disable_timing=True)

    def record(self, event: Event, stream: int | None = None) -> None:
        """Let the event pass when what has been queued so far is done. Does not block."""
        self._cupy.cuda.runtime.eventRecord(event.ptr, self.stream if stream is None else stream)

    def hold_back(self, stream: int, event: Event) -> None:
        """Let what is queued on a stream from now on wait for the event. Does not block."""
        self._cupy.cuda.runtime.streamWaitEvent(stream, event.ptr)

    def passed(self, event: Event) -> bool:
        """Whether an event has passed. Does not block."""
        with self.on_device():
            status = self._cupy.cuda.runtime.eventQuery(event.ptr)  # CuPy's own `done` is False forever after a fault
            if status not in (SUCCESS, NOT_READY):
                self._cupy.cuda.runtime.check_status(status)
        return bool(status == SUCCESS)

    def wait(self, event: Event) -> None:
        """Blocks the calling thread until the event has passed."""
        with self.current():
            event.synchronize()

    def wait_for_all(self) -> None:
        """Blocks until all that was queued here is done: for loading and closing."""
        with self.on_device():
            for stream in (self._copies, self._stream, self._handover):
                stream.synchronize()

    def export(self, array: Array) -> Any:
        """The array as DALI takes it, in the order of this stream."""
        with self.current():
            return _Exported(array, self.stream)


def _address(array: Array) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data.ptr)
