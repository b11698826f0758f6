"""keyed_noise: Gaussian noise inside a graph, determined by the random numbers of each sample.

    keyed_noise(u, (2, 3))     sample of row 0   [[ 0.43 -1.20  0.07]      the same in another batch size, order,
                                                  [-0.68  1.91  0.35]]     on another rank and after a resume

    key       of a sample: a hash of all its numbers; of a stream: output `stream` + 1 of splitmix64 seeded with that
    word n    output n + 1 of splitmix64 seeded with the key of the stream, for entry n in C order
    entry n   sqrt(-2 ln a) cos(2 pi b), a and b from the upper and the lower 32 bits of word n (G. E. P. Box,
              M. E. Muller, "A Note on the Generation of Random Normal Deviates", 1958); at most 6.8 away from 0

DALI's own `fn.random.normal` and `fn.noise` depend on how often they have been called, and so on the batch.
"""

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import ConfigError
from dali_pipes.samples.draws import Draws

_LARGEST = 2**31 - 1


def keyed_noise(u: Draws, shape: Sequence[int], *, stream: int = 0) -> Any:
    """Standard normal noise for each sample, as a DALI node for use in a `graph=`.

    u:      the random numbers passed to the graph
    shape:  shape of the noise of one sample, at most 2**31 - 1 values
    stream: >= 0; different streams give independent noise

    Returns a float32 node of that shape, computed on the CPU in about 40 ns per value; `.gpu()` passes it to operators
    on the GPU. Two samples get the same noise only if all their numbers are equal. `num_draws` must be at least 2,
    because one number has only 24 bits. Raises `ConfigError` for other arguments.
    """
    from nvidia.dali import math, types

    if len(u) < 2:
        raise ConfigError(
            f"keyed_noise: num_draws = {len(u)}, expected at least 2, or different samples could get the same noise"
        )
    if not 0 <= stream < _LARGEST or min(shape, default=1) < 1 or prod(shape) > _LARGEST:
        raise ConfigError(
            f"keyed_noise got shape {tuple(shape)} and stream {stream}; expected positive sizes, at most {_LARGEST:,} "
            f"values, and 0 <= stream < {_LARGEST:,}"
        )

    def constant(values: npt.NDArray[np.int64] | int) -> Any:
        return types.Constant(np.asarray(values), dtype=types.UINT64)

    step, first, second = u.keys[1], u.keys[2], u.keys[3]

    def mixed(state: Any) -> Any:  # the output function of splitmix64
        state = (state ^ (state >> constant(30))) * first
        state = (state ^ (state >> constant(27))) * second
        return state ^ (state >> constant(31))

    state = mixed(u.keys[0] + constant(stream + 1) * step) + step
    for axis, size in enumerate(shape):
        places = np.arange(size) * prod(shape[axis + 1 :])
        alone = [size if other == axis else 1 for other in range(len(shape))]
        state = state + constant(places.reshape(alone)) * step
    words = mixed(state)
    upper, lower = (words >> constant(32)) * 2.0**-32, (words << constant(32)) * 2.0**-64
    return math.sqrt(-2.0 * math.log(upper + 2.0**-33)) * math.cos(lower * (2 * np.pi))
