"""The benchmark of the scan at tiny size: it runs alone, checks its results and ends with one line of JSON."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import scan_documents


def test_it_runs(tmp_path: Path) -> None:
    command = [sys.executable, scan_documents.__file__, "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [(entry["dtype"], entry["name"]) for entry in found["entries"]] == [
        (dtype, name) for dtype in ("uint16", "uint32") for name in ("numpy", "dali_pipes")
    ]
    for entry in found["entries"]:
        assert entry["documents"] > 1
        for quantity in ("gb_per_s", "ratio"):
            assert 0 < entry[quantity]["low"] <= entry[quantity]["median"] <= entry[quantity]["high"]
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_result_stops_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scan_documents, "scan_offsets", lambda corpus, delimiter: np.array([0, corpus.num_tokens]))
    with pytest.raises(SystemExit, match="the scan is wrong for uint16: 2 offsets"):
        scan_documents.main(quick=True, rounds=1, megabytes=1)
