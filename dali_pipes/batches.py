"""Blocks of arrays cut into batches of tensors: views, no copies, unless they must be at fixed addresses."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from dali_pipes.block_queue import Piece
from dali_pipes.context_parallel import shared_ranges
from dali_pipes.row_outputs import RowOutputs

ROW_OUTPUTS = frozenset(("input_ids", "labels", "position_ids", "segment_ids", "loss_mask", "attention_mask"))
"""Outputs with an entry for each position of a row, in their second axis."""

Batch = dict[str, Any]
"""Tensors by output name; `max_seqlen` and `num_segments` are whole numbers."""


def sliced(piece: Piece, names: Sequence[str], device: int | None, row_outputs: RowOutputs | None) -> Iterator[Batch]:
    """The batches of a piece, one after another, as views of its memory. Does not block."""
    columns: dict[str, Sequence[Any]] = {}
    for name in names:
        if name not in piece.arrays:
            columns[name] = [values[name] for values in piece.values]
            continue
        tensor = as_tensor(piece.arrays[name], device)
        if piece.is_flat and name != "row_ids":
            assert row_outputs is not None
            columns[name] = row_outputs.unfolded(name, tensor, list(zip(piece.sizes, piece.widths, strict=True)))
        elif len(piece.sizes) == 1:
            columns[name] = [tensor]
        else:
            columns[name] = tensor.split([1] * len(piece.sizes) if name == "cu_seqlens" else piece.sizes)
        if name == "cu_seqlens":
            columns[name] = [bounds[0] for bounds in columns[name]]
    return (dict(zip(columns, batch, strict=True)) for batch in zip(*columns.values(), strict=True))


class RowShare:
    """The share of every row that one context-parallel rank gets, as copies: (B, T / size, ...).

    What describes whole rows stays whole: `cu_seqlens`, `max_seqlen`, `num_segments` and `row_ids`.
    """

    def __init__(self, rank: int, size: int, split: str) -> None:
        self.size = size
        self._rank, self._split = rank, split

    def of(self, batch: Batch) -> Batch:
        """The share of a batch. On a GPU it is copied on torch's current stream; does not block."""
        return {name: self.columns(value) if name in ROW_OUTPUTS else value for name, value in batch.items()}

    def columns(self, rows: torch.Tensor) -> torch.Tensor:
        """The share of (B, T, ...): a copy, (B, T / size, ...)."""
        ranges = shared_ranges(rows.shape[1], self._rank, self.size, self._split)
        parts = [rows[:, first:end] for first, end in ranges]
        return parts[0].clone(memory_format=torch.contiguous_format) if len(parts) == 1 else torch.cat(parts, 1)


class StaticBatch:
    """Tensors at fixed addresses, a set for each width of a batch, which batch after batch is copied into.

    order: lets one stream wait for what has been queued on another
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

    def copied(self, batch: Batch) -> Batch:
        """The same, where what reads the last batch has been queued on the same stream."""
        tensors = {name: value for name, value in batch.items() if isinstance(value, torch.Tensor)}
        filled = dict(batch)
        for name, tensor in tensors.items():
            key = name, tensor.shape if name == "cu_seqlens" else tensor.shape[1:]
            if key not in self._tensors:
                shape = tensor.shape if name == "cu_seqlens" else (self._batch_size, *tensor.shape[1:])
                self._tensors[key] = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            filled[name] = self._tensors[key][: len(tensor)]
            filled[name].copy_(tensor, non_blocking=True)
        return filled


def why_no_cuda() -> str | None:
    """Why torch cannot use a GPU that CUDA has, None if it can. Creates no CUDA context."""
    if torch.cuda.is_available():
        return None
    return f"torch {torch.__version__} sees no GPU: it is a build for the CPU, or for a newer driver"


def current_stream(device: int | None) -> int | None:
    """The raw handle of torch's current stream, which the trainer works on; None on the CPU."""
    if device is None:
        return None
    # What `torch.cuda.current_stream(device).cuda_stream` says, without making an object for every batch.
    return torch._C._cuda_getCurrentRawStream(device)


def as_tensor(array: Any, device: int | None) -> Any:
    """A tensor over an array's memory, which holds the array as long as any view of it lives."""
    if isinstance(array, np.ndarray):
        assert array.flags.writeable, "a kept plan's arrays are not: the trainer would change what later batches are"
        return torch.from_numpy(array)
    if device is None:  # DALI's own output, on the CPU
        return torch.utils.dlpack.from_dlpack(array)
    return torch.as_tensor(array, device=torch.device("cuda", device))
