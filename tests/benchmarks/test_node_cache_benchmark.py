"""The benchmark of the cache of the node runs, checks what it reads, and shows what the cache saves."""

import importlib
import json

import numpy as np
import pytest

node_cache = importlib.import_module("node_cache")


def test_next_use_keeps_more_than_least_recent_use(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(node_cache, "_LOCAL_BLOCK", 1 << 12)
    monkeypatch.setattr(node_cache, "_WINDOW", 2)
    monkeypatch.setattr(node_cache, "_EPOCHS", 1)
    node_cache.main("hits", blocks=32, rounds=1)
    hits = {entry["case"]: entry["hits"] for entry in json.loads(capsys.readouterr().out.splitlines()[-1])["hits"]}
    assert hits["next use"] > 0.4 > 0.3 > hits["LRU"]


@pytest.mark.slow
@pytest.mark.needs("obstore")
def test_a_store_sends_each_block_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(node_cache, "RANKS", 2)
    monkeypatch.setattr(node_cache, "_STORE_BLOCK", 1 << 15)
    node_cache.main("bytes", tokens=1 << 19, latency_ms=1)
    entries = json.loads(capsys.readouterr().out.splitlines()[-1])["bytes"]
    cases = [f"{ranks}, {cache} a cache" for ranks in ("1 rank", "2 ranks") for cache in ("without", "with")]
    assert [entry["case"] for entry in entries] == [*cases, "2 ranks on 2 nodes, with a cache on each"]
    *cached, of_two_nodes = (entries[number]["bytes_read_per_used"] for number in (1, 3, 4))
    assert all(1 <= ratio < 1.3 for ratio in cached)  # opening such a small corpus takes a part
    assert 1.5 < of_two_nodes < 2.6
    assert entries[1]["requests"] < entries[0]["requests"] / 4


@pytest.mark.slow
@pytest.mark.needs("obstore")
def test_blocks_that_are_fetched_ahead_are_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    fetch_ahead = node_cache.BlockReads.fetch_ahead
    node_cache.main("waits", pace_rounds=1, pace_window=8, pace_block=1 << 17, lead_s=1, rate=0.5, latency_ms=1)
    ahead, other = json.loads(capsys.readouterr().out.splitlines()[-1])["waits"]
    assert [ahead["case"], other["case"]] == ["ahead", "once a batch needs them"]
    assert ahead["median"]["first_batch_s"] > 0
    assert 0 <= ahead["median"]["read_twice_pct"] <= 1
    assert other["median"]["read_twice_pct"] == 0
    assert node_cache.BlockReads.fetch_ahead is fetch_ahead


def test_lost_tokens_are_told() -> None:
    with pytest.raises(SystemExit, match="each token once"):
        node_cache.check_sum(4, np.arange(4))
