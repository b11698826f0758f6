"""Memory for blocks on the CPU, reused when it is no longer referenced: fresh pages would cost more than the work."""

import weakref
from collections import deque
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

_ALIGNED = 64
"""Bytes of a line of the cache, on which every array begins."""


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

    def __init__(self) -> None:
        self._free: list[Bytes] = []
        self._used: dict[int, _BufferOf] = {}
        self._dropped: deque[_BufferOf] = deque()

    def take(self, sizes: dict[str, tuple[int, np.dtype[Any]]]) -> dict[str, npt.NDArray[Any]]:
        """Arrays (N,) with any content, by name: N and dtype of each."""
        places, end = {}, 0
        for name, (count, dtype) in sizes.items():
            places[name] = end, end + count * dtype.itemsize
            end = -(-places[name][1] // _ALIGNED) * _ALIGNED
        whole = self._whole(end)
        return {name: whole[begin:stop].view(sizes[name][1]) for name, (begin, stop) in places.items()}

    def _whole(self, size: int) -> Bytes:
        self._take_back()
        try:  # the one used last is the likeliest to be in the cache
            buffer = self._free.pop()
        except IndexError:
            buffer = None
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
            self._used.pop(id(reference), None)
            if len(self._free) < self.MOST_FREE:
                self._free.append(reference.buffer)
