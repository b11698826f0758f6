"""The benchmark of mixtures runs at small size; its children check the batches that they time."""

import json
from pathlib import Path

import mixture_speed
import numpy as np
import pytest
from comparison.check import CheckError
from comparison.mixture import rates, run, start
from start_resume import sparse_corpus

from dali_pipes import TokenLoader


def files(folder: Path, count: int) -> list[list[str]]:
    """Sources of a file each, whose ids say where they stand."""
    paths = []
    for number in range(count):
        paths.append([str(folder / f"{number}.bin")])
        (np.arange(5000) + 5000 * number).astype(np.uint16).tofile(paths[-1][0])
    return paths


def test_rates_of_cases_in_turn(tmp_path: Path) -> None:
    sources = files(tmp_path, 3)
    together = [[path for of_source in sources for path in of_source]]
    found = rates([sources[:1], together, sources], 15000, 2, 16, 4, 0.01)
    assert [len(of_case) for of_case in found] == [4, 4, 4]
    for figures in found[0] + found[1] + found[2]:
        assert figures["tokens_per_s"] > 0
        assert figures["main_thread_cpu_s_per_batch"] > 0


@pytest.mark.parametrize("count", [1, 3])
def test_a_start(tmp_path: Path, count: int) -> None:
    sources = []
    for number in range(count):
        (tmp_path / str(number)).mkdir()
        sources.append([str(path) for path in sparse_corpus(tmp_path / str(number), 10**7)])
    figures = start(sources, count * 10**7, 2, 16)
    assert figures["first_batch_s"] > 0
    assert figures["resume_s"] > 0


def test_wrong_data_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    where = TokenLoader.locate
    monkeypatch.setattr(TokenLoader, "locate", lambda self, step, row, epoch: where(self, step + 1, row, epoch))
    with pytest.raises(CheckError, match="is not at token"):
        rates([files(tmp_path, 3)], 15000, 2, 16, 1, 0.01)
    task = {"sources": files(tmp_path, 2), "total_tokens": 10000, "batch_size": 2, "seq_len": 16}
    assert "failed" in run(task)


@pytest.mark.slow
def test_a_small_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mixture_speed.main(
        only="rate,start",
        rounds=2,
        slices=3,
        tokens=400_000,
        mixed="3",
        sources=4,
        total_tokens="4e7",
        seconds=0.05,
        data_dir=tmp_path,
    )
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["failed"] == []
    found = [(entry["part"], entry["batch_size"], entry["sources"]) for entry in report["entries"]]
    rates = [
        ("rate", batch_size, count)
        for batch_size, _ in mixture_speed.SIZES
        for count in ("1, of 1 file", "1, of 3 files", "3")
    ]
    assert found == rates + [("start", 8, count) for count in ("1, of 1 file", "1, of 4 files", "4")]
    for entry in report["entries"]:
        name = "tokens_per_s" if entry["part"] == "rate" else "resume_s"
        assert len(entry["rounds"]) == (3 if entry["part"] == "rate" else 2)
        assert 0 < entry[name]["low"] <= entry[name]["median"] <= entry[name]["high"]
        assert entry[f"{name}_ratio"]["median"] > 0
    assert list(tmp_path.iterdir()) == []
