"""A source's rows counted on from pass to pass, from the beginning or a mark, against plain concatenation."""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes.errors import ConfigError
from dali_pipes.rows.base import RowSource
from dali_pipes.rows.document_rows import DocumentRows
from dali_pipes.rows.length_buckets import LengthBuckets
from dali_pipes.rows.pass_begins import PassBegin, PassBegins
from dali_pipes.rows.windows import WindowRows, split_windows

PASSES = 5


def document_rows(lengths: list[int], **changes: Any) -> DocumentRows:
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    options = {"mode": "pack", "long_documents": "split", "window_documents": 4, "shuffle": True, "seed": 3, **changes}
    return DocumentRows(offsets, 8, **options)


def concatenated(rows: RowSource, passes: int = PASSES) -> list[tuple[int, int]]:
    return [(number, place) for number in range(passes) for place in range(rows.count(number))]


def asked(rows: RowSource, counts: list[int]) -> list[tuple[int, int]]:
    passes, places = rows.at(np.array(counts, np.int64))
    assert passes.dtype == places.dtype == np.int64
    return list(zip(passes.tolist(), places.tolist(), strict=True))


def watch_plans(rows: DocumentRows) -> list[tuple[int, int]]:
    """Passes and windows that are planned from now on."""
    planned: list[tuple[int, int]] = []
    real = rows._make_plan

    def watched(number: int, window: int) -> Any:
        planned.append((number, window))
        return real(number, window)

    rows._make_plan = watched  # type: ignore[method-assign, assignment]
    return planned


@st.composite
def sources(draw: st.DrawFn) -> Callable[[], DocumentRows]:
    """Makes the same document rows anew: ragged passes, empty documents, windows without rows."""
    lengths = draw(
        st.lists(st.integers(0, 23), min_size=1, max_size=40).filter(lambda all_: 0 < min_positive(all_) < 9)
    )
    changes: dict[str, Any] = {
        "mode": draw(st.sampled_from(["pack", "pad"])),
        "long_documents": draw(st.sampled_from(["split", "truncate", "drop"])),
        "window_documents": draw(st.integers(1, 9)),
        "shuffle": draw(st.booleans()),
        "name": draw(st.sampled_from([None, "web"])),
    }
    if changes["mode"] == "pad" and draw(st.booleans()):
        changes["buckets"] = LengthBuckets(np.array([4, 8]))
    return lambda: document_rows(lengths, **changes)


def min_positive(lengths: list[int]) -> int:
    return min(filter(None, lengths), default=0)


@given(sources(), st.data())
@settings(max_examples=examples(100))
def test_rows_of_documents_equal_concatenated_passes(make: Callable[[], DocumentRows], data: st.DataObject) -> None:
    expected = concatenated(make())
    numbers = st.integers(0, len(expected) - 1)
    rows = make()
    for _ in range(3):
        counts = data.draw(st.lists(numbers, max_size=20))
        assert asked(rows, counts) == [expected[count] for count in counts]
    assert asked(rows, list(range(len(expected)))) == expected


@given(sources(), st.data())
@settings(max_examples=examples(100))
def test_rows_go_on_from_a_mark(make: Callable[[], DocumentRows], data: st.DataObject) -> None:
    source = make()
    expected = concatenated(source)
    count = data.draw(st.integers(0, len(expected) - 1))
    before = watch_plans(source)
    asked(source, [max(0, count - 1)])
    del before[:]
    mark = tuple(json.loads(json.dumps(source.mark_count(count))))
    assert not before, "the rows up to this one have been planned"
    fresh = make()
    planned = watch_plans(fresh)
    assert fresh.seek_count(count, mark)
    rest = data.draw(st.lists(st.integers(count, len(expected) - 1), max_size=20))
    assert asked(fresh, rest) == [expected[number] for number in rest]
    if count:
        assert mark[0] == expected[count - 1][0]
    if not fresh._shuffle:
        assert all(number == 0 for number, _ in planned)
    else:
        assert min(planned, default=mark[:1] + mark[2:3]) >= (mark[0], mark[2])
    assert fresh.mark_count(count) == mark
    for number, place in map(tuple, [expected[number] for number in rest]):
        mine, theirs = fresh.plan(number, np.array([place])), source.plan(number, np.array([place]))
        assert mine.starts.tolist() == theirs.starts.tolist()
    everything = list(range(len(expected)))
    assert asked(fresh, everything) == expected, "earlier rows can be asked for, too"
    later = data.draw(st.integers(0, len(expected) - 1))
    assert fresh.mark_count(later) == make().mark_count(later)


@given(sources(), st.data())
@settings(max_examples=examples(50))
def test_marks_are_the_same_whatever_has_been_planned(make: Callable[[], DocumentRows], data: st.DataObject) -> None:
    source = make()
    expected = concatenated(source)
    counts = data.draw(st.lists(st.integers(0, len(expected)), min_size=1, max_size=5))
    wanted = [source.mark_count(count) for count in counts]
    resumed = make()
    for count, mark in zip(counts, wanted, strict=True):
        assert make().mark_count(count) == mark
        assert resumed.seek_count(count, mark)
        assert resumed.mark_count(count) == mark
        assert asked(resumed, list(range(len(expected)))) == expected


@given(st.integers(20, 300), st.booleans(), st.sampled_from([None, Fraction(1, 3)]), st.booleans(), st.data())
def test_rows_of_windows_equal_concatenated_passes(
    num_tokens: int, shuffle: bool, share: Fraction | None, offset: bool, data: st.DataObject
) -> None:
    def make() -> WindowRows:
        windows = split_windows(num_tokens, 5, 3)
        return WindowRows(windows, shuffle=shuffle, name="web", share=share, random_offset=offset)

    rows, fresh = make(), make()
    expected = concatenated(rows)
    counts = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=20))
    assert asked(rows, counts) == [expected[count] for count in counts]
    assert asked(rows, list(range(len(expected)))) == expected
    for count in counts:
        mark = json.loads(json.dumps(rows.mark_count(count)))
        assert mark == []
        assert fresh.seek_count(count, mark)
        assert not fresh.seek_count(count, [0])
    assert rows.rows_of_pass() == rows.count(3)
    assert rows.mean_tokens() == Fraction(5)


def test_windows_far_away_are_arithmetic() -> None:
    rows = WindowRows(split_windows(10**13, 2048), name="web")
    per_pass = rows.count(0)
    far = 10**6 * per_pass + 12_345
    assert asked(rows, [far, 0, far + per_pass]) == [(10**6, 12_345), (0, 0), (10**6 + 1, 12_345)]


def test_only_the_windows_up_to_the_row_are_planned() -> None:
    rows = document_rows([7] * 40)
    planned = watch_plans(rows)
    asked(rows, [0, 3])
    assert planned == [(0, 0)]
    asked(rows, [0, 3, 5, 4])
    assert planned == [(0, 0), (0, 1)]


def test_passes_before_a_mark_are_not_counted_again() -> None:
    source = document_rows([3, 5, 6, 2] * 10)
    expected = concatenated(source, 9)
    mark = source.mark_count(len(expected))
    assert mark[:2] == (8, len(expected) - source.count(8))
    fresh = document_rows([3, 5, 6, 2] * 10)
    planned = watch_plans(fresh)
    assert fresh.seek_count(len(expected), mark)
    assert asked(fresh, [len(expected), len(expected) + source.count(9) - 1]) == [(9, 0), (9, source.count(9) - 1)]
    assert min(planned) >= (8, mark[2])
    assert asked(fresh, [0, len(expected)]) == [(0, 0), (9, 0)]
    assert {number for number, _ in planned if number < 8} == {0}, "row 0 needs the first window of pass 0 alone"


@pytest.mark.parametrize("mode", ["pack", "pad"])
def test_a_mark_that_cannot_be_is_refused(mode: str) -> None:
    source = document_rows([3, 5, 6, 2] * 10, mode=mode)
    first, count = source.count(0), source.count(0) + source.count(1) + 7
    good = source.mark_count(count)
    assert good[0] == 2
    number, before, window, rows_before = good
    wrong: list[tuple[Any, ...]] = [
        (),
        good[:3],
        (*good, 0),
        (number, count + 1, 0, 0),
        (number, -1, window, rows_before),
        (-1, before, window, rows_before),
        (0, before, window, rows_before),
        (before + 1, before, window, rows_before),
        (number, before, 99, rows_before),
        (number, before, -1, rows_before),
        (number, before, window, count),
        (number, before, 0, 1),
        (number, before, window, -1),
        (float(number), before, window, rows_before),
        (number, float(before), window, rows_before),
        (number, before, float(window), rows_before),
        ("2", before, window, rows_before),
        (number, None, window, rows_before),
        (number, before, window, None),
        (2**70, before, window, rows_before),
    ]
    for mark in wrong:
        fresh = document_rows([3, 5, 6, 2] * 10, mode=mode)
        assert not fresh.seek_count(count, mark), mark
        assert asked(fresh, [first - 1, first]) == [(0, first - 1), (1, 0)]
    counted = document_rows([3, 5, 6, 2] * 10, mode=mode)
    asked(counted, [count])
    assert not counted.seek_count(count, (1, first - 1, *counted.mark(1, first - 1)))
    assert counted.seek_count(count, good)


@pytest.mark.parametrize("marked", [False, True])
def test_threads_agree(marked: bool) -> None:
    lengths = np.random.default_rng(7).integers(1, 20, 200).tolist()
    source = document_rows(lengths)
    expected = concatenated(source, 8)
    middle = len(expected) // 2
    rows = document_rows(lengths)
    if marked:
        assert rows.seek_count(middle, source.mark_count(middle))
    barrier = threading.Barrier(4)

    def ask(seed: int) -> None:
        random = np.random.default_rng(seed)
        barrier.wait(30)
        for _ in range(30):
            counts = random.integers(0, len(expected), 5).tolist()
            assert asked(rows, counts) == [expected[count] for count in counts]
            count = int(random.integers(0, len(expected)))
            mark = rows.mark_count(count)
            assert mark[0] == expected[max(0, count - 1)][0]
            if marked and seed == 0:
                assert rows.seek_count(count, mark)

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(ask, range(4)))


@given(sources())
@settings(max_examples=examples(50))
def test_figures_of_a_pass_are_those_of_its_first_windows(make: Callable[[], DocumentRows]) -> None:
    rows, resumed, whole = make(), make(), make()
    size, documents, planned, tokens = rows._window_documents, 0, 0, 0
    for window in range(whole.num_windows):
        packing = whole._plan(0, window)
        documents = min(documents + size, whole.num_documents)
        planned, tokens = packing.num_rows, int(packing.piece_lengths.sum())
        if planned:
            break
    resumed.count(3)
    for source in (rows, resumed):
        assert source.rows_of_pass() == max(1, int(Fraction(planned * source.num_documents, documents)))
        assert source.mean_tokens() == Fraction(tokens, planned)
        assert 0 < source.mean_tokens() <= 8
    if whole.num_windows == 1:
        assert rows.rows_of_pass() == whole.count(0)


def test_documents_that_make_no_rows() -> None:
    for rows in (
        document_rows([20] * 30, long_documents="drop"),
        document_rows([0] * 30 + [4], share=Fraction(1, 31), name="b"),
    ):
        if rows.count(0):
            pytest.fail("choose a name whose share has only empty documents")
        for ask in (lambda rows=rows: rows.at(np.array([0])), rows.rows_of_pass, rows.mean_tokens):
            with pytest.raises(ConfigError) as raised:
                ask()
            assert all(part in str(raised.value) for part in (f"{rows.num_documents}", "seq_len = 8", "long_documents"))


def test_beginnings_of_passes() -> None:
    begins = PassBegins(PassBegin(2, 83))
    begins.note(PassBegin(4, 160))  # not the next one
    begins.note(PassBegin(3, 124))
    begins.note(PassBegin(3, 124))
    assert begins.of(83) == (PassBegin(2, 83), True)
    assert begins.of(123) == (PassBegin(2, 83), True)
    assert begins.of(500) == (PassBegin(3, 124), False)
    assert [column.tolist() for column in begins.split(np.array([130, 83, 124]))] == [[3, 2, 3], [6, 0, 0]]
    assert [begins.begins_with(PassBegin(*begin)) for begin in ((1, 0), (2, 83), (3, 125), (4, 160))] == [
        None,
        True,
        False,
        None,
    ]
