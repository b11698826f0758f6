"""The tokenising benchmark runs at small size and compares the ids; the tokenizer it makes is that of GPT-2."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tokenize_text
from decode import load_pieces
from gpt2_tokenizer import tokenizer_json

SCRIPT = Path(tokenize_text.__file__)


@pytest.mark.slow
def test_quick_run(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["failed"] == []
    report = json.loads((tmp_path / "tokenize_text.json").read_text())
    assert set(report["ratios_of_best"]) == {f"to {method}" for method in tokenize_text.LIBRARIES}
    assert all(len(report["seconds"][method]) == 2 for method in (tokenize_text.OURS, *tokenize_text.LIBRARIES))
    assert all(entry["best"] >= entry["median"] > 0 for entry in report["methods"].values())


def test_documents_are_those_of_the_demo_and_differ_from_copy_to_copy() -> None:
    texts = tokenize_text.documents(2)
    assert len(texts) == 760
    assert len(set(texts)) == 760
    assert texts[0].startswith("First Citizen:\nBefore we proceed")


def test_every_merge_joins_two_pieces_that_come_before_it() -> None:
    made = json.loads(tokenizer_json())["model"]
    assert len(made["merges"]) == 50_000
    assert made["merges"][:3] == [["Ġ", "t"], ["Ġ", "a"], ["h", "e"]]
    vocabulary = made["vocab"]
    assert len(vocabulary) == len(load_pieces()) == 50_257
    assert all(
        vocabulary[left + right] == number > max(vocabulary[left], vocabulary[right])
        for number, (left, right) in enumerate(made["merges"], 256)
    )
