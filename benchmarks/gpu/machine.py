"""The seam between the parts and the device: `Cuda` for a real card, `Dry` for running every line without one.

A part asks a `Machine` for what only a device has: streams, events, long kernels, graphs, a full memory. All else is
torch, CuPy and the loader, which in a dry run are torch on the CPU and a stand-in for CuPy and DALI's GPU side.
"""

import contextlib
import datetime
import importlib
import platform
import re
import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

_PACKAGES = ("torch", "numpy", "cupy", "nvidia.dali")
_TESTS = Path(__file__).resolve().parents[2] / "tests"
_LONGEST_HEAD_START_S = 0.02


class Event(Protocol):
    """A mark in a stream. `elapsed_time` is in milliseconds, as torch has it."""

    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def elapsed_time(self, end_event: Any, /) -> float: ...


class Machine(ABC):
    """What the parts need of a device."""

    dry: bool
    device: torch.device
    out_of_memory: type[Exception]

    @abstractmethod
    def card(self) -> dict[str, Any]:
        """Name, driver, CUDA and memory of the card."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work of the device."""

    @abstractmethod
    def stream(self) -> Any:
        """A new stream beside the default one."""

    @abstractmethod
    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Make `stream` torch's current one while entered."""

    @abstractmethod
    def busy(self, seconds: float) -> None:
        """Queue a kernel of about this length on the current stream."""

    @abstractmethod
    def event(self) -> Event:
        """An event that keeps time, and whose `synchronize` sleeps instead of spinning."""

    @abstractmethod
    def capture(self, function: Callable[[], None], mode: str = "thread_local") -> Callable[[], None]:
        """Capture what `function` queues in a CUDA graph; returns what replays it on the current stream.

        mode: torch's `capture_error_mode`. In its default, "global", calls of other threads may end the capture.
        """

    @abstractmethod
    def wait(self, stream: Any, other: Any) -> None:
        """Let `stream` (None: the current one) wait for what has been queued on `other` (None: the same)."""

    @abstractmethod
    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """What torch offers to say that a tensor is used on another stream."""

    @abstractmethod
    def fail_a_kernel(self) -> None:
        """Run a kernel with a device-side assert that does not hold; afterwards the device is of no use."""

    @abstractmethod
    def devices(self) -> int:
        """How many devices there are."""

    @abstractmethod
    def use(self, number: int) -> torch.device:
        """Make a device the current one of torch; returns it."""

    @abstractmethod
    def free_and_total_bytes(self) -> tuple[int, int]:
        """Device memory, over all processes."""

    @abstractmethod
    def nearly_full(self, leave_bytes: int) -> contextlib.AbstractContextManager[None]:
        """While entered, all but about `leave_bytes` of the device's memory is taken."""

    @abstractmethod
    def exhaust(self) -> None:
        """Allocate until `out_of_memory` is raised."""

    @abstractmethod
    def pinned(self, size_bytes: int) -> torch.Tensor:
        """Page-locked host memory."""

    @abstractmethod
    def no_waits(self) -> contextlib.AbstractContextManager[None]:
        """While entered, a call of torch's that waits for the device raises."""

    def about(self) -> dict[str, Any]:
        """Card and versions, for the report."""
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "dry": self.dry,
            **self.card(),
            "python": platform.python_version(),
            "versions": {name: str(importlib.import_module(name).__version__) for name in _PACKAGES},
        }

    def timed(self, function: Callable[[], object], calls: int, repeats: int = 7) -> float:
        """Seconds of the device for one call: the median of `repeats` rows of `calls`.

        The calls queue up behind a kernel that runs while the host launches them, so the host's time is not in it.
        """
        function()
        self.synchronize()
        started = time.perf_counter()
        for _ in range(calls):
            function()
        head_start_s = min(1.5 * (time.perf_counter() - started) + 1e-4, _LONGEST_HEAD_START_S)
        self.synchronize()
        seconds = []
        for _ in range(repeats):
            start, end = self.event(), self.event()
            self.busy(head_start_s)
            start.record()
            for _ in range(calls):
                function()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3 / calls)
        return statistics.median(seconds)


class Cuda(Machine):
    """The current device, through torch."""

    dry = False
    out_of_memory = torch.cuda.OutOfMemoryError

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())
        self._cycles_per_s = 1e9
        self.busy(1e-3)  # loads the kernel
        start, end = self.event(), self.event()
        start.record()
        self.busy(1e-2)
        end.record()
        end.synchronize()
        self._cycles_per_s = 1e7 / (start.elapsed_time(end) / 1e3)

    def card(self) -> dict[str, Any]:
        import cupy

        properties = torch.cuda.get_device_properties(self.device)
        return {
            "card": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "driver": _driver_version(),
            "cuda_of_driver": int(cupy.cuda.runtime.driverGetVersion()),
            "cuda_runtime": torch.version.cuda,
            "cuda_runtime_of_cupy": int(cupy.cuda.runtime.runtimeGetVersion()),
        }

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def stream(self) -> Any:
        return torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def busy(self, seconds: float) -> None:
        torch.cuda._sleep(int(seconds * self._cycles_per_s))  # type: ignore[no-untyped-call]

    def event(self) -> Event:
        event: Event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        return event

    def capture(self, function: Callable[[], None], mode: str = "thread_local") -> Callable[[], None]:
        warm_up = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            function()
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode=mode):
            function()
        return graph.replay

    def wait(self, stream: Any, other: Any) -> None:
        current = torch.cuda.current_stream()
        (stream or current).wait_stream(other or current)

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def fail_a_kernel(self) -> None:
        table = torch.zeros(4, device=self.device)
        torch.index_select(table, 0, torch.full((4,), 1000, device=self.device))

    def devices(self) -> int:
        return torch.cuda.device_count()

    def use(self, number: int) -> torch.device:
        torch.cuda.set_device(number)
        return torch.device("cuda", number)

    def free_and_total_bytes(self) -> tuple[int, int]:
        free, total = torch.cuda.mem_get_info()
        return free, total

    @contextlib.contextmanager
    def nearly_full(self, leave_bytes: int) -> Iterator[None]:
        torch.cuda.empty_cache()
        held = []
        while (size := self.free_and_total_bytes()[0] - leave_bytes) > 0:
            held.append(torch.empty(min(size, 2**30), dtype=torch.uint8, device=self.device))
        try:
            yield
        finally:
            held.clear()
            torch.cuda.empty_cache()

    def exhaust(self) -> None:
        held = []
        try:
            while True:
                held.append(torch.empty(2**30, dtype=torch.uint8, device=self.device))
        finally:
            held.clear()
            torch.cuda.empty_cache()

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class _HostEvent:
    """Work is done when it has been queued, so an event is a time."""

    def record(self) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        assert self._time > 0.0, "waiting for an event that was never recorded"

    def elapsed_time(self, end_event: Any, /) -> float:
        return 1e3 * float(end_event._time - self._time)


class Dry(Machine):
    """No device: torch on the CPU, and a stand-in for CuPy and DALI's GPU side for as long as the process lives."""

    dry = True
    out_of_memory = MemoryError

    def __init__(self) -> None:
        sys.path.insert(0, str(_TESTS))
        import gpu_stand_in

        # "early": work runs when it is queued, so that arrays may be dropped right after a launch, as CuPy allows.
        self._installed = gpu_stand_in.installed("early")
        self._gpu = self._installed.__enter__()
        self.device = torch.device("cpu")
        torch.set_num_threads(1)  # threads that wait for each other make tiny steps slow on a busy machine

    def card(self) -> dict[str, Any]:
        return {"card": "none: dry run on the CPU", "driver": None, "cuda_runtime": None}

    def synchronize(self) -> None:
        pass

    def stream(self) -> Any:
        return object()

    def on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext(stream)

    def busy(self, seconds: float) -> None:
        pass

    def event(self) -> Event:
        return _HostEvent()

    def capture(self, function: Callable[[], None], mode: str = "thread_local") -> Callable[[], None]:
        function()
        return function

    def wait(self, stream: Any, other: Any) -> None:
        pass

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        pass

    def fail_a_kernel(self) -> None:
        self._gpu.fault = 710

    def devices(self) -> int:
        return int(self._gpu.devices)

    def use(self, number: int) -> torch.device:
        return self.device

    def free_and_total_bytes(self) -> tuple[int, int]:
        import cupy

        free, total = cupy.cuda.runtime.memGetInfo()
        return int(free), int(total)

    @contextlib.contextmanager
    def nearly_full(self, leave_bytes: int) -> Iterator[None]:
        import cupy

        runtime = cupy.cuda.runtime
        before, total = runtime.memGetInfo, self.free_and_total_bytes()[1]
        runtime.memGetInfo = lambda: (leave_bytes, total)
        try:
            yield
        finally:
            runtime.memGetInfo = before

    def exhaust(self) -> None:
        raise MemoryError("out of memory, as asked for")

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def no_waits(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def make_machine(dry: bool) -> Machine:
    """The machine that all parts of a run use. Creates the CUDA context."""
    return Dry() if dry else Cuda()


def _driver_version() -> str:
    """As the kernel module says, else as nvidia-smi does."""
    module = Path("/proc/driver/nvidia/version")
    if module.exists():
        found = re.search(r"\s(\d+\.\d+(\.\d+)?)\s", module.read_text())
        if found:
            return found[1]
    try:
        command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.split()
    except (OSError, subprocess.TimeoutExpired):
        lines = []
    return lines[0] if lines else "unknown"
