"""The benchmark of remote corpora runs, counts requests and bytes, and reports ratios."""

import json
from pathlib import Path

import pytest
import remote

pytestmark = pytest.mark.needs("obstore")


def test_it_measures_each_number_of_requests(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "IN_FLIGHT", (1, 4))
    monkeypatch.setattr(remote, "SETTLES_S", 0.01)
    monkeypatch.setenv("DALI_PIPES_CACHE", "")  # restored after it
    remote.main(
        latency_ms=0.2,
        bandwidth_mb=100,
        batch_size=2,
        seq_len=64,
        seconds=0.2,
        rounds=1,
        tokens=2_000_000,
        data_dir=tmp_path,
        out=tmp_path / "out",
    )
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [entry["loader"] for entry in report["entries"]] == ["local", "1", "4"]
    for entry in report["entries"]:
        median = entry["median"]
        assert median["tokens_per_s"] > 0
        assert ("requests_per_mtok" in median) == (entry["loader"] != "local")
        if entry["loader"] != "local":
            assert median["requests_per_mtok"] > 0
            assert median["bytes_read_per_used"] > 0
    assert all(value > 0 for value in report["ratios"].values())
    assert json.loads((tmp_path / "out" / "remote.json").read_text()) == report
