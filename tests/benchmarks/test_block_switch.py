"""block_switch.py at a tiny size: it compares both ways for each placement."""

import json

import block_switch
import gpu_stand_in
import pytest


@pytest.mark.skipif(gpu_stand_in.why_not() is not None, reason=str(gpu_stand_in.why_not()))
def test_both_ways_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    block_switch.main(per_block=3, count=2, rounds=1, evict_mb=1)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(last["us"]) == set(block_switch.PLACEMENTS)
    for found in last["us"].values():
        assert all(0 < found[way][1] <= found[way][0] <= found[way][2] for way in block_switch.WAYS)
        assert found["ratio"] > 0
