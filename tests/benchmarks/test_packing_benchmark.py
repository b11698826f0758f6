"""The packing benchmark runs at small size; its other ways to pack do what they say, and its check can fail."""

import json
from pathlib import Path

import numpy as np
import packing
import pytest


def window(pieces: list[int], seq_len: int) -> packing.Window:
    return packing.Window(np.array(pieces, np.int64), pieces, seq_len)


def test_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packing.main(quick=True, seed=0, out=tmp_path)
    printed = capsys.readouterr().out
    last = json.loads(printed.splitlines()[-1])
    assert last["failed"] == []
    report = json.loads((tmp_path / "packing.json").read_text())
    assert [entry["seq_len"] for entry in report["entries"]] == list(packing.SEQ_LENS)
    methods, skipped = packing.available_methods()
    assert all(f"skipped {name}" in printed for name in skipped)
    for entry in report["entries"]:
        assert list(entry["methods"]) == list(methods)
        medians = last["medians"][str(entry["seq_len"])]
        assert medians[packing.OURS]["fill"] == medians[packing.YARDSTICK]["fill"]
        assert all(0.5 < median["fill"] <= 1 and median["documents_per_s"] > 0 for median in medians.values())
        assert entry["loader_plan"]["documents_per_s"] > 0
        assert 4 < entry["loader_plan"]["kept_bytes_per_document"] <= 16
        assert sum(entry["histograms"]["documents"]) == 2 * 2048
        assert sum(entry["histograms"]["rows"][packing.OURS]) == sum(
            figures["rows"] for figures in entry["methods"][packing.OURS]["rounds"]
        )
    if (tmp_path / "packing.png").exists():
        assert (tmp_path / "packing.png").read_bytes()[:4] == b"\x89PNG"
    else:
        assert "no chart" in printed


def test_first_fit_and_best_fit_by_hand() -> None:
    """Pieces of 5, 7, 3, 5 in rows of 10: first fit puts 3 to the first 5; best fit to the 7."""
    assert packing.first_fit(window([5, 7, 3, 5], 10)) == [[0, 2], [1], [3]]
    assert packing.best_fit_decreasing(window([5, 7, 3, 5], 10)) == [[1, 2], [0, 3]]
    assert packing.first_fit(window([4], 10)) == packing.best_fit_decreasing(window([4], 10)) == [[0]]
    assert packing.row_tokens_of(window([5, 7, 3, 5], 10), [[0, 2], [1], [3]]).tolist() == [8, 7, 5]


@pytest.mark.parametrize(
    ("ours", "text"),
    [([10, 9], "19 of 20 tokens"), ([11, 9], "at most 11 in a row"), ([10, 5, 5], "differently")],
)
def test_wrong_row_tokens_are_found(ours: list[int], text: str) -> None:
    given = window([5, 7, 3, 5], 10)
    right = np.array([10, 10])
    assert packing.faults(given, {packing.OURS: right, packing.YARDSTICK: right}) == []
    (found, *_) = packing.faults(given, {packing.OURS: np.array(ours), packing.YARDSTICK: right})
    assert text in found


@pytest.mark.parametrize("rows", [[[0, 1], [3]], [[0, 1], [2, 2], [3]], [[0, 1, 2, 3, 4]]])
def test_missing_and_repeated_pieces_are_found(rows: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="exactly one row"):
        packing.row_tokens_of(window([1, 1, 1, 1], 10), rows)
