"""The benchmarks of the operators at tiny size: they check their results and end with one line of JSON."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import bench_document_rows
import bench_permute
import bench_rows
import bench_segments
import fim
import numpy as np
import operator_timing
import pytest

from dali_pipes.operators import segments


def run_quick(benchmark: ModuleType, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    benchmark.main(quick=True, rounds=2)
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["machine"]["cores"] >= 1
    for entry in found["entries"]:
        for quantity in ("seconds", "ratio"):
            spread = entry[quantity]
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
    return found


def test_rows(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_quick(bench_rows, capsys)
    on_cpu = [entry for entry in found["entries"] if entry["device"] == "numpy"]
    assert {entry["case"] for entry in on_cpu} == {"4 x 64", "3 x 33"}
    assert [entry["name"] for entry in on_cpu if entry["case"] == "3 x 33" and entry["baseline"] == "gather"] == [
        *("rows", "rows, ids checked", "permute, rows", "shuffled_rows", "gather", "torch gather")
    ]
    assert [entry["name"] for entry in on_cpu if entry["baseline"] == "permute, rows"] == ["shuffled_rows"] * 2


def test_segments(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_quick(bench_segments, capsys)
    on_cpu = [entry for entry in found["entries"] if entry["device"] == "numpy"]
    assert [entry["name"] for entry in on_cpu] == [
        *("segments, all outputs", "segments, all, int32 and bool", "segments, inputs and labels", "rows") * 2
    ]
    assert all(entry["pieces"] > entry["rows"] == 3 and entry["baseline"] == "rows" for entry in on_cpu)


@pytest.mark.slow
def test_fim(tmp_path: Path) -> None:
    command = [sys.executable, fim.__file__, "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    plain, *others = json.loads(done.stdout.splitlines()[-1])["entries"]
    assert plain["high"]["time_ratio"] == plain["high"]["cpu_ratio"] == 1
    assert [entry["name"] for entry in others] == ["fim", "fim, all documents", "Megatron's rule, NumPy"]


@pytest.mark.slow
def test_document_rows(tmp_path: Path) -> None:
    command = [sys.executable, bench_document_rows.__file__, "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    windows, *others = json.loads(done.stdout.splitlines()[-1])["entries"]
    assert windows["best_cpu_ratio"] == windows["time_ratio"]["high"] == windows["cpu_ratio"]["high"] == 1
    assert [entry["name"] for entry in others] == [
        *("packed, inputs and labels", "packed, all outputs", "packed, all, int32 and bool")
    ]
    for entry in (windows, *others):
        assert entry["documents"] > entry["batch_size"] == 2
        for quantity in ("mtok_per_s", "cpu_ms_per_mtok", "build_us", "time_ratio", "cpu_ratio"):
            assert 0 < entry[quantity]["low"] <= entry[quantity]["median"] <= entry[quantity]["high"]


def test_permute(capsys: pytest.CaptureFixture[str]) -> None:
    found = run_quick(bench_permute, capsys)
    formula, table, many = found["entries"][:3]
    assert (formula["name"], table["name"], many["name"]) == ("permute", "table", "permute")
    assert table["peak_bytes"] >= 8 * table["n"]
    assert many["rows"] == 4096


def test_wrong_results_stop_a_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_rows, "rows", lambda tokens, starts, seq_len, out, **_: out)
    with pytest.raises(SystemExit, match="rows is wrong at 4 x 64 on numpy"):
        bench_rows.main(quick=True, rounds=1)
    changed = {"pad_id": 1}
    monkeypatch.setattr(bench_segments, "segments", lambda **options: segments(**options | changed))
    with pytest.raises(
        SystemExit, match=r"input_ids of segments are wrong at 3 x 100, \d+ pieces side by side on numpy"
    ):
        bench_segments.main(quick=True, rounds=1)
    monkeypatch.setattr(bench_permute, "permute", lambda indices, n, key: indices * 0)
    with pytest.raises(SystemExit, match="not a bijection"):
        bench_permute.main(quick=True, rounds=1)


def test_ratios_are_taken_within_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([2.0, 1.0, 40.0, 10.0, 6.0, 3.0])
    monkeypatch.setattr(operator_timing, "_calls", lambda module, run: 1)
    monkeypatch.setattr(operator_timing, "_seconds", lambda module, run, calls: next(seconds))
    slow, fast = operator_timing.measure(np, {"slow": list, "fast": list}, "slow", 3)
    assert slow["seconds"] == {"median": 6.0, "low": 2.0, "high": 40.0}
    assert fast["ratio"] == {"median": 2.0, "low": 2.0, "high": 4.0}
