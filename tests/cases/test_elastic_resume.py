"""A run goes on with another number of ranks, another batch size and other threads, and loses no row."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import epoch_batches
from profiles import examples
from streams import all_same, oracle_stream, row_ids, take, write_counting

from dali_pipes import TokenLoader
from dali_pipes.errors import ConfigError

T = 4
ROWS = 4096
OUTPUTS = ("input_ids", "labels", "row_ids")
Ranks = list[TokenLoader]


def open_ranks(corpus: Any, world_size: int, batch_size: int, **how: Any) -> Ranks:
    common: dict[str, Any] = {
        "corpus": corpus.pattern,
        "dtype": "uint32",
        "device": "cpu",
        "seq_len": T,
        "outputs": OUTPUTS,
        **how,
    }
    return [
        TokenLoader(**common, batch_size=batch_size, rank=rank, world_size=world_size) for rank in range(world_size)
    ]


def run(ranks: Ranks, steps: int, state: dict[str, Any] | None = None) -> tuple[list[list[Any]], dict[str, Any]]:
    """Batches of every rank, and the state, which must be the same on all."""
    parts = []
    for loader in ranks:
        if state is not None:
            loader.load_state_dict(state)
        parts.append(take(loader, steps))
        assert len(parts[-1]) == steps
    states = [loader.state_dict() for loader in ranks]
    assert all(other == states[0] for other in states)
    for loader in ranks:
        loader.close()
    return parts, states[0]


def global_batches(parts: list[list[Any]]) -> list[set[int]]:
    """First tokens of the rows of each step, over all ranks: which windows they are."""
    return [{int(row[0]) for part in step for row in part["input_ids"]} for step in zip(*parts, strict=True)]


@pytest.fixture
def corpus(counting: Callable[..., Any]) -> Any:
    return counting(5000, ROWS * T + 1 - 5000)


@pytest.fixture
def saved(corpus: Any) -> dict[str, Any]:
    """The state of 2 ranks after step 10 with a global batch of 32."""
    return run(open_ranks(corpus, 2, 16), 10)[1]


def unbroken(corpus: Any) -> list[set[int]]:
    """Global batches of 32 of a run that never stopped."""
    batches = epoch_batches(corpus.tokens, batch_size=32, seq_len=T)
    return [{int(row[0]) for row in batch["input_ids"]} for batch in batches]


@pytest.mark.parametrize(("world_size", "num_threads"), [(1, 1), (2, 2), (4, 8), (4, 1)])
def test_the_same_global_batch(corpus: Any, saved: dict[str, Any], world_size: int, num_threads: int) -> None:
    assert (saved["epoch"], saved["rows"]) == (0, 320)
    parts, state = run(open_ranks(corpus, world_size, 32 // world_size, num_threads=num_threads), 118, saved)
    assert global_batches(parts) == unbroken(corpus)[10:]
    assert (state["epoch"], state["rows"]) == (1, 0)


@pytest.mark.parametrize(("world_size", "batch_size"), [(2, 24), (3, 16), (1, 48), (3, 11)])
def test_another_global_batch(corpus: Any, saved: dict[str, Any], world_size: int, batch_size: int) -> None:
    """From 32 rows a step to 48 or 33: on at row 320 with no gap or repeat; the partial step at the end is dropped."""
    size = world_size * batch_size
    steps = (ROWS - 320) // size
    ranks = open_ranks(corpus, world_size, batch_size)
    parts, state = run(ranks, steps, saved)
    for number in range(steps):
        expected = set(range(320 + number * size, 320 + (number + 1) * size))
        got = [row for part in parts for row in row_ids([part[number]])]
        assert len(got) == size
        assert set(got) == expected
    for rank, part in enumerate(parts):
        order: dict[str, Any] = {
            "rank": rank,
            "world_size": world_size,
            "batch_size": batch_size,
            "seq_len": T,
            "first_row": 320,
        }
        assert all_same(part, epoch_batches(corpus.tokens, **order))
    assert (state["epoch"], state["rows"]) == (1, 0)


def test_once_more_after_an_elastic_resume(corpus: Any, saved: dict[str, Any]) -> None:
    """2 ranks, then 3 with 33 rows a step, then 1, then 4 with 32 again: the rows follow each other without a seam."""
    state, at = saved, 320
    for world_size, batch_size, steps, how in [
        (3, 11, 7, {"batches_per_run": 2}),
        (3, 11, 0, {"num_threads": 5}),
        (1, 5, 3, {"batches_per_run": 3, "prefetch_queue_depth": 5}),
        (4, 8, 20, {}),
        (1, 1, 1, {}),
        (2, 16, 5, {"num_threads": 4}),
    ]:
        parts, state = run(open_ranks(corpus, world_size, batch_size, **how), steps, state)
        got = {row for part in parts for row in row_ids(part)}
        assert got == set(range(at, at + steps * world_size * batch_size))
        at += len(got)
        assert (state["epoch"], state["rows"]) == (0, at)
    rest, _ = run(open_ranks(corpus, 1, 7, drop_last=False), -(-(ROWS - at) // 7), state)
    assert row_ids(rest[0]) == list(range(at, ROWS))


def test_the_epoch_after_an_elastic_resume_is_whole(corpus: Any, saved: dict[str, Any]) -> None:
    """What was left of the resumed epoch shortens no later one."""
    for rank, loader in enumerate(open_ranks(corpus, 3, 100)):
        loader.load_state_dict(saved)
        assert (loader.epoch, loader.step, len(loader)) == (0, 2, 2 + 12)
        order: dict[str, Any] = {"rank": rank, "world_size": 3, "batch_size": 100, "seq_len": T}
        got = list(loader) + list(loader) + take(loader, 2)
        assert all_same(got, take(oracle_stream(corpus.tokens, first_row=320, **order), len(got)))
        assert len(got) == 12 + 13 + 2
        loader.close()


def test_ranks_that_share_data_get_identical_batches(corpus: Any, saved: dict[str, Any]) -> None:
    """Two tensor-parallel processes of one data rank are given the same rank, and see the same."""
    pairs = [open_ranks(corpus, 2, 16, num_threads=threads, batches_per_run=k)[1] for threads, k in ((1, 1), (4, 9))]
    (one, two), _ = run(pairs, 30, saved)
    order: dict[str, Any] = {"rank": 1, "world_size": 2, "batch_size": 16, "seq_len": T, "first_row": 320}
    assert all_same(one, take(epoch_batches(corpus.tokens, **order), 30))
    assert all_same(two, take(epoch_batches(corpus.tokens, **order), 30))


def test_fewer_rows_left_than_a_step_are_the_end_of_the_epoch(corpus: Any) -> None:
    """With drop_last the rest of the epoch is left out, as it is at the end of any epoch; without it is served."""
    state = run(open_ranks(corpus, 2, 16), 127)[1]
    assert (state["epoch"], state["rows"]) == (0, ROWS - 32)
    (loader,) = open_ranks(corpus, 1, 48)
    loader.load_state_dict(state)
    assert (loader.epoch, loader.step) == (1, 0)
    assert all_same(take(loader, 1), take(epoch_batches(corpus.tokens, batch_size=48, seq_len=T, epoch=1), 1))
    loader.close()
    (loader,) = open_ranks(corpus, 1, 48, drop_last=False)
    loader.load_state_dict(state)
    assert row_ids(loader) == list(range(ROWS - 32, ROWS))
    loader.close()


@settings(max_examples=examples(6))
@given(
    rows=st.integers(1, 60),
    shuffle=st.booleans(),
    segments=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 4), st.none() | st.integers(1, 3)), max_size=5
    ),
    last=st.tuples(st.integers(1, 4), st.integers(1, 5)),
)
def test_any_chain_of_resumes_serves_every_row_once(
    tmp_path_factory: pytest.TempPathFactory,
    rows: int,
    shuffle: bool,
    segments: list[tuple[int, int, int, int | None]],
    last: tuple[int, int],
) -> None:
    """Conservation: each segment has its own ranks, batch size and block size; padding rows are marked and no data."""

    class Corpus:
        pattern, tokens = write_counting(tmp_path_factory.mktemp("corpus"), [rows * T + 1])

    served: list[int] = []
    state: dict[str, Any] | None = None
    for number, (world_size, batch_size, steps, per_run) in enumerate([*segments, (*last, 10**6, None)]):
        ranks = open_ranks(Corpus, world_size, batch_size, drop_last=False, shuffle=shuffle, batches_per_run=per_run)
        left = rows - (state["rows"] if state is not None else 0)
        possible = -(-left // (world_size * batch_size))
        if number < len(segments) and steps >= possible:  # stay in epoch 0 until the last segment
            steps = 0
        parts, state = run(ranks, min(steps, possible), state)
        for step in zip(*parts, strict=True):
            assert len({len(part["row_ids"]) for part in step}) == 1
            for part in step:
                for row, inputs, labels in zip(part["row_ids"], part["input_ids"], part["labels"], strict=True):
                    if row < 0:
                        assert labels.tolist() == [-100] * T
                    else:
                        assert labels.tolist() == (inputs + 1).tolist()
                        served.append(int(inputs[0]))
    assert sorted(served) == [row * T for row in range(rows)]
    assert state is not None
    assert (state["epoch"], state["rows"]) == (1, 0)


def test_three_ranks_for_more_rows_than_there_are(counting: Callable[..., Any]) -> None:
    corpus = counting(5 * T + 1)
    with pytest.raises(ConfigError, match=r"5 rows .* 6 rows"):
        open_ranks(corpus, 3, 2)
