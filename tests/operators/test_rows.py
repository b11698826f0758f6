"""rows: every element of inputs and labels, on every backend, for every pair of dtypes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import cuda_on_cpu
import numpy as np
import pytest
from backends import Backend, outside
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dali_pipes.operators import rows

settings_with_backend = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

TEN = np.arange(10, 20, dtype=np.uint16)


def rows_by_element(
    tokens: list[int], starts: list[int], seq_len: int, shift: bool
) -> tuple[list[list[int]], list[list[int]]]:
    """Slow and independent, over Python integers."""
    inputs = [[tokens[start + t] for t in range(seq_len)] for start in starts]
    labels = [[tokens[start + t + int(shift)] for t in range(seq_len)] for start in starts]
    return inputs, labels


def random_tokens(dtype: np.dtype[Any], count: int, seed: int = 0) -> NDArray[Any]:
    """Values from the whole range of the dtype, both ends among them where there is room."""
    limits = np.iinfo(dtype)
    tokens = np.random.default_rng(seed).integers(limits.min, limits.max, count, dtype, endpoint=True)
    tokens[:2] = (limits.max, limits.min)[:count]
    return tokens


def test_tiny_case(xp: Backend) -> None:
    inputs, labels = rows(xp.array(TEN), xp.array(np.array([0, 5, 2])), 4)
    assert xp.numpy(inputs).tolist() == [[10, 11, 12, 13], [15, 16, 17, 18], [12, 13, 14, 15]]
    assert xp.numpy(labels).tolist() == [[11, 12, 13, 14], [16, 17, 18, 19], [13, 14, 15, 16]]
    assert inputs.dtype == labels.dtype == np.int64


def test_tiny_case_without_shift(xp: Backend) -> None:
    inputs, labels = rows(xp.array(TEN), range(0, 9, 4), 2, label_shift=False)
    assert xp.numpy(inputs).tolist() == [[10, 11], [14, 15], [18, 19]]
    assert xp.numpy(labels).tolist() == [[10, 11], [14, 15], [18, 19]]


@pytest.mark.parametrize(
    ("starts", "expected"),
    [
        (range(0, 10, 5), [[10, 11, 12, 13], [15, 16, 17, 18]]),  # staged rows, T + 1 tokens each
        (range(6), [[10 + i, 11 + i, 12 + i, 13 + i] for i in range(6)]),  # rows that overlap
        (range(5, -1, -5), [[15, 16, 17, 18], [10, 11, 12, 13]]),  # backwards
        (range(5, 6, 1000), [[15, 16, 17, 18]]),  # one row, which ends at the last token
    ],
)
def test_rows_at_equal_distances(xp: Backend, starts: range, expected: list[list[int]]) -> None:
    inputs, labels = rows(xp.array(TEN), starts, 4)
    assert xp.numpy(inputs).tolist() == expected
    assert xp.numpy(labels).tolist() == [[token + 1 for token in row] for row in expected]


@pytest.mark.parametrize(("token_dtype", "dtype"), cuda_on_cpu.rows_dtype_pairs(), ids=str)
@pytest.mark.parametrize("shift", [True, False], ids=["shifted", "unshifted"])
def test_every_pair_of_dtypes(xp: Backend, token_dtype: np.dtype[Any], dtype: np.dtype[Any], shift: bool) -> None:
    tokens = random_tokens(token_dtype, 1000)
    starts = np.array([0, 1, 17, 450, 1000 - 99 - shift])
    inputs, labels = rows(xp.array(tokens), xp.array(starts), 99, label_shift=shift, dtype=dtype)
    expected = rows_by_element(tokens.tolist(), starts.tolist(), 99, shift)
    for result, values in zip((inputs, labels), expected, strict=True):
        assert result.dtype == dtype
        assert result.flags.c_contiguous
        modulus = 2 ** (8 * dtype.itemsize)
        np.testing.assert_array_equal(xp.numpy(result), np.array(values, object) % modulus - _borrow(values, dtype))


def _borrow(values: list[list[int]], dtype: np.dtype[Any]) -> NDArray[Any]:
    """2**bits where the low bits of a value read as negative in `dtype`, else 0."""
    modulus = 2 ** (8 * dtype.itemsize)
    if dtype.kind == "u":
        return np.zeros(np.shape(values), object)
    return np.array([[modulus if value % modulus >= modulus // 2 else 0 for value in row] for row in values], object)


@settings_with_backend
@given(data=st.data(), shift=st.booleans(), seq_len=st.integers(1, 70), spare=st.integers(0, 60))
def test_equals_the_copy_by_element(xp: Backend, data: st.DataObject, shift: bool, seq_len: int, spare: int) -> None:
    dtype = data.draw(st.sampled_from(cuda_on_cpu.TOKEN_DTYPES))
    backing = random_tokens(dtype, seq_len + shift + spare + 3, seed=seq_len)
    tokens = backing[data.draw(st.integers(0, 3)) :]  # begins anywhere, so also at an odd address
    last = tokens.size - seq_len - shift
    starts = data.draw(st.lists(st.sampled_from([0, last]) | st.integers(0, last), max_size=12))
    inputs, labels = rows(
        xp.array(tokens), xp.array(np.array(starts, np.int64)), seq_len, label_shift=shift, dtype=dtype
    )
    assert inputs.shape == labels.shape == (len(starts), seq_len)
    expected = rows_by_element(tokens.tolist(), starts, seq_len, shift)
    assert (xp.numpy(inputs).tolist(), xp.numpy(labels).tolist()) == expected


@settings_with_backend
@given(data=st.data(), shift=st.booleans(), seq_len=st.integers(1, 70) | st.sampled_from([64, 128, 256, 300]))
def test_results_at_any_address_leave_their_surroundings_alone(
    xp: Backend, data: st.DataObject, shift: bool, seq_len: int
) -> None:
    """Stores of 16 bytes where they fit, narrow ones elsewhere."""
    token_dtype, dtype = data.draw(st.sampled_from(cuda_on_cpu.rows_dtype_pairs()))
    count = data.draw(st.integers(1, 5))
    tokens = np.random.default_rng(seq_len).integers(0, 100, count * (seq_len + shift), token_dtype)
    starts = range(0, tokens.size, seq_len + shift)
    offsets = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    whole = [xp.array(np.full(count * seq_len + 7, 111, dtype)) for _ in offsets]
    size = count * seq_len
    out = [array[at : at + size].reshape(count, seq_len) for array, at in zip(whole, offsets, strict=True)]
    rows(xp.array(tokens), starts, seq_len, label_shift=shift, out=(out[0], out[1]))
    expected = rows_by_element(tokens.tolist(), list(starts), seq_len, shift)
    for array, at, values in zip(whole, offsets, expected, strict=True):
        flat = [value for row in values for value in row]
        assert xp.numpy(array).tolist() == [111] * at + flat + [111] * (7 - at)


def count_bad(
    xp: Backend, tokens: NDArray[Any], starts: range, seq_len: int, vocab_size: int | None, shift: bool = True
) -> list[int]:
    """`bad` after one call; the results must be what they are without it."""
    bad, device_tokens = xp.bad(), xp.array(tokens)
    counted = rows(device_tokens, starts, seq_len, label_shift=shift, vocab_size=vocab_size, bad=bad)
    plain = rows(device_tokens, starts, seq_len, label_shift=shift)
    for one, other in zip(counted, plain, strict=True):
        np.testing.assert_array_equal(xp.numpy(one), xp.numpy(other))
    result: list[int] = xp.numpy(bad).tolist()
    return result


@settings_with_backend
@given(data=st.data(), shift=st.booleans(), seq_len=st.integers(1, 40), count=st.integers(1, 6))
def test_bad_ids_are_counted(xp: Backend, data: st.DataObject, shift: bool, seq_len: int, count: int) -> None:
    dtype = data.draw(st.sampled_from(cuda_on_cpu.TOKEN_DTYPES))
    limits = np.iinfo(dtype)
    border = st.sampled_from([1, 2, 100, limits.max, limits.max + 1, 2**63])
    vocab_size = data.draw(st.none() | border.filter(lambda size: size <= 2**63))
    good = min(vocab_size or 2**63, limits.max + 1)
    size = seq_len + shift + (count - 1) * 3
    tokens = np.random.default_rng(size).integers(0, good - 1, size, dtype, endpoint=True)
    places = data.draw(st.lists(st.integers(0, size - 1), max_size=4))
    tokens[places] = data.draw(st.sampled_from([limits.max, limits.min, min(good, limits.max)]))
    starts = range(0, count * 3, 3)
    read = [tokens[start : start + seq_len + shift].tolist() for start in starts]
    assert count_bad(xp, tokens, starts, seq_len, vocab_size, shift) == outside(read, vocab_size)


@pytest.mark.parametrize(
    ("token_dtype", "token", "vocab_size", "is_bad"),
    [
        ("uint16", 65535, None, False),
        ("uint16", 65535, 65536, False),
        ("uint16", 65535, 65535, True),
        ("uint16", 65535, 2**63, False),
        ("uint8", 1, 1, True),
        ("int8", -1, None, True),
        ("int16", -(2**15), 2**63, True),
        ("int32", 2**31 - 1, 2**31, False),
        ("int64", 2**63 - 1, None, False),
        ("int64", 2**63 - 1, 2**63 - 1, True),
        ("int64", -(2**63), None, True),
        ("uint64", 2**63 - 1, None, False),
        ("uint64", 2**63, None, True),
        ("uint64", 2**64 - 1, 2**63, True),
        ("uint32", 2**32 - 1, 2**32 - 1, True),
    ],
)
@pytest.mark.parametrize("seq_len", [1, 5, 16])
def test_bad_ids_at_the_limits(
    xp: Backend, token_dtype: str, token: int, vocab_size: int | None, is_bad: bool, seq_len: int
) -> None:
    """In the first place, in the last that is only a label, and in all, of the second of three rows."""
    width = seq_len + 1
    starts = range(0, 3 * width, width)
    for places in ([width], [2 * width - 1], range(width, 2 * width)):
        tokens = np.zeros(3 * width, token_dtype)
        tokens[list(places)] = token
        expected = [len(places), places[0]] if is_bad else [0, 2**63 - 1]
        assert count_bad(xp, tokens, starts, seq_len, vocab_size) == expected


def test_a_token_that_rows_share_counts_in_each_and_calls_add_up(xp: Backend) -> None:
    bad = xp.bad()
    tokens = xp.array(np.array([0, 0, 0, 9, 0, 0], np.uint16))
    rows(tokens, range(3), 3, vocab_size=9, bad=bad)
    assert xp.numpy(bad).tolist() == [3, 3]
    rows(tokens, range(2, 4), 1, vocab_size=9, bad=bad)
    assert xp.numpy(bad).tolist() == [5, 1]
    rows(tokens, xp.array(np.array([4])), 1, vocab_size=9, bad=bad)
    assert xp.numpy(bad).tolist() == [5, 1]


def test_wrong_bad(xp: Backend) -> None:
    tokens = xp.array(TEN)
    with pytest.raises(ValueError, match=r"vocab_size .* bad"):
        rows(tokens, range(1), 4, vocab_size=9)
    for wrong in (np.zeros(3, np.int64), np.zeros(2, np.uint64), np.zeros(4, np.int64)[::2]):
        with pytest.raises(
            ValueError, match=r"bad has shape .*expected a contiguous array of shape \(2,\), dtype int64"
        ):
            rows(tokens, range(1), 4, bad=xp.array(wrong))
    for size in (0, -1, 2**63 + 1):
        with pytest.raises(ValueError, match=rf"vocab_size is {size}, expected 1 <= vocab_size <= 2\*\*63"):
            rows(tokens, range(1), 4, vocab_size=size, bad=xp.bad())


@settings_with_backend
@given(data=st.data(), shift=st.booleans(), seq_len=st.integers(1, 300), count=st.integers(0, 40))
def test_a_range_equals_its_starts_as_an_array(
    xp: Backend, data: st.DataObject, shift: bool, seq_len: int, count: int
) -> None:
    step = data.draw(st.integers(1, seq_len + 5))
    first = data.draw(st.integers(0, 7))
    starts = range(first, first + count * step, step)
    if data.draw(st.booleans()):
        starts = starts[::-1]
    tokens = xp.array(np.arange(first + count * step + seq_len + shift, dtype=np.uint32))
    by_range = rows(tokens, starts, seq_len, label_shift=shift)
    by_array = rows(tokens, xp.array(np.array(starts, np.int64)), seq_len, label_shift=shift)
    for one, other in zip(by_range, by_array, strict=True):
        np.testing.assert_array_equal(xp.numpy(one), xp.numpy(other))


@pytest.mark.parametrize(
    ("count", "seq_len"), [(1, 1), (1, 5000), (700, 3), (66_000, 1), (257, 257), (3, 256), (40, 255)]
)
def test_shapes_around_the_limits_of_a_launch(xp: Backend, count: int, seq_len: int) -> None:
    tokens = random_tokens(np.dtype(np.uint16), count * (seq_len + 1))
    inputs, labels = rows(xp.array(tokens), range(0, count * (seq_len + 1), seq_len + 1), seq_len)
    whole = tokens.reshape(count, seq_len + 1)
    np.testing.assert_array_equal(xp.numpy(inputs), whole[:, :-1])
    np.testing.assert_array_equal(xp.numpy(labels), whole[:, 1:])


def test_more_rows_than_the_second_axis_of_a_grid(xp: Backend) -> None:
    count, seq_len = 65_535 + 10, 300
    tokens = random_tokens(np.dtype(np.uint8), count + seq_len)
    out = tuple(xp.array(np.zeros((count, seq_len), np.uint8)) for _ in range(2))
    inputs, labels = rows(xp.array(tokens), range(count), seq_len, dtype=np.dtype(np.uint8), out=out)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, seq_len)
    assert np.array_equal(xp.numpy(inputs), windows[:-1])
    assert np.array_equal(xp.numpy(labels), windows[1:])


@pytest.mark.parametrize("border", [2**31, 2**32])
def test_positions_past_32_bits(xp: Backend, border: int, tmp_path: Path) -> None:
    """The file is a hole: only the few pages that are written take room."""
    path = tmp_path / "tokens.bin"
    path.touch()
    os.truncate(path, border + 1000)
    tokens = np.memmap(path, np.uint8, "r+")
    marks = [0, border - 1, border, border + 999]
    tokens[marks] = [1, 2, 3, 4]
    device_tokens = xp.array(tokens)
    expected = [[1, 0], [0, 2], [2, 3], [3, 0], [0, 4]]
    starts = np.array([0, border - 2, border - 1, border, border + 998])
    assert xp.numpy(rows(device_tokens, xp.array(starts), 2, label_shift=False)[0]).tolist() == expected
    assert xp.numpy(rows(device_tokens, range(0, border + 1, border), 2)[0]).tolist() == [[1, 0], [3, 0]]
    with pytest.raises(ValueError, match=f"row 1 .* {border + 998:,} to {border + 1001:,}"):
        rows(device_tokens, range(0, border + 999, border + 998), 2)


@pytest.mark.parametrize(
    ("token_dtype", "value"), [("uint32", 2**31 + 5), ("uint32", 2**32 - 1), ("uint16", 65535), ("uint8", 255)]
)
def test_large_ids_keep_their_value_and_sign(xp: Backend, token_dtype: str, value: int) -> None:
    inputs, labels = rows(xp.array(np.array([value, 0, value], token_dtype)), range(1), 2)
    assert xp.numpy(inputs).tolist() == [[value, 0]]
    assert xp.numpy(labels).tolist() == [[0, value]]


def test_no_rows(xp: Backend) -> None:
    for starts in (range(0), xp.array(np.array([], np.int64))):
        for tokens in (TEN, TEN[:0]):
            inputs, labels = rows(xp.array(tokens), starts, 100, dtype=np.dtype(np.int32))
            assert inputs.shape == labels.shape == (0, 100)
            assert inputs.dtype == labels.dtype == np.int32


def test_read_only_tokens_and_strided_starts(xp: Backend) -> None:
    tokens = TEN.copy()
    tokens.flags.writeable = False
    starts = np.array([0, 99, 3, 99, 6])[::2]
    expected = [[10, 11], [13, 14], [16, 17]]
    assert xp.numpy(rows(xp.array(tokens), xp.array(starts), 2)[0]).tolist() == expected
    assert xp.numpy(rows(xp.array(tokens), range(0, 9, 3), 2)[0]).tolist() == expected
    assert tokens.tolist() == TEN.tolist()


def test_results_are_separate_memory() -> None:
    inputs, labels = rows(TEN, range(0, 8, 4), 4, label_shift=False, dtype=TEN.dtype)
    inputs[:] = 0
    assert labels.tolist() == [[10, 11, 12, 13], [14, 15, 16, 17]]
    assert TEN.tolist() == list(range(10, 20))


def test_out_is_filled_and_returned(xp: Backend) -> None:
    out = xp.array(np.full((2, 4), -7, np.int32)), xp.array(np.full((2, 4), -7, np.int32))
    for dtype in (None, np.dtype(np.int32)):
        for starts in (range(0, 10, 5), xp.array(np.array([0, 5]))):
            inputs, labels = rows(xp.array(TEN), starts, 4, dtype=dtype, out=out)
            assert inputs is out[0]
            assert labels is out[1]
            assert xp.numpy(out[0]).tolist() == [[10, 11, 12, 13], [15, 16, 17, 18]]
            assert xp.numpy(out[1]).tolist() == [[11, 12, 13, 14], [16, 17, 18, 19]]


@pytest.mark.parametrize(
    ("first", "second", "wrong"),
    [
        (np.zeros((2, 5), np.int64), np.zeros((2, 4), np.int64), r"out\[0\] has shape \(2, 5\)"),
        (np.zeros((2, 4), np.int64), np.zeros(8, np.int64), r"out\[1\] has shape \(8,\)"),
        (np.zeros((2, 4), np.int64), np.zeros((2, 4), np.int32), r"out\[1\] has shape \(2, 4\), dtype int32"),
        (np.zeros((4, 2), np.int64).T, np.zeros((2, 4), np.int64), r"out\[0\] has shape .* strides \(8, 16\)"),
    ],
)
def test_wrong_out(xp: Backend, first: NDArray[Any], second: NDArray[Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=rf"{wrong}.*expected a contiguous array of shape \(2, 4\), dtype int64"):
        rows(xp.array(TEN), range(0, 10, 5), 4, out=(xp.array(first), xp.array(second)))


@pytest.mark.parametrize(
    ("starts", "row", "start", "end"),
    [
        ([0, 6], 1, 6, 11),
        ([0, -1], 1, -1, 4),
        ([3, -(2**63), 2**62], 1, -(2**63), -(2**63) + 5),
        ([2**63 - 1], 0, 2**63 - 1, 2**63 + 4),
    ],
)
def test_start_out_of_range_in_an_array(starts: list[int], row: int, start: int, end: int) -> None:
    with pytest.raises(ValueError, match=rf"row {row} .* {start:,} to {end:,}, .*\b10 tokens"):
        rows(TEN, np.array(starts), 4)


@pytest.mark.parametrize(
    ("starts", "row", "start"), [(range(0, 7, 6), 1, 6), (range(5, -2, -6), 1, -1), (range(2**70, 2**70 + 1), 0, 2**70)]
)
def test_start_out_of_range_in_a_range(xp: Backend, starts: range, row: int, start: int) -> None:
    with pytest.raises(ValueError, match=rf"row {row} .* {start:,} to {start + 5:,},"):
        rows(xp.array(TEN), starts, 4)


def test_row_longer_than_the_tokens(xp: Backend) -> None:
    assert xp.numpy(rows(xp.array(TEN), range(1), 9)[1]).tolist() == [list(range(11, 20))]
    with pytest.raises(ValueError, match=r"row 0 .* 0 to 11,"):
        rows(xp.array(TEN), range(1), 10)
    assert xp.numpy(rows(xp.array(TEN), range(1), 10, label_shift=False)[1]).tolist() == [list(range(10, 20))]


@pytest.mark.parametrize("dtype", ["float32", "bool", "complex64"])
def test_token_dtype(xp: Backend, dtype: str) -> None:
    with pytest.raises(TypeError, match=f"tokens have dtype {dtype}, expected an integer dtype such as uint16"):
        rows(xp.array(np.zeros(10, dtype)), range(1), 4)


@pytest.mark.parametrize("tokens", [np.zeros((2, 5), np.uint16), np.zeros(20, np.uint16)[::2]])
def test_token_layout(xp: Backend, tokens: NDArray[Any]) -> None:
    with pytest.raises(ValueError, match=r"tokens have shape .* and strides .*, expected one contiguous axis"):
        rows(xp.array(tokens), range(1), 4)


@pytest.mark.parametrize("dtype", ["uint8", "int16", "float32", "uint64"])
def test_output_dtype(xp: Backend, dtype: str) -> None:
    with pytest.raises(TypeError, match=f"dtype is {dtype}, expected one of int64, int32, uint16"):
        rows(xp.array(TEN), range(1), 4, dtype=np.dtype(dtype))


def test_start_dtype_and_shape(xp: Backend) -> None:
    with pytest.raises(TypeError, match="starts have dtype int32, expected int64"):
        rows(xp.array(TEN), xp.array(np.zeros(1, np.int32)), 4)
    with pytest.raises(ValueError, match=r"starts have shape \(1, 1\), expected one axis"):
        rows(xp.array(TEN), xp.array(np.zeros((1, 1), np.int64)), 4)


@pytest.mark.parametrize("seq_len", [0, -1])
def test_seq_len(xp: Backend, seq_len: int) -> None:
    with pytest.raises(ValueError, match=f"seq_len is {seq_len}, expected at least 1"):
        rows(xp.array(TEN), range(1), seq_len)


def test_other_arrays_are_refused_naming_both_kinds() -> None:
    both = r"must be a numpy\.ndarray or a cupy\.ndarray, not"
    with pytest.raises(TypeError, match=rf"tokens {both} builtins\.bytes"):
        rows(b"1234", range(1), 2)
    with pytest.raises(TypeError, match=rf"starts {both} builtins\.list"):
        rows(TEN, [0, 1], 2)


def test_arrays_of_two_kinds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", cuda_on_cpu.stand_in_for_cupy({}))
    host, device = np.zeros(1, np.int64), cuda_on_cpu.DeviceArray(np.zeros(1, np.int64))
    with pytest.raises(TypeError, match=r"starts is a cupy\.ndarray.* numpy\.ndarray"):
        rows(TEN, device, 2)
    with pytest.raises(TypeError, match=r"starts is a numpy\.ndarray.* cupy\.ndarray"):
        rows(cuda_on_cpu.DeviceArray(TEN), host, 2)
    with pytest.raises(TypeError, match=r"out\[1\] is a cupy\.ndarray.* numpy\.ndarray"):
        rows(TEN, range(1), 2, out=(np.zeros((1, 2), np.int64), device))
