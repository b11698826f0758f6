"""The DALI graph used without our loader, the way people who drive DALI themselves use it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from oracle import epoch_batches

from dali_pipes import LoaderConfig, TokenLoader, build_pipeline
from dali_pipes.errors import BackendError, ConfigError

pytest.importorskip("nvidia.dali", reason="DALI is not installed")
from nvidia.dali import fn
from nvidia.dali.plugin.pytorch import DALIGenericIterator


def configure(corpus: Any, **settings: Any) -> LoaderConfig:
    defaults = {"corpus": corpus.pattern, "dtype": corpus.dtype, "batch_size": 4, "seq_len": 8, "device": "cpu"}
    return LoaderConfig(**{**defaults, **settings})


@pytest.mark.parametrize("per_run", [1, 3])
def test_dali_generic_iterator_over_three_epochs(counting: Callable[..., Any], per_run: int) -> None:
    corpus = counting(401)
    config = configure(corpus, batches_per_run=per_run)
    iterator = DALIGenericIterator([build_pipeline(config)], list(config.outputs), auto_reset=True)
    for epoch in range(3):
        expected = list(epoch_batches(corpus.tokens, batch_size=4, seq_len=8, epoch=epoch))
        got = [data for data in iterator]  # noqa: C416 - list() asks for its len(), which fails for an unknown size
        for name in config.outputs:
            rows = torch.cat([data[0][name][0] for data in got])
            assert rows.dtype == torch.int64
            assert np.array_equal(rows.numpy(), np.concatenate([batch[name] for batch in expected]))
    assert got[0][0]["input_ids"].shape == (1, per_run * 4, 8)


@pytest.mark.parametrize("depth", [1, 2, 6])
def test_run_and_reset(counting: Callable[..., Any], depth: int) -> None:
    """Fewer blocks than the queue is deep; StopIteration, reset, and the next epoch in its own order."""
    corpus = counting(81)
    config = configure(corpus, batches_per_run=1, prefetch_queue_depth=depth)
    pipe = build_pipeline(config)
    pipe.build()
    for epoch in range(3):
        expected = list(epoch_batches(corpus.tokens, batch_size=4, seq_len=8, epoch=epoch))
        for batch in expected:
            inputs, labels = pipe.run()
            assert np.array_equal(np.array(inputs[0]), batch["input_ids"])
            assert np.array_equal(np.array(labels[0]), batch["labels"])
        with pytest.raises(StopIteration):
            pipe.run()
        pipe.reset()


def test_repeat_never_ends(counting: Callable[..., Any]) -> None:
    pipe = build_pipeline(configure(counting(81), repeat=True))
    pipe.build()
    for _ in range(20):
        pipe.run()


def test_operators_of_the_user(counting: Callable[..., Any]) -> None:
    corpus = counting(401)

    def graph(nodes: dict[str, Any]) -> dict[str, Any]:
        return {**nodes, "labels": fn.cast_like(nodes["labels"] * 2, nodes["labels"])}

    with TokenLoader(configure(corpus), graph=graph) as loader:
        for batch in loader:
            assert torch.equal(batch["labels"], (batch["input_ids"] + 1) * 2)


def test_a_graph_must_keep_the_names(counting: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match=r"\['other'\]"):
        build_pipeline(configure(counting(401)), graph=lambda nodes: {"other": nodes["labels"]})


def test_a_missing_gpu_is_one_clear_error(counting: Callable[..., Any]) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    for device in ("cuda", "cuda:0"):
        with pytest.raises(BackendError, match=r'device = "cuda"'):
            build_pipeline(configure(counting(401), device=device))
    with pytest.raises(BackendError, match=r'placement = "device" needs a GPU .*no CUDA driver'):
        build_pipeline(configure(counting(401), device="auto", placement="device"))
