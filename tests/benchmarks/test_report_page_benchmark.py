"""The benchmark of the page makes pages, and its other cases find the same documents."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import report_page
from typer.testing import CliRunner

from dali_pipes.tools.cli import app


@pytest.mark.needs("matplotlib", "jinja2")
def test_it_makes_pages(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has made the imports; without the page that finds what another one has kept."""
    cases = ("stream", "pack", report_page.CASES[-1])

    def called(command: list[str], cache: Path) -> tuple[dict[str, float], dict[str, Any]]:
        figures = {"seconds": 2.0, "cpu_s": 1.0}
        if command[1] == "-c":
            return figures, json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        ended = CliRunner().invoke(app, command[3:], env={"DALI_PIPES_CACHE": str(cache)})
        assert ended.exit_code == 0, ended.output
        return figures, json.loads(ended.stdout)

    monkeypatch.setattr(report_page, "timed", called)
    monkeypatch.setattr(report_page, "CASES", cases)
    report_page.main(tokens=20_000, steps=2, rounds=1)
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["within"]
    assert [entry["case"] for entry in report["entries"]] == list(cases)
    for entry in report["entries"]:
        assert entry["median"]["ids_looked_at"] == 20_000
        assert ("bytes" in entry["median"]) == (entry["case"] != report_page.CASES[-1])


@pytest.mark.slow
@pytest.mark.needs("matplotlib", "jinja2")
def test_each_page_is_made_by_a_process() -> None:
    command = [sys.executable, report_page.__file__, "--tokens", "20000", "--steps", "1", "--rounds", "1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    report = json.loads(ended.stdout.splitlines()[-1])
    assert [entry["case"] for entry in report["entries"]] == list(report_page.CASES)
    assert all(entry["low"]["cpu_s"] > 0 for entry in report["entries"])


def test_what_it_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_page, "_CHUNK", 3_000)
    report_page.write_corpus(tmp_path / "corpus.bin", 10_000)
    ids = np.fromfile(tmp_path / "corpus.bin", np.uint16)
    assert (len(ids), ids[-1]) == (10_000, report_page.END)
    assert 10 < (ids == report_page.END).sum() < 40
