"""Progress in a notebook: bars below the cell, replaced as work goes on and removed at its end; one at a time."""

import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_notebook import Cell, run_cell
from table_files import list_array, table_of, write_parquet
from tokenizers import Tokenizer, models

from dali_pipes import TokenLoader, open_corpus
from dali_pipes.runtime import notebook_output
from dali_pipes.runtime.notebook_output import NotebookOutput
from dali_pipes.runtime.progress import ProgressBar, progress_bar

END = 0


@pytest.fixture
def cell(monkeypatch: pytest.MonkeyPatch) -> Cell:
    return run_cell(monkeypatch)


def documents_of(folder: Path) -> Path:
    ids = np.random.default_rng(0).integers(0, 9, 4000).astype(np.uint16)
    ids.tofile(folder / "data.bin")
    return folder / "data.bin"


def plan(folder: Path) -> None:
    settings: dict[str, Any] = {"batch_size": 2, "seq_len": 16, "rows": "pack", "eos_id": END, "dtype": "uint16"}
    with TokenLoader(documents_of(folder), **settings, device="cpu", quiet=True) as loader:
        loader.plan_report()


def open_lists(folder: Path) -> None:
    table = table_of([list_array([[1, 2, 3], []] * 30)])  # its statistics do not count the ids
    open_corpus(write_parquet(folder / "a.parquet", table)).close()


def open_text(folder: Path) -> None:
    words = {"<|endoftext|>": END, "all": 1, "the": 2, "world": 3}
    Tokenizer(models.WordLevel(words, unk_token="all")).save(str(folder / "tokenizer.json"))
    (folder / "text.jsonl").write_text(9 * (json.dumps({"text": "the"}) + "\n"))
    open_corpus(folder / "text.jsonl", tokenizer=folder / "tokenizer.json", eos_id=END).close()


WORK: dict[Callable[[Path], None], set[str]] = {
    plan: {"finding documents", "planning epoch 0"},
    open_lists: {"reading row lengths"},
    open_text: {"tokenizing"},
}


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_long_work_shows_its_bar(
    cell: Cell, work: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "cache"))
    work(tmp_path)
    titles = {title for shown in cell.displays for title in WORK[work] if title in shown[0]}
    assert titles == WORK[work]
    for *drawn, last in cell.displays:
        assert last == "", "it is removed at the end"
        assert all(html.startswith("<pre") and "<script" not in html for html in drawn)


def test_a_bar_shows_how_far_it_is(cell: Cell) -> None:
    """Also from threads, which may report after its end."""
    with progress_bar("<b>[red]files", 4_000_000, in_bytes=True) as advance:
        threads = [threading.Thread(target=advance, args=(1_000_000,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    advance(1)
    ((*drawn, last),) = cell.displays
    texts = [re.sub(r"<[^>]*>", "", html) for html in drawn]
    assert [text.split("%")[0].split()[-1] for text in texts] == ["25", "50", "75"]
    assert "3.0/4.0 MB" in texts[-1]
    assert "&lt;b&gt;" in drawn[0]
    assert last == ""


def test_one_bar_is_shown_at_a_time(cell: Cell) -> None:
    """The one that comes first; the other takes its place when it has ended."""
    outer, inner = ProgressBar("outer"), ProgressBar("inner")
    inner.advance(1)
    outer.advance(1)
    assert ["inner" in shown[0] for shown in cell.displays] == [True]
    inner.close()
    inner.close()
    outer.advance(1)
    assert ["outer" in shown[0] for shown in cell.displays] == [False, True]
    ProgressBar("third").advance(1)
    outer.close()
    assert [shown[-1] for shown in cell.displays] == ["", ""]


def test_a_cell_is_not_flooded(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(notebook_output, "_DRAWN_EVERY_S", 0.5)
    monkeypatch.setattr("dali_pipes.runtime.notebook_output.time.monotonic", lambda: clock[0])
    output = NotebookOutput()
    for tenth in range(21):
        clock[0] = 100 + tenth / 10
        output.draw(str(tenth))
    assert [re.findall(r">(\d+)", html) for html in cell.displays[0]] == [["0"], ["5"], ["10"], ["15"], ["20"]]


def test_nothing_is_shown_without_a_cell(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """IPython is imported, but no cell runs here, and standard error is not a terminal."""
    cell = run_cell(monkeypatch)
    monkeypatch.delattr("builtins.get_ipython")
    with progress_bar("files", 2) as advance:
        advance(1)
    assert (cell.displays, capsys.readouterr().err) == ([], "")
