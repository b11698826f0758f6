"""beside_training.py at a tiny size: every alternative is measured in every round, and closed."""

import json
import threading

import beside_training
import pytest


def test_every_alternative_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    before = set(threading.enumerate())
    names = "dali_pipes,numpy,torch_gather_0"
    shape = {"batch_size": 2, "seq_len": 64, "step_ms": 0.1, "steps": 3, "rounds": 2, "tokens": 50_000}
    beside_training.main(**shape, only=names)  # type: ignore[arg-type]
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["benchmark"] == "beside_training"
    assert list(last["quartiles"]) == ["no loader", *names.split(",")]
    for figures in last["quartiles"].values():
        assert set(figures) == set(beside_training.FIGURES)
        assert all(low <= middle <= high for low, middle, high in figures.values())
        assert figures["step_ms"][0] > 0
    assert last["quartiles"]["no loader"]["longer_ms"] == [0, 0, 0]
    assert not [one for one in set(threading.enumerate()) - before if "dali_pipes" in one.name]
