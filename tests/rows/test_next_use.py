"""When blocks are needed next, and what goes first: compared with plain lists of everything that a run still reads."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from block_oracle import kept_of, key_of, windows_of
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.rows.item_order import BlockShape
from dali_pipes.rows.next_use import NextUseFormula, Standing, needed_next, published
from dali_pipes.rows.windows import WindowRows, split_windows
from dali_pipes.storage.eviction import Entry, choose_victims, next_uses

STRIDE = 4


def rows_of(count: int, block_rows: int, window_blocks: int, share: Fraction | None = None) -> WindowRows:
    windows = split_windows(count * STRIDE + 1, STRIDE)
    blocks = BlockShape(window_blocks, block_rows * STRIDE)
    return WindowRows(windows, seed=1, name="a", share=share, blocks=blocks)


def told(rows: WindowRows, pass_number: int, place: int, item_tokens: float = 1.0) -> dict[str, Any]:
    grid = rows.block_grid()
    assert grid is not None
    keys = (rows.key(pass_number), rows.key(pass_number + 1))
    return published("c", rows.order, grid, "", Standing(place, keys, item_tokens))


def uses_by_hand(rows: WindowRows, pass_number: int, place: int, share: Fraction | None) -> list[float]:
    """Places until each block of the corpus is in the window that a run stands in, or comes to."""
    order = rows.order
    assert order.blocks is not None
    kept = kept_of(order.num_items, order.blocks.block_rows, share, "a")
    num_blocks = -(-order.num_items // order.blocks.block_rows)
    found = [math.inf] * num_blocks
    before = -place
    for of_pass in (pass_number, pass_number + 1):
        key = key_of("order", 1, '"a"', of_pass)
        for window in windows_of(len(kept), order.blocks.block_rows, order.blocks.window_blocks, key):
            size = sum(map(len, window))
            for number in {kept[row] // order.blocks.block_rows for block in window for row in block}:
                if before + size > 0:
                    found[number] = min(found[number], max(0, before))
            before += size
    return found


@given(
    count=st.integers(1, 60),
    block_rows=st.integers(1, 9),
    window_blocks=st.integers(1, 5),
    share=st.sampled_from([None, Fraction(1, 3), Fraction(7, 8)]),
    pass_number=st.integers(0, 3),
    data=st.data(),
)
def test_blocks_are_needed_when_the_order_says(
    count: int, block_rows: int, window_blocks: int, share: Fraction | None, pass_number: int, data: st.DataObject
) -> None:
    rows = rows_of(count, block_rows, window_blocks, share)
    place = data.draw(st.integers(0, rows.count(0) - 1))
    grid = rows.block_grid()
    assert grid is not None
    begins, ends = grid.spans(np.arange(grid.count))
    uses = NextUseFormula()(told(rows, pass_number, place, 2.0), begins, ends)
    assert uses is not None
    assert (uses / 2.0).tolist() == uses_by_hand(rows, pass_number, place, share)


@given(data=st.data(), size=st.integers(1, 40))
def test_a_part_that_spans_blocks_is_needed_with_the_first_of_them(data: st.DataObject, size: int) -> None:
    """Decoded chunks are not cut where blocks are."""
    rows = rows_of(50, 4, 2)
    begin = data.draw(st.integers(0, 50 * STRIDE - size))
    found = NextUseFormula()(told(rows, 0, 17), np.array([begin]), np.array([begin + size]))
    by_block = uses_by_hand(rows, 0, 17, None)
    rows_read = range(begin // STRIDE, (begin + max(1, size - 1) - 1) // STRIDE + 1)  # the last token is a label
    assert found is not None
    assert found[0] == min(by_block[row // 4] for row in rows_read)


def test_without_a_shuffle_blocks_come_one_after_another() -> None:
    rows = WindowRows(split_windows(10 * STRIDE + 1, STRIDE), shuffle=False, blocks=BlockShape(2, 2 * STRIDE))
    grid = rows.block_grid()
    assert grid is not None
    uses = NextUseFormula()(told(rows, 0, 5), *grid.spans(np.arange(5)))
    assert uses is not None
    assert uses.tolist() == [5, 7, 0, 1, 3]


def test_documents_of_another_process_are_unknown() -> None:
    order = {**told(rows_of(20, 4, 2), 0, 0), "grid_key": "5f2c"}
    assert NextUseFormula()(order, np.array([0]), np.array([4])) is None


def entries_of(number: int) -> list[Entry]:
    return [Entry(f"{at}", "c", 4 * at, 4 * at + 4, num_bytes=10, used_at=at) for at in range(number)]


def test_the_smallest_next_use_of_all_jobs_counts() -> None:
    orders: list[dict[str, Any]] = [
        {"corpus": "c", "uses": [5.0, 9.0, 1.0]},
        {"corpus": "c", "uses": [7.0, 2.0, math.inf]},
        {"corpus": "d"},
    ]
    found = next_uses(entries_of(3), orders, lambda order, begins, ends: np.array(order["uses"]))
    assert found.tolist() == [5, 2, 1]
    nobody = next_uses(entries_of(3), [{"corpus": "d"}], lambda order, begins, ends: None)
    assert nobody.tolist() == [math.inf] * 3
    unknown = next_uses(entries_of(2), [{"corpus": "c", "uses": [3.0, 3.0]}, {"corpus": "c"}], _uses_if_known)
    assert np.isnan(unknown).all()


def _uses_if_known(order: dict[str, Any], begins: Any, ends: Any) -> Any:
    return np.array(order["uses"]) if "uses" in order else None


@given(
    uses=st.lists(st.sampled_from([0.0, 1.0, 2.0, 5.0, math.inf, math.nan]), min_size=1, max_size=8),
    needed=st.integers(1, 60),
    new_use=st.sampled_from([0.0, 1.0, 3.0, math.nan]),
)
def test_nothing_goes_that_is_needed_sooner(uses: list[float], needed: int, new_use: float) -> None:
    entries = entries_of(len(uses))
    victims = choose_victims(entries, np.array(uses), needed, new_use)
    limit = 0.0 if math.isnan(new_use) else new_use
    may_go = [number for number, use in enumerate(uses) if math.isnan(use) or use > limit]
    if 10 * len(may_go) < needed:
        assert victims is None
        return
    assert victims is not None
    gone = [int(victim.name) for victim in victims]
    assert len(gone) == -(-needed // 10)
    assert set(gone) <= set(may_go)

    def order(number: int) -> tuple[int, float, int]:
        use = uses[number]
        rank = 0 if math.isinf(use) else 1 if math.isnan(use) else 2
        return rank, -use if rank == 2 else 0.0, number

    assert gone == sorted(may_go, key=order)[: len(gone)]


def best_hits(reads: list[int], room: int, end: int) -> int:
    """Hits of the first `end` reads with the best choice, which knows all of them: what is read again last goes."""
    kept: set[int] = set()
    hits = 0
    for at, block in enumerate(reads[:end]):
        hits += block in kept
        kept.add(block)
        if len(kept) > room:
            later = {one: next((k for k in range(at + 1, len(reads)) if reads[k] == one), math.inf) for one in kept}
            kept.remove(max(kept - {block}, key=lambda one: later[one]))
    return hits


@pytest.mark.parametrize("room", [2, 5, 8])
def test_three_epochs_have_as_many_hits_as_possible(room: int) -> None:
    """Blocks read one after another, each epoch in another order, with room for some of them."""
    rows = rows_of(16 * 3, 3, 1)
    grid, formula = rows.block_grid(), NextUseFormula()
    assert grid is not None
    reads = [
        (number, place, int(block))
        for number in range(4)
        for place, block in enumerate(rows.plan(number, np.arange(48)).starts // (3 * STRIDE))
        if place % 3 == 0
    ]
    kept: dict[int, Entry] = {}
    hits = 0
    for number, place, block in reads[: 3 * 16]:
        begin, end = (int(one[0]) for one in grid.spans(np.array([block])))
        entry = Entry(str(block), "c", begin, end, 1)
        hits += block in kept
        if block not in kept and len(kept) == room:
            uses = next_uses([*kept.values(), entry], [told(rows, number, place)], formula)
            victims = choose_victims(list(kept.values()), uses[:-1], 1, float(uses[-1]))
            assert victims is not None
            del kept[int(victims[0].name)]
        kept[block] = entry
    assert hits == best_hits([block for _, _, block in reads], room, 3 * 16)  # both know the fourth epoch


@given(
    count=st.integers(1, 60),
    block_rows=st.integers(1, 9),
    window_blocks=st.integers(1, 5),
    share=st.sampled_from([None, Fraction(1, 3), Fraction(7, 8)]),
    goes_on=st.booleans(),
    data=st.data(),
)
def test_the_blocks_of_this_window_and_the_next_come_next(
    count: int, block_rows: int, window_blocks: int, share: Fraction | None, goes_on: bool, data: st.DataObject
) -> None:
    rows = rows_of(count, block_rows, window_blocks, share)
    place, order = data.draw(st.integers(0, rows.count(0) - 1)), rows.order
    assert order.blocks is not None
    kept = kept_of(order.num_items, order.blocks.block_rows, share, "a")
    windows: list[list[int]] = []
    ends = [0]
    for of_pass in (0, 1):
        for window in windows_of(len(kept), block_rows, window_blocks, key_of("order", 1, '"a"', of_pass)):
            windows.append([kept[block[0]] // block_rows for block in window])
            ends.append(ends[-1] + sum(map(len, window)))
    at = next(number for number in range(len(windows)) if place < ends[number + 1])
    has_next = goes_on or ends[at + 1] < len(kept)
    found = needed_next(order, Standing(place, (rows.key(0), rows.key(1)), 1.0), goes_on=goes_on).tolist()
    assert found == windows[at] + (windows[at + 1] if has_next else [])


def test_without_a_shuffle_the_next_blocks_of_the_corpus_come_next() -> None:
    rows = WindowRows(split_windows(10 * STRIDE + 1, STRIDE), shuffle=False, blocks=BlockShape(2, 2 * STRIDE))
    now = Standing(5, (None, None), 1.0)
    assert needed_next(rows.order, now, goes_on=False).tolist() == [2, 3, 4]
    assert needed_next(rows.order, now, goes_on=True).tolist() == [2, 3, 4, 0]
