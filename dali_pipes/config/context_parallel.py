"""Which positions of a row a context-parallel rank gets: an equal share of every row, without overlap.

    T = 8, two ranks     contiguous            zigzag
    rank 0               0 1 2 3               0 1         6 7
    rank 1                       4 5 6 7           2 3 4 5

With causal attention later positions attend to more tokens, so contiguous shares give the last rank most of the work.
With zigzag, rank r has chunks r and 2 * size - 1 - r of 2 * size, which balances it. The same scheme is used by
ring-flash-attention's `zigzag` variants, Megatron-LM and torch's context parallel.
"""

import functools

from dali_pipes.errors import ConfigError


@functools.lru_cache(maxsize=64)  # called for every output of every batch
def shared_ranges(width: int, rank: int, size: int, split: str) -> tuple[tuple[int, int], ...]:
    """The (start, end) ranges of a row of `width` positions that `rank` of `size` gets, in order.

    One range, or two of equal length. Raises `ConfigError` if the width cannot be split evenly.
    """
    chunks = size if split == "contiguous" else 2 * size
    if width % chunks:
        raise ConfigError(
            f"a row of {width:,} positions cannot be split evenly between {size} context-parallel ranks ({split}): its "
            f"width must be a multiple of {chunks:,}"
        )
    chunk = width // chunks
    mine = [rank] if split == "contiguous" else [rank, chunks - 1 - rank]
    if len(mine) == 2 and mine[0] + 1 == mine[1]:
        return ((mine[0] * chunk, (mine[1] + 1) * chunk),)
    return tuple((number * chunk, (number + 1) * chunk) for number in mine)
