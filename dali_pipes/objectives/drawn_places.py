"""drawn_places: some of the places of each row, drawn by the row's key, so that every choice is equally likely.

    4 of 9 places     draws  5 2 5 7 0 3 ...     taken  0 2 5 7

The first distinct places of a sequence of draws are a uniform choice, because all orders of the places are equally
likely. A keyed permutation of the places, or sorting a random number for each, takes several times as long.
"""

import math

import numpy as np
import numpy.typing as npt

from dali_pipes.operators.permute import splitmix64

Int64Array = npt.NDArray[np.int64]
Int32Array = npt.NDArray[np.int32]

_DRAWS = 2**32


def drawn_places(places: Int64Array, wanted: Int64Array, keys: npt.NDArray[np.uint64], width: int) -> Int32Array:
    """(R, width): `wanted` of the `places` of each row, rising; after them, the number of its places.

    0 <= wanted <= places <= 2**30, wanted <= width. The draws of a row are the halves of outputs 1, 2, ... of
    splitmix64 seeded with its key, the upper half first. A draw d means place d * places >> 32, unless the lower
    32 bits of that product are below 2**32 % places: without those, equally many draws mean each place. Where more than
    half of the places are wanted, the others are drawn.
    """
    none = places.astype(np.int32)[:, None]
    taken, takes_others = none.repeat(width, 1), 2 * wanted > places
    needed = np.where(takes_others, places - wanted, wanted)
    todo, words = needed.nonzero()[0], _likely_words(places, needed)
    while len(todo):
        drawn, is_first = _drawn(places[todo], keys[todo], words)
        ranks = is_first.cumsum(axis=1)  # from the last draw on
        spare = ranks[:, -1] - needed[todo]
        is_first &= ranks > spare[:, None]
        drawn |= np.left_shift(~is_first, 30, dtype=np.int32)
        drawn.sort(axis=1)
        taken[todo, : drawn.shape[1]] = np.minimum(drawn[:, :width], none[todo])
        todo, words = todo[spare < 0], 2 * words  # these draw again, from the first on
    others = takes_others.nonzero()[0]
    if len(others):
        taken[others] = _others(taken[others], places[others], wanted[others])
    return taken


def _likely_words(places: Int64Array, needed: Int64Array) -> int:
    """Outputs whose halves nearly always are enough for any row. Which places are taken does not depend on it."""
    repeats = int((needed * needed // np.maximum(2 * (places - needed), 1)).max(initial=0))
    return (int(needed.max(initial=0)) + repeats + 3 * math.isqrt(repeats) + 4) // 2


def _drawn(places: Int64Array, keys: npt.NDArray[np.uint64], words: int) -> tuple[Int32Array, npt.NDArray[np.bool_]]:
    """(R, 2 * words): places that are drawn, the last ones first, and whether they had not been drawn before."""
    outputs = splitmix64(keys[:, None], np.arange(words, 0, -1, dtype=np.uint64))
    products = outputs.astype("<u8", copy=False).view("<u4").astype(np.uint64)
    products *= places.view(np.uint64)[:, None]
    rests, too_low = products.astype(np.uint32), (_DRAWS % places).astype(np.uint32)
    products >>= np.uint64(32)
    drawn, most = products.view(np.int64), int(places.max())
    # A place remembers the draw that is written last, which is the first one. Others are not read.
    at = drawn + (np.arange(len(keys)) * most)[:, None]
    numbers = np.arange(2 * words, dtype=np.min_scalar_type(2 * words))
    first = np.empty(len(keys) * most + 1, numbers.dtype)
    has_rejected = rests.min() < too_low.max()
    if has_rejected:
        at[rests < too_low[:, None]] = len(keys) * most
    first[at.reshape(-1)] = np.broadcast_to(numbers, at.shape).reshape(-1)
    is_first: npt.NDArray[np.bool_] = first.take(at) == numbers
    if has_rejected:
        is_first &= rests >= too_low[:, None]
    return drawn.astype(np.int32), is_first


def _others(drawn: Int32Array, places: Int64Array, wanted: Int64Array) -> Int32Array:
    """The places that are not drawn, in the same form."""
    is_taken = np.arange(int(places.max())) < places[:, None]
    rows, columns = (drawn < places[:, None]).nonzero()
    is_taken[rows, drawn[rows, columns]] = False
    taken = places.astype(np.int32)[:, None].repeat(drawn.shape[1], 1)
    taken[np.arange(drawn.shape[1]) < wanted[:, None]] = is_taken.nonzero()[1]
    return taken
