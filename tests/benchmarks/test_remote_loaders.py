"""The benchmarks of remote loaders and starts run, in processes, and report what they measured."""

import json
from pathlib import Path

import pytest
import remote_loaders
import remote_starts

pytestmark = [pytest.mark.slow, pytest.mark.needs("obstore")]


def test_loaders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    remote_loaders.main(
        latency_ms=0.2,
        bandwidth_mb=100,
        batch_size=4,
        seq_len=64,
        rate=1,
        seconds=0.1,
        most_s=60,
        rounds=1,
        tokens=200_000,
        only="dali_pipes",
        data_dir=tmp_path,
        out=tmp_path / "out",
    )
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    (entry,) = report["entries"]
    median = entry["median"]
    assert (entry["loader"], median["resume_exact"], report["failed"]) == ("dali_pipes", 1, {})
    assert median["epoch_share"] == pytest.approx(1, abs=0.01)
    for key in ("first_batch_s", "resume_s", "bytes_read_per_used", "requests_per_mtok"):
        assert median[key] > 0
    assert json.loads((tmp_path / "out" / "remote_loaders.json").read_text()) == report


def test_starts(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DALI_PIPES_CACHE", "")  # restored after it
    monkeypatch.setattr("dali_pipes.engine.mixture._MOST_OPENING", 16)
    remote_starts.main(latency_ms=0.2, objects=20, ranks=2, sources=3, out=tmp_path)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    together, again = report["starts"]["together"], report["starts"]["again"]
    assert len(together["seconds"]) == 2
    assert 0 < again["requests"] < together["requests"]
    assert report["mixture_ratio"] > 0
