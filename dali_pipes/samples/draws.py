"""`u` of a graph: the random numbers of each sample as DALI nodes, and the key of its noise."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.operators.permute import splitmix64

_STEP = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


class Draws(Sequence[Any]):
    """`u` of a graph: `num_draws` DALI nodes, each with one float32 in [0, 1) per sample.

    keys: DALI node for `keyed_noise`, uint64 (4,) a sample: a hash of all its numbers, then step and multipliers of
          splitmix64, which are more than a DALI constant holds
    """

    def __init__(self, numbers: Any, num_draws: int, keys: Any) -> None:
        self.keys = keys
        self._numbers, self._num_draws = numbers, num_draws

    def __len__(self) -> int:
        return self._num_draws

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(self._num_draws))]
        if not -self._num_draws <= index < self._num_draws:
            raise IndexError(f"u[{index}] is out of range: num_draws is {self._num_draws}; increase num_draws")
        return self._numbers[index % self._num_draws]


def noise_keys(numbers: npt.NDArray[np.float32]) -> npt.NDArray[np.uint64]:
    """`Draws.keys`, from the numbers (B, num_draws) of samples: uint64 (B, 4)."""
    bits = np.ascontiguousarray(numbers, np.float32).view(np.uint32).astype(np.uint64)
    draws = np.arange(1, numbers.shape[1] + 1, dtype=np.uint64)
    keys = np.empty((len(numbers), 4), np.uint64)
    keys[:, 0] = splitmix64(bits << np.uint64(32), draws).sum(1, dtype=np.uint64)
    keys[:, 1:] = [_STEP, *_MULTIPLIERS]
    return keys
