"""The benchmark of cold reads: what it makes cold is cold, and it reports the waits of a consumer of its pace."""

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cold_reads
import pytest
import torch
from comparison import cold
from comparison.check import CheckError

PAGES = 64


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file on a disk that can be dropped from the page cache."""
    path = tmp_path / "a.bin"
    path.write_bytes(os.urandom(PAGES << 12))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        cold.drop_pages(file.fileno())
    if cold.resident_share(path) > cold.MOST_RESIDENT:
        pytest.skip("the temporary folder is not on a disk")
    return path


def test_the_share_in_the_cache_is_that_of_the_pages_that_were_read(path: Path) -> None:
    assert cold.resident_share(path) == 0
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # without reading ahead
        os.pread(file.fileno(), 16 << 12, 0)
        assert cold.resident_share(path) == 16 / PAGES
        os.pread(file.fileno(), PAGES << 12, 0)
        assert cold.resident_share(path) == 1
        cold.drop_pages(file.fileno())
    assert cold.resident_share(path) == 0


def test_a_file_is_kept_cold_while_it_is_read(path: Path) -> None:
    path.read_bytes()
    with cold.kept_cold(path):
        assert cold.resident_share(path) == 0
        path.read_bytes()
        deadline = time.monotonic() + 30
        while cold.resident_share(path) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert cold.resident_share(path) == 0
    path.read_bytes()
    assert cold.resident_share(path) == 1


def test_a_file_that_stays_in_the_cache_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "drop_pages", lambda descriptor: None)
    path.read_bytes()
    with pytest.raises(CheckError, match="100%"), cold.kept_cold(path):
        pass


@pytest.mark.parametrize("consumer", cold.CONSUMERS)
def test_the_consumer_waits_for_the_loader_alone(consumer: str) -> None:
    """A batch that takes 20 ms every tenth time, for a consumer that takes 1 ms a step."""
    batch = torch.zeros(1), torch.zeros(1)
    asked: list[int] = []

    def stream() -> Iterator[Any]:
        while True:
            asked.append(len(asked))
            if len(asked) % 10 == 0:
                time.sleep(0.02)
            yield batch

    own = iter([0.5, 0.75])
    found = cold.consume(stream(), 0.001, 0.03, consumer, first_s=0.03, blocks_s=lambda: next(own))
    assert len(found.waits) == 30
    assert found.first_waits
    assert len(asked) == 30 + len(found.first_waits)
    assert sum(wait >= 0.02 for wait in found.waits) >= 3
    assert found.elapsed_s >= 30 * 0.001 + sum(found.waits) > 0.06
    assert found.cpu_s >= (0.015 if consumer == "burn" else 0)
    assert found.blocks_s == 0.25


@pytest.mark.slow
def test_it_measures_both_loaders_warm_and_cold(tmp_path: Path, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    del path  # or skipped
    cold_reads.main(
        rate=1,
        batch_size=2,
        seq_len=64,
        seconds=0.01,
        first_s=0,
        rounds=1,
        tokens=300_000,
        data_dir=tmp_path,
        out=tmp_path / "out",
    )
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(entry["loader"], entry["cache"]) for entry in report["entries"]] == [
        (name, cache) for name in cold.LOADERS for cache in ("warm", "cold")
    ]
    for entry in report["entries"]:
        median = entry["median"]
        assert median["steps"] == round(0.01 / (2 * 64 / 1e6))
        assert 0 < median["tokens_per_s"] <= 1e6
        assert 0 <= median["next_p50_s"] <= median["next_p99_s"] <= median["next_most_s"] <= median["data_wait_s"]
        assert ("blocks_wait_pct" in median) == (entry["loader"] == "dali_pipes")
        assert 0 <= median.get("blocks_wait_pct", 0) <= median["data_wait_pct"]
        assert 0 < median["first_batch_s"] <= median["start_wait_s"]
        if entry["cache"] == "warm":
            assert median["resident_share"] == 1
    assert len(report["ratios"]) == 10
    assert all(value > 0 for value in report["ratios"].values())
    whole = json.loads((tmp_path / "out" / "cold_reads.json").read_text())
    assert [len(entry["rounds"]) for entry in whole["entries"]] == [1] * 4


def test_medians_and_what_failed() -> None:
    def entry(loader: str, cache: str, *rates: float) -> dict[str, Any]:
        rounds: list[dict[str, Any]] = [
            {"tokens_per_s": rate, "next_p99_s": 1.0, "data_wait_s": 2.0, "cpu_s": 3.0} for rate in rates
        ]
        return {"loader": loader, "cache": cache, "rounds": [*rounds, {"failed": f"{loader} {cache}"}]}

    ours, theirs = cold.LOADERS
    entries = [
        *(entry(ours, "warm", 4.0, 5.0, 7.0), entry(ours, "cold", 2.5)),
        *(entry(theirs, "warm", 3.0), entry(theirs, "cold")),
    ]
    found = cold_reads.summary(entries)
    assert entries[0]["median"]["tokens_per_s"] == 5
    assert (entries[0]["low"]["tokens_per_s"], entries[0]["high"]["tokens_per_s"]) == (4, 7)
    assert found["noise"] == {ours: pytest.approx(3 / 5), theirs: 0}
    assert found["ratios"][f"{ours} cold / warm tokens_per_s"] == 0.5
    assert found["ratios"][f"{theirs} cold / warm tokens_per_s"] is None
    assert len(found["failed"]) == 4
