"""The benchmark of formats runs, checks what it times, and tells wrong windows."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

formats = importlib.import_module("formats")


def is_missing(package: str) -> bool:
    return importlib.util.find_spec(package) is None


def test_it_measures_every_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DALI_PIPES_CACHE", "")  # which it sets
    formats.main(None, 50_000, 2, 64, rounds=1, seconds=0.01, data_dir=None, out=tmp_path)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report == json.loads((tmp_path / "formats.json").read_text())
    measured = {entry["format"] for entry in report["entries"]}
    missing = {name for name, one in formats.FORMATS.items() if any(map(is_missing, one.packages))}
    assert measured | missing == set(formats.FORMATS)
    assert {"flat", "parquet", "arrow"} <= measured
    for entry in report["entries"]:
        assert entry["alternatives"]["dali_pipes"]["tokens_per_s"]["low"] > 0
        assert entry["ratio_to_flat"] > 0


def test_wrong_windows_are_told() -> None:
    documents = formats.make_documents(10_000)
    assert documents.offsets[-1] == len(documents.tokens) == 10_000
    work = formats.Work(batch_size=2, seq_len=8)
    ids = torch.from_numpy(documents.tokens.astype(np.int64))
    right = [{"input_ids": ids[at : at + 16].view(2, 8), "labels": ids[at + 1 : at + 17].view(2, 8)} for at in (0, 16)]
    formats._check("x", iter(right), documents, work)
    with pytest.raises(SystemExit, match="x: input_ids of batch 0"):
        formats._check("x", iter(right[::-1]), documents, work)
