"""Which engine runs the queue, and where a setting for it cannot be met."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from dali_pipes import TokenLoader, build_pipeline
from dali_pipes.errors import ConfigError


@pytest.mark.parametrize(
    ("wanted", "with_graph", "expected"),
    [("auto", False, "direct"), ("direct", False, "direct"), ("dali", False, "dali"), ("auto", True, "dali")],
)
def test_on_a_cpu_dali_runs_where_it_is_asked_for(
    counting: Callable[..., Any], wanted: Any, with_graph: bool, expected: str
) -> None:
    corpus = counting(401)
    common: dict[str, Any] = {"dtype": "uint32", "batch_size": 4, "seq_len": 8, "device": "cpu", "quiet": True}
    with TokenLoader(corpus.pattern, engine=wanted, graph=dict if with_graph else None, **common) as loader:
        assert loader.stats().engine == expected
        rows = [batch["input_ids"].tolist() for batch in loader]
    with TokenLoader(corpus.pattern, **common) as loader:
        assert rows == [batch["input_ids"].tolist() for batch in loader]


def test_a_direct_queue_is_refused_where_dali_is_needed(counting: Callable[..., Any]) -> None:
    common: dict[str, Any] = {"batch_size": 4, "seq_len": 8, "device": "cpu", "quiet": True, "engine": "direct"}
    pattern = counting(401).pattern
    with pytest.raises(ConfigError, match=r'engine = "direct".*graph'):
        TokenLoader(pattern, dtype="uint32", graph=dict, **common)
    with pytest.raises(ConfigError, match=r'engine = "direct".*build_pipeline'):
        build_pipeline(pattern, dtype="uint32", **common)


@pytest.mark.parametrize("widths", [{"rows": "pad", "length_buckets": [4, 8]}, {"seq_len": [[0, 4], [400, 8]]}])
def test_batches_of_different_widths_are_the_same_from_both(counting: Callable[..., Any], widths: Any) -> None:
    """DALI gets arrays in one line then."""
    corpus = counting(1_601, vocab_size=11)
    common: dict[str, Any] = {"dtype": "uint32", "batch_size": 4, "seq_len": 8, "device": "cpu", "quiet": True}
    common |= {"eos_id": 10, "batches_per_run": 7, **widths}
    if "rows" not in widths:
        common |= {"global_batch": 4}
    streams = []
    for engine in ("direct", "dali"):
        with TokenLoader(corpus.pattern, engine=engine, **common) as loader:
            streams.append([{name: tensor.tolist() for name, tensor in batch.items()} for batch in loader])
    assert streams[0] == streams[1]
    assert len({len(batch["input_ids"][0]) for batch in streams[0]}) == 2


def test_without_dali_the_setting_says_what_to_install(
    counting: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dali_pipes.errors import BackendError

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BackendError, match=re.compile("DALI.*pip install", re.DOTALL)):
        TokenLoader(counting(401).pattern, dtype="uint32", batch_size=4, seq_len=8, device="cpu", engine="dali")
