"""permute: row numbers to window numbers, by a keyed bijection on [0, n) that needs no table.

    n = 10, key = 2024     row     0  1  2  3  4  5  6  7  8  9
                           window  2  5  9  1  3  7  0  4  8  6

Each image depends only on (index, n, key), so any part of an epoch is as fast to compute as its beginning, and the
order does not take memory. The bijection is VariPhilox with 24 rounds, from R. Mitchell, D. Stokes, E. Frank,
G. Holmes, "Bandwidth-Optimal Random Shuffling for GPUs", 2021 (arXiv:2106.06161), with one addition:

- The domain is the smallest power of two that is at least n and at least 16: b bits, the left half with l = b // 2 bits
  and the right half with r = b - l bits.
- A round multiplies the left half by a 64-bit constant. The next left half is the product's high word, mixed with the
  round key and the right half. The next right half is the product's low word, with the right half's spare bit if
  r = l + 1. The low l bits of the product determine the left half (the constant is odd), and the left half determines
  the rest, so each round is a bijection of the domain. For n < 2**63 both halves fit 32 bits.
- The addition: after the rounds, an offset derived from the key is added, modulo 2**b. The rounds are even permutations
  of the domain for every key; without the offset, whose odd values are odd permutations, half of all orders of 16 could
  not occur, and among the 120 orders of 5 the even ones were 18% more frequent than the odd ones.
- Cycle walking: an image outside [0, n) is encrypted again until it is inside (fewer than two passes on average for
  n > 8). The result is a bijection on [0, n).

The round keys are the upper words of the first 24 outputs of splitmix64 (G. Steele, D. Lea, C. Flood, "Fast Splittable
Pseudorandom Number Generators", 2014) seeded with the key; the offset is the 25th output. Derive the keys of epochs
with a hash: two keys that differ by a small multiple of splitmix64's step share most of their round keys.

The order is fixed under ORDER_NAME, which saved states contain: a change of any image needs a new name.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dali_pipes.operators import _kernel
from dali_pipes.operators._array import is_cupy, require_inside

if TYPE_CHECKING:
    import cupy

    from dali_pipes.operators._array import Array

ORDER_NAME = "philox24-v1"

_ROUNDS = 24
_MULTIPLIER = 0xD2B74407B1CE6E93
_SPLITMIX_STEP = 0x9E3779B97F4A7C15
_SPLITMIX_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD = 2**64 - 1

# From this many elements on, a vectorized pass (30-50 us of call overhead) is cheaper than Python integers (5 us each).
_VECTOR_MINIMUM = 8

# The same for `permute_each`, where a vectorized pass takes 50 us or more, 30 by a table, and a single element 10.
_EACH_VECTOR_MINIMUM, _TABLE_VECTOR_MINIMUM = 16, 4

# Elements that `permute_each` takes together: its working arrays, 25 words a group among them, stay in the cache.
_EACH_PART = 2**14

# From this many elements on, the keys of each round are spread over them when it comes: those of all rounds would not
# stay in the cache.
_SPREAD_BY_ROUND = 2**11

# A domain of up to 7 bits is permuted by a table of three rounds, one of up to 10 bits by a table of two. They have up
# to 2**13 and 2**15 entries, which stay in the cache of the second level.
_TABLE_BITS = 10
_BITS_OF_THREE_ROUNDS = 7

_OUTPUT_NUMBERS = np.arange(1, _ROUNDS + 2, dtype=np.uint64)[:, None]
_POWERS_OF_TWO = np.left_shift(1, np.arange(63, dtype=np.int64))

_Spread = Callable[[NDArray[Any]], NDArray[Any]]

_THREADS = 256
_BLOCKS_MAXIMUM = 4096


def permute(indices: Array, n: int, key: int) -> Array:
    """Images of `indices` under the bijection on [0, n) selected by `key`.

    indices: int64 (R,), values in [0, n), in any order, repeats allowed; NumPy or CuPy.
    n: size of the set, 1 <= n < 2**63. key: 0 <= key < 2**64.
    Returns int64 (R,), a new array of the same kind.

    NumPy checks every index. CuPy launches one kernel on the current stream and does not block; it maps an index
    outside [0, n) to -1.
    """
    n, key = operator.index(n), operator.index(key)
    require_inside("permute", 1, 63, n=n)
    require_inside("permute", 0, 64, key=key)
    on_device = is_cupy("permute", "indices", indices)
    if indices.dtype != np.int64:
        raise TypeError(f"permute: indices have dtype {indices.dtype}, expected int64")
    if indices.ndim != 1:
        raise ValueError(f"permute: indices have shape {indices.shape}, expected one axis")
    if indices.size == 0:
        return indices.copy()
    if on_device:
        return _permute_cupy(indices, n, key)
    lowest, highest = int(indices.min()), int(indices.max())
    if lowest < 0 or highest >= n:
        wrong = lowest if lowest < 0 else highest
        position = int(np.argmax(indices == wrong))
        raise ValueError(f"permute: indices[{position}] is {wrong}, expected 0 <= index < n = {n}")
    return _permute_numpy(indices, n, key)


def permute_each(
    indices: NDArray[np.int64], counts: NDArray[np.int64], sizes: NDArray[np.int64], keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """`permute` with a size and a key for each group of indices, all groups in one call.

    indices: int64 (R,), the counts[0] indices of group 0, then the counts[1] of group 1, and so on. Those of group g
    are in [0, sizes[g]), and their images are those with keys[g].
    counts, sizes, keys: int64, int64 and uint64 (G,), 1 <= size < 2**63. Returns int64 (R,), a new array. NumPy only;
    needs no more memory for more groups.
    """
    expected = {"indices": np.int64, "counts": np.int64, "sizes": np.int64, "keys": np.uint64}
    for (name, dtype), array in zip(expected.items(), (indices, counts, sizes, keys), strict=True):
        if array.dtype != dtype:
            raise TypeError(f"permute_each: {name} have dtype {array.dtype}, expected {np.dtype(dtype)}")
    if indices.ndim != 1:
        raise ValueError(f"permute_each: indices have shape {indices.shape}, expected one axis")
    borders = np.concatenate(([0], np.cumsum(counts)))
    if borders[-1] != indices.size:
        raise ValueError(f"permute_each: counts add up to {borders[-1]}, expected the {indices.size} indices")
    values, images = indices.astype(np.uint64), np.empty(indices.size, np.uint64)
    for first in range(0, indices.size, _EACH_PART):
        part = slice(first, min(first + _EACH_PART, indices.size))
        counts_here = np.diff(borders.clip(part.start, part.stop))
        used = np.flatnonzero(counts_here)
        counts_here, sizes_here = counts_here[used], sizes[used]
        wrong = values[part] >= sizes_here.astype(np.uint64).repeat(counts_here)  # as a negative index is, too
        if wrong.any():
            position = first + int(np.argmax(wrong))
            size = sizes[np.searchsorted(borders, position, side="right") - 1]
            raise ValueError(
                f"permute_each: indices[{position}] is {indices[position]}, expected 0 <= index < {size}, the size of "
                "its group"
            )
        outputs = splitmix64(keys[used], _OUTPUT_NUMBERS)
        images[part] = _permute_groups(values[part], counts_here, sizes_here, outputs)
    return images.view(np.int64)


def splitmix64(seeds: NDArray[np.uint64], numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Outputs of splitmix64, by seed and number, counted from 1; the two are broadcast."""
    words: NDArray[np.uint64] = np.asarray(seeds + numbers * _constant(_SPLITMIX_STEP))
    shifted = np.asarray(words >> _constant(30))
    words ^= shifted
    words *= _constant(_SPLITMIX_MULTIPLIERS[0])
    words ^= np.right_shift(words, _constant(27), out=shifted)
    words *= _constant(_SPLITMIX_MULTIPLIERS[1])
    words ^= np.right_shift(words, _constant(31), out=shifted)
    return words


def preimage(image: int, n: int, key: int) -> int:
    """The index that `permute` maps to `image`, 0 <= image < n; takes tens of microseconds for any n."""
    domain, schedule = _domain(n), _key_schedule(key)
    index = _decrypt_one(image, domain, schedule)
    while index >= n:
        index = _decrypt_one(index, domain, schedule)
    return index


def _permute_numpy(indices: NDArray[np.int64], n: int, key: int) -> NDArray[np.int64]:
    domain, schedule = _domain(n), _key_schedule(key)
    constants, offset, end = _constants(sum(domain)), _constant(schedule.offset), _constant(n)
    images = indices.astype(np.uint64)
    if images.size < _VECTOR_MINIMUM:
        outside = np.arange(images.size)
    else:
        images = _encrypt(images, constants, schedule.arrays, offset)
        outside = np.flatnonzero(images >= end)
    while outside.size >= _VECTOR_MINIMUM:
        walked = _encrypt(images[outside], constants, schedule.arrays, offset)
        images[outside] = walked
        outside = outside[walked >= end]
    for position in outside.tolist():
        images[position] = _walk_one(int(images[position]), n, schedule)
    return images.view(np.int64)


def _permute_groups(
    values: NDArray[np.uint64], counts: NDArray[np.int64], sizes: NDArray[np.int64], outputs: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Images of the next counts[g] values under the bijection on [0, sizes[g]) by outputs[:, g], group after group."""
    # The number of powers of two up to n - 1 is its bit length.
    bits = np.maximum(np.searchsorted(_POWERS_OF_TWO, sizes - 1, side="right"), 4).astype(np.uint64)
    # One domain for all groups, such as that of strata, takes less time than one for each value.
    if (bits == bits[0]).all():
        bits = bits[0, ...]
    ends, groups, spread = sizes.view(np.uint64), np.arange(len(counts)).repeat(counts), _spread(counts)
    encrypt, minimum = partial(_encrypt_each, bits, outputs), _EACH_VECTOR_MINIMUM
    if bits.ndim == 0 and bits <= _TABLE_BITS:
        encrypt = partial(_encrypt_by_table, int(bits), _table_keys(int(bits), outputs))
        minimum = _TABLE_VECTOR_MINIMUM
    images = encrypt(values, spread)
    outside = np.flatnonzero(images >= spread(ends))
    while outside.size >= minimum:
        spread = _taken(groups[outside])
        walked = encrypt(images[outside], spread)
        images[outside] = walked
        outside = outside[walked >= spread(ends)]
    groups = groups[outside]
    for position, n, own in zip(outside.tolist(), sizes[groups].tolist(), outputs.T[groups].tolist(), strict=True):
        images[position] = _walk_one(int(images[position]), n, _schedule(own))
    return images


def _encrypt_each(
    bits: NDArray[np.uint64], outputs: NDArray[np.uint64], values: NDArray[np.uint64], spread: _Spread
) -> NDArray[np.uint64]:
    """One pass, with a key for each group. bits: of the groups' domains, (G,), or of the one domain of all, ().

    outputs: (25, G).
    """
    constants = _Constants.of(spread(bits)) if bits.ndim else _constants(int(bits))
    keys = outputs[:-1] >> _constant(32)
    is_few = outputs.shape[1] > 1 and values.size < _SPREAD_BY_ROUND
    return _encrypt(values, constants, spread(keys) if is_few else map(spread, keys), spread(outputs[-1]))


def _spread(counts: NDArray[np.int64]) -> _Spread:
    """What turns an entry for each group into one for each of its counts[g] values; of one group, into one for all."""
    if len(counts) == 1:
        return lambda of_groups: of_groups[0, ...]
    if len(counts) == counts.sum():
        return lambda of_groups: of_groups
    if 4 * len(counts) < counts.sum():
        return lambda of_groups: of_groups.repeat(counts, axis=-1)
    return _taken(np.arange(len(counts)).repeat(counts))  # faster for few values a group


def _taken(groups: NDArray[np.int64]) -> _Spread:
    return lambda of_groups: of_groups.take(groups, axis=-1)


def _permute_cupy(indices: cupy.ndarray, n: int, key: int) -> cupy.ndarray:
    import cupy

    indices = cupy.ascontiguousarray(indices)
    images = cupy.empty(indices.shape, np.int64)
    arguments = (indices, np.int64(indices.size), bijection(n, key), images)
    grid, block = _launch_shape(indices.size)
    _kernel.load("permute", "permute")(grid, block, arguments)
    return images


def _launch_shape(count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Grid and block for `count` >= 1 indices; the kernel loops over the indices beyond the grid."""
    return (min(-(-count // _THREADS), _BLOCKS_MAXIMUM),), (_THREADS,)


# The struct of philox24.cuh, field by field.
_BIJECTION = np.dtype(
    [
        ("n", np.uint64),
        ("offset", np.uint64),
        ("round_keys", np.uint32, _ROUNDS),
        ("left_bits", np.int32),
        ("right_bits", np.int32),
    ],
    align=True,
)


@functools.lru_cache(maxsize=64)
def bijection(n: int, key: int | None) -> NDArray[np.void]:
    """The bijection on [0, n) selected by `key`, as one read-only element that kernels take by value.

    If the key is None, `left_bits` is 0, which means the identity.
    """
    packed = np.zeros(1, _BIJECTION)
    packed["n"] = n
    if key is not None:
        schedule = _key_schedule(key)
        packed["offset"], packed["round_keys"] = schedule.offset, schedule.round_keys
        packed["left_bits"], packed["right_bits"] = _domain(n)
    packed.flags.writeable = False
    return packed


class _Domain(NamedTuple):
    left_bits: int
    right_bits: int


def _domain(n: int) -> _Domain:
    bits = max((n - 1).bit_length(), 4)
    return _Domain(bits // 2, bits - bits // 2)


class _KeySchedule(NamedTuple):
    round_keys: tuple[int, ...]
    offset: int
    arrays: tuple[NDArray[np.uint64], ...]
    """The round keys; none, where they are used once."""


@functools.lru_cache(maxsize=64)
def _key_schedule(key: int) -> _KeySchedule:
    schedule = _schedule(splitmix64(_constant(key), _OUTPUT_NUMBERS[:, 0]).tolist())
    return schedule._replace(arrays=tuple(map(_constant, schedule.round_keys)))


def _schedule(outputs: Sequence[int]) -> _KeySchedule:
    """Of outputs of splitmix64: round keys in the upper words, and at last the offset."""
    return _KeySchedule(tuple([output >> 32 for output in outputs[:-1]]), outputs[-1], ())


def _constant(value: int) -> NDArray[np.uint64]:
    # A zero-dimensional array: ufuncs handle it twice as fast as a NumPy scalar, or as an array of one entry.
    return np.array(value, np.uint64)


class _Constants(NamedTuple):
    """What a pass needs of the domains: for each value, (R,), or for all, ()."""

    multiplier: NDArray[np.uint64]
    high_word: NDArray[np.uint64]
    left_bits: NDArray[np.uint64]
    right_bits: NDArray[np.uint64]
    left_mask: NDArray[np.uint64]
    right_mask: NDArray[np.uint64]
    mask: NDArray[np.uint64]
    has_spare: bool
    """Whether the right half of any domain has a bit more than the left half."""

    @classmethod
    def of(cls, bits: NDArray[np.uint64]) -> _Constants:
        one = _constant(1)
        left_bits = bits >> one
        right_bits = bits - left_bits
        spare = right_bits - left_bits
        return cls(
            # The product shifted left by the spare bit is that with a shifted constant; no bit of the halves is lost.
            multiplier=np.asarray(_constant(_MULTIPLIER) << spare),
            high_word=np.asarray(_constant(32) + spare),
            left_bits=np.asarray(left_bits),
            right_bits=np.asarray(right_bits),
            left_mask=np.asarray((one << left_bits) - one),
            right_mask=np.asarray((one << right_bits) - one),
            mask=np.asarray((one << bits) - one),
            has_spare=bool(spare.any()),
        )


@functools.lru_cache(maxsize=64)
def _constants(bits: int) -> _Constants:
    return _Constants.of(_constant(bits))


def _encrypt(
    values: NDArray[np.uint64],
    constants: _Constants,
    round_keys: Iterable[NDArray[np.uint64]],
    offset: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """One pass of the rounds over values (R,), each in its domain. Allocates two arrays of that size; wraps on purpose.

    Each of round_keys, offset: for each value, (R,), or for all, ().
    """
    multiplier, high_word, left_bits, right_bits, left_mask, right_mask, whole_mask, has_spare = constants
    left, right = values >> right_bits, values & right_mask
    product = np.empty_like(left)
    # A pass over few elements is 120 to 190 calls; looking up their names in NumPy each time took 20% of it.
    multiply, shift, xor, mask, merge = np.multiply, np.right_shift, np.bitwise_xor, np.bitwise_and, np.bitwise_or
    for round_key in round_keys:
        multiply(left, multiplier, product)
        shift(product, high_word, left)
        xor(left, right, left)
        xor(left, round_key, left)
        mask(left, left_mask, left)
        # Without a spare bit the right half may keep bits above r; the left mask removes their effect.
        if has_spare:
            mask(product, right_mask, product)
            shift(right, left_bits, right)
            merge(product, right, product)
        right, product = product, right
    right &= right_mask
    left <<= right_bits
    left |= right
    left += offset
    left &= whole_mask
    return left


def _encrypt_by_table(
    bits: int, keys: NDArray[np.int64], values: NDArray[np.uint64], spread: _Spread
) -> NDArray[np.uint64]:
    """`_encrypt_each` in one small domain.

    A round is a permutation of the domain, the same for every key, and then an exclusive or with the round key, above
    the right half. So the outcome of two or three rounds, up to the last key, depends on the value and the keys before:
    an entry of a table, whose number is made of the value and, above it, these keys.
    """
    table, entries = _rounds_table(bits), values.view(np.int64) | spread(keys[0])
    for of_groups in keys[1:-1]:
        entries = table.take(entries)
        entries ^= spread(of_groups)
    entries += spread(keys[-1])
    entries &= (1 << bits) - 1
    return entries.view(np.uint64)


def _table_keys(bits: int, outputs: NDArray[np.uint64]) -> NDArray[np.int64]:
    """What `_encrypt_by_table` merges with values before the first look-up and after each, and adds at last, (., G)."""
    left_bits, rounds = bits // 2, _table_rounds(bits)
    keys = ((outputs[:-1] >> _constant(32)) & _constant((1 << left_bits) - 1)).view(np.int64)
    above = keys[0::rounds] << bits
    if rounds == 3:
        above |= keys[1::rounds] << (bits + left_bits)
    after = keys[rounds - 1 :: rounds] << (bits - left_bits)
    after[:-1] |= above[1:]
    offset = (outputs[-1:] & _constant((1 << bits) - 1)).view(np.int64)
    return np.concatenate((above[:1], after, offset))


@functools.lru_cache(maxsize=_TABLE_BITS)
def _rounds_table(bits: int) -> NDArray[np.int64]:
    """The table of `_encrypt_by_table`: for each value and, above it, each key of all rounds but the last."""
    left_bits, right_bits = _Domain(bits // 2, bits - bits // 2)
    values, no_key = np.arange(1 << bits, dtype=np.uint64), _constant(0)
    one_round = _encrypt(values, _constants(bits), [no_key], no_key).view(np.int64)
    keys = np.arange(1 << left_bits) << right_bits
    table: NDArray[np.int64] = one_round[one_round ^ keys[:, None]]
    if _table_rounds(bits) == 3:
        table = one_round[table ^ keys[:, None, None]]
    return table.ravel()


def _table_rounds(bits: int) -> int:
    return 3 if bits <= _BITS_OF_THREE_ROUNDS else 2


def _walk_one(value: int, n: int, schedule: _KeySchedule) -> int:
    """The image of one Python integer."""
    domain = _domain(n)
    image = _encrypt_one(value, domain, schedule)
    while image >= n:
        image = _encrypt_one(image, domain, schedule)
    return image


def _encrypt_one(value: int, domain: _Domain, schedule: _KeySchedule) -> int:
    """The same pass for one Python integer."""
    left_bits, right_bits = domain
    spare = right_bits - left_bits
    left_mask, right_mask = (1 << left_bits) - 1, (1 << right_bits) - 1
    left, right = value >> right_bits, value & right_mask
    multiplier = _MULTIPLIER & ((1 << (32 + left_bits)) - 1)  # no higher bit of a product is used
    for round_key in schedule.round_keys:
        product = left * multiplier
        left = ((product >> 32) ^ right ^ round_key) & left_mask
        right = ((product << spare) | (right >> left_bits)) & right_mask
    return (((left << right_bits) | right) + schedule.offset) & ((1 << sum(domain)) - 1)


def _decrypt_one(value: int, domain: _Domain, schedule: _KeySchedule) -> int:
    """The inverse of `_encrypt_one`: the constant is odd, so a product's low bits determine the left half."""
    left_bits, right_bits = domain
    left_mask, spare = (1 << left_bits) - 1, right_bits - left_bits
    value = (value - schedule.offset) & ((1 << sum(domain)) - 1)
    left, right = value >> right_bits, value & ((1 << right_bits) - 1)
    inverse = pow(_MULTIPLIER, -1, 1 << left_bits)
    for round_key in reversed(schedule.round_keys):
        before = ((right >> spare) * inverse) & left_mask
        high = ((before * _MULTIPLIER) & _WORD) >> 32
        left, right = before, ((left ^ high ^ round_key) & left_mask) | ((right & spare) << left_bits)
    return (left << right_bits) | right
