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
from typing import TYPE_CHECKING, NamedTuple

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

# The same for `permute_each`, where a vectorized pass takes 70 us or more, and a single element 12.
_EACH_VECTOR_MINIMUM = 16

# Elements that `permute_each` takes together: its working arrays, 25 words a group among them, stay in the cache.
_EACH_PART = 2**14
_POWERS_OF_TWO = np.left_shift(1, np.arange(63, dtype=np.int64))

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
    indices: NDArray[np.int64], groups: NDArray[np.int64], sizes: NDArray[np.int64], keys: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """`permute` with a size and a key for each group of indices, all groups in one call.

    indices, groups: int64 (R,); indices[i] is in [0, sizes[groups[i]]), and its image is that with keys[groups[i]].
    sizes, keys: int64 and uint64 (G,), 1 <= size < 2**63; groups may share them. Returns int64 (R,), a new array. NumPy
    only; needs no more memory for more groups.
    """
    expected = {"indices": np.int64, "groups": np.int64, "sizes": np.int64, "keys": np.uint64}
    for (name, dtype), array in zip(expected.items(), (indices, groups, sizes, keys), strict=True):
        if array.dtype != dtype:
            raise TypeError(f"permute_each: {name} have dtype {array.dtype}, expected {np.dtype(dtype)}")
    if indices.ndim != 1:
        raise ValueError(f"permute_each: indices have shape {indices.shape}, expected one axis")
    ends = sizes[groups]
    wrong = (indices < 0) | (indices >= ends)
    if wrong.any():
        position = int(np.argmax(wrong))
        raise ValueError(
            f"permute_each: indices[{position}] is {indices[position]}, "
            f"expected 0 <= index < sizes[{groups[position]}] = {ends[position]}"
        )
    images = indices.astype(np.uint64)
    for first in range(0, indices.size, _EACH_PART):
        part = slice(first, first + _EACH_PART)
        used, numbers = np.arange(len(keys)), groups[part]
        if len(keys) > len(numbers):
            used, numbers = np.unique(numbers, return_inverse=True)
        images[part] = _permute_part(images[part], numbers, sizes[used], keys[used])
    return images.view(np.int64)


def splitmix64(seeds: NDArray[np.uint64], numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Outputs of splitmix64, by seed and number, counted from 1; the two are broadcast."""
    words: NDArray[np.uint64] = seeds + numbers * _constant(_SPLITMIX_STEP)
    words = (words ^ (words >> _constant(30))) * _constant(_SPLITMIX_MULTIPLIERS[0])
    words = (words ^ (words >> _constant(27))) * _constant(_SPLITMIX_MULTIPLIERS[1])
    words ^= words >> _constant(31)
    return words


def _permute_part(
    images: NDArray[np.uint64], groups: NDArray[np.int64], sizes: NDArray[np.int64], keys: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    outputs = splitmix64(keys, np.arange(1, _ROUNDS + 2, dtype=np.uint64)[:, None])
    # The number of powers of two up to n - 1 is its bit length.
    of_groups = np.maximum(np.searchsorted(_POWERS_OF_TWO, sizes - 1, side="right"), 4).astype(np.uint64)
    # One domain for all groups, such as that of strata, takes a quarter less time than one for each element.
    has_one_domain = bool((of_groups == of_groups[0]).all())
    bits = of_groups[:1] if has_one_domain else of_groups[groups]
    ends = sizes.astype(np.uint64)[groups]
    images = _encrypt_each(images, bits, outputs, groups)
    outside = np.flatnonzero(images >= ends)
    while outside.size >= _EACH_VECTOR_MINIMUM:
        own = bits if has_one_domain else bits[outside]
        images[outside] = _encrypt_each(images[outside], own, outputs, groups[outside])
        outside = outside[images[outside] >= ends[outside]]
    for position in outside.tolist():
        *rounds, offset = outputs[:, groups[position]].tolist()
        schedule = _KeySchedule(tuple(output >> 32 for output in rounds), offset, ())
        n, image = int(ends[position]), int(images[position])
        while image >= n:
            image = _encrypt_one(image, _domain(n), schedule)
        images[position] = image
    return images


def _encrypt_each(
    values: NDArray[np.uint64], bits: NDArray[np.uint64], outputs: NDArray[np.uint64], groups: NDArray[np.int64]
) -> NDArray[np.uint64]:
    """One pass of the rounds, as `_encrypt`; value i is in a domain of bits[i] and uses outputs[:, groups[i]].

    bits: (R,), or (1,) for one domain.
    """
    one = _constant(1)
    left_bits = bits >> one
    right_bits = bits - left_bits
    spare = right_bits - left_bits
    multiplier, high_word = _constant(_MULTIPLIER) << spare, _constant(32) + spare
    left_mask, right_mask = (one << left_bits) - one, (one << right_bits) - one
    left, right = values >> right_bits, values & right_mask
    product = np.empty_like(left)
    round_keys = outputs[:_ROUNDS] >> _constant(32)
    for of_round in round_keys:
        np.multiply(left, multiplier, product)
        np.right_shift(product, high_word, left)
        left ^= right
        left ^= of_round[groups]
        left &= left_mask
        product &= right_mask
        # The right half keeps no bits above r, so this is its spare bit, or nothing.
        right >>= left_bits
        product |= right
        right, product = product, right
    image = (left << right_bits) | right
    image += outputs[_ROUNDS][groups]
    image &= (one << bits) - one
    return image


def preimage(image: int, n: int, key: int) -> int:
    """The index that `permute` maps to `image`, 0 <= image < n; takes tens of microseconds for any n."""
    domain, schedule = _domain(n), _key_schedule(key)
    index = _decrypt_one(image, domain, schedule)
    while index >= n:
        index = _decrypt_one(index, domain, schedule)
    return index


def _permute_numpy(indices: NDArray[np.int64], n: int, key: int) -> NDArray[np.int64]:
    domain, schedule = _domain(n), _key_schedule(key)
    images = indices.astype(np.uint64)
    outside = np.arange(images.size)
    while outside.size >= _VECTOR_MINIMUM:
        walked = _encrypt(images[outside], domain, schedule)
        images[outside] = walked
        outside = outside[walked >= np.uint64(n)]
    for position in outside.tolist():
        image = _encrypt_one(int(images[position]), domain, schedule)
        while image >= n:
            image = _encrypt_one(image, domain, schedule)
        images[position] = image
    return images.view(np.int64)


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
    round_key_arrays: tuple[NDArray[np.uint64], ...]


@functools.lru_cache(maxsize=64)
def _key_schedule(key: int) -> _KeySchedule:
    outputs = []
    for index in range(1, _ROUNDS + 2):
        mixed = (key + index * _SPLITMIX_STEP) & _WORD
        mixed = ((mixed ^ (mixed >> 30)) * _SPLITMIX_MULTIPLIERS[0]) & _WORD
        mixed = ((mixed ^ (mixed >> 27)) * _SPLITMIX_MULTIPLIERS[1]) & _WORD
        outputs.append(mixed ^ (mixed >> 31))
    round_keys = tuple(output >> 32 for output in outputs[:_ROUNDS])
    return _KeySchedule(round_keys, outputs[_ROUNDS], tuple(_constant(round_key) for round_key in round_keys))


def _constant(value: int) -> NDArray[np.uint64]:
    # A zero-dimensional array: ufuncs handle it twice as fast as a NumPy scalar.
    return np.array(value, np.uint64)


def _encrypt(values: NDArray[np.uint64], domain: _Domain, schedule: _KeySchedule) -> NDArray[np.uint64]:
    """One pass of the 24 rounds over `values`, all below 2**b. Allocates two arrays of that size; wraps on purpose."""
    spare = domain.right_bits - domain.left_bits
    # The product shifted left by the spare bit is the product with a shifted constant; no bit of the halves is lost.
    multiplier = _constant((_MULTIPLIER << spare) & _WORD)
    high_word, left_bits, right_bits = _constant(32 + spare), _constant(domain.left_bits), _constant(domain.right_bits)
    left_mask, right_mask = _constant((1 << domain.left_bits) - 1), _constant((1 << domain.right_bits) - 1)
    left, right = values >> right_bits, values & right_mask
    product = np.empty_like(left)
    # A pass over few elements is 120 to 190 calls; looking up their names in NumPy each time took 20% of it.
    multiply, shift, xor, mask, merge = np.multiply, np.right_shift, np.bitwise_xor, np.bitwise_and, np.bitwise_or
    for round_key in schedule.round_key_arrays:
        multiply(left, multiplier, product)
        shift(product, high_word, left)
        xor(left, right, left)
        xor(left, round_key, left)
        mask(left, left_mask, left)
        # Without a spare bit the right half may keep bits above r; the left mask removes their effect.
        if spare:
            mask(product, right_mask, product)
            shift(right, left_bits, right)
            merge(product, right, product)
        right, product = product, right
    image = (left << right_bits) | (right & right_mask)
    image += _constant(schedule.offset)
    image &= _constant((1 << sum(domain)) - 1)
    return image


def _encrypt_one(value: int, domain: _Domain, schedule: _KeySchedule) -> int:
    """The same pass for one Python integer."""
    left_bits, right_bits = domain
    left_mask, right_mask = (1 << left_bits) - 1, (1 << right_bits) - 1
    left, right = value >> right_bits, value & right_mask
    for round_key in schedule.round_keys:
        product = (left * _MULTIPLIER) & _WORD
        left = ((product >> 32) ^ right ^ round_key) & left_mask
        right = ((product << (right_bits - left_bits)) | (right >> left_bits)) & right_mask
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
