"""permute: a bijection, frozen, equal on every backend, and as the paper describes it."""

from __future__ import annotations

import sys
import threading
import time
from itertools import chain

import numpy as np
import pytest
from backends import Backend
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes.operators import permute
from dali_pipes.operators.permute import ORDER_NAME, permute_each, preimage

settings_with_backend = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

sizes = st.one_of(
    st.integers(1, 40),
    st.builds(
        lambda power, offset: min(max(2**power + offset, 1), 2**63 - 1), st.integers(0, 63), st.sampled_from([-1, 0, 1])
    ),
    st.integers(1, 2**63 - 1),
)
keys = st.integers(0, 2**64 - 1)


def permute_by_paper(index: int, n: int, key: int) -> int:
    """Slow and independent: bits are lists, lowest first; the round of Mitchell et al., then the offset."""

    def number(bits: list[int]) -> int:
        return sum(bit << place for place, bit in enumerate(bits))

    def bits_of(value: int, count: int) -> list[int]:
        return [(value >> place) & 1 for place in range(count)]

    outputs = []
    counter = key
    for _ in range(25):
        counter = (counter + 0x9E3779B97F4A7C15) % 2**64
        z = counter
        z = (z ^ z // 2**30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z // 2**27) * 0x94D049BB133111EB % 2**64
        outputs.append(z ^ z // 2**31)

    total = 4
    while 1 << total < n:
        total += 1
    in_left = total // 2
    value = index
    while True:
        bits = bits_of(value, total)
        right, left = bits[: total - in_left], bits[total - in_left :]
        for output in outputs[:24]:
            product = bits_of(number(left) * 0xD2B74407B1CE6E93, 64)
            key_bits = bits_of(output, 64)[32:]
            # what the right half has above the left half's width becomes the lowest bit of the next right half
            next_right = right[in_left:] + product[:in_left]
            left = [product[32 + place] ^ key_bits[place] ^ right[place] for place in range(in_left)]
            right = next_right
        value = (number(right + left) + outputs[24]) % (1 << total)
        if value < n:
            return value


@settings_with_backend
@given(n=sizes, key=keys, data=st.data())
def test_equals_the_description_in_the_paper(xp: Backend, n: int, key: int, data: st.DataObject) -> None:
    index = st.one_of(st.integers(0, n - 1), st.sampled_from([0, n - 1, n // 2]))
    indices = data.draw(st.lists(index, min_size=1, max_size=20))
    images = xp.numpy(permute(xp.array(np.array(indices, np.int64)), n, key))
    assert images.tolist() == [permute_by_paper(index, n, key) for index in indices]


@given(n=sizes, key=keys, data=st.data())
def test_a_preimage_is_what_is_sent_there(n: int, key: int, data: st.DataObject) -> None:
    image = data.draw(st.one_of(st.integers(0, n - 1), st.sampled_from([0, n - 1])))
    index = preimage(image, n, key)
    assert permute(np.array([index]), n, key).tolist() == [image]


def test_backends_agree_on_more_indices_than_the_grid_has_threads(xp: Backend) -> None:
    n, key = 2**33 + 1, 0xFEEDFACE
    indices = np.random.default_rng(5).integers(0, n, 4096 * 256 + 37)
    images = xp.numpy(permute(xp.array(indices), n, key))
    again = np.concatenate([permute(part, n, key) for part in np.array_split(indices, 300)])
    np.testing.assert_array_equal(images, again)


@pytest.mark.parametrize("n", [*range(1, 41), *(2**k + d for k in range(6, 17) for d in (-1, 0, 1))])
def test_is_a_bijection(xp: Backend, n: int) -> None:
    images = xp.numpy(permute(xp.array(np.arange(n)), n, key=n * 0x1234567))
    assert images.dtype == np.int64
    assert np.array_equal(np.sort(images), np.arange(n))


@settings_with_backend
@given(n=st.integers(1, 5000), key=keys)
def test_is_a_bijection_for_any_size_and_key(xp: Backend, n: int, key: int) -> None:
    images = xp.numpy(permute(xp.array(np.arange(n)), n, key))
    assert np.array_equal(np.sort(images), np.arange(n))


@settings(max_examples=examples(10))
@given(n=st.integers(2**32 - 2, 2**63 - 1), key=keys, seed=st.integers(0, 2**32))
def test_distinct_indices_of_a_large_set_have_distinct_images(n: int, key: int, seed: int) -> None:
    indices = np.unique(np.random.default_rng(seed).integers(0, n, 5000))
    images = permute(indices, n, key)
    assert images.min() >= 0
    assert images.max() < n
    assert np.unique(images).size == indices.size


FROZEN = [  # (n, key, indices, images)
    (1, 0, [0], [0]),
    (2, 1, [0, 1], [1, 0]),
    (3, 2, [0, 1, 2], [2, 1, 0]),
    (5, 0, [0, 1, 2, 3, 4], [3, 0, 4, 2, 1]),
    (10, 2024, [0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [2, 5, 9, 1, 3, 7, 0, 4, 8, 6]),
    (
        16,
        18446744073709551615,
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
        [13, 9, 6, 15, 7, 2, 14, 4, 1, 3, 11, 8, 5, 10, 0, 12],
    ),
    (
        17,
        3,
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16],
        [8, 6, 9, 5, 0, 3, 16, 12, 10, 7, 14, 4, 11, 15, 13, 1, 2],
    ),
    (1000, 11400714819323198485, [0, 1, 2, 3, 500, 999], [145, 630, 131, 476, 506, 452]),
    (65536, 42, [0, 1, 2, 32768, 65535], [61117, 5320, 16110, 23603, 14980]),
    (65537, 42, [0, 1, 2, 32768, 65535, 65536], [15194, 6816, 36657, 38992, 25227, 21472]),
    (200000, 1234567890123456789, [0, 1, 2, 99999, 199999], [197012, 190611, 172062, 127277, 63871]),
    (4294967296, 7, [0, 1, 2147483648, 4294967295], [2015580261, 1255705397, 2171973011, 3036760739]),
    (
        4294967297,
        7,
        [0, 1, 2147483648, 4294967295, 4294967296],
        [3853289579, 4147827946, 1128775155, 1258924570, 2207293982],
    ),
    (
        9765625000,
        3735928559,
        [0, 1, 2, 4882812500, 9765624999],
        [2987046380, 6373275647, 4335752455, 733692253, 6702058154],
    ),
    (
        4611686018427387905,
        99,
        [0, 1, 2305843009213693952, 4611686018427387904],
        [1178167775789406296, 3850447944686917137, 3575899598488788740, 4090563652121251740],
    ),
    (
        9223372036854775807,
        18446744069414584320,
        [0, 1, 4611686018427387904, 9223372036854775806],
        [5997570409438086566, 7983247015300586097, 5500402313033280112, 8576270817916894756],
    ),
]


@pytest.mark.parametrize(("n", "key", "indices", "images"), FROZEN)
def test_frozen_order(xp: Backend, n: int, key: int, indices: list[int], images: list[int]) -> None:
    """Saved states rely on these numbers: if one has to change, the order needs a new name."""
    assert ORDER_NAME == "philox24-v1"
    assert xp.numpy(permute(xp.array(np.array(indices, np.int64)), n, key)).tolist() == images


def test_image_does_not_depend_on_its_neighbours() -> None:
    n, key = 100_003, 77
    whole = permute(np.arange(n), n, key)
    assert [int(permute(np.array([i]), n, key)[0]) for i in (0, 1, 99, n - 1)] == whole[[0, 1, 99, n - 1]].tolist()
    for size in (2, 7, 8, 9, 300):
        np.testing.assert_array_equal(permute(np.arange(500, 500 + size), n, key), whole[500 : 500 + size])


def test_input_is_left_alone_and_may_be_strided_read_only_or_empty(xp: Backend) -> None:
    indices = np.arange(100)
    indices.flags.writeable = False
    images = xp.numpy(permute(xp.array(indices), 100, 1))
    assert indices.tolist() == list(range(100))
    assert xp.numpy(permute(xp.array(indices[::3]), 100, 1)).tolist() == images[::3].tolist()
    assert xp.numpy(permute(xp.array(indices[::-1]), 100, 1)).tolist() == images[::-1].tolist()
    empty = xp.numpy(permute(xp.array(indices[:0]), 100, 1))
    assert empty.shape == (0,)
    assert empty.dtype == np.int64


def test_numpy_integers_are_taken_as_size_and_key(xp: Backend) -> None:
    indices = xp.array(np.arange(10))
    expected = xp.numpy(permute(indices, 10, 2**64 - 1)).tolist()
    assert xp.numpy(permute(indices, np.int64(10), np.uint64(2**64 - 1))).tolist() == expected  # type: ignore[arg-type]


@pytest.mark.parametrize("n", [0, -1, 2**63])
def test_size_out_of_range(xp: Backend, n: int) -> None:
    with pytest.raises(ValueError, match=rf"n is {n}, expected 1 <= n < 2\*\*63"):
        permute(xp.array(np.arange(1)), n, 0)


@pytest.mark.parametrize("key", [-1, 2**64])
def test_key_out_of_range(xp: Backend, key: int) -> None:
    with pytest.raises(ValueError, match=rf"key is {key}, expected 0 <= key < 2\*\*64"):
        permute(xp.array(np.arange(1)), 1, key)


def test_size_and_key_must_be_integers(xp: Backend) -> None:
    with pytest.raises(TypeError, match="float"):
        permute(xp.array(np.arange(1)), 1.0, 0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="float"):
        permute(xp.array(np.arange(1)), 1, 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("indices", "position", "wrong"), [([0, 3, -1], 2, -1), ([5, 10, 3, 10], 1, 10), ([2**62], 0, 2**62)]
)
def test_index_outside_the_set(xp: Backend, indices: list[int], position: int, wrong: int) -> None:
    array = xp.array(np.array(indices, np.int64))
    if xp.checks_values:
        with pytest.raises(ValueError, match=rf"indices\[{position}\] is {wrong}, expected 0 <= index < n = 10"):
            permute(array, 10, 0)
    else:
        assert (xp.numpy(permute(array, 10, 0)) == -1).tolist() == [not 0 <= index < 10 for index in indices]


@pytest.mark.parametrize("dtype", ["int32", "uint64", "float64", "bool"])
def test_index_dtype(xp: Backend, dtype: str) -> None:
    with pytest.raises(TypeError, match=f"indices have dtype {dtype}, expected int64"):
        permute(xp.array(np.zeros(3, dtype)), 10, 0)


def test_index_shape(xp: Backend) -> None:
    with pytest.raises(ValueError, match=r"indices have shape \(2, 3\), expected one axis"):
        permute(xp.array(np.zeros((2, 3), np.int64)), 10, 0)


def test_other_arrays_are_refused_naming_both_kinds() -> None:
    with pytest.raises(TypeError, match=r"indices must be a numpy\.ndarray or a cupy\.ndarray, not builtins\.list"):
        permute([1, 2, 3], 10, 0)


border_sizes = st.integers(0, 62).flatmap(lambda bits: st.sampled_from([max(2**bits - 1, 1), 2**bits, 2**bits + 1]))


@st.composite
def groups_of_one_size_and_key(draw: st.DrawFn) -> tuple[list[int], list[int], list[list[int]]]:
    """Sizes, keys and indices of groups, some empty, some of hundreds; often of sizes with one domain."""
    one_bits = draw(st.one_of(st.none(), st.integers(4, 40)))
    kinds = st.one_of(sizes, border_sizes) if one_bits is None else st.integers(2 ** (one_bits - 1) + 1, 2**one_bits)
    ends = draw(st.lists(kinds, min_size=1, max_size=30))
    indices = []
    for end in ends:
        some = draw(st.lists(st.one_of(st.integers(0, end - 1), st.just(end - 1)), max_size=4))
        indices.append(some + [number % end for number in range(draw(st.sampled_from([0, 0, 0, 1, 40, 500])))])
    distinct = draw(st.lists(keys, min_size=1, max_size=3))
    return ends, [draw(st.sampled_from(distinct)) for _ in ends], indices


@given(groups=groups_of_one_size_and_key())
def test_each_group_has_its_own_size_and_key(groups: tuple[list[int], list[int], list[list[int]]]) -> None:
    ends, keys_used, indices = groups
    counts = [len(of_group) for of_group in indices]
    images = permute_each(
        np.array([*chain(*indices)], np.int64), np.array(counts), np.array(ends), np.array(keys_used, np.uint64)
    )
    assert images.dtype == np.int64
    oracles: dict[tuple[int, int], dict[int, int]] = {}
    for (end, key), of_group, found in zip(
        zip(ends, keys_used, strict=True), indices, np.split(images, np.cumsum(counts)[:-1]), strict=True
    ):
        known = oracles.setdefault((end, key), {})
        for index in of_group[:6] + of_group[-6:]:
            known.setdefault(index, permute_by_paper(index, end, key))
        assert found[:6].tolist() == [known[index] for index in of_group[:6]]
        assert found[-6:].tolist() == [known[index] for index in of_group[-6:]]
        assert found.tolist() == permute(np.array(of_group, np.int64), end, key).tolist()


@given(n=st.integers(1, 300), key=keys)
def test_one_size_and_key_for_all_elements(n: int, key: int) -> None:
    indices = np.arange(n)
    images = permute_each(indices, np.array([n]), np.array([n]), np.array([key], np.uint64))
    assert images.tolist() == [permute_by_paper(index, n, key) for index in range(n)]


@pytest.mark.parametrize("num_groups", [3, 40_000])
@pytest.mark.parametrize("largest", [100, 5000])
def test_parts_of_many_elements_join_to_the_same_images(num_groups: int, largest: int) -> None:
    random = np.random.default_rng(15)
    counts = np.bincount(random.integers(0, num_groups, 40_000), minlength=num_groups)
    sizes, keys = random.integers(65, largest, num_groups), random.integers(0, 2**64, num_groups, np.uint64)
    groups = np.arange(num_groups).repeat(counts)
    indices = random.integers(0, 65, 40_000)
    images = permute_each(indices, counts, sizes, keys)
    for position in range(0, 40_000, 997):
        one, group = slice(position, position + 1), groups[position]
        assert images[one].tolist() == permute(indices[one], int(sizes[group]), int(keys[group])).tolist()
    nothing = np.zeros(0, np.int64)
    assert permute_each(nothing, np.zeros(num_groups, np.int64), sizes, keys).tolist() == []
    assert permute_each(nothing, nothing, nothing, nothing.view(np.uint64)).tolist() == []


@pytest.mark.parametrize(("index", "size"), [(-1, 5), (5, 5), (0, 0)])
@pytest.mark.parametrize("before", [1, 20_000])
def test_an_index_outside_its_own_size_is_named(index: int, size: int, before: int) -> None:
    indices, counts = np.array([*[2] * before, index, 0]), np.array([before, 2])
    with pytest.raises(ValueError, match=rf"indices\[{before}\] is {index}, .* < {size}"):
        permute_each(indices, counts, np.array([3, size]), np.array([7, 7], np.uint64))


def test_counts_that_are_not_those_of_the_indices_are_named() -> None:
    with pytest.raises(ValueError, match=r"add up to 3.* 2 indices"):
        permute_each(np.array([0, 0]), np.array([1, 2]), np.array([3, 3]), np.array([7, 7], np.uint64))


def test_other_types_are_named() -> None:
    with pytest.raises(TypeError, match="keys have dtype int64, expected uint64"):
        permute_each(np.array([0]), np.array([1]), np.array([3]), np.array([7]))


def test_a_plan_of_many_rows_lets_other_threads_run() -> None:
    """From 16,384 rows on: a reader thread that plans a block must not hold up the trainer's thread."""
    rows, ran, ended = np.arange(1 << 14), 0, threading.Event()

    def other() -> None:
        nonlocal ran
        while not ended.is_set():
            ran += 1
            time.sleep(0)

    interval = sys.getswitchinterval()
    thread = threading.Thread(target=other)
    try:
        sys.setswitchinterval(1000)  # seconds, so that a thread runs only where another one gives the lock away
        thread.start()
        permute(rows, 10**9, 7)
        before = ran
        for _ in range(200):
            permute(rows, 10**9, 7)
            if ran > before:
                break
        assert ran > before
    finally:
        sys.setswitchinterval(interval)
        ended.set()
        thread.join()
