"""Memory for batches on the CPU, reused when it is no longer referenced: fresh pages would cost more than the work."""

import math
import weakref
from collections import deque

import numpy as np
import numpy.typing as npt


class _BufferOf(weakref.ref[npt.NDArray[np.int64]]):
    """A weak reference to an array that knows the buffer under it."""

    __slots__ = ("buffer",)
    buffer: npt.NDArray[np.int64]


class Buffers:
    """int64 arrays of up to `size` elements, whose memory is used again once no array or tensor refers to it.

    For one thread at a time; arrays and tensors may be dropped in any.
    """

    MOST_FREE = 8
    """Free buffers kept; what a consumer held beyond that goes back to the system."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._free: list[npt.NDArray[np.int64]] = []
        self._used: dict[int, _BufferOf] = {}
        self._dropped: deque[_BufferOf] = deque()

    def take(self, shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
        """An array with any content."""
        while self._dropped:
            reference = self._dropped.popleft()
            self._used.pop(id(reference), None)
            if len(self._free) < self.MOST_FREE:
                self._free.append(reference.buffer)
        # The one used last is the likeliest to be in the cache.
        buffer = self._free.pop() if self._free else np.empty(self._size, np.int64)
        # NumPy lets a view of a view refer to the array that the first is a view of, here that would be `buffer`, but
        # not beyond an array that is over other memory than an array's: so every part of what is returned, and every
        # tensor over one, holds `whole`, and the reference dies with the last of them.
        whole = np.frombuffer(buffer.data, np.int64)
        # The callback is a C function: no interrupt can hit it, which one in Python would swallow.
        reference = _BufferOf(whole, self._dropped.append)
        reference.buffer = buffer
        self._used[id(reference)] = reference
        return whole[: math.prod(shape)].reshape(shape)
