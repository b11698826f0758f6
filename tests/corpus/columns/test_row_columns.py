"""What the columns beside the ids mean: arrays against a slow reading of one row at a time, and what is refused."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes.corpus.columns.row_columns import Cells, Place, read_rows
from dali_pipes.errors import CorpusFormatError

MASKS = ("loss_mask", "completion_mask", "assistant_masks", "assistant_mask", "assistant_tokens_mask")
NUMBERED = ("attention_mask", "segment_ids", "sequence_id")
Row = Mapping[str, Sequence[int]]


class Refused(Exception):
    """The oracle finds that a row contradicts itself."""


def read_row(ids: Sequence[int], row: Row) -> list[list[tuple[int, bool]]]:
    """Documents of one row, with whether each id is learned. Plain and slow, from what each column is said to mean."""
    size = len(ids)
    for name, values in row.items():
        if name not in ("seq_lengths", "cu_seqlens") and len(values) != size:
            raise Refused(name)
    kept = list(range(size))
    numbered = {}
    for name in NUMBERED:
        if name in row:
            from_zero = name != "attention_mask" and size and row[name][0] == 0
            numbers = [value + bool(from_zero) for value in row[name]]
            if any(number < 0 for number in numbers):
                raise Refused(name)
            there = [at for at, number in enumerate(numbers) if number]
            if there and len(there) != there[-1] - there[0] + 1:
                raise Refused(name)
            numbered[name] = numbers
            kept = [at for at in kept if at in there]
    learners: list[set[int]] = []
    for name in MASKS:
        if name in row:
            if not set(row[name]) <= {0, 1}:
                raise Refused(name)
            learners.append({at for at in kept if row[name][at]})
    if "labels" in row:
        learners.append({at for at in kept if row["labels"][at] != -100})
        if any(row["labels"][at] != ids[at] for at in learners[-1]):
            raise Refused("labels")
    learned = set.intersection(*learners) if learners else set(kept)
    if learners and all(learners) and not learned:
        raise Refused("masks")
    splits: list[set[int]] = []  # of places in `kept`
    if "seq_lengths" in row:
        if any(length < 0 for length in row["seq_lengths"]) or sum(row["seq_lengths"]) != len(kept):
            raise Refused("seq_lengths")
        splits.append(set(itertools.accumulate(row["seq_lengths"])) - {0, len(kept)})
    if "cu_seqlens" in row:
        ends = row["cu_seqlens"]
        rises = all(one <= two for one, two in itertools.pairwise(ends))
        if (ends and ends[0] != 0) or not rises or (ends[-1] if ends else 0) != len(kept):
            raise Refused("cu_seqlens")
        splits.append(set(ends) - {0, len(kept)})
    if "position_ids" in row:
        positions = [row["position_ids"][at] for at in kept]
        starts = set()
        for at, position in enumerate(positions):
            if at == 0 and position not in (0, kept[0]):
                raise Refused("position_ids")
            if at and position == 0:
                starts.add(at)
            elif at and position != positions[at - 1] + 1:
                raise Refused("position_ids")
        splits.append(starts)
    for name, numbers in numbered.items():
        mine = [numbers[at] for at in kept]
        if any(one > two for one, two in itertools.pairwise(mine)):
            raise Refused(name)
        if name != "attention_mask" or max(mine, default=0) > 1:
            splits.append({at for at in range(1, len(mine)) if mine[at] != mine[at - 1]})
    if any(one != splits[0] for one in splits):
        raise Refused("splits")
    borders = [0, *sorted(splits[0] if splits else ()), len(kept)]
    return [[(ids[at], at in learned) for at in kept[a:b]] for a, b in itertools.pairwise(borders)]


def read_together(ids: Sequence[Sequence[int]], rows: Sequence[Row]) -> list[list[tuple[int, bool]]]:
    """The same by the package, of all rows at once."""

    def cells(parts: Sequence[Sequence[int]]) -> Cells:
        values = [value for part in parts for value in part]
        return Cells(np.array([len(part) for part in parts], np.int64), np.array(values, np.int64))

    beside = {name: cells([row[name] for row in rows]) for name in rows[0]}
    found = read_rows(cells(ids), beside, Place(Path("a"), 0, "input_ids"))
    tokens = np.array([token for row in ids for token in row], np.int64)
    tokens = tokens if found.kept is None else tokens[found.kept]
    learned = np.ones(len(tokens), np.bool_) if found.learned is None else found.learned
    assert found.lengths.sum() == found.documents.sum() == len(tokens) == len(learned)
    both = list(zip(tokens.tolist(), learned.tolist(), strict=True))
    ends = np.cumsum(found.documents).tolist()
    return [both[end - length : end] for end, length in zip(ends, found.documents.tolist(), strict=True)]


@st.composite
def rows_by_structure(draw: st.DrawFn) -> tuple[list[list[int]], list[dict[str, list[int]]]]:
    """Rows with columns that fit one another, then sometimes one value of one of them changed."""
    names = draw(
        st.lists(
            st.sampled_from([*NUMBERED, "position_ids", "seq_lengths", "cu_seqlens", "labels", *MASKS]),
            unique=True,
            max_size=5,
        )
    )
    ids, rows = [], []
    for _ in range(draw(st.integers(1, 4))):
        lengths = draw(st.lists(st.integers(1, 3), max_size=3))
        may_pad = {"attention_mask", "segment_ids"} & set(names) and not {"sequence_id"} & set(names)
        left = draw(st.integers(0, 2)) if may_pad and "segment_ids" not in names else 0
        right = draw(st.integers(0, 2)) if may_pad and lengths else 0
        count = sum(lengths)
        numbers = [number for number, length in enumerate(lengths, 1) for _ in range(length)]
        is_marked = draw(st.booleans())
        flags = [draw(st.integers(0, 1)) for _ in range(count)]
        own = draw(st.lists(st.integers(1, 4), min_size=left + count + right, max_size=left + count + right))
        positions = [at for length in lengths for at in range(length)]
        if left and draw(st.booleans()) and lengths:
            positions[: lengths[0]] = [left + at for at in range(lengths[0])]
        row: dict[str, list[int]] = {}
        for name in names:
            marked = is_marked or name != "attention_mask"
            column = {
                "attention_mask": [number if marked else 1 for number in numbers],
                "segment_ids": numbers,
                "sequence_id": [number - 1 for number in numbers],
                "position_ids": positions,
                "labels": [own[left + at] if flag else -100 for at, flag in enumerate(flags)],
            }.get(name, flags)
            row[name] = [0] * left + column + [0] * right
        if "seq_lengths" in names:
            row["seq_lengths"] = lengths
        if "cu_seqlens" in names:
            row["cu_seqlens"] = [0, *itertools.accumulate(lengths)]
        ids.append(own)
        rows.append({name: list(row[name]) for name in names})
    is_changed: bool = draw(st.booleans())
    if names and is_changed:
        cells = [(row, name, at) for row in rows for name in names for at in range(len(row[name]))]
        if cells:
            row, name, at = draw(st.sampled_from(cells))
            row[name][at] = draw(st.integers(-1, 4) | st.just(-100))
    return ids, rows


@settings(max_examples=examples(100))
@example(([[1, 2, 3]], [{"attention_mask": [0, 0, 0]}]))
@example(([[], [1]], [{"seq_lengths": []}, {"seq_lengths": [0, 1, 0]}]))
@example(
    (
        [[1, 1, 2], [3]],
        [{"attention_mask": [0, 1, 1], "position_ids": [7, 1, 2]}, {"attention_mask": [1], "position_ids": [0]}],
    )
)
@given(case=rows_by_structure())
def test_all_columns_equal_the_oracle(case: tuple[list[list[int]], list[dict[str, list[int]]]]) -> None:
    ids, rows = case
    try:
        expected = [document for one, row in zip(ids, rows, strict=True) for document in read_row(one, row)]
    except Refused:
        with pytest.raises(CorpusFormatError, match=r"^a: row \d+: .*columns? "):
            read_together(ids, rows)
        return
    assert read_together(ids, rows) == expected


@settings(max_examples=examples(60))
@given(
    ids=st.lists(st.lists(st.integers(0, 3), max_size=4), min_size=1, max_size=3),
    names=st.lists(
        st.sampled_from(["attention_mask", "sequence_id", "position_ids", "seq_lengths", "labels", "loss_mask"]),
        unique=True,
        max_size=3,
    ),
    data=st.data(),
)
def test_any_values_equal_the_oracle(ids: list[list[int]], names: list[str], data: st.DataObject) -> None:
    """Not made to fit: most are refused, and those that are not mean the same."""
    rows = [
        {name: data.draw(st.lists(st.integers(0, 2), min_size=len(one), max_size=len(one))) for name in names}
        for one in ids
    ]
    try:
        expected = [document for one, row in zip(ids, rows, strict=True) for document in read_row(one, row)]
    except Refused:
        with pytest.raises(CorpusFormatError):
            read_together(ids, rows)
        return
    assert read_together(ids, rows) == expected


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"labels": [6, 7, 8, -100]}, r"labels holds 6 at token 0, but input_ids holds 5; .*already shifted by one"),
        (
            {"labels": [-100, 6, 9, 8]},
            r"labels holds 9 at token 2, but input_ids holds 7; a label must be the token at",
        ),
        ({"labels": [5, 6]}, r"column labels has 2 values for 4 ids.*seq2seq.*loss_masks = \[\]"),
        ({"attention_mask": [1, 0, 1, 1]}, r"attention_mask holds 0 at token 1, with tokens on both sides"),
        ({"attention_mask": [1, 2, 1, 0]}, r"attention_mask holds 1 at token 2; document numbers must not decrease"),
        ({"attention_mask": [1, -1, 1, 1]}, r"attention_mask holds -1 at token 1; expected 0 or more"),
        ({"position_ids": [0, 1, 3, 4]}, r"position_ids holds 3 at token 2; positions must start at 0 and rise by 1"),
        ({"position_ids": [2, 3, 4, 5]}, r"position_ids holds 2 at token 0; positions must start at 0"),
        ({"attention_mask": [0, 1, 1, 1], "position_ids": [0, 0, 1, 3]}, r"position_ids holds 3 at token 3"),
        ({"seq_lengths": [2, 3]}, r"the documents in column seq_lengths have 5 tokens in total, but the row has 4"),
        ({"seq_lengths": [5, -1]}, r"column seq_lengths holds -1 as entry 1"),
        ({"cu_seqlens": [1, 4]}, r"column cu_seqlens holds 1 as entry 0: it must start with 0"),
        ({"cu_seqlens": [0, 3, 2, 4]}, r"column cu_seqlens holds 2 as entry 2: the length of a document"),
        (
            {"seq_lengths": [2, 2], "position_ids": [0, 0, 1, 2]},
            r"token 1 according to position_ids, but not according to seq_lengths",
        ),
        (
            {"attention_mask": [0, 1, 1, 2], "position_ids": [0, 0, 0, 1]},
            r"columns .* contradict.*: .* at token 2 according to position_ids, but not according to attention_mask",
        ),
        ({"loss_mask": [0, 1, 0, 0], "labels": [5, -100, 7, 8]}, r"columns loss_mask and labels contradict each other"),
    ],
)
def test_what_is_refused_is_named(columns: dict[str, list[int]], message: str) -> None:
    good = {name: [0, 2] if name == "cu_seqlens" else [2] if name == "seq_lengths" else [1, 1] for name in columns}
    if "position_ids" in good:
        good["position_ids"] = [0, 1]
    with pytest.raises(CorpusFormatError, match=rf"^a: row 1: .*{message}"):
        read_together([[1, 1], [5, 6, 7, 8]], [good, columns])


def test_masks_are_joined_as_trl_joins_them() -> None:
    columns: dict[str, Any] = {
        "labels": [-100, 6, 7, 8],
        "completion_mask": [0, 0, 1, 1],
        "assistant_masks": [1, 0, 1, 0],
    }
    (document,) = read_together([[5, 6, 7, 8]], [columns])
    assert document == [(5, False), (6, False), (7, True), (8, False)]
