"""shuffled_rows: equal to `permute`, `rows` and padding one after the other, and to a copy by element."""

from __future__ import annotations

from typing import Any

import cuda_on_cpu
import numpy as np
import pytest
from backends import NUMPY, Backend, outside
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dali_pipes.operators import permute, rows, shuffled_rows
from dali_pipes.operators.shuffled_rows import IGNORE_INDEX, Slots
from dali_pipes.rows.windows import WindowRows, Windows
from dali_pipes.schedule import Schedule, StepRange
from dali_pipes.schedule.plans import plan_steps

settings_with_backend = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

NINE = np.arange(10, 19, dtype=np.uint16)
FOUR_WINDOWS: dict[str, Any] = {"row_step": 2, "num_rows": 4, "key": 2, "origin": 0, "stride": 2, "seq_len": 2}


def padded_dtypes(padding: bool) -> list[tuple[np.dtype[Any], np.dtype[Any]]]:
    """Pairs of token and output dtype, without those that have no room for the labels of padding."""
    pairs = cuda_on_cpu.rows_dtype_pairs()
    return [pair for pair in pairs if not padding or (pair[1].kind == "i" and pair[1].itemsize > 1)]


@st.composite
def slots_of(draw: st.DrawFn, num_rows: int, stride: int, width: int) -> Slots:
    """Slots that hold so many windows: all are full, or one is short, if that is not all of a slot."""
    rows = draw(st.integers(1, 9))
    missing = -num_rows % rows
    short = draw(st.integers(0, (num_rows + missing) // rows - 1))
    tokens = (rows - 1) * stride + width + draw(st.integers(0, 3))
    return Slots(rows, tokens, (short + 1) * rows - missing if missing else num_rows, missing)


def starts_in(slots: Slots | None, num_rows: int, stride: int) -> list[int]:
    """Where windows start, by lists."""
    if slots is None:
        return [window * stride for window in range(num_rows)]
    starts: list[int] = []
    for slot in range(num_rows + 1):
        is_short = slots.missing and (slot + 1) * slots.rows - slots.missing == slots.short_end
        starts += [slot * slots.tokens + row * stride for row in range(slots.rows - slots.missing * bool(is_short))]
    return starts[:num_rows]


def test_the_slots_of_the_docstring(xp: Backend) -> None:
    tokens = np.arange(16, dtype=np.uint16)
    place: dict[str, Any] = {"row_step": 1, "num_rows": 5, "key": None, "origin": 0, "stride": 2, "seq_len": 2}
    inputs, labels = shuffled_rows(xp.array(tokens), 100, 5, **place, begin=100, slots=Slots(3, 8, 2, 1))
    assert xp.numpy(inputs).tolist() == [[0, 1], [2, 3], [8, 9], [10, 11], [12, 13]]
    assert xp.numpy(labels).tolist() == [[1, 2], [3, 4], [9, 10], [11, 12], [13, 14]]
    with pytest.raises(ValueError, match=r"last window, 4, .* 12 to 15, .*\b14 tokens"):
        shuffled_rows(xp.array(tokens[:14]), 100, 5, **place, begin=100, slots=Slots(3, 8, 2, 1))
    with pytest.raises(ValueError, match="first is 99, expected 100"):
        shuffled_rows(xp.array(tokens), 99, 5, **place, begin=100, slots=Slots(3, 8, 2, 1))


def test_tiny_case(xp: Backend) -> None:
    row_ids = xp.array(np.full(3, 77))
    inputs, labels = shuffled_rows(xp.array(NINE), 1, 3, row_ids=row_ids, **FOUR_WINDOWS)
    assert xp.numpy(row_ids).tolist() == [1, 3, -1]
    assert xp.numpy(inputs).tolist() == [[12, 13], [14, 15], [16, 17]]
    assert xp.numpy(labels).tolist() == [[13, 14], [15, 16], [-100, -100]]
    assert inputs.dtype == labels.dtype == np.int64


def test_tiny_case_in_file_order(xp: Backend) -> None:
    inputs, labels = shuffled_rows(xp.array(NINE), 0, 2, **FOUR_WINDOWS | {"key": None, "origin": 2, "num_rows": 3})
    assert xp.numpy(inputs).tolist() == [[12, 13], [16, 17]]
    assert xp.numpy(labels).tolist() == [[13, 14], [17, 18]]


@settings_with_backend
@given(
    data=st.data(),
    shift=st.booleans(),
    seq_len=st.integers(1, 40) | st.sampled_from([64, 256]),
    num_rows=st.integers(1, 60),
    stride=st.integers(1, 50),
    origin=st.integers(0, 9),
    row_step=st.integers(1, 9),
    count=st.integers(0, 20),
    key=st.none() | st.integers(0, 2**64 - 1),
)
def test_equals_the_copy_by_element(
    xp: Backend,
    data: st.DataObject,
    shift: bool,
    seq_len: int,
    num_rows: int,
    stride: int,
    origin: int,
    row_step: int,
    count: int,
    key: int | None,
) -> None:
    begin = data.draw(st.sampled_from([0, 0, 1, 2**40]))
    first = begin + data.draw(st.integers(0, num_rows + 3))
    numbers = [first + row * row_step for row in range(count)]
    is_real = [number < begin + num_rows for number in numbers]
    token_dtype, dtype = data.draw(st.sampled_from(padded_dtypes(not all(is_real))))
    width = seq_len + shift
    slots = data.draw(st.none() | st.just(num_rows).flatmap(lambda rows: slots_of(rows, stride, width)))
    starts = [origin + start for start in starts_in(slots, num_rows, stride)]
    size = max(starts) + width  # the last window ends where the tokens end
    if slots is not None:  # as the whole slots do
        size = origin + (num_rows - 1 + slots.missing) // slots.rows * slots.tokens + (slots.rows - 1) * stride + width
    limits = np.iinfo(token_dtype)
    backing = np.random.default_rng(size).integers(0, min(limits.max, 2**31 - 1), size + 3, token_dtype, endpoint=True)
    places = data.draw(st.lists(st.integers(0, size - 1), max_size=3))
    backing[places] = data.draw(st.sampled_from([limits.max, limits.min]))
    tokens = backing[data.draw(st.integers(0, 3)) :][:size]
    vocab_size = data.draw(st.sampled_from([None, 50, min(int(limits.max), 2**63)]))
    at = data.draw(st.integers(0, 3))
    whole = [xp.array(np.full(count * seq_len + 4, 111, dtype)) for _ in range(2)]
    out = [array[at : at + count * seq_len].reshape(count, seq_len) for array in whole]
    row_ids, bad = xp.array(np.full(count, 77)), xp.bad()
    inputs, labels = shuffled_rows(
        xp.array(tokens),
        first,
        count,
        row_step=row_step,
        num_rows=num_rows,
        key=key,
        origin=origin,
        stride=stride,
        seq_len=seq_len,
        label_shift=shift,
        begin=begin,
        slots=slots,
        out=(out[0], out[1]),
        row_ids=row_ids,
        vocab_size=vocab_size,
        bad=bad,
    )
    order = list(range(num_rows)) if key is None else permute(np.arange(num_rows), num_rows, key).tolist()
    shown = [order[number - begin if real else 0] for number, real in zip(numbers, is_real, strict=True)]
    read = [tokens[starts[window] :][:width] for window in shown]
    assert xp.numpy(inputs).tolist() == [row[:seq_len].astype(dtype).tolist() for row in read]
    assert xp.numpy(labels).tolist() == [
        row[shift:].astype(dtype).tolist() if real else [-100] * seq_len
        for real, row in zip(is_real, read, strict=True)
    ]
    assert xp.numpy(row_ids).tolist() == [number if real else -1 for number, real in zip(numbers, is_real, strict=True)]
    assert xp.numpy(bad).tolist() == outside([row.tolist() for row in read], vocab_size)
    for array in whole:
        around = xp.numpy(array)
        assert (around[:at] == 111).all()
        assert (around[at + count * seq_len :] == 111).all()


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize(("world_size", "drop_last"), [(1, True), (3, True), (3, False)])
def test_equals_the_plan_of_a_schedule(xp: Backend, shuffle: bool, world_size: int, drop_last: bool) -> None:
    """Bit for bit what the other placements make of the same steps: `plan_steps`, `rows`, labels of padding rows."""
    seq_len = 32
    tokens = np.random.default_rng(0).integers(0, 60_000, 5 + 40 * 24 + seq_len + 1, np.uint16)
    windows = Windows(first=5, count=41, seq_len=seq_len, stride=24, num_tokens=tokens.size)
    source = WindowRows(windows, shuffle=shuffle, seed=3)
    for rank in range(world_size):
        schedule = Schedule(source, 4, rank, world_size, drop_last=drop_last)
        steps = StepRange(epoch=2, base=2, first_step=1, num_steps=schedule.steps(2) - 1)
        plan = plan_steps(schedule, steps)
        inputs, labels = rows(tokens, plan.starts, seq_len)
        labels[plan.row_ids < 0] = IGNORE_INDEX
        row_ids = xp.array(np.zeros(plan.row_ids.size, np.int64))
        fused = shuffled_rows(
            xp.array(tokens),
            steps.base + steps.first_step * schedule.global_rows + rank,
            plan.row_ids.size,
            row_step=world_size,
            num_rows=windows.count,
            key=source.key(steps.epoch),
            origin=windows.first,
            stride=windows.stride,
            seq_len=seq_len,
            row_ids=row_ids,
        )
        for one, other in ((fused[0], inputs), (fused[1], labels), (row_ids, plan.row_ids)):
            np.testing.assert_array_equal(xp.numpy(one), other)


@pytest.mark.parametrize(
    ("count", "seq_len", "num_rows"), [(1, 1, 1), (1, 5000, 2), (700, 3, 900), (3000, 1, 2**20), (257, 257, 300)]
)
@pytest.mark.parametrize("dtype", ["int64", "int32", "uint16"])
def test_shapes_around_the_limits_of_a_launch(xp: Backend, count: int, seq_len: int, num_rows: int, dtype: str) -> None:
    tokens = np.random.default_rng(1).integers(0, 65536, num_rows + seq_len, np.uint16)
    inputs, labels = shuffled_rows(
        xp.array(tokens),
        0,
        count,
        row_step=1,
        num_rows=num_rows,
        key=12345,
        origin=0,
        stride=1,
        seq_len=seq_len,
        dtype=np.dtype(dtype),
    )
    starts = permute(np.arange(count), num_rows, 12345)
    whole = np.lib.stride_tricks.sliding_window_view(tokens, seq_len + 1)[starts]
    np.testing.assert_array_equal(xp.numpy(inputs), whole[:, :-1])
    np.testing.assert_array_equal(xp.numpy(labels), whole[:, 1:])


def test_tokens_past_32_bits(xp: Backend, tmp_path: Any) -> None:
    """The file is a hole: only the few pages that are touched take room."""
    size = 2**32 + 1000
    path = tmp_path / "tokens.bin"
    with path.open("wb") as file:
        file.truncate(size)
    tokens = np.memmap(path, np.uint8, "r+")
    num_rows, seq_len = size - 4, 4
    windows = permute(np.arange(2**32, 2**32 + 8), num_rows, 99)
    tokens[windows] = np.arange(1, 9)
    row_ids = xp.array(np.zeros(8, np.int64))
    place: dict[str, Any] = {"row_step": 1, "num_rows": num_rows, "origin": 0, "stride": 1, "seq_len": seq_len}
    inputs, _ = shuffled_rows(xp.array(tokens), 2**32, 8, key=99, row_ids=row_ids, **place)
    assert xp.numpy(inputs)[:, 0].tolist() == list(range(1, 9))
    assert xp.numpy(row_ids).tolist() == list(range(2**32, 2**32 + 8))


def test_row_numbers_far_past_the_end(xp: Backend) -> None:
    """Up to the last that has a number at all."""
    row_ids = xp.array(np.zeros(2, np.int64))
    labels = shuffled_rows(xp.array(NINE), 3, 2, row_ids=row_ids, **FOUR_WINDOWS | {"row_step": 2**63 - 4})[1]
    assert xp.numpy(row_ids).tolist() == [3, -1]
    assert xp.numpy(labels).tolist() == [[15, 16], [-100, -100]]
    with pytest.raises(ValueError, match=rf"last_row is {2**63}, expected 0 <= last_row < 2\*\*63"):
        shuffled_rows(xp.array(NINE), 3, 2, **FOUR_WINDOWS | {"row_step": 2**63 - 3})


@pytest.mark.parametrize("dtype", ["uint16", "int8", "uint64"])
def test_padding_needs_room_for_its_labels(xp: Backend, dtype: str) -> None:
    tokens = xp.array(NINE.astype(dtype))
    with pytest.raises(TypeError, match=f"dtype is {dtype}, .*row 5 of 4"):
        shuffled_rows(tokens, 1, 3, dtype=np.dtype(dtype), **FOUR_WINDOWS)
    assert shuffled_rows(tokens, 1, 2, dtype=np.dtype(dtype), **FOUR_WINDOWS)[0].dtype == dtype
    assert shuffled_rows(tokens, 5, 0, dtype=np.dtype(dtype), **FOUR_WINDOWS)[0].shape == (0, 2)


def test_windows_must_lie_inside_the_tokens(xp: Backend) -> None:
    with pytest.raises(ValueError, match=r"window, 3, .* 6 to 9, .*\b8 tokens"):
        shuffled_rows(xp.array(NINE[:8]), 0, 1, **FOUR_WINDOWS)
    shuffled_rows(xp.array(NINE[:8]), 0, 1, label_shift=False, **FOUR_WINDOWS)
    for change in ({"origin": 1}, {"stride": 3}, {"num_rows": 5}, {"seq_len": 3}, {"stride": 2**62}):
        with pytest.raises(ValueError, match="last window"):
            shuffled_rows(xp.array(NINE), 0, 1, **FOUR_WINDOWS | change)


@pytest.mark.parametrize(
    ("name", "wrong", "expected"),
    [
        ("first", -1, r"expected 0 <= first < 2\*\*63"),
        ("count", -1, r"expected 0 <= count < 2\*\*63"),
        ("row_step", 0, r"expected 1 <= row_step < 2\*\*63"),
        ("num_rows", 0, r"expected 1 <= num_rows < 2\*\*63"),
        ("stride", 0, r"expected 1 <= stride < 2\*\*63"),
        ("origin", -1, r"expected 0 <= origin < 2\*\*63"),
        ("key", 2**64, r"expected 0 <= key < 2\*\*64"),
        ("seq_len", 0, "expected at least 1"),
        ("num_rows", 2**63, r"expected 1 <= num_rows < 2\*\*63"),
    ],
)
def test_numbers_out_of_range(xp: Backend, name: str, wrong: int, expected: str) -> None:
    arguments = FOUR_WINDOWS | {"first": 0, "count": 1} | {name: wrong}
    with pytest.raises(ValueError, match=f"{name} is {wrong}, {expected}"):
        shuffled_rows(xp.array(NINE), **arguments)
    with pytest.raises(TypeError, match="float"):
        shuffled_rows(xp.array(NINE), **arguments | {name: 1.5})


def test_wrong_arrays(xp: Backend) -> None:
    def run(tokens: NDArray[Any], **changes: Any) -> None:
        shuffled_rows(xp.array(tokens), 0, 2, **FOUR_WINDOWS | changes)

    with pytest.raises(TypeError, match="tokens have dtype float64"):
        run(NINE.astype(float))
    with pytest.raises(ValueError, match=r"out\[0\] has shape \(3, 2\)"):
        run(NINE, out=(xp.array(np.zeros((3, 2))), xp.array(np.zeros((2, 2)))), dtype=np.dtype(np.int64))
    for ids in (np.zeros(3, np.int64), np.zeros(2, np.int32), np.zeros(4, np.int64)[::2]):
        with pytest.raises(ValueError, match=r"row_ids has shape .* expected a contiguous array of shape \(2,\)"):
            run(NINE, row_ids=xp.array(ids))
    with pytest.raises(ValueError, match=r"vocab_size .* bad"):
        run(NINE, vocab_size=5)
    other = cuda_on_cpu.DeviceArray(np.zeros(2, np.int64)) if xp is NUMPY else np.zeros(2, np.int64)
    arrays: dict[str, Any] = {"row_ids": other, "bad": other}
    for name, array in arrays.items():
        with pytest.raises(TypeError, match=f"{name} (is a|must be)"):
            run(NINE, **{name: array})
