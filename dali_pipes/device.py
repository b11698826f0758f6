"""The one module that owns GPU memory and streams. Every CUDA call of this package is made here or by an operator.

Who owns a buffer, who writes it, and what frees it:

    staging    pinned host memory, one a block in flight; written by a reader thread, read by an asynchronous copy on
               `stream`; free again when the event recorded behind that copy has passed (a reader thread waits for it)
    tokens, input_ids, labels
               device memory, one set; written by the copy and the kernels on `stream`. DALI copies input_ids and
               labels into its own memory on the same `stream`, so the next block cannot overtake that copy.
    corpus     device memory (placement "device"); written once while loading

Nothing here runs on the default stream and nothing waits for the device in the steady state.

Not yet run on a GPU: this is the thin first form, and no figure is claimed for it.
"""

import ctypes
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus import Corpus
from dali_pipes.errors import BackendError
from dali_pipes.operators import permute, rows
from dali_pipes.schedule import Schedule
from dali_pipes.source import IGNORE_INDEX, Plan, Slot, check_range, read_checked
from dali_pipes.stats import BlockTimes

Array = Any

DEVICE_SHARE = 0.1
"""Share of the free GPU memory that placement "auto" gives to the corpus at most."""


def cuda_driver_present() -> bool:
    """Whether the CUDA driver library can be loaded. Creates no CUDA context."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def require_cupy() -> Any:
    """CuPy with at least one visible device. Raises `BackendError` naming what is missing and how to get it."""
    try:
        import cupy
    except ImportError as error:
        raise BackendError(
            'device = "cuda" needs CuPy: pip install "dali-pipes[cuda12]" or "dali-pipes[cuda13]" to match the driver, '
            'or use device = "cpu"'
        ) from error
    try:
        count = int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise BackendError(
            f'device = "cuda" was asked for, but CUDA found no usable device ({error}); use device = "cpu"'
        ) from error
    if count == 0:
        raise BackendError('device = "cuda" was asked for, but no device is visible; use device = "cpu"')
    return cupy


def empty_pinned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """Page-locked host memory as a NumPy array, so that copies to the device need no staging of the driver's own."""
    import cupyx

    return cupyx.empty_pinned(shape, dtype)


def choose_device(requested: str, local_rank: int | None) -> tuple[int | None, str]:
    """The CUDA device number, or None for the CPU, and the reason for the choice.

    "cuda" is the launcher's local rank where there is one, else CUDA's current device. Only "auto" may fall back to
    the CPU. Raises `BackendError` when a GPU that was asked for cannot be used.
    """
    if requested == "cpu":
        return None, 'device = "cpu"'
    if requested == "auto":
        if not cuda_driver_present():
            return None, "no CUDA driver on this machine"
        try:
            cupy = require_cupy()
        except BackendError as error:
            return None, str(error)
    else:
        cupy = require_cupy()
    if ":" in requested:
        number = int(requested.split(":")[1])
    else:
        number = local_rank if local_rank is not None else int(cupy.cuda.Device().id)
    count = int(cupy.cuda.runtime.getDeviceCount())
    if number >= count:
        raise BackendError(f"device cuda:{number} was asked for, but {count} device(s) are visible")
    return number, f"device = {requested!r}"


def choose_placement(requested: str, device: int, corpus: Corpus) -> tuple[str, str]:
    """The placement, "host" or "device", and the reason."""
    cupy = require_cupy()
    size = corpus.num_tokens * corpus.dtype.itemsize
    with cupy.cuda.Device(device):
        free, _total = cupy.cuda.runtime.memGetInfo()
    if requested == "device" and size > free:
        raise BackendError(
            f'placement = "device": the corpus takes {size / 2**30:.2f} GiB and cuda:{device} has '
            f'{free / 2**30:.2f} GiB free; use placement = "host"'
        )
    if requested != "auto":
        return requested, f"placement = {requested!r}"
    fits = size <= DEVICE_SHARE * free
    comparison = "fits in" if fits else "is more than"
    reason = f"corpus of {size / 2**30:.2f} GiB {comparison} {DEVICE_SHARE:.0%} of {free / 2**30:.1f} GiB free"
    return ("device" if fits else "host"), reason


class _GpuPlacement:
    """What both placements share: a stream, and device arrays for one block."""

    def __init__(self, schedule: Schedule, device: int, *, label_shift: bool) -> None:
        self._cupy = require_cupy()
        self._schedule, self._seq_len, self._label_shift = schedule, schedule.windows.seq_len, label_shift
        self._device = self._cupy.cuda.Device(device)
        with self._device:
            self.stream = self._cupy.cuda.Stream(non_blocking=True)
        self._arrays: dict[str, Array] = {}

    def _device_array(self, name: str, max_rows: int, width: int, dtype: npt.DTypeLike) -> Array:
        if name not in self._arrays or self._arrays[name].shape[0] < max_rows:
            self._arrays[name] = self._cupy.empty((max_rows, width), dtype)
        return self._arrays[name]

    def _run_rows(self, tokens: Array, starts: Array | range, plan: Plan, max_rows: int) -> dict[str, Array]:
        count = len(plan.row_ids)
        inputs = self._device_array("input_ids", max_rows, self._seq_len, np.int64)[:count]
        labels = self._device_array("labels", max_rows, self._seq_len, np.int64)[:count]
        rows(tokens, starts, self._seq_len, label_shift=self._label_shift, out=(inputs, labels))
        if self._schedule.pads and plan.row_ids[-1] < 0:  # padding is always the last row of a block
            labels[count - 1].fill(IGNORE_INDEX)
        return {"input_ids": inputs, "labels": labels}

    def close(self) -> None:
        self._arrays.clear()


class HostPlacement(_GpuPlacement):
    """Tokens cross to the GPU block by block, in the file's own width, and are widened and labelled there."""

    def __init__(
        self, corpus: Corpus, schedule: Schedule, device: int, *, label_shift: bool, vocab_size: int | None
    ) -> None:
        super().__init__(schedule, device, label_shift=label_shift)
        self._corpus, self._vocab_size = corpus, vocab_size
        self._width = self._seq_len + label_shift

    def new_slot(self, max_rows: int) -> Slot:
        with self._device:
            staging = empty_pinned((max_rows, self._width), self._corpus.dtype)
            return Slot({"staging": staging, "copied": self._cupy.cuda.Event(disable_timing=True)})

    def prepare(self, slot: Slot, plan: Plan, times: BlockTimes) -> None:
        slot.arrays["copied"].synchronize()  # the last copy out of this staging buffer; a new event has passed already
        read_checked(self._corpus, plan, slot.arrays["staging"][: len(plan.starts)], self._vocab_size, times)

    def deliver(self, slot: Slot, plan: Plan) -> dict[str, Array]:
        count, staging = len(plan.starts), slot.arrays["staging"]
        with self._device, self.stream:
            tokens = self._device_array("tokens", len(staging), self._width, staging.dtype)[:count]
            tokens.set(staging[:count], stream=self.stream)
            slot.arrays["copied"].record(self.stream)
            starts = range(0, count * self._width, self._width)
            return self._run_rows(tokens.reshape(-1), starts, plan, len(staging))


class DevicePlacement(_GpuPlacement):
    """The whole corpus in GPU memory; order and gather are computed there."""

    def __init__(
        self, corpus: Corpus, schedule: Schedule, device: int, *, label_shift: bool, vocab_size: int | None
    ) -> None:
        super().__init__(schedule, device, label_shift=label_shift)
        piece = 32 << 20
        with self._device, self.stream:
            self._tokens = self._cupy.empty(corpus.num_tokens, corpus.dtype)
            for start in range(0, corpus.num_tokens, piece):
                tokens = corpus.tokens(start, min(piece, corpus.num_tokens - start))
                check_range(tokens[None], np.array([start]), corpus, vocab_size)
                self._tokens[start : start + len(tokens)].set(tokens, stream=self.stream)
                self.stream.synchronize()  # before the piece's memory goes away

    def new_slot(self, max_rows: int) -> Slot:
        return Slot({"max_rows": max_rows})

    def prepare(self, slot: Slot, plan: Plan, times: BlockTimes) -> None:
        pass

    def deliver(self, slot: Slot, plan: Plan) -> dict[str, Array]:
        schedule, key = self._schedule, self._schedule.key(plan.steps.epoch)
        with self._device, self.stream:
            windows = self._cupy.asarray(np.maximum(plan.row_ids, 0))
            if key is not None:
                windows = permute(windows, schedule.num_rows, key)
            starts = schedule.starts(windows)
            return self._run_rows(self._tokens, starts, plan, slot.arrays["max_rows"])

    def close(self) -> None:
        super().close()
        self._tokens = None
