"""Orders by blocks: against plain lists, and what they promise for any number of rows, ranks, batches, and places."""

import itertools
from fractions import Fraction
from pathlib import Path
from typing import Any

import block_oracle
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from profiles import examples
from streams import row_ids, take

from dali_pipes import TokenLoader
from dali_pipes.errors import ConfigError, StateError
from dali_pipes.rows import make
from dali_pipes.rows.block_order import BlockOrder, KeptBlocks, kept_by_blocks, numbers_by_blocks
from dali_pipes.rows.document_rows import DocumentRows
from dali_pipes.rows.item_order import BlockShape
from dali_pipes.rows.windows import WindowCuts, WindowRows, split_windows
from dali_pipes.runtime.messages import say_once

KEYS = st.integers(0, 2**64 - 1)
COUNTS = st.one_of(st.integers(1, 200), st.integers(200, 1500))
BLOCK_ROWS = st.one_of(st.integers(1, 9), st.integers(1, 400))
WINDOWS = st.integers(1, 12)
SHARES = st.one_of(
    st.none(), st.integers(1, 30).flatmap(lambda below: st.integers(1, below).map(lambda above: Fraction(above, below)))
)
T = 4


@given(COUNTS, BLOCK_ROWS, WINDOWS, KEYS)
@settings(max_examples=examples(90))
def test_orders_are_those_of_plain_lists(count: int, block_rows: int, window_blocks: int, key: int) -> None:
    order = BlockOrder(count, block_rows, window_blocks)
    rows = order.numbers(np.arange(count), key).tolist()
    assert rows == block_oracle.order_of(count, block_rows, window_blocks, key)
    assert sorted(rows) == list(range(count))
    assert [order.place_of(row, key) for row in rows[:50]] == list(range(min(count, 50)))


@given(COUNTS, BLOCK_ROWS, WINDOWS, KEYS, st.data())
def test_any_places_in_any_order(
    count: int, block_rows: int, window_blocks: int, key: int, data: st.DataObject
) -> None:
    order = BlockOrder(count, block_rows, window_blocks)
    places = data.draw(st.lists(st.integers(0, count - 1), max_size=60))
    whole = order.numbers(np.arange(count), key)
    asked = order.numbers(np.array(places, np.int64), key)
    assert asked.dtype == np.int64
    assert asked.tolist() == whole[places].tolist()
    assert [order.place_of(row, key) for row in asked.tolist()] == places


@given(st.lists(st.tuples(COUNTS, BLOCK_ROWS, WINDOWS, KEYS), min_size=1, max_size=5), st.data())
@settings(max_examples=examples(40))
def test_several_orders_in_one_call(shapes: list[tuple[int, int, int, int]], data: st.DataObject) -> None:
    """Few places of a window, or all of it."""
    places, expected = [], []
    for count, block_rows, window_blocks, key in shapes:
        asked = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=9) | st.just(list(range(count))))
        order = block_oracle.order_of(count, block_rows, window_blocks, key)
        places.append(asked)
        expected += [order[place] for place in asked]
    found = numbers_by_blocks(
        [BlockOrder(*shape[:3]) for shape in shapes],
        [shape[3] for shape in shapes],
        np.array(list(map(len, places))),
        np.array(list(itertools.chain(*places))),
    )
    assert found.dtype == np.int64
    assert found.tolist() == expected


@given(COUNTS, BLOCK_ROWS, WINDOWS, KEYS)
def test_windows_have_blocks_of_their_own(count: int, block_rows: int, window_blocks: int, key: int) -> None:
    """And no stretch of places as long as the shortest window reads more than two windows' blocks."""
    order = BlockOrder(count, block_rows, window_blocks)
    blocks = (order.numbers(np.arange(count), key) // block_rows).tolist()
    ends = block_oracle.ends_in(order, key)
    assert len(ends) == order.num_windows
    assert ends[-1] == count
    own = [set(blocks[begin:end]) for begin, end in itertools.pairwise([0, *ends])]
    assert sum(map(len, own)) == len(set(blocks)) == -(-count // block_rows)
    assert [set(block_oracle.blocks_in(order, window, key)) for window in range(len(own))] == own
    sizes = list(map(len, own))
    assert max(sizes) <= window_blocks
    assert max(sizes) - min(sizes) <= 1
    stretch = min(end - begin for begin, end in itertools.pairwise([0, *ends]))
    for begin in range(0, count - stretch, max(1, count // 40)):
        assert len(set(blocks[begin : begin + stretch])) <= 2 * window_blocks


def test_the_example_of_the_docstring() -> None:
    order = BlockOrder(14, 4, 2)
    assert order.numbers(np.arange(14), 0).tolist() == [12, 4, 7, 13, 5, 6, 2, 9, 10, 0, 11, 3, 8, 1]
    assert [block_oracle.blocks_in(order, window, 0) for window in range(2)] == [[3, 1], [0, 2]]
    assert block_oracle.ends_in(order, 0) == [6, 14]


def test_orders_of_long_runs() -> None:
    """10^13 rows: any place costs as much as the first ones, and is found again."""
    order, key = BlockOrder(10**13 + 7, 512, 512), 2024
    places = np.array([0, 1, 10**12, 5 * 10**12 + 1, 10**13 + 6])
    rows = order.numbers(places, key)
    assert len(set(rows.tolist())) == 5
    assert [order.place_of(row, key) for row in rows.tolist()] == places.tolist()


def test_blocks_come_anywhere_and_rows_of_a_window_mix() -> None:
    """Over many keys each block is in each window equally often, also the short one; so is each row at each place."""
    in_window, at_place, keys = np.zeros((10, 5)), np.zeros((8, 8)), 800
    for key in range(keys):
        order = BlockOrder(39, 4, 2)
        for window in range(5):
            in_window[block_oracle.blocks_in(order, window, key), window] += 1
        at_place[np.arange(8), BlockOrder(8, 4, 2).numbers(np.arange(8), key)] += 1
    for table in (in_window, at_place):
        expected = table.sum(axis=1, keepdims=True) / table.shape[1]
        chi_square = ((table - expected) ** 2 / expected).sum()
        assert chi_square < table.size + 6 * (2 * table.size) ** 0.5


@given(st.integers(1, 300), st.integers(1, 40), KEYS)
def test_kept_blocks_are_whole(count: int, block_rows: int, key: int) -> None:
    kept = KeptBlocks(count, block_rows, key)
    rows = kept_by_blocks([kept], np.array([count]), np.arange(count)).tolist()
    assert sorted(rows) == list(range(count))
    assert [kept.place_of(row) for row in rows] == list(range(count))
    for first in range(0, count - count % block_rows, block_rows):
        begin = rows[first]
        assert begin % block_rows == 0
        assert rows[first : first + block_rows] == list(range(begin, begin + block_rows))


@given(
    num_tokens=st.integers(60, 900),
    stride=st.integers(1, 9),
    block_tokens=st.integers(1, 90),
    window_blocks=WINDOWS,
    name=st.one_of(st.none(), st.text(max_size=4)),
    share=SHARES,
    offset=st.booleans(),
    seed=st.integers(0, 5),
)
@settings(max_examples=examples(60))
def test_windows_of_tokens_against_plain_lists(
    num_tokens: int,
    stride: int,
    block_tokens: int,
    window_blocks: int,
    name: str | None,
    share: Fraction | None,
    offset: bool,
    seed: int,
) -> None:
    windows = split_windows(num_tokens, 5, stride)
    given_: dict[str, Any] = {"name": name, "share": share, "random_offset": offset}
    shape = BlockShape(window_blocks, block_tokens)
    rows = WindowRows(windows, seed=seed, blocks=shape, **given_)
    count = (num_tokens - 5) // stride if offset else windows.count
    orders = []
    for pass_number in range(2):
        first = block_oracle.key_of("offset", seed, *block_oracle.named(name), pass_number) % stride if offset else 0
        starts = rows.plan(pass_number, np.arange(rows.count(pass_number))).starts.tolist()
        numbers = block_oracle.pass_of(
            count,
            max(1, block_tokens // stride),
            window_blocks,
            seed=seed,
            pass_number=pass_number,
            name=name,
            share=share,
        )
        assert starts == [first + stride * number for number in numbers]
        orders.append(numbers)
        for position in range(0, num_tokens, 29):
            reading = [place for place, start in enumerate(starts) if start <= position < start + rows.row_tokens]
            assert sorted(rows.places_of(pass_number, position) or []) == reading
    formula = rows.formula(0)
    assert formula is not None
    assert not formula.is_one_permutation, "a kernel would compute the order by rows"
    assert set(orders[0]) == set(orders[1])
    in_corpus_order = WindowRows(windows, shuffle=False, seed=99, blocks=shape, **given_)
    assert set(in_corpus_order.plan(0, np.arange(rows.count(0))).starts.tolist()) == {
        in_corpus_order.first_of(0) + stride * number for number in orders[0]
    }, "which rows a share keeps depends neither on seed nor on shuffle"


def test_a_block_has_8_mib_of_wide_ids_whatever_the_corpus_stores(tmp_path: Path) -> None:
    for dtype in ("uint16", "uint32"):
        np.arange(2000, dtype=dtype).tofile(tmp_path / f"{dtype}.bin")
        with TokenLoader(
            corpus=str(tmp_path / f"{dtype}.bin"), batch_size=1, **{**SETTINGS, "seq_len": 512, "dtype": dtype}
        ) as loader:
            rows = loader._schedule.interleave
            assert isinstance(rows, WindowRows)
            assert rows.order.blocks is not None
            assert rows.order.blocks.block_rows == 8 * 2**20 // 4 // 512


@given(
    lengths=st.lists(st.integers(1, 19), min_size=1, max_size=60),
    share=SHARES,
    mode=st.sampled_from(["pack", "pad"]),
    block_tokens=st.integers(1, 120),
    window_blocks=st.integers(1, 4),
    packed=st.integers(1, 9),
)
def test_documents_by_blocks(
    lengths: list[int], share: Fraction | None, mode: Any, block_tokens: int, window_blocks: int, packed: int
) -> None:
    """The documents of packing windows come in the order by blocks, each once a pass."""
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int64)
    rows = DocumentRows(
        offsets,
        8,
        mode=mode,
        long_documents="split",
        window_documents=packed,
        shuffle=True,
        seed=3,
        share=share,
        blocks=BlockShape(window_blocks, block_tokens),
    )
    count = len(lengths)
    block = max(1, block_tokens * count // sum(lengths))
    kept = block_oracle.kept_of(count, block, share, None)
    for pass_number in range(2):
        key = block_oracle.key_of(3, "order", pass_number)  # that of documents names the seed first
        order = [kept[number] for number in block_oracle.order_of(len(kept), block, window_blocks, key)]
        pieces = rows.plan(pass_number, np.arange(rows.count(pass_number))).pieces
        assert pieces is not None
        whose = np.searchsorted(offsets, pieces.starts, side="right") - 1
        served = [document for document, _ in itertools.groupby(sorted(whose.tolist()))]
        assert served == sorted(order)
        assert int(pieces.lengths.sum()) == sum(lengths[document] for document in kept)
        windows = [order[first : first + packed] for first in range(0, len(order), packed)]
        at = 0
        for window in windows:
            tokens = sum(lengths[document] for document in window)
            seen: set[int] = set()
            while tokens > 0:
                seen.add(int(whose[at]))
                tokens -= int(pieces.lengths[at])
                at += 1
            assert seen == set(window)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 24 tokens, so that a small corpus has many windows."""
    monkeypatch.setattr(make, "BLOCK_TOKENS", 24)


SETTINGS: dict[str, Any] = {
    "dtype": "uint32",
    "device": "cpu",
    "seq_len": T,
    "order": "blocks",
    "shuffle_window": 3,
    "outputs": ("input_ids", "labels", "row_ids"),
    "quiet": True,
}
KINDS: dict[str, dict[str, Any]] = {
    "stream": {},
    "overlapping": {"stride": 3},
    "random offset": {"random_offset": True},
    "pieces": {"outputs": ("input_ids", "labels", "row_ids", "position_ids"), "eos_id": 7},
    "pack": {"rows": "pack", "eos_id": 7, "window_documents": 16},
    "pad": {"rows": "pad", "eos_id": 7, "window_documents": 16},
    "lengths": {"seq_len": [[0, 2], [120, 4]], "global_batch": 12},
}


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """Tokens that are their places, but for ends of documents."""
    tokens = np.arange(1000, 1413, dtype=np.uint32)
    tokens[np.cumsum([(7 * number) % 11 + 2 for number in range(55)])[:-1] % 413] = 7
    tokens.tofile(tmp_path / "a.bin")
    return str(tmp_path / "a.bin")


def mixed(corpus: str, tmp_path: Path) -> dict[str, Any]:
    np.arange(5000, 5300, dtype=np.uint32).tofile(tmp_path / "b.bin")
    sources = {
        "web": {"corpus": corpus, "weight": 0.6, "share": 0.5},
        "code": {"corpus": str(tmp_path / "b.bin"), "weight": 0.4, "max_epochs": 10},
    }
    return {"mixture": sources, "total_rows": 180}


def given_by(kind: str, corpus: str, tmp_path: Path) -> dict[str, Any]:
    if kind.startswith("mixture"):
        more = KINDS["pieces"] if kind.endswith("pieces") else {}
        return {**SETTINGS, **more, **mixed(corpus, tmp_path)}
    return {**SETTINGS, "corpus": corpus, **KINDS[kind]}


def rows_of(batches: list[Any]) -> list[tuple[int, tuple[int, ...]]]:
    return [
        (row, tuple(ids))
        for batch in batches
        for row, ids in zip(batch["row_ids"].tolist(), batch["input_ids"].tolist(), strict=True)
    ]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", [*KINDS, "mixture", "mixture in pieces"])
def test_ranks_batches_and_blocks_change_nothing(kind: str, corpus: str, tmp_path: Path) -> None:
    settings_ = given_by(kind, corpus, tmp_path)
    with TokenLoader(batch_size=1, rank=0, world_size=1, **settings_) as loader:
        whole = {epoch: dict(rows_of(list(loader))) for epoch in range(2)}
    assert list(whole[0].values()) != list(whole[1].values())
    for world_size, batch_size, steps_a_run in ((2, 3, 1), (4, 1, 3), (1, 12, 2)):
        for epoch in range(2):
            seen: dict[int, tuple[int, ...]] = {}
            for rank in range(world_size):
                with TokenLoader(
                    batch_size=batch_size,
                    rank=rank,
                    world_size=world_size,
                    batches_per_run=steps_a_run,
                    num_threads=1,
                    **settings_,
                ) as loader:
                    if epoch:
                        list(loader)
                    own = rows_of(list(loader))
                assert not {row for row, _ in own} & seen.keys()
                seen |= dict(own)
            assert seen.items() <= whole[epoch].items()
            assert len(seen) > len(whole[epoch]) - world_size * batch_size


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", [*KINDS, "mixture", "mixture in pieces"])
def test_every_step_of_a_resume(kind: str, corpus: str, tmp_path: Path) -> None:
    settings_ = {**given_by(kind, corpus, tmp_path), "batch_size": 12, "batches_per_run": 2, "num_threads": 1}
    states, batches = [], []
    with TokenLoader(**settings_) as loader:
        for _ in range(2):
            states.append(loader.state_dict())
            for batch in loader:
                batches.append(batch)
                states.append(loader.state_dict())
            states.pop()  # that of the next epoch's beginning comes again
    with TokenLoader(**settings_) as loader:
        for number, state in enumerate(states[: len(batches)]):
            loader.load_state_dict(state)
            [batch] = take(loader, 1)
            assert rows_of([batch]) == rows_of([batches[number]]), number


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("kind", ["stream", "pack", "mixture"])
def test_one_four_and_two_ranks_of_one_run(kind: str, corpus: str, tmp_path: Path) -> None:
    settings_ = given_by(kind, corpus, tmp_path)
    with TokenLoader(batch_size=1, rank=0, world_size=1, **settings_) as loader:
        expected = dict(rows_of(list(loader)))
    state, seen = None, []
    for world_size, steps in ((1, 3), (4, 2), (2, None)):
        state_after = None
        for rank in range(world_size):
            with TokenLoader(batch_size=2, rank=rank, world_size=world_size, drop_last=False, **settings_) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                seen += rows_of(take(loader, 10**6 if steps is None else steps))
                state_after = loader.state_dict()
        state = state_after
    real = [(row, ids) for row, ids in seen if row >= 0]
    assert len(real) == len(expected)
    assert dict(real) == expected


@pytest.mark.usefixtures("small_blocks")
def test_a_mixture_has_the_order_of_each_source(corpus: str, tmp_path: Path) -> None:
    with TokenLoader(batch_size=1, rank=0, world_size=1, **given_by("mixture", corpus, tmp_path)) as loader:
        served = np.array([ids[0] for _ in range(3) for _, ids in rows_of(list(loader))])[:512]  # whole strata
        mixture = loader._built.mixture
        assert mixture is not None
        sources, counts = mixture.order.rows(np.arange(len(served)))
    found = served[sources == 1][np.argsort(counts[sources == 1])].tolist()
    of_code: list[int] = []
    for pass_number in range(4):
        order = block_oracle.pass_of(74, 24 // T, 3, seed=0, pass_number=pass_number, name="code")
        of_code += [5000 + T * number for number in order]
    assert found == of_code[: len(found)]
    assert len(found) > 2 * 74


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    tokens=st.integers(40, 300),
    batch_size=st.integers(1, 5),
    world_size=st.integers(1, 3),
    window=st.integers(1, 5),
    drop_last=st.booleans(),
    data=st.data(),
)
@pytest.mark.usefixtures("small_blocks")
def test_loaders_against_plain_lists(
    tmp_path: Path, tokens: int, batch_size: int, world_size: int, window: int, drop_last: bool, data: st.DataObject
) -> None:
    count = (tokens - 1) // T
    assume(count >= batch_size * world_size)
    np.arange(tokens, dtype=np.uint32).tofile(tmp_path / f"{tokens}.bin")
    rank = data.draw(st.integers(0, world_size - 1))
    order = block_oracle.pass_of(count, 24 // T, window, seed=0, pass_number=0)
    size = batch_size * world_size
    expected = []
    for begin in range(0, count, size):
        step = order[begin : begin + size]
        if len(step) == size or not drop_last:
            expected += [T * number for number in step[rank::world_size]]
    with TokenLoader(
        corpus=str(tmp_path / f"{tokens}.bin"),
        batch_size=batch_size,
        rank=rank,
        world_size=world_size,
        drop_last=drop_last,
        **{**SETTINGS, "shuffle_window": window},
    ) as loader:
        assert [ids[0] for row, ids in rows_of(list(loader)) if row >= 0] == expected


def state_after(count: int, **changes: Any) -> dict[str, Any]:
    with TokenLoader(**{**SETTINGS, "batch_size": 3, **changes}) as loader:
        take(loader, count)
        return loader.state_dict()


def test_states_name_the_order_and_what_decides_it(corpus: str) -> None:
    state = state_after(2, corpus=corpus)
    assert "blocks-v1" in state["order"]
    assert (state["config"]["order"], state["config"]["shuffle_window"]) == ("blocks", 3)
    by_rows = state_after(2, corpus=corpus, order="rows", shuffle_window=512)
    assert "blocks" not in by_rows["order"]
    assert not {"order", "shuffle_window"} & by_rows["config"].keys()


@pytest.mark.parametrize("kind", ["stream", "pack", "mixture", "lengths"])
@pytest.mark.parametrize("on_change", ["refuse", "nearest", "mixture"])
def test_another_order_is_refused_by_name(kind: str, on_change: str, corpus: str, tmp_path: Path) -> None:
    of_blocks = {**given_by(kind, corpus, tmp_path), "batch_size": 3, "on_change": on_change}
    of_rows = {**of_blocks, "order": "rows", "shuffle_window": 512}
    wider = {**of_blocks, "shuffle_window": 4}
    for saving, loading, words in (
        (of_rows, of_blocks, "order: saved 'rows', now 'blocks'"),
        (of_blocks, of_rows, "order: saved 'blocks', now 'rows'"),
        (of_blocks, wider, "shuffle_window: saved 3, now 4"),
    ):
        with TokenLoader(**saving) as loader:
            take(loader, 2)
            state = loader.state_dict()
        with TokenLoader(**loading) as loader:
            with pytest.raises(StateError) as raised:
                loader.load_state_dict(state)
            assert words in str(raised.value)
            assert len(take(loader, 1)) == 1


@pytest.mark.usefixtures("small_blocks")
def test_the_nearest_row_of_another_length(corpus: str) -> None:
    state = state_after(4, corpus=corpus)
    with TokenLoader(**{**SETTINGS, "corpus": corpus, "batch_size": 3, "seq_len": 8, "on_change": "nearest"}) as loader:
        loader.load_state_dict(state)
        assert row_ids(take(loader, 1))[0] == 6


def test_settings_that_do_not_go_together(corpus: str) -> None:
    with pytest.raises(ConfigError) as raised:
        TokenLoader(corpus=corpus, batch_size=1, seq_len=4, dtype="uint32", shuffle_window=64)
    assert all(word in str(raised.value) for word in ("shuffle_window", "64", "order"))
    with pytest.raises(ConfigError) as raised:
        TokenLoader(corpus=corpus, batch_size=1, seq_len=4, dtype="uint32", order="block")
    assert all(word in str(raised.value) for word in ("order", "'rows'", "'blocks'", "block"))


@pytest.mark.usefixtures("small_blocks")
def test_validation_is_in_the_order_of_the_corpus(corpus: str) -> None:
    """Settings of a training run may be used as they are."""
    of_validation = {**SETTINGS, "corpus": corpus, "split": "validation", "validation_fraction": 0.3, "batch_size": 3}
    with TokenLoader(**of_validation) as loader:
        found = rows_of(list(loader))
    with TokenLoader(**{**of_validation, "order": "rows", "shuffle_window": 512}) as loader:
        assert rows_of(list(loader)) == found


@pytest.mark.usefixtures("small_blocks")
def test_a_bad_id_names_its_steps(tmp_path: Path) -> None:
    tokens = np.arange(400, dtype=np.uint32)
    tokens[200] = 60_000
    tokens.tofile(tmp_path / "bad.bin")
    settings_ = {**SETTINGS, "corpus": str(tmp_path / "bad.bin"), "batch_size": 3, "vocab_size": 50_000}
    order = block_oracle.pass_of(99, 6, 3, seed=0, pass_number=0)
    steps = sorted({place // 3 for place, number in enumerate(order) if T * number <= 200 <= T * number + T})
    with TokenLoader(**settings_) as loader, pytest.raises(Exception, match=str(steps[0])) as raised:
        list(loader)
    assert str(steps) in str(raised.value) or all(f"{step}" in str(raised.value) for step in steps)
    skip = [[step, step + 1] for step in steps]
    with TokenLoader(**settings_, skip_steps=skip) as loader:
        assert len(list(loader)) == 33 - len(steps)


def test_pieces_of_windows_in_blocks_stay_in_the_split() -> None:
    windows = split_windows(300, 5, validation_fraction=0.2)
    cuts = WindowCuts(None, 1, windows.first + windows.num_tokens, False)
    rows = WindowRows(windows, cuts=cuts, blocks=BlockShape(2, 20))
    plain = WindowRows(windows, blocks=BlockShape(2, 20))
    places = np.append(np.arange(rows.count(0)), [-1, -1])
    planned, of_plain = rows.plan(0, places), plain.plan(0, places)
    assert planned.starts.tolist() == of_plain.starts.tolist()
    assert planned.pieces is not None
    assert planned.pieces.row_offsets.tolist()[-3:] == [rows.count(0)] * 3


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"shuffle_window": 20, "decoded_cache_bytes": 1000}, ["20", "1,000", "1,920", "shuffle_window = 10 "]),
        ({"shuffle_window": 500, "decoded_cache_bytes": 1000}, ["500", "4,000"]),  # not more than all of it
        ({"shuffle_window": 2, "decoded_cache_bytes": 50}, ["50", "192"]),
        ({"shuffle_window": 10, "decoded_cache_bytes": 1000}, []),
        ({"shuffle_window": 500, "decoded_cache_bytes": 4000}, []),
        ({"shuffle_window": 500, "decoded_cache_bytes": 1000, "shuffle": False}, []),
        ({"shuffle_window": 512, "decoded_cache_bytes": 1000, "order": "rows"}, []),
    ],
)
def test_windows_that_the_cache_cannot_hold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], settings_: dict[str, Any], words: list[str]
) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow as pa

    lists = [list(range(first, first + 20)) for first in range(0, 1000, 20)]
    table = pa.table({"input_ids": pa.array(lists, pa.list_(pa.int32()))})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    given_ = {name: value for name, value in SETTINGS.items() if name != "dtype"} | settings_
    say_once.cache_clear()
    with TokenLoader(corpus=str(tmp_path / "a.parquet"), batch_size=2, **given_) as loader:
        assert len(take(loader, 3)) == 3
    said = capsys.readouterr().err
    assert all(word in said for word in words)
    assert ("decoded_cache_bytes" in said) == bool(words)
