"""Runs of tokens that are read where something ends: a file, a chunk, or a whole corpus among joined ones.

bounds      0         5         9            ends of the parts
pieces          [2, 4 tokens)   [6, 2)       positions and lengths
cut             2+3 | 5+1       6+2          of part 0, 1 and 1
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


def cut_at(
    bounds: Int64Array, positions: Int64Array, lengths: Int64Array, targets: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array, Int64Array]:
    """Pieces cut at `bounds`, in rising order: positions, lengths and targets, and the part that each is in.

    bounds: (N + 1,), where parts begin, and the end of the last. A piece is `lengths[p]` tokens from positions[p], and
            goes to targets[p]
    """
    firsts = np.searchsorted(bounds, positions, side="right") - 1
    if lengths.all() and (positions + lengths <= bounds[firsts + 1]).all():  # nothing to cut, as nearly always
        order = np.argsort(positions)
        return positions[order], lengths[order], targets[order], firsts[order]
    counts = np.maximum(np.searchsorted(bounds, positions + lengths, side="left") - firsts, 0)
    piece = np.repeat(np.arange(len(positions)), counts)
    parts = np.arange(len(piece)) + (firsts - np.cumsum(counts) + counts)[piece]
    begins = np.maximum(bounds[parts], positions[piece])
    ends = np.minimum(bounds[parts + 1], (positions + lengths)[piece])
    places = targets[piece] + begins - positions[piece]
    order = np.argsort(begins)
    return begins[order], (ends - begins)[order], places[order], parts[order]


def read_through(
    read: Callable[[Int64Array, Int64Array, Int64Array, npt.NDArray[Any]], None],
    dtype: np.dtype[Any],
    positions: Int64Array,
    lengths: Int64Array,
    targets: Int64Array,
    out: npt.NDArray[Any],
) -> None:
    """Read pieces into memory of `dtype` with `read`, then copy them to their targets in `out`, of a wider type."""
    places = np.cumsum(lengths) - lengths
    part = np.empty(int(lengths.sum()), dtype)
    read(positions, lengths, places, part)
    for target, place, length in zip(targets.tolist(), places.tolist(), lengths.tolist(), strict=True):
        out[target : target + length] = part[place : place + length]
