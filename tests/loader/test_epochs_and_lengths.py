"""Every epoch is complete, in its own order and of the announced length, however the last one ended."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from oracle import epoch_batches
from streams import all_same, oracle_stream, take

from dali_pipes import LoaderConfig, TokenLoader, build_pipeline

T = 4
Load = Callable[..., TokenLoader]
ENDINGS = ("to the end", "exactly len() times", "len() + 1 asked for", "break after one")


@pytest.fixture(autouse=True)
def warnings_are_errors() -> Iterator[None]:
    """DALI warns when its iterators are reset early."""
    import nvidia.dali.plugin.pytorch  # noqa: F401 - what it warns about at import is its own affair

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def files_of_rows(counting: Callable[..., Any], rows: int) -> Any:
    """Three files of uneven sizes that hold `rows` windows together."""
    total = rows * T + 1
    return counting(total // 2, total // 3, total - total // 2 - total // 3)


def run_one_epoch(loader: Any, ending: str) -> list[Any]:
    if ending == "to the end":
        return list(loader)
    if ending == "exactly len() times":
        return [batch for _, batch in zip(range(len(loader)), loader, strict=False)]
    if ending == "len() + 1 asked for":
        return [batch for batch, _ in zip(loader, range(len(loader)), strict=False)]
    return take(loader, 1)


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize(
    ("engine", "per_run", "depth"),
    [("dali", 1, 1), ("dali", 2, 6), ("dali", None, 2), ("direct", 2, 2)],
    indirect=["engine"],
)
def test_a_new_epoch_is_complete_whatever_ended_the_last(
    counting: Callable[..., Any], load: Load, engine: str, ending: str, per_run: int | None, depth: int
) -> None:
    """42 rows in batches of 16: two batches, or 16, 16 and 10; 48 rows are three batches and len() says so."""
    for rows, last_sizes in {42: [10], 48: [16], 47: [15], 49: [16, 1]}.items():
        corpus = files_of_rows(counting, rows)
        for drop_last in (True, False):
            sizes = [16, 16, *(size for size in last_sizes if size == 16 or not drop_last)]
            order: dict[str, Any] = {"batch_size": 16, "seq_len": T, "drop_last": drop_last}
            loader = load(corpus, batches_per_run=per_run, prefetch_queue_depth=depth, **order)
            assert len(loader) == len(sizes)
            for epoch in (0, 2):
                got = run_one_epoch(loader, ending)
                assert len(got) == (1 if ending == "break after one" else len(sizes))
                assert all_same(got, take(epoch_batches(corpus.tokens, epoch=epoch, **order), len(got)))
                assert loader.epoch == epoch + 1
                whole = list(loader)
                assert [len(batch["input_ids"]) for batch in whole] == sizes
                assert all_same(whole, epoch_batches(corpus.tokens, epoch=epoch + 1, **order))
            loader.close()


def test_an_epoch_serves_each_row_once_and_orders_differ(counting: Callable[..., Any], load: Load) -> None:
    corpus = files_of_rows(counting, 42)
    loader = load(corpus, batch_size=16, seq_len=T, drop_last=False)
    orders = []
    for _ in range(3):
        first_tokens = [int(row[0]) for batch in loader for row in batch["input_ids"]]
        assert sorted(first_tokens) == [row * T for row in range(42)]
        orders.append(tuple(first_tokens))
    assert len(set(orders)) == 3


def test_an_iterator_that_was_never_asked_costs_no_epoch(counting: Callable[..., Any], load: Load) -> None:
    corpus = files_of_rows(counting, 42)
    loader = load(corpus, batch_size=16, seq_len=T)
    for _ in range(3):
        iter(loader)
    assert loader.epoch == 0
    assert all_same(loader, epoch_batches(corpus.tokens, batch_size=16, seq_len=T))


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
def test_asking_past_the_end_changes_nothing(counting: Callable[..., Any], load: Load, engine: str) -> None:
    """DALI calls a source a few times past the end of an epoch, and so may a trainer."""
    corpus = files_of_rows(counting, 42)
    loader = load(corpus, batch_size=16, seq_len=T, batches_per_run=1, prefetch_queue_depth=6)
    batches = iter(loader)
    assert len(list(batches)) == 2
    state, counted = loader.state_dict(), loader.stats().batches
    for _ in range(10):
        with pytest.raises(StopIteration):
            next(batches)
    assert (loader.state_dict(), loader.stats().batches) == (state, counted)
    assert all_same(loader, epoch_batches(corpus.tokens, batch_size=16, seq_len=T, epoch=1))


@pytest.mark.parametrize(
    ("engine", "num_threads", "per_run"),
    [("dali", 1, 1), ("dali", 4, 5), ("direct", 1, None), ("direct", 4, 1), ("direct", 1, 5), ("direct", 4, None)],
    indirect=["engine"],
)
def test_rollover_after_a_resume(
    counting: Callable[..., Any], load: Load, engine: str, num_threads: int, per_run: int | None
) -> None:
    """4 files, 50 samples. Resumed at sample 37 of epoch 1: 13 more, then 50 and 50."""
    corpus = counting(50, 70, 41, 40)
    order: dict[str, Any] = {"batch_size": 1, "seq_len": T}
    settings = {**order, "num_threads": num_threads, "batches_per_run": per_run}
    first = load(corpus, **settings)
    assert len(list(first)) == 50
    assert len(take(first, 37)) == 37
    resumed = load(corpus, **settings)
    resumed.load_state_dict(first.state_dict())
    epochs = [list(resumed) for _ in range(3)]
    assert [len(batches) for batches in epochs] == [13, 50, 50]
    assert all_same(epochs[0], epoch_batches(corpus.tokens, epoch=1, first_row=37, **order))
    for number in (1, 2):
        assert all_same(epochs[number], epoch_batches(corpus.tokens, epoch=number + 1, **order))
        assert {int(batch["input_ids"][0, 0]) for batch in epochs[number]} == {row * T for row in range(50)}
    windows = [[int(batch["input_ids"][0, 0]) for batch in batches] for batches in epochs]
    assert windows[1] != windows[2]
    assert windows[1][37:] != windows[0]


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
@pytest.mark.parametrize("resume", [False, True])
def test_repeat_never_stalls(counting: Callable[..., Any], load: Load, engine: str, resume: bool) -> None:
    """Five epochs' worth of steps, in one `for`; 50 rows in batches of 3 leave a partial step."""
    corpus = counting(50, 70, 41, 40)
    for drop_last in (True, False):
        order: dict[str, Any] = {"batch_size": 3, "seq_len": T, "drop_last": drop_last}
        loader = load(corpus, repeat=True, batches_per_run=5, **order)
        epoch, row = 0, 0
        if resume:
            straight = load(corpus, repeat=True, **order)
            take(straight, len(straight) + 7)
            state = straight.state_dict()
            epoch, row = state["epoch"], state["rows"]
            assert (epoch, row) == (1, 21)
            loader.load_state_dict(state)
        count = 5 * len(loader)
        got = take(loader, count)
        assert len(got) == count
        assert all_same(got, take(oracle_stream(corpus.tokens, epoch=epoch, first_row=row, **order), count))


def test_repeat_and_single_epochs_are_the_same_stream(counting: Callable[..., Any], load: Load) -> None:
    """Leaving a repeating loader on an epoch's last batch skips nothing; leaving it earlier, the rest of the epoch."""
    corpus = counting(201)
    order: dict[str, Any] = {"batch_size": 10, "seq_len": T}
    loader = load(corpus, repeat=True, **order)
    assert len(take(loader, 10)) == 10
    assert loader.epoch == 2
    assert all_same(take(loader, 2), take(oracle_stream(corpus.tokens, epoch=2, **order), 2))
    assert loader.epoch == 3
    assert all_same(take(loader, 7), take(oracle_stream(corpus.tokens, epoch=3, **order), 7))


@pytest.mark.parametrize("engine", ["dali", "direct"], indirect=True)
@pytest.mark.parametrize("per_run", [1, 2])
def test_breaking_every_epoch_early_gives_the_starts_of_all(
    counting: Callable[..., Any], load: Load, engine: str, per_run: int
) -> None:
    corpus = counting(201)
    order: dict[str, Any] = {"batch_size": 10, "seq_len": T}
    loader = load(corpus, batches_per_run=per_run, **order)
    for epoch, count in enumerate([1, 2, 3, 4, 5, 1, 4, 2, 5, 3]):
        assert loader.epoch == epoch
        assert all_same(take(loader, count), take(epoch_batches(corpus.tokens, epoch=epoch, **order), count))


@pytest.mark.parametrize("rows", [42, 48])
@pytest.mark.parametrize("per_run", [1, 2])
@pytest.mark.parametrize("policy", [None, "DROP", "PARTIAL", "FILL"])
def test_dalis_own_iterator(counting: Callable[..., Any], rows: int, per_run: int, policy: str | None) -> None:
    """A run is one sample, so no policy may cut, pad or drop anything; auto_reset begins the next epoch."""
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    corpus = files_of_rows(counting, rows)
    config = LoaderConfig(
        corpus=corpus.pattern,
        dtype="uint32",
        batch_size=16,
        seq_len=T,
        drop_last=False,
        device="cpu",
        batches_per_run=per_run,
    )
    policies = {} if policy is None else {"last_batch_policy": getattr(LastBatchPolicy, policy)}
    iterator = DALIGenericIterator([build_pipeline(config)], list(config.outputs), auto_reset=True, **policies)
    steps = -(-rows // 16)
    for epoch in range(3):
        runs = [outputs[0] for outputs in iterator]
        assert [run["input_ids"].shape[1] for run in runs] == (
            [min(16 * per_run, rows - start) for start in range(0, rows, 16 * per_run)]
        )
        expected = list(epoch_batches(corpus.tokens, batch_size=16, seq_len=T, epoch=epoch, drop_last=False))
        assert len(expected) == steps
        for name in config.outputs:
            got = np.concatenate([run[name][0].numpy() for run in runs])
            assert got.dtype == np.int64
            np.testing.assert_array_equal(got, np.concatenate([batch[name] for batch in expected]))


@pytest.mark.parametrize("auto_reset", [True, False])
def test_dalis_own_iterator_with_a_known_size(counting: Callable[..., Any], auto_reset: bool) -> None:
    """A trainer may tell DALI how many runs there are, and reset by hand: every epoch is complete."""
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

    corpus = files_of_rows(counting, 42)
    config = LoaderConfig(
        corpus=corpus.pattern, dtype="uint32", batch_size=16, seq_len=T, device="cpu", batches_per_run=1
    )
    with pytest.warns(Warning, match="reader_name"):  # DALI prefers its own readers, whatever the source
        iterator = DALIGenericIterator([build_pipeline(config)], list(config.outputs), size=2, auto_reset=auto_reset)
    assert len(iterator) == 2
    for epoch in range(3):
        runs = [{name: value[0] for name, value in outputs[0].items()} for outputs in iterator]
        assert all_same(runs, epoch_batches(corpus.tokens, batch_size=16, seq_len=T, epoch=epoch))
        if not auto_reset:
            iterator.reset()
