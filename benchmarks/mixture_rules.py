"""The rules by which loaders choose the source of each row of a mixture, ours and those of others.

Those of others are written anew after their public sources, whose files and commits `RULES` names, so that they run
without the packages, and a million rows of a thousand sources take seconds. A rule takes weights that add up to 1, the
number of rows, and a seed, and returns the number of each row's source, int64 (rows,).
"""

from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes.schedule.mixture import MixtureOrder

Int64Array = npt.NDArray[np.int64]
Weights = Sequence[Fraction]

_PART = 1 << 16
"""Rows whose sources are computed together, so that the arrays stay in the cache."""
_DRAWN_TOGETHER = 1000


def dali_pipes(weights: Weights, rows: int, seed: int) -> Int64Array:
    """A keyed permutation of every 128 places, then a tree over the sources."""
    names = [f"{number:04d}" for number in range(len(weights))]
    order = MixtureOrder(names, [(0, dict(zip(names, weights, strict=True)))], seed=seed)
    parts = [order.rows(np.arange(first, min(first + _PART, rows)))[0] for first in range(0, rows, _PART)]
    return np.concatenate(parts)


def megatron(weights: Weights, rows: int, seed: int) -> Int64Array:
    """Each row goes to the source that is farthest below its share of the rows so far; of equals, to the first."""
    shares, counts = np.array(weights, np.float64), np.zeros(len(weights))
    below = np.empty_like(counts)
    sources = np.empty(rows, np.int64)
    for row in range(rows):
        np.multiply(shares, max(row, 1), out=below)
        np.subtract(below, counts, out=below)
        sources[row] = source = below.argmax()
        counts[source] += 1
    return sources


def grain(weights: Weights, rows: int, seed: int) -> Int64Array:
    """Weights as integers, the smallest 100; the first source takes its share rounded up, the others share the rest.

    Of the first k rows, k w / (w + rest) rounded up are of the first source; what is left is shared by the others in
    the same way.
    """
    shares = [float(weight) for weight in weights]
    factor = 100 / min(shares)
    whole = [int(share * factor) for share in shares]
    sources = np.empty(rows, np.int64)
    places, k, together = np.arange(rows), np.arange(rows), sum(whole)
    for source, weight in enumerate(whole):
        before, after = k * (together - weight) // together, (k + 1) * (together - weight) // together
        here = before == after  # the others do not get this row
        sources[places[here]] = source
        places, k, together = places[~here], before[~here], together - weight
    return sources


def huggingface(weights: Weights, rows: int, seed: int) -> Int64Array:
    """Every row is drawn independently."""
    shares, generator = np.array(weights, np.float64), np.random.default_rng(seed)
    shares /= shares.sum()
    parts = [generator.choice(len(shares), _DRAWN_TOGETHER, p=shares) for _ in range(-(-rows // _DRAWN_TOGETHER))]
    return np.concatenate(parts)[:rows]


def mosaic(weights: Weights, rows: int, seed: int) -> Int64Array:
    """Rows of an epoch are counted by share, rounded down, and what is missing is drawn; then the epoch is shuffled.

    Here the epoch is all rows, and the shuffle is uniform, as where the block of `py1e` is not smaller than the epoch.
    """
    shares = np.array(weights, np.float64)
    shares /= shares.sum()
    counts = (rows * shares).astype(np.int64)
    generator = np.random.default_rng(seed)
    counts[generator.choice(len(shares), rows - int(counts.sum()), replace=False)] += 1
    return np.random.default_rng(seed + 1).permutation(np.repeat(np.arange(len(shares)), counts))


class Rule(NamedTuple):
    """A rule, its name in the tables, and where its public source was read."""

    name: str
    sources: Callable[[Weights, int, int], Int64Array]
    origin: str


RULES = (
    Rule("dali_pipes", dali_pipes, "dali_pipes.schedule.mixture.MixtureOrder, run as it is"),
    Rule(
        "Megatron greedy",
        megatron,
        "NVIDIA/Megatron-LM, megatron/core/datasets/helpers.cpp at 298c71d2, build_blending_indices",
    ),
    Rule(
        "Grain mix",
        grain,
        "google/grain, grain/_src/python/dataset/transformations/mix.py at 016c60fe, MixedMapDataset",
    ),
    Rule(
        "HF interleave",
        huggingface,
        "huggingface/datasets, arrow_dataset.py, _interleave_map_style_datasets with probabilities and a seed",
    ),
    Rule(
        "Mosaic proportions",
        mosaic,
        "mosaicml/streaming, Stream.apply_weights with proportions, and the random batching method",
    ),
)
"""Ours comes first."""
