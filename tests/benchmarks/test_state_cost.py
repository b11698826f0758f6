"""The benchmark of states takes them, of every kind of rows."""

import json
from pathlib import Path

import pytest
import state_cost

from dali_pipes import open_corpus


def test_it_takes_states_of_all_kinds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("DALI_PIPES_CACHE", "")  # which it sets
    state_cost.main(files="1,30", states=20)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(entry["files"], entry["rows"]) for entry in report["entries"]] == [
        (files, rows) for files in (1, 30) for rows in state_cost.ROWS
    ]
    for entry in report["entries"]:
        assert entry["bytes"] < 1024
        for name in ("state_us", "copy_us"):
            assert 0 < entry[name]["low"] <= entry[name]["median"] <= entry[name]["p99"]


def test_what_it_writes(tmp_path: Path) -> None:
    state_cost.write_corpus(tmp_path, 7)
    with open_corpus(tmp_path, eos_id=state_cost.END) as corpus:
        assert (len(corpus.files), corpus.num_tokens) == (7, state_cost.TOKENS)
