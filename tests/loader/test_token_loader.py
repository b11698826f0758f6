"""`TokenLoader` against the oracle, over shapes, shards, dtypes and settings that must not change what it delivers."""

import copy
import pickle
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from counting import CountingCorpus
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracle import epoch_batches, same
from profiles import examples

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.errors import ConfigError, LoaderClosedError


def load(corpus: Any, **overrides: Any) -> TokenLoader:
    defaults = {
        "corpus": corpus.pattern,
        "dtype": corpus.dtype,
        "batch_size": 4,
        "seq_len": 8,
        "device": "cpu",
        "outputs": ("input_ids", "labels", "row_ids"),
    }
    return TokenLoader(**{**defaults, **overrides})


def test_hand_written_batches(counting: Callable[..., Any]) -> None:
    """Thirteen tokens, T = 4, in order: three rows, two of them in the first batch."""
    corpus = counting(7, 6, dtype="uint16")
    with load(corpus, batch_size=2, seq_len=4, shuffle=False, drop_last=False) as loader:
        batches = [{name: tensor.tolist() for name, tensor in batch.items()} for batch in loader]
    assert batches == [
        {"input_ids": [[0, 1, 2, 3], [4, 5, 6, 7]], "labels": [[1, 2, 3, 4], [5, 6, 7, 8]], "row_ids": [0, 1]},
        {"input_ids": [[8, 9, 10, 11]], "labels": [[9, 10, 11, 12]], "row_ids": [2]},
    ]


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_equals_the_oracle(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 60), min_size=1, max_size=4).filter(lambda s: sum(s) >= 14))
    seq_len = data.draw(st.integers(1, 12))
    world_size = data.draw(st.integers(1, 3))
    order: dict[str, Any] = {
        "batch_size": data.draw(st.integers(1, 4)),
        "seq_len": seq_len,
        "stride": data.draw(st.none() | st.integers(1, 15)),
        "seed": data.draw(st.integers(0, 2**64 - 1)),
        "shuffle": data.draw(st.booleans()),
        "drop_last": data.draw(st.booleans()),
        "label_shift": data.draw(st.booleans()),
        "rank": data.draw(st.integers(0, world_size - 1)),
        "world_size": world_size,
    }
    cost = {
        "batches_per_run": data.draw(st.none() | st.integers(1, 5)),
        "prefetch_queue_depth": data.draw(st.integers(1, 4)),
        "num_threads": data.draw(st.integers(1, 3)),
    }
    dtype = data.draw(st.sampled_from(["uint8", "uint16", "int32", "uint32", "int64"]))
    corpus = CountingCorpus(tmp_path_factory.mktemp("data"), sizes, dtype, vocab_size=97)
    tokens = corpus.tokens
    expected = [list(epoch_batches(tokens, epoch=epoch, **order)) for epoch in range(2)]
    if not expected[0]:
        with pytest.raises(ConfigError):
            load(corpus, **order, **cost)
        return
    with load(corpus, **order, **cost) as loader:
        for batches in expected:
            got = list(loader)
            assert len(got) == len(batches) == len(loader)
            assert all(same(a, b) for a, b in zip(got, batches, strict=True))


def test_batches_are_contiguous_int64_on_the_device(counting: Callable[..., Any]) -> None:
    with load(counting(401, dtype="uint16")) as loader:
        for batch in loader:
            for name in ("input_ids", "labels"):
                assert batch[name].dtype == torch.int64
                assert batch[name].shape == (4, 8)
                assert batch[name].is_contiguous()
                assert batch[name].device == loader.device == torch.device("cpu")


@pytest.mark.parametrize("outputs", [("labels",), ("row_ids", "input_ids")])
def test_only_the_outputs_that_were_asked_for(counting: Callable[..., Any], outputs: tuple[str, ...]) -> None:
    with load(counting(401), outputs=outputs) as loader:
        assert all(tuple(batch) == outputs for batch in loader)


def test_epoch_and_step_follow_the_next_batch(counting: Callable[..., Any]) -> None:
    with load(counting(101)) as loader:  # 12 rows, 3 steps
        assert (loader.epoch, loader.step) == (0, 0)
        for number, _ in enumerate(loader, start=1):
            assert (loader.epoch, loader.step) == ((0, number) if number < 3 else (1, 0))
        assert (loader.epoch, loader.step) == (1, 0)
        for _ in loader:
            break
        assert (loader.epoch, loader.step) == (2, 0)  # left early: the next `for` is the next epoch
        assert (loader.state_dict()["epoch"], loader.state_dict()["rows"]) == (1, 4)  # a resume goes on where it was
        iter(loader)  # no batch taken: nothing changes
        assert loader.epoch == 2
        for _ in loader:
            assert loader.epoch == 2
            break
        assert loader.epoch == 3


def test_leaving_after_the_last_batch_skips_no_epoch(counting: Callable[..., Any]) -> None:
    corpus = counting(101)
    with load(corpus) as loader:
        for epoch in range(3):
            expected = list(epoch_batches(corpus.tokens, batch_size=4, seq_len=8, epoch=epoch))
            iterator = iter(loader)
            for batch in expected:
                assert same(next(iterator), batch)
            del iterator


def test_an_older_iterator_is_refused(counting: Callable[..., Any]) -> None:
    with load(counting(401)) as loader:
        old = iter(loader)
        next(old)
        new = iter(loader)
        with pytest.raises(LoaderClosedError, match="superseded"):
            next(old)
        assert next(new)["row_ids"].tolist() == [0, 1, 2, 3]
        assert loader.state_dict()["epoch"] == 1
        loader.load_state_dict(loader.state_dict())
        with pytest.raises(LoaderClosedError, match="superseded"):
            next(new)


def test_a_closed_loader_says_so(counting: Callable[..., Any]) -> None:
    loader = load(counting(401))
    iterator = iter(loader)
    batch = next(iterator)
    expected = batch["input_ids"].clone()
    state = loader.state_dict()
    loader.close()
    loader.close()
    for use in (lambda: next(iterator), lambda: iter(loader), lambda: loader.load_state_dict(state)):
        with pytest.raises(LoaderClosedError, match="closed"):
            use()
    assert torch.equal(batch["input_ids"], expected)
    assert loader.state_dict() == state


def test_repeat_runs_through_epochs(counting: Callable[..., Any]) -> None:
    corpus = counting(101)
    expected = [b for e in range(4) for b in epoch_batches(corpus.tokens, batch_size=4, seq_len=8, epoch=e)]
    with load(corpus, repeat=True, batches_per_run=2) as loader:
        iterator = iter(loader)
        assert all(same(next(iterator), batch) for batch in expected)


def test_validation_split(counting: Callable[..., Any]) -> None:
    """Disjoint from the training split, the same rows in the same order for every seed, epoch and rank count."""
    corpus = counting(1001)
    orders = []
    for seed in (0, 1):
        for world_size in (1, 2):
            rows = []
            ranks = [
                load(
                    corpus,
                    split="validation",
                    validation_fraction=0.2,
                    seed=seed,
                    rank=rank,
                    world_size=world_size,
                    batch_size=4 // world_size,
                )
                for rank in range(world_size)
            ]
            for _ in range(2):
                for step in zip(*ranks, strict=True):
                    firsts = torch.stack([b["input_ids"][:, 0] for b in step], dim=1)
                    rows.append(firsts.flatten().tolist())
            orders.append(rows)
            for loader in ranks:
                loader.close()
    assert all(order == orders[0] for order in orders)
    with load(corpus, validation_fraction=0.2) as training:
        train_tokens = {t for b in training for name in ("input_ids", "labels") for t in b[name].flatten().tolist()}
    assert max(train_tokens) < 801
    assert min(min(row) for row in orders[0]) == 801


def test_config_and_keywords_combine(counting: Callable[..., Any], tmp_path: Path) -> None:
    corpus = counting(401)
    config = LoaderConfig(corpus=corpus.pattern, dtype="uint32", batch_size=4, seq_len=8, device="cpu")
    (tmp_path / "c.toml").write_text(config.to_toml())
    for loader in (TokenLoader(config, batch_size=2), TokenLoader(LoaderConfig.from_file(tmp_path / "c.toml"))):
        with loader:
            assert next(iter(loader))["input_ids"].shape == (loader.config.batch_size, 8)


def test_global_random_states_are_left_alone(counting: Callable[..., Any]) -> None:
    random.seed(1)
    np.random.seed(1)  # noqa: NPY002 - the global state is what must not change
    torch.manual_seed(1)

    def states() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # type: ignore[index]  # noqa: NPY002

    before = states()
    with load(counting(401)) as loader:
        list(loader)
        loader.state_dict()
    assert states() == before


def test_a_loader_is_no_data_set(counting: Callable[..., CountingCorpus]) -> None:
    """Whoever puts it into a DataLoader, has a trainer do so, copies it or sends it away is told where it goes."""
    with load(counting(100)) as loader:
        with pytest.raises(TypeError, match="loader_trainer"):
            next(iter(torch.utils.data.DataLoader(cast(Any, loader), batch_size=None)))
        for action in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"loader\.config"):
                action(loader)


class InWorkers(torch.utils.data.IterableDataset[Any]):
    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def __iter__(self) -> Iterator[Any]:
        with TokenLoader(**self.settings) as loader:
            yield from loader


def test_workers_of_a_data_loader_do_not_all_hand_out_the_same(
    counting: Callable[..., CountingCorpus], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.2)  # else 5 s at the end of each
    corpus = counting(100)
    settings = {"corpus": corpus.pattern, "dtype": corpus.dtype, "batch_size": 4, "seq_len": 8, "device": "cpu"}
    with pytest.raises(ConfigError, match="worker 0 of 2"):
        list(torch.utils.data.DataLoader(InWorkers(**settings), batch_size=None, num_workers=2))
    assert len(list(torch.utils.data.DataLoader(InWorkers(**settings), batch_size=None, num_workers=1))) == 3
