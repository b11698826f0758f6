"""The benchmark of orders by blocks runs, checks what it reads, and shows that they decode less."""

import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from dali_pipes.rows import make

order_blocks = importlib.import_module("order_blocks")


@pytest.mark.slow
def test_it_measures_both_orders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in (make, order_blocks):
        monkeypatch.setattr(module, "BLOCK_TOKENS", 1 << 16)
    monkeypatch.setattr(order_blocks, "_SIZES", (16,))
    monkeypatch.setattr(order_blocks, "_SOURCES", (1, 3))
    monkeypatch.setattr(order_blocks, "_GROUPS", (1 << 15,))
    order_blocks.main("plan,decode", 1 << 21, rounds=1, data_dir=tmp_path)
    entries = json.loads(capsys.readouterr().out.splitlines()[-1])["entries"]
    assert [entry["part"] for entry in entries] == ["plan", "plan", "decode"]
    assert all(entry["us_a_row"]["ratio"] > 0 for entry in entries[:2])
    decoded = entries[-1]["decoded_per_chunk"]
    assert 1 <= decoded["blocks"] < 2 < decoded["rows"]


def test_lost_tokens_are_told(tmp_path: Path) -> None:
    ids = np.arange(40_960, dtype=np.int32)
    order_blocks.write_parquet(tmp_path / "a.parquet", ids, 4096)
    order_blocks.run_epoch(tmp_path / "a.parquet", ids, {}, 0, 1 << 20)
    with pytest.raises(SystemExit, match="each token once"):
        order_blocks.run_epoch(tmp_path / "a.parquet", ids + 1, {}, 0, 1 << 20)
