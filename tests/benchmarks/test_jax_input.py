"""jax_input.py at a tiny size: figures of each way, and wrong data is noticed."""

import importlib.util
import json
from pathlib import Path

import jax_input
import numpy as np
import pytest
import typer


@pytest.mark.slow
def test_every_way_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax", reason="jax is not installed: the extra `jax` brings it")
    ways = ["dali_pipes", *(["grain"] if importlib.util.find_spec("grain") else [])]
    jax_input.main(
        tokens=40_000,
        rounds=1,
        seconds=0.05,
        batch_size=4,
        seq_len=64,
        only=",".join(ways),
        data_dir=tmp_path,
        out=tmp_path / "out",
    )
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["benchmark"] == "jax_input"
    figures = last["medians"]["4 x 64"]
    assert list(figures) == ways
    for one in figures.values():
        assert set(one) == set(jax_input.FIGURES)
        assert all(value > 0 for value in one.values())
    saved = json.loads((tmp_path / "out" / "jax_input.json").read_text())
    assert saved["sizes"][0]["median"] == figures


def test_wrong_data_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    jax = pytest.importorskip("jax", reason="jax is not installed: the extra `jax` brings it")
    from comparison import jax_arrays
    from comparison.work import Limits, Work, make_corpus

    monkeypatch.setattr(jax_arrays, "_WARMUP_S", 0.0)
    work = Work(str(make_corpus(tmp_path, 20_000)), 20_000, 2, 64, str(tmp_path))
    task = {"name": "dali_pipes", "work": work.as_dict(), "limits": vars(Limits(max_s=0.01))}
    assert "failed" not in jax_arrays.run(task)
    monkeypatch.setattr(jax_arrays.Ours, "__iter__", lambda self: iter([(jax.numpy.ones((2, 64), np.int32),) * 2]))
    assert "wrong data" in jax_arrays.run(task)["failed"]


def test_unknown_ways_are_refused() -> None:
    with pytest.raises(typer.BadParameter, match="'tf'"):
        jax_input.main(only="grain,tf")
