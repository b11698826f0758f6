"""Memory that a thread needs while it makes a block, and not longer: as many pieces as threads work on blocks."""

from typing import Any

import numpy as np
import numpy.typing as npt


class Scratch:
    """Arrays (N,) of one dtype, borrowed for a while. Safe for several threads."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._free: list[npt.NDArray[Any]] = []

    def borrow(self, size: int) -> npt.NDArray[Any]:
        """(`size` or more,), with any content. The one given back last, as it is the likeliest to be in the cache."""
        try:
            array = self._free.pop()
        except IndexError:
            return np.empty(size, self._dtype)
        return array if len(array) >= size else np.empty(size, self._dtype)

    def give_back(self, array: npt.NDArray[Any]) -> None:
        """Let another thread borrow the array."""
        self._free.append(array)
