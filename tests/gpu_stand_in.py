"""A CUDA device, CuPy and DALI's GPU pipeline, played on the CPU: what lets the whole GPU branch run without a card.

    with gpu_stand_in.installed() as gpu:
        loader = TokenLoader(..., device="cuda")        # hands out CPU tensors that went through the GPU branch

Kernels are the real CUDA sources, compiled by g++. Streams are queues of operations that run as late as CUDA allows
("late": when somebody waits for them), at once ("early"), or in between ("random"), and memory is poisoned the moment
it is freed. So a buffer that is filled again before its event, or freed before its consumer, gives wrong numbers
instead of a race that is seen once a month. The consumer, torch on the CPU, does its work at once; a test that wants a
slow one queues work on a consumer's stream with `gpu.stream(handle).enqueue(...)`.
"""

import bisect
import contextlib
import ctypes
import hashlib
import os
import random
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pytest
import torch

sys.path.append(str(Path(__file__).parent / "operators"))
import cuda_on_cpu

from dali_pipes.engine import block_stream
from dali_pipes.engine import dali as pipeline
from dali_pipes.engine.block_source import BlockInfo
from dali_pipes.loader import batches, token_loader
from dali_pipes.loader import token_loader as loader
from dali_pipes.operators import _kernel
from dali_pipes.placement import cuda as device
from dali_pipes.placement import loans, on_device

POISON = 0xA5
RELAXED = 2
FAULTS = {
    700: "cudaErrorIllegalAddress: an illegal memory access was encountered",
    710: "cudaErrorAssert: device-side assert triggered",
}
CONSUMER = 0
"""Handle of the consumer's stream where a test names no other: CUDA's default stream, as in torch."""


def why_not() -> str | None:
    """Why the stand-in cannot work on this machine, None if it can."""
    return None if cuda_on_cpu.find_compiler() else "neither g++ nor clang++ is installed to compile the kernels"


class Stream:
    """Operations in order; how many of them have run."""

    def __init__(self, gpu: "StandInGpu", handle: int) -> None:
        self.gpu, self.ptr = gpu, handle
        self.priority = self.device = 0
        self.is_prompt = False
        """Whether its operations run when they are queued, whatever the order of the others."""
        self.queued = self.ran = 0
        self._waiting: deque[Callable[[], object]] = deque()

    def enqueue(self, operation: Callable[[], object]) -> None:
        with self.gpu.lock:
            self.queued += 1
            self._waiting.append(operation)
            if self.gpu.order == "early" or self.is_prompt:
                self.run()
            elif self.gpu.order == "random":
                for stream in list(self.gpu.streams.values()):
                    if stream is self or stream.ptr != CONSUMER:
                        stream.run(stream.ran + self.gpu.random.randint(0, 2))

    def run(self, until: int | None = None) -> None:
        """Run what is queued, up to the operation number `until`."""
        with self.gpu.lock:
            while self._waiting and (until is None or self.ran < until):
                operation = self._waiting.popleft()
                self.ran += 1
                operation()

    def abandon(self) -> None:
        """What is queued never runs."""
        with self.gpu.lock:
            self._waiting.clear()
            self.ran = self.queued

    def synchronize(self) -> None:
        self.gpu.unsafe_in_captures()
        self.gpu.check_status(self.gpu.fault)
        self.run()

    def __enter__(self) -> Self:
        self.gpu.current.append(self)
        return self

    def __exit__(self, *exception: object) -> None:
        assert self.gpu.current.pop() is self


class Event:
    """A place in a stream's queue; one that was never recorded has passed."""

    def __init__(self, gpu: "StandInGpu") -> None:
        self.gpu = gpu
        self.ptr = gpu.new_handle()
        self._stream: Stream | None = None
        self._place = 0
        gpu.events[self.ptr] = self

    def record(self, stream: Stream) -> None:
        with self.gpu.lock:
            self._stream, self._place = stream, stream.queued
            if self.gpu.order == "early":
                stream.run()

    @property
    def done(self) -> bool:
        return self._stream is None or self._stream.ran >= self._place

    def synchronize(self) -> None:
        self.gpu.unsafe_in_captures()
        self.gpu.check_status(self.gpu.fault)
        if self._stream is not None:
            self._stream.run(self._place)

    def wait_from(self, stream: Stream) -> None:
        """Make a stream wait; what was recorded by now counts, not what is recorded later."""
        recorded, place = self._stream, self._place
        if recorded is not None and recorded is not stream:
            stream.enqueue(lambda: recorded.run(place))


class Memory:
    """Bytes at an address, poisoned when the object dies. They stay mapped, so that a late access shows."""

    def __init__(self, gpu: "StandInGpu", size: int, *, on_host: bool = False, stream: Stream | None = None) -> None:
        self.raw = np.full(max(size, 1) + 63, POISON, np.uint8)
        self.offset = -self.raw.ctypes.data % 64
        self.address, self.size = self.raw.ctypes.data + self.offset, size
        gpu.everything.append(self.raw)
        with gpu.lock:
            bisect.insort(gpu._ranges, (self.address, self.address + max(size, 1)))
        counted = 0 if on_host else size
        gpu.allocated += counted
        weakref.finalize(self, gpu.poison, self.raw, counted, stream).atexit = False

    def array(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.ndarray(shape, dtype, self.raw.data, offset=self.offset)


class DeviceArray(cuda_on_cpu.DeviceArray):
    """`cupy.ndarray`: no values for the host."""

    def __init__(self, host: Any, memory: Any, memptr: Any = None) -> None:
        if memptr is not None:  # called as `cupy.ndarray(shape, dtype, memptr=...)`
            owner = memptr.mem.owner
            assert memptr.mem.ptr == owner.ctypes.data
            host, memory = np.ndarray(host, memory, owner.data), owner
        super().__init__(host)
        self.memory = memory
        self.nbytes = host.nbytes
        self.data = SimpleNamespace(ptr=host.ctypes.data)

    def __getitem__(self, part: Any) -> "DeviceArray":
        return DeviceArray(self._host[part], self.memory)

    def view(self, dtype: npt.DTypeLike) -> "DeviceArray":
        return DeviceArray(self._host.view(dtype), self.memory)

    def reshape(self, *shape: int) -> "DeviceArray":
        return DeviceArray(self._host.reshape(*shape), self.memory)

    def copy(self) -> "DeviceArray":
        raise AssertionError("a copy on the device that nobody counted on")

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self._host.ctypes.data, False),
            "version": 3,
            "strides": None,
            "stream": 1,  # the default stream, as CuPy says where no other is current
        }


class DaliTensor:
    """One output of a block, in DALI's memory."""

    def __init__(self, gpu: "StandInGpu", shape: tuple[int, ...], typestr: str) -> None:
        self.memory = Memory(gpu, int(np.prod(shape)) * np.dtype(typestr).itemsize)
        gpu.pooled_bytes -= min(gpu.pooled_bytes, self.memory.size)
        weakref.finalize(self.memory, gpu.keep_in_pool, self.memory.size).atexit = False
        self.__cuda_array_interface__ = {
            "shape": shape,
            "typestr": typestr,
            "data": (self.memory.address, False),
            "version": 3,
            "strides": None,
        }


class OnHost:
    """Memory of the device as NumPy takes it; holds what torch would hold."""

    def __init__(self, lent: Any) -> None:
        self.__array_interface__ = {**lent.__cuda_array_interface__, "version": 3}
        self.lent = lent


class Pipeline:
    """DALI's pipeline around an external source on a GPU, as `DaliQueue` uses it: copies in, hands out, forgets."""

    def __init__(self, gpu: "StandInGpu", built: Any, depth: int) -> None:
        self.prefetch_queue_depth = depth
        self._gpu, self._source, self._stream = gpu, built.source, built.gpu.stream
        self._device = built.gpu.number
        self._iteration = 0
        self._ready: deque[tuple[list[DaliTensor], Event]] = deque()

    def build(self) -> None:
        assert self._gpu.current_device == self._device, "DALI wakes the device that is current"

    def __del__(self) -> None:
        if self._ready:
            assert self._gpu.current_device == self._device, "DALI frees memory of the device that is current"

    def schedule_run(self) -> None:
        assert self._gpu.current_device == self._device, "DALI wakes the device that is current"
        for _ in range(self.prefetch_queue_depth if self._iteration == 0 else 1):
            arrays = self._source(BlockInfo(self._iteration, 0))
            self._iteration += 1
            outputs = []
            for array in arrays:
                interface = array.__cuda_array_interface__
                assert interface["stream"] == self._stream, "arrays are ordered by the loader's own stream"
                outputs.append(DaliTensor(self._gpu, interface["shape"][1:], interface["typestr"]))
                self._gpu.copy(outputs[-1].memory.address, interface["data"][0], outputs[-1].memory.size, self._stream)
            event = Event(self._gpu)
            event.record(self._gpu.stream(self._stream))
            self._ready.append((outputs, event))

    def share_outputs(self, cuda_stream: int) -> list[list[DaliTensor]]:
        assert self._gpu.current_device == self._device, "a raw handle is one of the current device's streams"
        if not self._ready:
            raise StopIteration
        outputs, event = self._ready.popleft()
        event.wait_from(self._gpu.stream(cuda_stream))
        return [[output] for output in outputs]

    def release_outputs(self) -> None:
        """The outputs own their memory."""


class OutOfMemoryError(MemoryError):
    """`cupy.cuda.memory.OutOfMemoryError`."""


class CudaRuntimeError(RuntimeError):
    """`cupy.cuda.runtime.CUDARuntimeError`."""


class StandInGpu:
    """The state of the machine: streams, events, memory, and what a test may change."""

    def __init__(self, order: str, seed: int, capacity: int) -> None:
        self.order, self.random = order, random.Random(seed)
        self.capacity, self.allocated, self.devices = capacity, 0, 2
        self.lock = threading.RLock()
        self.streams: dict[int, Stream] = {}
        self.events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()
        self.everything: list[npt.NDArray[np.uint8]] = []
        self.consumer = CONSUMER
        """Handle that torch says is current."""
        self.eager = True
        """Whether work that the consumer's stream waits for runs before a batch is handed out, as torch needs here."""
        self.default_stream_work = self.events_made = self.arrays_made = 0
        self.kernels: list[str] = []
        """Names of the kernels launched so far."""
        self.ranges: list[tuple[str, str | None]] = []
        """Threads and the ranges that they began, or None where they ended one."""
        self.trims = self.pooled_bytes = 0
        """What DALI's pool keeps of blocks that were dropped, which nobody else can use until it is trimmed."""
        self.registered: dict[int, int] = {}
        """Host memory that is page-locked, by address."""
        self.waiting_for: list[list[int]] = []
        """Addresses of the arrays of each kernel that was launched and has not run."""
        self.lock_limit, self.device_offset = 1 << 40, 0
        self.fault = 0
        """The error that every call meets from now on, as after a kernel that failed."""
        self.captures_ended: list[str] = []
        """Threads whose calls would have ended the capture of a CUDA graph with default settings."""
        self.freed_arenas: list[int] = []
        """Streams whose free memory CuPy's pool was told to give back."""
        self.pageable_copies = 0
        self._ranges: list[tuple[int, int]] = []
        self._handles = iter(range(1000, 10**9))
        self._threads = threading.local()
        self._kernels: dict[tuple[str, str], cuda_on_cpu.CpuKernel] = {}

    @property
    def current(self) -> list[Stream]:
        """CuPy's stack of current streams, of this thread."""
        if not hasattr(self._threads, "streams"):
            self._threads.streams = []
        stack: list[Stream] = self._threads.streams
        return stack

    @property
    def current_device(self) -> int:
        """CUDA's current device of this thread."""
        return getattr(self._threads, "device", 0)

    @current_device.setter
    def current_device(self, number: int) -> None:
        self._threads.device = number

    def new_handle(self) -> int:
        return next(self._handles)

    def stream(self, handle: int) -> Stream:
        with self.lock:
            return self.streams.setdefault(handle, Stream(self, handle))

    def exchange_capture_mode(self, mode: int) -> int:
        before = getattr(self._threads, "capture_mode", 0)
        self._threads.capture_mode = mode
        return before

    def unsafe_in_captures(self) -> None:
        """A call that ends a capture elsewhere, unless the thread is in relaxed mode."""
        if getattr(self._threads, "capture_mode", 0) != RELAXED:
            self.captures_ended.append(threading.current_thread().name)

    def query_event(self, event: int) -> int:
        self.unsafe_in_captures()
        if self.fault:
            return self.fault
        return 0 if self.events[event].done else 600

    def host_register(self, address: int, size: int, flags: int) -> None:
        self.unsafe_in_captures()
        assert (address % 4096, flags) == (0, 3)
        if sum(self.registered.values()) + size > self.lock_limit:
            raise CudaRuntimeError("cudaErrorMemoryAllocation: out of memory")
        self.registered[address] = size

    def host_unregister(self, address: int) -> None:
        self.unsafe_in_captures()
        self.check_status(self.fault)
        end = address + self.registered.pop(address)
        assert not any(address <= one < end for used in self.waiting_for for one in used), "a kernel will read it"

    def check_status(self, status: int) -> None:
        if status:
            for stream in list(self.streams.values()):
                stream.abandon()
            raise CudaRuntimeError(FAULTS[status])

    def run_all(self) -> None:
        """Time passes: everything that was queued runs."""
        for stream in list(self.streams.values()):
            stream.run()

    def keep_in_pool(self, size: int) -> None:
        self.pooled_bytes += size

    def trim(self) -> None:
        """`nvidia.dali.backend.ReleaseUnusedMemory`."""
        self.pooled_bytes = 0
        self.trims += 1

    def consume(self, handle: int) -> None:
        """Catch up with what a stream's next operation has to wait for, since torch's operations here run at once."""
        if self.eager:
            self.stream(handle).run()

    def wait_for_event(self, handle: int, event: int) -> None:
        self.events[event].wait_from(self.stream(handle))
        if handle == self.consumer:
            self.consume(handle)

    def new_stream(self, non_blocking: bool, priority: int) -> Stream:
        assert non_blocking, "it must not wait for the default stream, nor that one for it"
        stream = self.stream(self.new_handle())
        stream.priority, stream.device = priority, self.current_device
        return stream

    def poison(self, raw: npt.NDArray[np.uint8], counted: int, stream: Stream | None) -> None:
        with self.lock:
            self.allocated -= counted
            if stream is None:
                raw.fill(POISON)
            else:  # CuPy's pool gives memory to work that comes behind, on the stream it was taken for
                stream.enqueue(lambda: raw.fill(POISON))

    def copy(self, target: int, source: int, size: int, handle: int) -> None:
        self.check_status(self.fault)
        if handle == 0:
            self.default_stream_work += 1
        if not self.is_known(source):  # CUDA has read pageable memory when the call returns
            kept = ctypes.string_at(source, size)
            self.pageable_copies += 1
            self.stream(handle).enqueue(lambda: ctypes.memmove(target, kept, size))
            return
        self.stream(handle).enqueue(lambda: ctypes.memmove(target, source, size))

    def is_known(self, address: int) -> bool:
        """Whether an address is one of the device's, or of pinned memory."""
        with self.lock:
            number = bisect.bisect_right(self._ranges, (address, 1 << 64)) - 1
            return number >= 0 and address < self._ranges[number][1]

    def empty(self, shape: Any, dtype: npt.DTypeLike = np.float64) -> DeviceArray:
        self.unsafe_in_captures()
        self.arrays_made += 1
        shape = shape if isinstance(shape, tuple) else (shape,)
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        if self.allocated + size > self.capacity:
            raise OutOfMemoryError(f"{size} bytes")
        memory = Memory(self, size, stream=self.current[-1] if self.current else self.stream(0))
        return DeviceArray(memory.array(shape, dtype), memory)

    def asarray(self, host: npt.NDArray[Any]) -> DeviceArray:
        array = self.empty(host.shape, host.dtype)
        np.copyto(array._host, host)
        return array

    def contiguous(self, array: DeviceArray) -> DeviceArray:
        assert array.flags.c_contiguous, "a copy on the device that nobody counted on"
        return array

    def asnumpy(self, array: DeviceArray) -> npt.NDArray[Any]:
        self.run_all()
        return array.get()

    def empty_pinned(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        self.unsafe_in_captures()
        memory = Memory(self, int(np.prod(shape)) * np.dtype(dtype).itemsize, on_host=True)
        window = (ctypes.c_char * max(memory.size, 1)).from_address(memory.address)
        window.memory = memory  # type: ignore[attr-defined]
        return np.ndarray(shape, dtype, memoryview(window))  # its views refer to the window, and that to the memory

    def module(self, *, code: str, options: tuple[str, ...], name_expressions: list[str]) -> SimpleNamespace:
        operator = next(name for name in cuda_on_cpu.kernel_names() if _kernel.source_of(name) == code)

        def get_function(name: str) -> Callable[..., None]:
            kernel = self._kernels.setdefault((operator, name), _built_kernel(operator, code, name))

            def launch(grid: Any, block: Any, arguments: Any) -> None:
                # Arrays may be dropped after the launch, as in CUDA; their memory is poisoned then.
                values = [np.uint64(a.address) if isinstance(a, DeviceArray) else np.array(a)[()] for a in arguments]
                values = [np.array(v) if isinstance(v, np.void) else v for v in values]
                stream = self.current[-1] if self.current else self.stream(0)
                self.kernels.append(operator)
                if stream.ptr == 0:
                    self.default_stream_work += 1
                addresses = [a.address for a in arguments if isinstance(a, DeviceArray)]
                self.waiting_for.append(addresses)

                def run() -> None:
                    kernel(grid, block, values)
                    self.waiting_for.remove(addresses)

                stream.enqueue(run)

            return launch

        return SimpleNamespace(get_function=get_function)

    def cupy(self) -> SimpleNamespace:
        """What `import cupy` gives."""

        gpu = self

        class Device:
            def __init__(self, number: int | None = None) -> None:
                self.id = gpu.current_device if number is None else number
                self._before: list[int] = []

            def use(self) -> None:
                gpu.current_device = self.id

            def __enter__(self) -> Self:
                self._before.append(gpu.current_device)
                self.use()
                return self

            def __exit__(self, *exception: object) -> None:
                gpu.current_device = self._before.pop()

        def make_event(block: bool = False, disable_timing: bool = False) -> Event:
            self.events_made += 1
            return Event(self)

        runtime = SimpleNamespace(
            CUDARuntimeError=CudaRuntimeError,
            getDeviceCount=lambda: self.devices,
            memGetInfo=lambda: (self.capacity - self.allocated - self.pooled_bytes, self.capacity),
            memcpyDefault=4,
            memcpyAsync=lambda target, source, size, kind, handle: self.copy(target, source, size, handle),
            eventQuery=self.query_event,
            check_status=self.check_status,
            hostRegister=self.host_register,
            hostUnregister=self.host_unregister,
            pointerGetAttributes=lambda address: SimpleNamespace(devicePointer=address + self.device_offset),
            eventRecord=lambda event, handle: self.events[event].record(self.stream(handle)),
            streamWaitEvent=self.wait_for_event,
        )
        cuda = SimpleNamespace(
            Device=Device,
            Stream=self.new_stream,
            Event=make_event,
            MemoryPointer=lambda memory, offset: SimpleNamespace(mem=memory, ptr=memory.ptr + offset),
            UnownedMemory=lambda ptr, size, owner, device_id: SimpleNamespace(ptr=ptr, size=size, owner=owner),
            runtime=runtime,
            memory=SimpleNamespace(OutOfMemoryError=OutOfMemoryError),
            nvtx=SimpleNamespace(
                available=True,
                RangePush=lambda name: self.ranges.append((threading.current_thread().name, name)),
                RangePop=lambda: self.ranges.append((threading.current_thread().name, None)),
            ),
        )
        return SimpleNamespace(
            __version__="stand-in",
            ndarray=DeviceArray,
            RawModule=self.module,
            ascontiguousarray=self.contiguous,
            empty=self.empty,
            asarray=self.asarray,
            asnumpy=self.asnumpy,
            get_default_memory_pool=lambda: SimpleNamespace(
                free_all_blocks=lambda stream: self.freed_arenas.append(stream.ptr)
            ),
            get_default_pinned_memory_pool=lambda: SimpleNamespace(
                free_all_blocks=lambda: None, n_free_blocks=lambda: 0
            ),
            cuda=cuda,
        )


def _built_kernel(operator: str, source: str, name: str) -> cuda_on_cpu.CpuKernel:
    """A kernel's CPU build, kept in the temporary folder for the next process."""
    text = source + name + cuda_on_cpu.SHIM.read_text() + Path(cuda_on_cpu.__file__).read_text()
    folder = Path(tempfile.gettempdir()) / f"dali_pipes-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    kept = folder / hashlib.sha256(text.encode()).hexdigest()[:32]
    if not kept.exists():
        fresh = Path(tempfile.mkdtemp(dir=folder))
        cuda_on_cpu.build(operator, source, [name], fresh)
        with contextlib.suppress(OSError):  # another process was faster
            fresh.rename(kept)
    return cuda_on_cpu.CpuKernel(ctypes.CDLL(str(kept / f"{operator}.so")), 0)


@contextlib.contextmanager
def installed(order: str = "late", *, seed: int = 0, capacity: int = 1 << 34) -> Iterator[StandInGpu]:
    """Put the stand-in where CuPy, CUDA and DALI's GPU pipeline would be. `capacity`: bytes of its device memory."""
    gpu = StandInGpu(order, seed, capacity)

    def fill(static: Any, batch: Mapping[str, torch.Tensor], real: Any = batches.StaticBatch.copied) -> Any:
        gpu.consume(gpu.consumer)
        return real(static, batch)

    def share(part: Any, batch: Mapping[str, torch.Tensor], real: Any = batches.RowShare.of) -> Any:
        gpu.consume(gpu.consumer)
        return real(part, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "cupy", gpu.cupy())
        patch.setitem(sys.modules, "cupyx", SimpleNamespace(empty_pinned=gpu.empty_pinned))
        patch.setattr(device, "cuda_driver_present", lambda: True)
        patch.setattr(batches, "on_gpu", lambda part, number: torch.from_numpy(np.asarray(OnHost(part))))
        patch.setattr(loans, "_loans", {})
        patch.setattr(on_device, "exchange_capture_mode", gpu.exchange_capture_mode)
        patch.setattr(loans, "sleep", lambda seconds: gpu.run_all())
        patch.setattr(pipeline, "release_unused_memory", gpu.trim)
        patch.setattr(
            block_stream, "define_pipeline", lambda built, config, graph: _pipeline(gpu, built, config, graph)
        )
        patch.setattr(loader, "current_stream", lambda number: None if number is None else gpu.consumer)
        patch.setattr(token_loader, "cuda_problem", lambda: None)
        patch.setattr(batches.StaticBatch, "copied", fill)
        patch.setattr(batches.RowShare, "of", share)
        patch.setattr(loader.TokenLoader, "device", property(lambda self: torch.device("cpu")))
        _kernel._load.cache_clear()
        try:
            yield gpu
        finally:
            _kernel._load.cache_clear()


def _pipeline(gpu: StandInGpu, built: Any, config: Any, graph: Any, real: Any = pipeline.define_pipeline) -> Any:
    """The stand-in's pipeline for a source on the GPU; DALI's own for one on the CPU."""
    if built.gpu is None:
        return real(built, config, graph)
    assert graph is None, "DALI operators on a GPU cannot be played"
    return Pipeline(gpu, built, built.source.autotune.now.prefetch_queue_depth)
