"""cpu_profile.py at a tiny size: every part has been timed."""

import json

import cpu_profile
import pytest


def test_every_part_is_timed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_profile, "BLOCKS", (1, 2))
    cpu_profile.main(batch_size=2, seq_len=64, tokens=600_000, seconds=0.05)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["benchmark"] == "cpu_profile"
    figures = last["ns_per_token"]
    for parts in figures["parts"].values():
        assert set(parts) == {"all threads", "trainer's thread", *cpu_profile.PARTS}
        assert all(value > 0 for value in parts.values())
    assert set(figures["copies"]) == {"1", "2"}
    assert all(value > 0 for one in figures["copies"].values() for value in one.values())
