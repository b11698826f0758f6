"""next_cost.py at a tiny size: what it prints, and that it counts each kind of call."""

import json

import gpu_stand_in
import next_calls
import next_cost
import pytest


def test_every_kind_of_call_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    next_cost.main(batches=10, per_block=5, evict_mb=1)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["benchmark"] == "next_cost"
    figures = last["microseconds"]
    assert set(figures) == {"warm", "cold", "next block", "list, warm", "list, cold"}
    assert all(0 < one["median"] <= one["p99"] for one in figures.values())
    assert {name: one["calls"] for name, one in figures.items() if name != "next block"} == dict.fromkeys(
        ("warm", "cold", "list, warm", "list, cold"), 10
    )
    assert figures["next block"]["calls"] >= 20
    assert set(last["missed"]) <= set(next_calls.AIMS)


@pytest.mark.skipif(gpu_stand_in.why_not() is not None, reason=str(gpu_stand_in.why_not()))
def test_a_device_is_measured_too(capsys: pytest.CaptureFixture[str]) -> None:
    with gpu_stand_in.installed("early") as gpu:
        next_cost.main(batches=10, per_block=5, evict_mb=1, device="cuda", placement="host")
        assert gpu.kernels
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["placement"] == "host"
