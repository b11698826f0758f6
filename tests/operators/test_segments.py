"""segments: every output of rows made of pieces, on every backend, against hand-written rows and a walk by token."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cuda_on_cpu
import numpy as np
import pytest
from backends import NUMPY, Backend, cuda_sources_on_cpu
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dali_pipes.operators import segments
from dali_pipes.operators.segments import OUTPUTS

settings_with_backend = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])

X = -100
TABLES = ("row_offsets", "piece_starts", "piece_lengths", "piece_ends")
Piece = tuple[int, int, int]  # start, length, end


def run(
    xp: Backend, tokens: NDArray[Any] | list[int], rows: list[list[Piece]], seq_len: int, **options: Any
) -> dict[str, Any]:
    """Every output, or those asked for, as lists."""
    if isinstance(tokens, list):
        tokens = np.array(tokens, np.uint16)
    table = np.array([piece for row in rows for piece in row], np.int64).reshape(-1, 3)
    offsets = np.cumsum([0, *(len(row) for row in rows)])
    options = {"outputs": OUTPUTS} | options
    if options.get("loss_mask") is not None:
        options["loss_mask"] = xp.array(np.array(options["loss_mask"], np.uint8))
    columns = [xp.array(np.ascontiguousarray(column)) for column in table.T]
    tables = dict(zip(TABLES, [xp.array(offsets), *columns], strict=True))
    found = segments(xp.array(tokens), **tables, seq_len=seq_len, **options)
    assert list(found) == list(options["outputs"])
    index, masks = options.get("index_dtype", np.int64), ("attention_mask", "loss_mask")
    dtypes = {
        "cu_seqlens": np.int32,
        "num_segments": np.int64,
        **dict.fromkeys(masks, options.get("mask_dtype", index)),
    }
    for name, array in found.items():
        assert array.dtype == dtypes.get(name, index)
        assert array.flags.c_contiguous
    return {name: xp.numpy(array).tolist() for name, array in found.items()}


def by_element(
    tokens: list[int],
    rows: list[list[Piece]],
    seq_len: int,
    pad_id: int,
    mtp: int,
    mask_boundaries: bool,
    loss_mask: list[int] | None,
    cu_capacity: int,
    batch_rows: int | None = None,
) -> dict[str, Any]:
    """Slow and independent, over Python integers, one position after another."""
    if batch_rows is not None:
        batches = [
            by_element(
                tokens, rows[begin : begin + batch_rows], seq_len, pad_id, mtp, mask_boundaries, loss_mask, cu_capacity
            )
            for begin in range(0, len(rows), batch_rows)
        ]
        return {
            name: [batch[name] for batch in batches]
            if name == "cu_seqlens"
            else [value for batch in batches for value in batch[name]]
            for name in OUTPUTS
        }
    wanted: dict[str, Any] = {name: [] for name in OUTPUTS}
    bounds = [0]
    for index, pieces in enumerate(rows):
        # of each position: its token's place, the place of the next token in the row, its end, position, segment
        places = [
            (start + i, end, i, number) for number, (start, length, end) in enumerate(pieces, 1) for i in range(length)
        ]
        labels: list[list[int]] = []
        for t in range(len(places)):
            nexts = []
            for target in range(t + 1, t + 1 + (mtp or 1)):
                at = t if mask_boundaries else min(target, len(places) - 1)  # from there on along the document
                ahead, end = places[at][0] + target - at, places[at][1]
                nexts.append(ahead if ahead < end else None)
            labels.append([X if at is None or (loss_mask and not loss_mask[at]) else tokens[at] for at in nexts])
        padding = seq_len - len(places)
        labels += [[X] * (mtp or 1)] * padding
        wanted["input_ids"].append([tokens[place[0]] for place in places] + [pad_id] * padding)
        wanted["labels"].append(labels if mtp else [label for (label,) in labels])
        wanted["position_ids"].append([place[2] for place in places] + [0] * padding)
        wanted["segment_ids"].append([place[3] for place in places] + [0] * padding)
        wanted["attention_mask"].append([1] * len(places) + [0] * padding)
        wanted["loss_mask"].append([int(label[0] != X) for label in labels])
        for _, length, _ in pieces:
            bounds.append(bounds[-1] + length)
        if padding:
            bounds.append((index + 1) * seq_len)
    wanted["num_segments"] = [len(bounds) - 1]
    wanted["cu_seqlens"] = bounds + [len(rows) * seq_len] * (cu_capacity + 1 - len(bounds))
    return wanted


def test_tiny_case(xp: Backend) -> None:
    """That of the module's docstring."""
    assert run(xp, [10, 11, 12, 13, 20, 21, 30], [[(0, 3, 4), (4, 2, 6)], [(6, 1, 7)]], 5) == {
        "input_ids": [[10, 11, 12, 20, 21], [30, 0, 0, 0, 0]],
        "labels": [[11, 12, 13, 21, X], [X, X, X, X, X]],
        "position_ids": [[0, 1, 2, 0, 1], [0, 0, 0, 0, 0]],
        "segment_ids": [[1, 1, 1, 2, 2], [1, 0, 0, 0, 0]],
        "attention_mask": [[1, 1, 1, 1, 1], [1, 0, 0, 0, 0]],
        "loss_mask": [[1, 1, 1, 1, 0], [0, 0, 0, 0, 0]],
        "cu_seqlens": [0, 3, 5, 6, 10, 10, 10, 10, 10, 10, 10],
        "num_segments": [4],
    }


def test_labels_end_with_the_document(xp: Backend) -> None:
    assert run(xp, [10, 11, 12, 20, 21, 30], [[(0, 3, 3), (3, 2, 5), (5, 1, 6)]], 6) == {
        "input_ids": [[10, 11, 12, 20, 21, 30]],
        "labels": [[11, 12, X, 21, X, X]],
        "position_ids": [[0, 1, 2, 0, 1, 0]],
        "segment_ids": [[1, 1, 1, 2, 2, 3]],
        "attention_mask": [[1, 1, 1, 1, 1, 1]],
        "loss_mask": [[1, 1, 0, 1, 0, 0]],
        "cu_seqlens": [0, 3, 5, 6, 6, 6, 6],
        "num_segments": [3],
    }


def test_labels_across_boundaries(xp: Backend) -> None:
    """Of the row's last piece as ever: here its document goes on in another row."""
    pieces = [(0, 2, 3), (4, 1, 5), (6, 2, 9)]
    tokens = [10, 11, 12, 13, 14, 15, 16, 17, 18]
    options: dict[str, Any] = {"outputs": ["labels", "loss_mask"], "mask_boundaries": False}
    assert run(xp, tokens, [pieces], 5, **options) == {
        "labels": [[11, 14, 16, 17, 18]],
        "loss_mask": [[1, 1, 1, 1, 1]],
    }
    assert run(xp, tokens, [[*pieces[:2], (6, 2, 8)]], 6, **options)["labels"] == [[11, 14, 16, 17, X, X]]
    assert run(xp, tokens, [pieces], 5, **options | {"mask_boundaries": True})["labels"] == [[11, 12, X, 17, 18]]
    learn = [1, 1, 1, 1, 0, 1, 1, 0, 1]
    assert run(xp, tokens, [pieces], 5, **options, loss_mask=learn)["labels"] == [[11, X, 16, X, 18]]
    # several labels a position go on along the row, over a piece of one token, and along the last document
    several = [[11, 14], [14, 16], [16, 17], [17, 18], [18, X]]
    assert run(xp, tokens, [pieces], 5, **options, mtp=2)["labels"] == [several]
    assert run(xp, tokens, [pieces, pieces[1:]], 5, **options, mtp=3)["labels"] == [
        [[*first, *second[1:]] for first, second in zip(several, [*several[1:], [X, X]], strict=True)],
        [[16, 17, 18], [17, 18, X], [18, X, X], [X, X, X], [X, X, X]],
    ]
    masked = [[[11, X], [X, 16], [16, X], [X, 18], [18, X]]]
    assert run(xp, tokens, [pieces], 5, **options, mtp=2, loss_mask=learn)["labels"] == masked
    inside = [[[11, 12], [12, X], [X, X], [17, 18], [18, X]]]
    assert run(xp, tokens, [pieces], 5, **options | {"mask_boundaries": True}, mtp=2)["labels"] == inside


@pytest.mark.parametrize(
    ("seq_len", "bounds", "number"),
    [(7, [0, 3, 4, 5, 7, 7, 7, 7], 4), (10, [0, 3, 4, 5, 7, 10, 10, 10, 10, 10, 10], 5)],
)
def test_one_token_pieces_keep_their_bounds(xp: Backend, seq_len: int, bounds: list[int], number: int) -> None:
    pieces = [(0, 3, 3), (3, 1, 4), (4, 1, 5), (5, 2, 7)]
    found = run(xp, [1, 2, 3, 4, 5, 6, 7], [pieces], seq_len)
    padding = [0] * (seq_len - 7)
    assert found["position_ids"] == [[0, 1, 2, 0, 0, 0, 1, *padding]]
    assert found["segment_ids"] == [[1, 1, 1, 2, 3, 4, 4, *padding]]
    assert found["labels"] == [[2, 3, X, X, X, 7, X, *[X] * len(padding)]]
    assert found["cu_seqlens"] == bounds
    assert found["num_segments"] == [number]


def test_rows_of_different_piece_counts(xp: Backend) -> None:
    """Nothing is left of a batch that had more segments in the same memory."""
    ones = [(i, 1, i + 1) for i in range(7)]
    whole = [(0, 7, 7)]
    out = {"cu_seqlens": xp.array(np.full(15, -1, np.int32)), "num_segments": xp.array(np.full(1, -1))}
    for rows, bounds in (
        ([ones, whole], [*range(8), *[14] * 7]),
        ([whole, whole], [0, 7, *[14] * 13]),
        ([[], whole], [0, 7, *[14] * 13]),
        ([[], ones[:2]], [0, 7, 8, 9, *[14] * 11]),
        ([ones, ones], list(range(15))),
    ):
        found = run(xp, list(range(7)), rows, 7, outputs=["cu_seqlens", "num_segments"], out=out)
        assert found == {"cu_seqlens": bounds, "num_segments": [len(set(bounds)) - 1]}


def test_padding_is_known_by_position(xp: Backend) -> None:
    """The id of padding may also be the one that ends documents."""
    found = run(xp, [5, 6, 0, 7, 0], [[(0, 3, 3), (3, 2, 5)]], 8, pad_id=0)
    assert found["input_ids"] == [[5, 6, 0, 7, 0, 0, 0, 0]]
    assert found["labels"] == [[6, 0, X, 0, X, X, X, X]]
    assert found["attention_mask"] == [[1, 1, 1, 1, 1, 0, 0, 0]]
    assert found["loss_mask"] == [[1, 1, 0, 1, 0, 0, 0, 0]]
    assert run(xp, [5], [[(0, 1, 1)]], 3, outputs=["input_ids"], pad_id=-(2**63))["input_ids"] == [[5, *[-(2**63)] * 2]]


def test_loss_mask_is_that_of_the_label(xp: Backend) -> None:
    learn = [0] * 20 + [1] * 5
    found = run(xp, list(range(25)), [[(0, 25, 25)]], 32, loss_mask=learn)
    assert found["loss_mask"] == [[0] * 19 + [1] * 5 + [0] * 8]
    assert found["labels"] == [[X] * 19 + [20, 21, 22, 23, 24] + [X] * 8]
    assert found["attention_mask"] == [[1] * 25 + [0] * 7]
    three = [(0, 25, 25), (25, 7, 32), (32, 25, 57)]
    found = run(xp, list(range(57)), [three], 64, loss_mask=[*learn, *[1] * 7, *learn])
    assert found["loss_mask"] == [[0] * 19 + [1] * 5 + [0] + [1] * 6 + [0] + [0] * 19 + [1] * 5 + [0] + [0] * 7]


def test_a_cut_may_leave_nothing_to_learn(xp: Backend) -> None:
    found = run(xp, list(range(25)), [[(0, 16, 25)]], 16, outputs=["loss_mask"], loss_mask=[0] * 20 + [1] * 5)
    assert found["loss_mask"] == [[0] * 16]


def test_several_labels_a_position(xp: Backend) -> None:
    tokens = [10, 11, 12, 13, 20, 21]
    rows: list[list[Piece]] = [[(0, 3, 4), (4, 2, 6)], [(3, 1, 4)]]
    found = run(xp, tokens, rows, 5, outputs=["labels", "loss_mask"], mtp=3)
    assert found["labels"] == [
        [[11, 12, 13], [12, 13, X], [13, X, X], [21, X, X], [X, X, X]],
        [[X, X, X]] * 5,
    ]
    assert found["loss_mask"] == [[1, 1, 1, 1, 0], [0, 0, 0, 0, 0]]
    masked = run(xp, tokens, rows, 5, outputs=["labels"], mtp=2, loss_mask=[1, 0, 1, 0, 1, 1])["labels"]
    assert masked[0] == [[X, 12], [12, X], [X, X], [21, X], [X, X]]


@pytest.mark.parametrize("mtp", [1, 6, 50])
def test_labels_from_beyond_the_row_and_the_tokens(xp: Backend, mtp: int) -> None:
    found = run(xp, [1, 2, 3, 4, 5], [[(0, 1, 5), (4, 1, 5)]], 2, outputs=["labels"], mtp=mtp)["labels"]
    assert found == [[([2, 3, 4, 5] + [X] * 50)[:mtp], [X] * mtp]]


def test_rows_without_pieces(xp: Backend) -> None:
    for tokens in ([7], []):
        assert run(xp, tokens, [[], []], 2, pad_id=9) == {
            "input_ids": [[9, 9], [9, 9]],
            "labels": [[X, X], [X, X]],
            "position_ids": [[0, 0], [0, 0]],
            "segment_ids": [[0, 0], [0, 0]],
            "attention_mask": [[0, 0], [0, 0]],
            "loss_mask": [[0, 0], [0, 0]],
            "cu_seqlens": [0, 2, 4, 4, 4],
            "num_segments": [2],
        }


def test_no_rows(xp: Backend) -> None:
    for mtp, loss_mask in ((0, None), (2, [1, 1])):
        found = run(xp, [1, 2], [], 3, mtp=mtp, loss_mask=loss_mask)
        assert found == {name: [] for name in OUTPUTS} | {"cu_seqlens": [0], "num_segments": [0]}
    assert run(xp, [1], [], 3, outputs=["cu_seqlens"], cu_capacity=4) == {"cu_seqlens": [0] * 5}
    assert run(xp, [1], [], 3, outputs=[]) == {}


def test_rows_of_one_position(xp: Backend) -> None:
    found = run(xp, [1, 2, 3], [[(0, 1, 2)], [], [(2, 1, 3)]], 1)
    assert found["input_ids"] == [[1], [0], [3]]
    assert found["labels"] == [[2], [X], [X]]
    assert found["cu_seqlens"] == [0, 1, 2, 3]


@st.composite
def rows_of_pieces(draw: st.DrawFn, seq_len: int, num_tokens: int) -> list[list[Piece]]:
    rows = []
    longest = draw(st.sampled_from([1, 3, seq_len]))
    staged = draw(st.booleans())  # one piece behind the other among the tokens, too
    place = 0
    for _ in range(draw(st.integers(0, 5))):
        left = draw(st.sampled_from([seq_len, seq_len, draw(st.integers(0, seq_len))]))
        pieces: list[Piece] = []
        while left and len(pieces) < 40:
            length = draw(st.integers(1, min(left, longest, num_tokens)))
            if not staged or place + length > num_tokens:
                place = draw(st.integers(0, num_tokens - length))
            end = min(num_tokens, place + length + draw(st.sampled_from([0, 0, 1, 5])))
            pieces.append((place, length, end))
            place, left = place + length, left - length
        rows.append(pieces)
    return rows


@settings_with_backend
@given(
    data=st.data(),
    dtypes=st.sampled_from(cuda_on_cpu.segments_dtypes()),
    seq_len=st.integers(1, 12) | st.sampled_from([33, 130, 300]),
    num_tokens=st.integers(1, 60),
    mtp=st.sampled_from([0, 0, 1, 2, 5]),
    mask_boundaries=st.booleans(),
    outputs=st.just(OUTPUTS) | st.lists(st.sampled_from(OUTPUTS), unique=True),
)
def test_equals_the_walk_by_element(
    xp: Backend,
    data: st.DataObject,
    dtypes: tuple[np.dtype[Any], np.dtype[Any], np.dtype[Any]],
    seq_len: int,
    num_tokens: int,
    mtp: int,
    mask_boundaries: bool,
    outputs: list[str],
) -> None:
    dtype, index_dtype, mask_dtype = dtypes
    pad_id = data.draw(st.sampled_from([0, 3, -1, np.iinfo(index_dtype).max]))
    rows = data.draw(rows_of_pieces(seq_len, num_tokens))
    limits = np.iinfo(dtype)
    tokens = np.random.default_rng(num_tokens).integers(limits.min, limits.max, num_tokens + 3, dtype, endpoint=True)
    tokens = tokens[data.draw(st.integers(0, 3)) :][:num_tokens]
    tokens[data.draw(st.lists(st.integers(0, num_tokens - 1), max_size=3))] = limits.max
    if limits.min < 0:
        tokens[data.draw(st.lists(st.integers(0, num_tokens - 1), max_size=3))] = X
    loss_mask = data.draw(st.none() | st.lists(st.sampled_from([0, 1, 255]), min_size=num_tokens, max_size=num_tokens))
    batch_rows = data.draw(st.none() | st.integers(1, 7))
    in_batch = len(rows) if batch_rows is None else batch_rows
    segment_counts = [len(row) + (sum(length for _, length, _ in row) < seq_len) for row in rows]
    needed = max((sum(segment_counts[row : row + in_batch]) for row in range(len(rows))), default=0)
    size = in_batch * seq_len
    capacity = data.draw(st.none() | st.integers(max(needed, in_batch), 2 * size + 3))
    options: dict[str, Any] = {"pad_id": pad_id, "mtp": mtp, "mask_boundaries": mask_boundaries, "loss_mask": loss_mask}
    options["batch_rows"] = batch_rows
    vocab_size = data.draw(st.none() | st.sampled_from([1, 100, 2**63]))
    bad = xp.bad()
    more: dict[str, Any] = {"index_dtype": index_dtype, "mask_dtype": mask_dtype, "cu_capacity": capacity}
    found = run(xp, tokens, rows, seq_len, **options, **more, outputs=outputs, bad=bad, vocab_size=vocab_size)
    values = [(int(value) + 2**63) % 2**64 - 2**63 for value in tokens]
    wanted = by_element(values, rows, seq_len, cu_capacity=size if capacity is None else capacity, **options)
    half = 2 ** (8 * index_dtype.itemsize - 1)
    for name in {"input_ids", "labels"} & {*outputs}:  # masks are those of the whole values
        stored = (np.array(wanted[name], object) + half) % (2 * half) - half
        assert found.pop(name) == stored.astype(np.int64).reshape(np.shape(wanted[name])).tolist()
    assert found == {name: wanted[name] for name in found}
    shown = [
        (row * seq_len + t, value)
        for row, (ids, mask) in enumerate(zip(wanted["input_ids"], wanted["attention_mask"], strict=True))
        for t, (value, real) in enumerate(zip(ids, mask, strict=True))
        if real
    ]
    for row, pieces in enumerate(rows) if {"labels", "loss_mask"} & {*outputs} else ():
        for number, (start, length, end) in enumerate(pieces, 1):
            last = row * seq_len + sum(length for _, length, _ in pieces[:number]) - 1
            if mask_boundaries or number == len(pieces):
                most = max(1, mtp) if "labels" in outputs else 1
                shown += [(last, value) for value in values[start + length : min(end, start + length + most)]]
    outside = [place for place, value in shown if not 0 <= value < (vocab_size or 2**63)]
    assert xp.numpy(bad).tolist() == [len(outside), min(outside, default=2**63 - 1)]


@settings_with_backend
@given(
    lengths=st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=6),
    spare=st.integers(0, 3),
    distance=st.integers(1, 9),
    first=st.integers(0, 3),
    after=st.integers(0, 4),
    mtp=st.sampled_from([0, 3]),
    mask_boundaries=st.booleans(),
)
def test_rows_at_equal_distances(
    xp: Backend,
    lengths: list[list[int]],
    spare: int,
    distance: int,
    first: int,
    after: int,
    mtp: int,
    mask_boundaries: bool,
) -> None:
    """As rows lie that were read one after another; they may overlap, and the tokens may end with the last piece."""
    seq_len = max(1, *map(sum, lengths)) + spare
    rows: list[list[Piece]] = []
    for number, row in enumerate(lengths):
        begin = first + number * distance
        rows.append([(begin + sum(row[:at]), length, begin + sum(row[: at + 1])) for at, length in enumerate(row)])
    num_tokens = max([1, *(end for row in rows for *_, end in row)]) + after
    rows = [[(start, length, min(num_tokens, end + after)) for start, length, end in row] for row in rows]
    tokens = list(range(100, 100 + num_tokens))
    options: dict[str, Any] = {"pad_id": 7, "mtp": mtp, "mask_boundaries": mask_boundaries, "loss_mask": None}
    found = run(xp, tokens, rows, seq_len, **options)
    assert found == by_element(tokens, rows, seq_len, cu_capacity=len(rows) * seq_len, **options)


SHAPES = [(1, 5000, 40), (2, 4096, 1), (1, 6000, 4000), (3, 257, 30), (600, 3, 2), (3000, 1, 1), (5, 1000, 1000)]


@pytest.mark.parametrize(
    ("count", "seq_len", "longest", "staged", "batch_rows"),
    [
        *((*shape, True, None) for shape in SHAPES),
        *(pytest.param(*shape, False, 3, marks=pytest.mark.slow if at % 2 else ()) for at, shape in enumerate(SHAPES)),
        *(
            pytest.param(*shape, True, 1100, marks=() if at % 2 else pytest.mark.slow)
            for at, shape in enumerate(SHAPES)
        ),
    ],
)
def test_shapes_around_the_limits_of_a_launch(
    xp: Backend, count: int, seq_len: int, longest: int, staged: bool, batch_rows: int | None
) -> None:
    generator = np.random.default_rng(count)
    tokens = generator.integers(0, 65536, count * seq_len + 50, np.uint16)
    rows: list[list[Piece]] = []
    place = 0
    for _ in range(count):
        pieces: list[Piece] = []
        left = seq_len - int(generator.integers(0, 2) * generator.integers(0, seq_len + 1))
        while left:
            length = min(left, int(generator.integers(1, longest + 1)))
            if not staged:
                place = int(generator.integers(0, tokens.size - length + 1))
            pieces.append((place, length, min(tokens.size, place + length + int(generator.integers(0, 3)))))
            place, left = place + length, left - length
        rows.append(pieces)
    options: dict[str, Any] = {"pad_id": 5, "mtp": 0, "mask_boundaries": True, "loss_mask": None}
    options |= {"batch_rows": batch_rows, "cu_capacity": seq_len * (batch_rows or count)}
    assert run(xp, tokens, rows, seq_len, **options) == by_element(tokens.tolist(), rows, seq_len, **options)


@pytest.mark.parametrize("mtp", [0, 2])
def test_out_is_filled_and_returned(xp: Backend, mtp: int) -> None:
    """Also where it is not aligned to 16 bytes; nothing beside it is written."""
    tables = [np.array(table) for table in ([0, 2, 3], [0, 3, 5], [3, 1, 4], [3, 5, 9])]
    tokens = np.arange(10, 20, dtype=np.uint16)
    arguments: dict[str, Any] = {name: xp.array(table) for name, table in zip(TABLES, tables, strict=True)}
    arguments |= {"tokens": xp.array(tokens), "seq_len": 5}
    made = segments(**arguments, outputs=OUTPUTS, mtp=mtp)
    whole, out = {}, {}
    for name, array in made.items():
        size = int(np.prod(array.shape))
        whole[name] = xp.array(np.full(size + 2, 77, array.dtype))
        out[name] = whole[name][1 : size + 1].reshape(*array.shape)
    found = segments(**arguments, outputs=OUTPUTS, mtp=mtp, out=out)
    for name, array in made.items():
        assert found[name] is out[name]
        assert xp.numpy(whole[name]).tolist() == [77, *xp.numpy(array).reshape(-1).tolist(), 77]
    some = {"labels": out["labels"]}
    found = segments(**arguments, outputs=["labels", "input_ids"], mtp=mtp, out=some)
    assert found["labels"] is out["labels"]
    assert xp.numpy(found["input_ids"]).tolist() == xp.numpy(made["input_ids"]).tolist()


def test_a_part_of_the_rows(xp: Backend) -> None:
    """A part of row_offsets, with the whole tables of the pieces, which need not be contiguous either."""
    table = np.array([[0, 3, 3], [3, 1, 4], [4, 1, 5], [5, 2, 7]])
    offsets = np.array([0, 1, 3, 4, 4])
    tokens = xp.array(np.arange(7, dtype=np.uint8))
    columns = [xp.array(column) for column in table.T]
    tables = dict(zip(TABLES, [xp.array(offsets[1:4]), *columns], strict=True))
    found = segments(tokens, **tables, seq_len=3, outputs=OUTPUTS, pad_id=9)
    assert xp.numpy(found["input_ids"]).tolist() == [[3, 4, 9], [5, 6, 9]]
    assert xp.numpy(found["segment_ids"]).tolist() == [[1, 2, 0], [1, 1, 0]]
    assert xp.numpy(found["cu_seqlens"]).tolist() == [0, 1, 2, 3, 5, 6, 6]


def test_a_block_of_batches(xp: Backend) -> None:
    """Each batch counts its segments and bounds by itself; the last one has a row less."""
    rows: list[list[Piece]] = [[(0, 2, 2)], [(2, 1, 3), (3, 2, 5)], []]
    found = run(xp, [1, 2, 3, 4, 5], rows, 3, batch_rows=2)
    assert found["cu_seqlens"] == [[0, 2, 3, 4, 6, 6, 6], [0, 3, 3, 3, 3, 3, 3]]
    assert found["num_segments"] == [4, 1]
    assert found["segment_ids"] == [[1, 1, 0], [1, 2, 2], [0, 0, 0]]
    one = run(xp, [1, 2, 3, 4, 5], rows, 3, batch_rows=3)
    assert (one["cu_seqlens"], one["num_segments"]) == ([[0, 2, 3, 4, 6, 9, 9, 9, 9, 9]], [5])
    none = run(xp, [1], [], 3, batch_rows=2)
    assert none == {name: [] for name in OUTPUTS}


def test_a_block_of_batches_takes_as_many_launches_as_one(
    cpu_kernels: Mapping[str, Mapping[str, cuda_on_cpu.CpuKernel]],
) -> None:
    launched: list[str] = []

    def counted(name: str, kernel: cuda_on_cpu.CpuKernel) -> Any:
        def launch(*arguments: Any) -> None:
            launched.append(name)
            kernel(*arguments)

        return launch

    counting: Any = {
        operator: {name: counted(name, kernel) for name, kernel in kernels.items()}
        for operator, kernels in cpu_kernels.items()
    }
    with cuda_sources_on_cpu(counting) as xp:
        run(xp, [1, 2, 3], [[(0, 1, 2)], [], [(1, 2, 3)]] * 5, 3, batch_rows=2)
    assert launched == ["piece_begins", "segments<unsigned short, long long, long long>"]


@pytest.mark.parametrize("seq_len", [65_535, 65_536, 70_001])
def test_numbers_past_two_bytes(xp: Backend, seq_len: int) -> None:
    """As many pieces as positions, a piece of the whole row, and pieces that begin late in a long line."""
    rows = [[1] * seq_len, [seq_len], [3, seq_len - 5], [1, 1, seq_len - 2]]
    lengths = np.array([length for row in rows for length in row])
    offsets = np.cumsum([0, *map(len, rows)])
    tables = (xp.array(table) for table in (offsets, np.zeros_like(lengths), lengths, lengths))
    options: dict[str, Any] = dict(zip(TABLES, tables, strict=True)) | {"outputs": ("position_ids", "segment_ids")}
    found = segments(xp.array(np.zeros(seq_len, np.uint16)), seq_len=seq_len, **options)
    for number, row in enumerate(rows):
        padding = [0] * (seq_len - sum(row))
        positions = np.concatenate([*map(np.arange, row), padding])
        assert (xp.numpy(found["position_ids"][number]) == positions).all()
        numbers = np.concatenate([np.repeat(np.arange(1, len(row) + 1), row), padding])
        assert (xp.numpy(found["segment_ids"][number]) == numbers).all()


def test_positions_past_32_bits(xp: Backend, tmp_path: Path) -> None:
    """The file is a hole: only the few pages that are written take room."""
    path = tmp_path / "tokens.bin"
    path.touch()
    os.truncate(path, 2**32 + 1000)
    tokens = np.memmap(path, np.uint8, "r+")
    tokens[[2**31, 2**32 - 1, 2**32, 2**32 + 999]] = [1, 2, 3, 4]
    pieces = [(2**31, 1, 2**31 + 2), (2**32 - 1, 2, 2**32 + 1), (2**32 + 997, 2, 2**32 + 1000)]
    found = run(xp, tokens, [pieces], 6, outputs=["input_ids", "labels"])
    assert found == {"input_ids": [[1, 2, 3, 0, 0, 0]], "labels": [[0, 3, X, 0, 4, X]]}


def test_bad_ids(xp: Backend) -> None:
    """Of what rows show and of labels that they do not show, masked or not; not of padding; calls add up."""
    bad = xp.bad()
    rows: list[list[Piece]] = [[(0, 2, 3)], [(3, 1, 4), (5, 2, 7)]]
    options: dict[str, Any] = {"outputs": ["labels"], "vocab_size": 9, "bad": bad, "pad_id": 99}
    run(xp, [1, 2, 3, 3, 9, 9, 8], rows, 4, **options)
    assert xp.numpy(bad).tolist() == [1, 5]
    run(xp, [1, 2, 9, 3, 9, 8, 8], rows, 4, **options)
    assert xp.numpy(bad).tolist() == [2, 1]
    run(xp, [9, 2, 9, 3, 9, 9, 8], rows, 4, **options, loss_mask=[1, 1, 0, 1, 1, 1, 1])
    assert xp.numpy(bad).tolist() == [5, 0]
    run(xp, [1, 2, 9, 3, 9, 8, 8], rows, 4, **options | {"outputs": ["input_ids"]})
    assert xp.numpy(bad).tolist() == [5, 0]
    with pytest.raises(ValueError, match=r"vocab_size .* bad"):
        run(xp, [1], [], 1, vocab_size=5)


def test_too_little_room_for_bounds(xp: Backend) -> None:
    """NumPy refuses; what a GPU leaves out it counts."""
    rows: list[list[Piece]] = [[(0, 1, 1), (1, 1, 2)], [(0, 2, 2)]]
    options: dict[str, Any] = {"outputs": ["cu_seqlens", "num_segments"]}
    assert run(xp, [1, 2], rows, 3, cu_capacity=5, **options)["cu_seqlens"] == [0, 1, 2, 3, 5, 6]
    if xp.checks_values:
        with pytest.raises(ValueError, match=r"cu_seqlens .*\b4\b.*\b5\b"):
            run(xp, [1, 2], rows, 3, cu_capacity=4, **options)
    else:
        found = run(xp, [1, 2], rows, 3, cu_capacity=4, **options)
        assert found == {"cu_seqlens": [0, 1, 2, 3, 6], "num_segments": [5]}
    with pytest.raises(ValueError, match=r"cu_seqlens .*\b1\b.*\b2\b"):
        run(xp, [1, 2], rows, 3, cu_capacity=1, **options)
    with pytest.raises(ValueError, match=r"3,000,000,000 .*2\*\*31"):
        run(xp, [1, 2], [[]] * 3, 10**9, outputs=["cu_seqlens"])


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        ([(0, 2, 2), (-1, 2, 3)], r"piece 1 .*token -1,.*\b2\b.*\b3\b"),
        ([(0, 0, 2)], r"piece 0 .*token 0,.*\b0\b.*\b2\b.*1 to 5 tokens"),
        ([(0, 6, 6)], r"\b6\b.*\b6\b.*1 to 5 tokens"),
        ([(8, 2, 11)], r"\b11; .*\b10 tokens"),
        ([(3, 2, 4)], r"\b4; .*\bend\b"),
        ([(3, 2, -(2**63))], f"{-(2**63):,};"),
        ([(2**63 - 1, 5, 5)], f"token {2**63 - 1:,}"),
        ([(0, 3, 3), (0, 3, 3)], r"row 0 .*\b6\b.*\b5\b"),
    ],
)
def test_wrong_pieces(pieces: list[Piece], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        run(NUMPY, list(range(10)), [pieces], 5)


@pytest.mark.parametrize("offsets", [[0, 2], [-1, 1], [1, 0], [0, 1, 0, 1]])
def test_wrong_row_offsets(offsets: list[int]) -> None:
    one = np.ones(1, np.int64)
    with pytest.raises(ValueError, match=r"row_offsets .*\[0, 1\]"):
        segments(np.zeros(5, np.uint8), np.array(offsets), one, one, 2 * one, 3, outputs=OUTPUTS)


def test_wrong_arguments(xp: Backend) -> None:
    good: dict[str, Any] = {
        "tokens": np.zeros(5, np.uint8),
        "row_offsets": np.array([0, 1]),
        "piece_starts": np.array([0]),
        "piece_lengths": np.array([2]),
        "piece_ends": np.array([3]),
    }

    def run_with(**changes: Any) -> None:
        arrays = {name: xp.array(changes.pop(name, array)) for name, array in good.items()}
        options: dict[str, Any] = {"seq_len": 4, "outputs": ["input_ids"]} | changes
        segments(**arrays, **options)

    run_with()
    for changed in ({"index_dtype": np.uint32}, {"mask_dtype": np.int32}, {"mask_dtype": np.uint8}):
        with pytest.raises(TypeError, match=rf"{next(iter(changed))} is .*, expected .*int64"):
            run_with(**changed)
    with pytest.raises(ValueError, match=r"pad_id is 2147483648, expected .* < 2\*\*31"):
        run_with(pad_id=2**31, index_dtype=np.int32)
    with pytest.raises(TypeError, match="tokens have dtype float32"):
        run_with(tokens=np.zeros(5, np.float32))
    with pytest.raises(ValueError, match="'max_seqlen', expected some of input_ids, labels"):
        run_with(outputs=["input_ids", "max_seqlen"])
    with pytest.raises(ValueError, match="'ids'"):
        run_with(out={"ids": xp.array(np.zeros(1))})
    for name in list(good)[1:]:
        with pytest.raises(TypeError, match=f"{name} have dtype int32, expected int64"):
            run_with(**{name: good[name].astype(np.int32)})
        with pytest.raises(ValueError, match=rf"{name} have shape \(1, \d\), expected one axis"):
            run_with(**{name: good[name][None]})
    with pytest.raises(ValueError, match="row_offsets have shape"):
        run_with(row_offsets=np.zeros(0, np.int64))
    with pytest.raises(ValueError, match="piece_starts, piece_lengths, and piece_ends have 1, 2 and 1 elements"):
        run_with(piece_lengths=np.array([1, 1]))
    for name, wrong, words in (
        ("seq_len", 0, "seq_len is 0, expected at least 1"),
        ("mtp", -1, "mtp is -1, expected 0 <= mtp"),
        ("pad_id", 2**63, "pad_id is 9223372036854775808, expected"),
    ):
        with pytest.raises(ValueError, match=words):
            run_with(**{name: wrong})
    for mask in (np.ones(4, np.uint8), np.ones(5, np.int8), np.ones(10, np.uint8)[::2]):
        with pytest.raises(ValueError, match=r"loss_mask has shape .* expected a contiguous array of shape \(5,\)"):
            run_with(loss_mask=xp.array(mask))
    for array in (np.zeros((1, 3), np.int64), np.zeros((1, 4), np.int32), np.zeros((1, 8), np.int64)[:, ::2]):
        with pytest.raises(ValueError, match=r"out\['input_ids'\] has shape .* expected a contiguous array of shape"):
            run_with(out={"input_ids": xp.array(array)})
    with pytest.raises(ValueError, match=r"out\['labels'\] has shape \(1, 4\), .* shape \(1, 4, 2\)"):
        run_with(outputs=["labels"], mtp=2, out={"labels": xp.array(np.zeros((1, 4), np.int64))})
    with pytest.raises(ValueError, match=r"out\['cu_seqlens'\] has shape \(4,\), .* shape \(3,\), dtype int32"):
        run_with(outputs=["cu_seqlens"], cu_capacity=2, out={"cu_seqlens": xp.array(np.zeros(4, np.int32))})
    other: Any = cuda_on_cpu.DeviceArray(np.zeros(5, np.uint8)) if xp is NUMPY else np.zeros(5, np.uint8)
    for changes in ({"loss_mask": other}, {"out": {"input_ids": other}}):
        with pytest.raises(TypeError, match=r"(is a|must be)"):
            run_with(**changes)
