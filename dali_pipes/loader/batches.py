"""Blocks of arrays cut into batches of tensors, without copies unless they must be at fixed addresses.

Arrays are cut, not tensors over them: each batch's tensor has a storage as large as the tensor, which keeps the block
alive. Views of one tensor would share a storage, and `torch.save` writes whole storages.

A trainer's modes (inference, fake tensors, a default device) are meant for what the trainer makes. The batches of a
block are made together, so a mode that is on at one `next()` would reach the others: they are made outside all modes.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

from dali_pipes.config.context_parallel import shared_ranges
from dali_pipes.config.outputs import OUTPUTS, Axes
from dali_pipes.placement.base import Batches
from dali_pipes.placement.on_device import name_fault
from dali_pipes.rows.outputs import Outputs

Batch = dict[str, Any]
"""Tensors by output name; `max_seqlen` and `num_segments` are integers."""


Arguments = ParamSpec("Arguments")
Made = TypeVar("Made")


def outside_modes(make: Callable[Arguments, Made]) -> Callable[Arguments, Made]:
    """The function, but it creates ordinary tensors regardless of the torch modes of the calling thread."""

    @functools.wraps(make)
    def made(*arguments: Arguments.args, **options: Arguments.kwargs) -> Made:
        if not (
            torch.is_inference_mode_enabled()
            or torch._C._len_torch_dispatch_stack()  # such as FakeTensorMode
            or torch._C._len_torch_function_stack()  # such as a default device
        ):
            return make(*arguments, **options)  # entering the three costs more than a tensor
        with torch.inference_mode(False), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
            return make(*arguments, **options)

    return made


@outside_modes
def sliced(block: Batches, outputs: Outputs, device: int | None) -> list[Batch]:
    """The batches of a block, one after another, in its memory. Does not block."""
    sizes, names = block.sizes, outputs.names
    if device is None and outputs.is_of_rows and not block.is_flat and sizes.count(sizes[0]) == len(sizes):
        arrays = [block.arrays[name] for name in names]
        if isinstance(arrays[0], np.ndarray):  # in few steps, as this is done for each of a few batches
            shape = len(sizes), sizes[0]
            parts = [map(torch.from_numpy, array.reshape(*shape, *array.shape[1:])) for array in arrays]
            return [dict(zip(names, batch, strict=True)) for batch in zip(*parts, strict=True)]
    columns: dict[str, Sequence[Any]] = {}
    for name in names:
        axes = OUTPUTS[name].axes
        if axes is Axes.NUMBER:
            columns[name] = [values[name] for values in block.values]
            continue
        array = as_cut(block.arrays[name], device)
        if block.is_flat and axes is not Axes.ROWS:
            shapes = [outputs.shape(name, *part) for part in zip(block.sizes, block.widths, strict=True)]
            flat = cut(array, [math.prod(shape) for shape in shapes], device)
            columns[name] = [values.view(shape) for values, shape in zip(flat, shapes, strict=True)]
        else:
            lines = [1] * len(block.sizes) if axes is Axes.SEGMENT_BOUNDS else block.sizes
            columns[name] = cut(array, lines, device)
        if axes is Axes.SEGMENT_BOUNDS:
            columns[name] = [bounds.view(-1) for bounds in columns[name]]
    return [dict(zip(columns, batch, strict=True)) for batch in zip(*columns.values(), strict=True)]


class RowShare:
    """The share of every row that one context-parallel rank gets, as copies: (B, T / size, ...).

    What describes whole rows stays whole: `cu_seqlens`, `max_seqlen`, `num_segments` and `row_ids`.
    """

    def __init__(self, rank: int, size: int, split: str) -> None:
        self.size = size
        self._rank, self._split = rank, split

    @outside_modes
    def of(self, batch: Batch) -> Batch:
        """The share of a batch. On a GPU it is copied on torch's current stream; does not block."""
        return {
            name: self.columns(value) if OUTPUTS[name].axes is Axes.POSITIONS else value
            for name, value in batch.items()
        }

    def columns(self, rows: torch.Tensor) -> torch.Tensor:
        """The share of (B, T, ...): a copy, (B, T / size, ...)."""
        ranges = shared_ranges(rows.shape[1], self._rank, self.size, self._split)
        parts = [rows[:, first:end] for first, end in ranges]
        return parts[0].clone(memory_format=torch.contiguous_format) if len(parts) == 1 else torch.cat(parts, 1)


@outside_modes
def row_positions(width: int, share: RowShare | None) -> torch.Tensor:
    """The positions, in a row of `width`, of a batch's columns: int64 (T,), on the CPU."""
    positions = torch.arange(width)
    return positions if share is None else share.columns(positions[None])[0]


class StaticBatch:
    """Tensors at fixed addresses, one set for each width, into which every batch is copied.

    order: makes one stream wait for what has been queued on another
    """

    def __init__(self, batch_size: int, order: Callable[[int, int], None]) -> None:
        self._batch_size, self._order = batch_size, order
        self._stream: int | None = None  # that the last batch was copied on
        self._tensors: dict[tuple[str, torch.Size], torch.Tensor] = {}

    def fill(self, batch: Batch, stream: int | None) -> Batch:
        """Copy a batch, on torch's current `stream`; a partial one fills the first rows. Does not block."""
        if stream is not None and self._stream is not None:
            self._order(self._stream, stream)  # the last batch may still be read there
        self._stream = stream
        return self.copied(batch)

    @outside_modes
    def copied(self, batch: Batch) -> Batch:
        """The same, if what reads the last batch has been queued on the same stream."""
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        filled = dict(batch)
        for name, tensor in tensors.items():
            has_rows = OUTPUTS[name].axes is not Axes.SEGMENT_BOUNDS
            key = name, tensor.shape[1:] if has_rows else tensor.shape
            if key not in self._tensors:
                shape = (self._batch_size, *tensor.shape[1:]) if has_rows else tensor.shape
                self._tensors[key] = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            filled[name] = _first_rows(self._tensors[key], len(tensor))
            filled[name].copy_(tensor, non_blocking=True)
        return filled


def _first_rows(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The first rows, at the same address, in a storage of their size."""
    if rows == len(tensor):
        return tensor.detach()  # another object over the same storage
    storage = tensor.untyped_storage()[: rows * tensor.stride(0) * tensor.itemsize]
    part = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return part.set_(storage, 0, (rows, *tensor.shape[1:]), tensor.stride())


def cuda_problem() -> str | None:
    """Why torch cannot use a GPU that CUDA has, None if it can. Does not create a CUDA context."""
    if torch.cuda.is_available():
        return None
    return f"torch {torch.__version__} does not see a GPU: it was built for CPUs, or for a newer driver"


def current_stream(device: int | None) -> int | None:
    """The raw handle of torch's current stream, which the trainer works on; None on the CPU."""
    if device is None:
        return None
    # The same as `torch.cuda.current_stream(device).cuda_stream`, without making an object for every batch.
    return torch._C._cuda_getCurrentRawStream(device)


def as_cut(array: Any, device: int | None) -> Any:
    """An array as one that can be cut: DALI's own output on the CPU cannot."""
    if device is None and not isinstance(array, np.ndarray):
        return torch.utils.dlpack.from_dlpack(array).numpy()
    assert device is not None or array.flags.writeable, "arrays of a kept plan are read-only: later batches need them"
    return array


def cut(array: Any, sizes: Sequence[int], device: int | None) -> list[torch.Tensor]:
    """Tensors over parts of an array, of `sizes` in its first axis; each holds the array as long as a view lives."""
    if len(sizes) == 1:
        return [torch.from_numpy(array) if device is None else on_gpu(array, device)]
    size, count = sizes[0], len(sizes)
    if device is None and sizes.count(size) == count and size * count == len(array):
        return list(map(torch.from_numpy, array.reshape(count, size, *array.shape[1:])))
    parts = [array[end - size : end] for size, end in zip(sizes, itertools.accumulate(sizes), strict=True)]
    return [torch.from_numpy(part) if device is None else on_gpu(part, device) for part in parts]


def on_gpu(part: Any, device: int) -> torch.Tensor:
    """A tensor over memory of a GPU."""
    try:
        return torch.as_tensor(part, device=torch.device("cuda", device))
    except RuntimeError as error:
        name_fault(error, device)
        raise
