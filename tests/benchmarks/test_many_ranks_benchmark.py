"""The benchmark of many ranks runs at small size, and its table has every case."""

import json

import many_ranks
import pytest


@pytest.mark.slow
def test_small_run(capsys: pytest.CaptureFixture[str]) -> None:
    many_ranks.main(world_sizes=[1, 3000], batch_sizes=[8], documents=100_000, rounds=1)
    entries = json.loads(capsys.readouterr().out.splitlines()[-1])["entries"]
    found = [(entry["rows"], entry["world_size"]) for entry in entries]
    assert found == [(rows, world_size) for rows in many_ranks.MODES for world_size in (1, 3000)]
    for entry in entries:
        assert 0 < entry["step_s"]["median"] < 10
        assert 0 < entry["step_cpu_s"]["median"] < 10
        assert 0 < entry["start_s"]["median"] < 10
        assert 0 < entry["peak_bytes"] < 10**8
        assert entry["step_ratio"] > 0


@pytest.mark.slow
def test_ranks_of_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    many_ranks.main(world_sizes=[3000], batch_sizes=[8], documents=100_000, node_ranks=2, rounds=1)
    entries = json.loads(capsys.readouterr().out.splitlines()[-1])["entries"]
    for entry in entries:
        assert ("copied" in entry) == (entry["rows"] != "stream")
        assert entry.get("planned", 1) > 0
        assert entry.get("copied", 1) > 0
