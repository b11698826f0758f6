"""The plan: every token once, the same on every rank, window by window, from any place on."""

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from row_oracle import pieces_of

from dali_pipes.errors import ConfigError
from dali_pipes.rows.document_rows import DocumentRows, split_documents
from dali_pipes.rows.packing import Packing
from dali_pipes.rows.window_counts import WindowMark
from dali_pipes.schedule import Position, Schedule, StepRange

LENGTHS = st.lists(st.integers(0, 23), min_size=1, max_size=40).filter(any)
MODES = st.sampled_from(["pack", "pad"])
LONG = st.sampled_from(["split", "truncate", "drop"])


def offsets_of(lengths: list[int], first: int = 0) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate(([first], first + np.cumsum(lengths))).astype(np.int64)


def make(lengths: list[int], seq_len: int = 8, first: int = 0, **changes: object) -> DocumentRows:
    options = {"mode": "pack", "long_documents": "split", "window_documents": 5, "shuffle": True, "seed": 3, **changes}
    return DocumentRows(offsets_of(lengths, first), seq_len, **options)  # type: ignore[arg-type]


@given(LENGTHS, MODES, LONG, st.integers(1, 12), st.integers(1, 50), st.booleans(), st.integers(0, 3))
def test_every_token_is_served_once_or_reported_dropped(
    lengths: list[int], mode: str, long_documents: str, seq_len: int, window: int, shuffle: bool, epoch: int
) -> None:
    rows = make(
        lengths, seq_len, 100, mode=mode, long_documents=long_documents, window_documents=window, shuffle=shuffle
    )
    count = rows.count(epoch)
    pieces = pieces_of(rows, epoch, np.arange(count))
    served = Counter(
        token
        for start, length in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)
        for token in range(start, start + length)
    )
    report = rows.report(epoch)
    assert set(served.values()) <= {1}
    assert set(served) <= set(range(100, 100 + sum(lengths)))
    assert len(served) + report.dropped_tokens == report.tokens == sum(lengths)
    assert (report.rows, report.documents) == (count, len(lengths))
    assert report.padding_tokens == count * seq_len - len(served)
    if long_documents == "split":
        assert report.dropped_tokens == 0
    sizes = np.diff(pieces.row_offsets)
    assert (sizes >= 1).all()
    if mode == "pad":
        assert (sizes == 1).all()
    for first, last in zip(pieces.row_offsets[:-1], pieces.row_offsets[1:], strict=True):
        assert pieces.lengths[first:last].sum() <= seq_len


@given(LENGTHS, MODES, st.integers(1, 9), st.data())
def test_any_rows_are_those_of_the_whole_plan(lengths: list[int], mode: str, window: int, data: st.DataObject) -> None:
    """Asked for alone, in any order, by an object that has planned nothing else."""
    whole = make(lengths, mode=mode, window_documents=window)
    count = whole.count(2)
    everything = pieces_of(whole, 2, np.arange(count))
    first = data.draw(st.integers(0, max(0, count - 1)))
    wanted = np.arange(first, count, data.draw(st.integers(1, 4)))
    fresh = make(lengths, mode=mode, window_documents=window)
    some = pieces_of(fresh, 2, np.append(wanted, -1))
    assert len(some.row_offsets) == len(wanted) + 2
    assert some.row_offsets[-1] == some.row_offsets[-2], "a padding row has no piece"
    for place, row in enumerate(wanted):
        mine = slice(some.row_offsets[place], some.row_offsets[place + 1])
        theirs = slice(everything.row_offsets[row], everything.row_offsets[row + 1])
        for column, other in zip(some[1:4], everything[1:4], strict=True):
            assert column[mine].tolist() == other[theirs].tolist()


@given(LENGTHS, st.integers(1, 9), st.data())
def test_a_mark_leads_back_without_planning_what_came_before(
    lengths: list[int], window: int, data: st.DataObject
) -> None:
    rows = make(lengths, window_documents=window)
    count = rows.count(1)
    row = data.draw(st.integers(0, count))
    mark = rows.mark(1, row)
    fresh = make(lengths, window_documents=window)
    planned: list[int] = []
    real = fresh._plan

    def watched(epoch: int, window: int) -> Any:
        planned.append(window)
        return real(epoch, window)

    fresh._plan = watched  # type: ignore[method-assign]
    assert fresh.seek(1, row, mark)
    assert not planned or min(planned) >= mark.window
    assert fresh.count(1) == count
    rest = np.arange(row, count)
    for mine, theirs in zip(pieces_of(fresh, 1, rest)[:4], pieces_of(rows, 1, rest)[:4], strict=True):
        assert mine.tolist() == theirs.tolist()
    assert min(planned, default=mark.window) >= mark.window
    whole = pieces_of(fresh, 1, np.arange(count))  # also what lies before the mark can be asked for
    assert whole.starts.tolist() == pieces_of(rows, 1, np.arange(count)).starts.tolist()


def test_a_mark_that_cannot_be_is_refused() -> None:
    lengths = [5] * 40
    rows = make(lengths)
    count = rows.count(0)
    mark = rows.mark(0, count // 2)
    assert mark.window > 0
    for wrong in (
        WindowMark(99, 0),
        WindowMark(0, 1),
        WindowMark(mark.window, count),
    ):
        assert not make(lengths).seek(0, count // 2, wrong)


def test_what_is_known_is_told_while_a_window_is_planned() -> None:
    """A state, a length, rows of a kept window and a whole report: none waits for a thread that plans for long."""
    lengths = [n % 9 + 1 for n in range(60)]
    expected = make(lengths)
    count = expected.count(0)
    rows = make(lengths)
    known = rows.count(0, 1)
    planning, go_on = threading.Event(), threading.Event()
    real, main = rows._make_plan, threading.get_ident()

    def slow(epoch: int, window: int) -> Any:
        if threading.get_ident() != main:
            planning.set()
            go_on.wait()
        return real(epoch, window)

    rows._make_plan = slow  # type: ignore[method-assign]
    counts: list[int] = []
    thread = threading.Thread(target=lambda: counts.append(rows.count(0)))
    thread.start()
    try:
        planning.wait()
        assert rows.mark(0, known) == expected.mark(0, known)
        assert (rows.count(0, known), rows.is_counted(0)) == (known, False)
        assert rows.estimate(0) > known
        some = np.arange(known)
        assert pieces_of(rows, 0, some).starts.tolist() == pieces_of(expected, 0, some).starts.tolist()
        assert rows.report(0) == expected.report(0)
        assert (rows.count(0), rows.is_counted(0)) == (count, True)
    finally:
        go_on.set()
        thread.join()
    assert counts == [count]
    assert (
        pieces_of(rows, 0, np.arange(count)).starts.tolist() == pieces_of(expected, 0, np.arange(count)).starts.tolist()
    )


def test_several_threads_that_ask_for_all_at_once() -> None:
    """Any rows of any epoch, from any thread, after any seek: each is what it is for one thread alone."""
    lengths = [n % 9 + 1 for n in range(80)]
    expected = make(lengths)
    counts = [expected.count(epoch) for epoch in range(5)]
    right = [pieces_of(expected, epoch, np.arange(count)).starts.tolist() for epoch, count in enumerate(counts)]
    marks = [[expected.mark(epoch, row) for row in range(count)] for epoch, count in enumerate(counts)]
    rows = make(lengths)
    wrong: list[object] = []

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(60):
            epoch = draw.randrange(5)
            row = draw.randrange(counts[epoch])
            if draw.random() < 0.2 and not rows.seek(epoch, row, marks[epoch][row]):
                wrong.append((seed, epoch, row))
            if draw.random() < 0.2 and rows.report(epoch).rows != counts[epoch]:
                wrong.append((seed, epoch))
            found = pieces_of(rows, epoch, np.arange(row, counts[epoch])).starts.tolist()
            if found != right[epoch][len(right[epoch]) - len(found) :] or len(found) < counts[epoch] - row:
                wrong.append((seed, epoch, row, found))

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_documents_and_pieces_past_32_bits() -> None:
    """A corpus whose tokens, documents' lengths and pieces' begins need 64 bits; rows lie where they lay in Python."""
    lengths = [3 * 2**31 + 5, 2, 2**33, 0, 2**31]
    rows = make(lengths, seq_len=2**31, first=2**40, window_documents=2, shuffle=False)
    begins = np.cumsum([2**40, *lengths]).tolist()
    pieces = pieces_of(rows, 0, np.arange(rows.count(0)))
    expected = [[(begins[0] + part * 2**31, 2**31)] for part in range(3)]
    expected += [[(begins[0] + 3 * 2**31, 5), (begins[1], 2)]]
    expected += [[(begins[2] + part * 2**31, 2**31)] for part in range(4)] + [[(begins[4], 2**31)]]
    found = list(zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True))
    bounds = itertools.pairwise(pieces.row_offsets.tolist())
    assert [found[first:last] for first, last in bounds] == expected
    assert pieces.document_ends.tolist() == [start + length for start, length in found]


def test_what_is_kept_of_plans() -> None:
    """Six windows, of at most 16 bytes a document where rows hold several."""
    lengths = np.random.default_rng(1).lognormal(np.log(400), 1.2, 80_000).astype(np.int64) + 1
    rows = make(lengths.tolist(), seq_len=2048, window_documents=10_000)
    assert rows.plan_bytes() == 0
    rows.count(0, 1)
    assert 0 < rows.plan_bytes() <= 16 * 10_000
    rows.count(0)
    assert 4 * 16 * 10_000 < rows.plan_bytes() <= 6 * 16 * 10_000


def test_epochs_differ_and_repeat_exactly() -> None:
    lengths = list(range(1, 30))
    orders = [
        pieces_of(make(lengths), epoch, np.arange(make(lengths).count(epoch))).starts.tolist() for epoch in range(3)
    ]
    assert orders[0] != orders[1] != orders[2]
    assert orders == [
        pieces_of(make(lengths), epoch, np.arange(make(lengths).count(epoch))).starts.tolist() for epoch in range(3)
    ]
    assert orders[0] != pieces_of(make(lengths, seed=4), 0, np.arange(make(lengths, seed=4).count(0))).starts.tolist()


def test_rows_of_a_window_are_shuffled() -> None:
    """Best fit makes full rows first; in that order a model would see long documents first."""
    lengths = [7] * 50 + [1] * 10
    rows = make(lengths, seq_len=8, window_documents=1000)
    sizes = np.diff(pieces_of(rows, 0, np.arange(rows.count(0))).row_offsets)
    assert sizes.tolist() != sorted(sizes.tolist())
    assert sizes.tolist() != sorted(sizes.tolist(), reverse=True)


@settings(max_examples=examples(12))
@given(LENGTHS, st.integers(1, 3), st.integers(1, 3), st.booleans(), st.integers(1, 4))
def test_ranks_share_every_step(
    lengths: list[int], world_size: int, batch_size: int, drop_last: bool, per_run: int
) -> None:
    """Equal steps on all ranks; together each row once; blocks run on through epochs of different lengths."""
    try:
        ranks = [
            Schedule(
                make(lengths),
                batch_size,
                rank=rank,
                world_size=world_size,
                drop_last=drop_last,
            )
            for rank in range(world_size)
        ]
    except ConfigError:
        assert drop_last
        assert make(lengths).count(0) < batch_size * world_size
        return
    for epoch in range(3):
        count = make(lengths).count(epoch)
        (steps,) = {schedule.steps(0, epoch) for schedule in ranks}
        seen: list[int] = []
        for step in range(steps):
            parts = [schedule.rows(StepRange(epoch, 0, step, 1)) for schedule in ranks]
            assert len({len(part) for part in parts}) == 1
            seen += [int(row) for part in parts for row in part if row >= 0]
        whole = count // (batch_size * world_size) * batch_size * world_size
        assert sorted(seen) == list(range(whole if drop_last else count))
        fewest = batch_size * world_size if drop_last else 1
        behind = next(later for later in itertools.count(epoch + 1) if make(lengths).count(later) >= fewest)
        assert ranks[0].normalize(Position(epoch, count)) == Position(behind, 0)


@given(LENGTHS, st.sampled_from([0.1, 0.5, 0.9]))
def test_splits_share_the_documents(lengths: list[int], fraction: float) -> None:
    offsets = offsets_of(lengths)
    parts = {}
    for split in ("train", "validation"):
        try:
            parts[split] = split_documents(offsets, split, fraction)
        except ConfigError as error:
            assert split in str(error)  # noqa: PT017
    if len(parts) == 2:
        assert parts["train"].tolist() + parts["validation"].tolist()[1:] == offsets.tolist()
    assert split_documents(offsets, "train", 0.0).tolist() == offsets.tolist()


def test_nothing_but_empty_documents_is_one_clear_error() -> None:
    with pytest.raises(ConfigError, match="is empty"):
        split_documents(offsets_of([0, 0, 0]), "train", 0.0)


def test_the_next_window_is_planned_before_its_rows_are_asked_for() -> None:
    rows, planned = make([4, 4] * 10, window_documents=8), list[tuple[int, int]]()

    def plan(epoch: int, window: int, make_plan: Callable[[int], Packing], _: int) -> Packing:
        planned.append((epoch, window))
        return make_plan(window)

    rows.share(plan)
    for row, expected in [(0, [(0, 0), (0, 1)]), (3, []), (4, [(0, 2)]), (5, []), (0, []), (8, [(1, 0)]), (9, [])]:
        rows.plan(0, np.array([row]))
        rows.plan_next(0, row)
        assert planned == expected, row
        planned.clear()
    rows.plan_next(1, 0)
    assert planned == [(1, 1)]
