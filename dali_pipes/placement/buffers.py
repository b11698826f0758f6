"""Memory for blocks on the CPU, reused when it is no longer referenced: fresh pages would cost more than the work."""

import math
import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_ALIGNED = 64
"""Bytes of a line of the cache, on which every array begins."""


class Layout(NamedTuple):
    """Where arrays are in one piece of memory."""

    arrays: dict[str, tuple[tuple[int, ...], np.dtype[Any], int]]
    """By name: shape, dtype, and the byte at which it begins."""
    num_bytes: int


def layout_of(arrays: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> Layout:
    """One array after another: shape and dtype of each."""
    places, end = {}, 0
    for name, (shape, dtype) in arrays.items():
        begin = -(-end // _ALIGNED) * _ALIGNED
        places[name], end = (shape, dtype, begin), begin + math.prod(shape) * dtype.itemsize
    return Layout(places, end)


class _BufferOf(weakref.ref[Bytes]):
    """A weak reference to an array that knows the buffer under it."""

    __slots__ = ("buffer",)
    buffer: Bytes


class Buffers:
    """Groups of arrays, each in one piece of memory that is used again once nothing refers to any of them.

    Safe for several threads; arrays, and tensors over them, may be dropped in any.
    """

    MOST_FREE = 8
    """Free pieces kept; what a consumer held beyond that goes back to the system."""
    WINDOW = 128
    """Calls after which pieces that stayed free go back, too, as when fewer blocks are read ahead than before."""

    def __init__(self) -> None:
        self._spare, self._calls = self.MOST_FREE, 0  # in this window: pieces that were free at every call, and calls
        self._free: list[Bytes] = []
        self._used: dict[int, _BufferOf] = {}
        self._dropped: deque[_BufferOf] = deque()

    def take(self, layout: Layout) -> dict[str, npt.NDArray[Any]]:
        """Contiguous arrays with any content, by name."""
        whole = self._whole(layout.num_bytes)
        return {name: np.ndarray(shape, dtype, whole, begin) for name, (shape, dtype, begin) in layout.arrays.items()}

    def _whole(self, size: int) -> Bytes:
        if self._dropped:
            self._take_back()
        free = self._free
        try:  # the one used last is the likeliest to be in the cache
            buffer = free.pop()
        except IndexError:
            buffer = None
        if len(free) < self._spare:
            self._spare = len(free)
        self._calls += 1
        if self._calls >= self.WINDOW:
            del free[: self._spare]  # the ones at the front have waited longest
            self._spare, self._calls = self.MOST_FREE, 0
        if buffer is None or len(buffer) < size:
            unaligned = np.empty(size + _ALIGNED, np.uint8)
            buffer = unaligned[-unaligned.ctypes.data % _ALIGNED :]
        # NumPy lets a view of a view refer to the array that the first is a view of, here that would be `buffer`, but
        # not beyond an array that is over other memory than an array's: so every part of what is returned, and every
        # tensor over one, holds `whole`, and the reference dies with the last of them.
        whole = np.frombuffer(buffer.data, np.uint8)
        # The callback is a C function: no interrupt can hit it, which one in Python would swallow.
        reference = _BufferOf(whole, self._dropped.append)
        reference.buffer = buffer
        self._used[id(reference)] = reference
        return whole

    def _take_back(self) -> None:
        while True:
            try:
                reference = self._dropped.popleft()
            except IndexError:  # another thread may have taken the last one
                return
            is_whole = self._used.pop(id(reference), None) is not None  # else an interrupt came before its buffer
            if is_whole and len(self._free) < self.MOST_FREE:
                self._free.append(reference.buffer)
