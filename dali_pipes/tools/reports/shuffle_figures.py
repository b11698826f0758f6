"""The figures of an order: how far neighbors are apart, and how many rows of a step come from one block or file.

    order        consecutive rows are apart         a step's rows from one block    correlation of positions
    sequential   one row                            nearly all                      1
    blocks       29 % of the corpus                 a few more than by chance       0
    rows         29 % of the corpus                 as many as by chance            0

Half of the pairs of two random places in a corpus are more than 1 - sqrt(1/2) of it apart, which is 29 %.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus import Corpus
from dali_pipes.rows.block_order import BLOCK_TOKENS

Int64Array = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]
OrderName = Literal["rows", "blocks", "sequential"]


@dataclass(frozen=True)
class OrderFigures:
    """What the steps of one order are made of. A row counts by its first token."""

    order: OrderName
    is_configured: bool
    windows: int | None
    """Of an order by blocks, in a pass of the source with most; None for the other orders."""
    distance_tokens: float | None
    """Median distance in the corpus of two consecutive rows, over all ranks, of one source. None: no such rows."""
    distance: float | None
    """The same as a fraction of the source."""
    from_one_block: float
    """Largest share of a step's rows that come from one block of about 2 million tokens; mean over the steps."""
    from_one_file: float
    """Largest share of a step's rows that come from one file; mean over the steps."""
    correlation: float | None
    """Of the positions of such consecutive rows within their sources, from -1 to 1. None where it is not defined: fewer
    than 3 pairs, or all at one place."""
    blocks: int
    """Different blocks that these steps read."""


class SourcePlaces:
    """Sources, blocks and files by position in the joined corpora."""

    def __init__(self, corpora: Sequence[Corpus], stride: int) -> None:
        self._sizes = np.array([corpus.num_tokens for corpus in corpora])
        self._bases = np.cumsum(self._sizes) - self._sizes
        self.num_tokens = int(self._sizes.sum())
        self._block_tokens = max(1, BLOCK_TOKENS // stride) * stride
        self.num_blocks = [-(-size // self._block_tokens) for size in self._sizes.tolist()]
        self._first_blocks = np.concatenate(([0], np.cumsum(self.num_blocks)))
        borders, files, tokens = [], [], [0.0]
        for base, corpus in zip(self._bases.tolist(), corpora, strict=True):
            starts, numbers = corpus.extents
            borders.append(starts[:-1] + base)
            files.append(numbers + len(tokens))
            tokens += np.bincount(numbers, np.diff(starts), len(corpus.files)).tolist()
        self._borders, self._files = np.concatenate(borders), np.concatenate(files)
        self.largest_file = max(tokens) / self.num_tokens
        """Share of the largest file in all tokens."""

    def figures(
        self, name: OrderName, is_configured: bool, windows: int | None, steps: Sequence[Int64Array]
    ) -> OrderFigures:
        """Of the positions of rows, step by step."""
        positions = np.concatenate(steps)
        sources = self._sources(positions)
        apart, parts_apart, pairs = [np.zeros(0)], [np.zeros(0)], [np.zeros((0, 2))]
        for source, size in enumerate(self._sizes.tolist()):
            own = (positions[sources == source] - self._bases[source]).astype(np.float64)
            apart.append(np.abs(np.diff(own)))
            parts_apart.append(apart[-1] / size)
            if len(own) > 1:
                pair = np.stack((own[:-1], own[1:]), 1)
                pairs.append((pair - pair.mean(axis=0)) / size)  # else sources that stand elsewhere would correlate
        distances, parts = np.concatenate(apart), np.concatenate(parts_apart)
        blocks = [self._blocks(step) for step in steps]
        files = [self._files[np.searchsorted(self._borders, step, side="right") - 1] for step in steps]
        return OrderFigures(
            name,
            is_configured,
            windows,
            float(np.median(distances)) if len(distances) else None,
            float(np.median(parts)) if len(parts) else None,
            float(np.mean([_largest_share(step) for step in blocks])),
            float(np.mean([_largest_share(step) for step in files])),
            _correlation(np.concatenate(pairs)),
            len(np.unique(np.concatenate(blocks))),
        )

    def _sources(self, positions: Int64Array) -> Int64Array:
        sources: Int64Array = np.searchsorted(self._bases, positions, side="right") - 1
        return sources

    def _blocks(self, positions: Int64Array) -> Int64Array:
        """The block of each position, numbered on from source to source."""
        sources = self._sources(positions)
        blocks: Int64Array = (positions - self._bases[sources]) // self._block_tokens + self._first_blocks[sources]
        return blocks


def _largest_share(numbers: npt.NDArray[np.integer[Any]]) -> float:
    """Of the most frequent number."""
    return float(np.unique(numbers, return_counts=True)[1].max() / len(numbers))


def _correlation(pairs: FloatArray) -> float | None:
    """Pearson's, of columns (P, 2) without their means."""
    squares = (pairs**2).sum(axis=0)
    if len(pairs) < 3 or not squares.all():
        return None
    return float((pairs[:, 0] * pairs[:, 1]).sum() / np.sqrt(squares.prod()))
