"""The notebook of the manual runs from its first cell to its last, and what cells end with shows itself in HTML."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from manual import DOCS

NOTEBOOK = DOCS / "see-your-data.ipynb"
SHOWN = ["TokenLoader", "Corpus", "PlanReport", "BatchPreview", "LoaderStats", "MixtureReport"]
AT_ONCE = "import dali_pipes.runtime.progress as progress; progress.SHOWN_AFTER_S = 0"
BARS = {"finding documents", "planning epoch 0"}


def code_cells() -> list[str]:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] for cell in code)
    return ["".join(cell["source"]) for cell in code]


@pytest.mark.needs("tokenizers")
def test_the_notebook_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel runs it: the value of the last line of a cell is shown."""
    monkeypatch.chdir(folder)
    names: dict[str, Any] = {}
    shown = []
    for cell in code_cells():
        body = ast.parse(cell).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), NOTEBOOK.name, "exec"), names)
        value = None
        if last is not None:
            assert isinstance(last, ast.Expr)
            value = eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)
        if value is not None:
            shown.append((type(value).__name__, value._repr_html_()))
    assert [name for name, _ in shown] == SHOWN
    assert all(html.startswith("<div") and "<script" not in html for _, html in shown)


@pytest.mark.browser
@pytest.mark.needs("tokenizers", "ipykernel")
def test_a_kernel_runs_the_notebook(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one: values show themselves in HTML, and bars are displays that are replaced and emptied at their end."""
    from jupyter_client.manager import start_new_kernel

    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "cache"))
    values: list[str] = []
    displays: dict[str, list[str]] = {}

    def take(message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        assert kind != "error", "\n".join(content["traceback"])
        if kind == "execute_result":
            values.append(content["data"]["text/html"])
        elif kind in ("display_data", "update_display_data"):
            displays.setdefault(content["transient"]["display_id"], []).append(content["data"]["text/html"])

    manager, client = start_new_kernel(cwd=str(folder))
    try:
        for cell in (AT_ONCE, *code_cells()):
            reply = client.execute_interactive(cell, output_hook=take, timeout=120)
            assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    assert len(values) == len(SHOWN)
    assert {title for title in BARS for shown in displays.values() if title in shown[0]} == BARS
    assert {shown[-1] for shown in displays.values()} == {""}


def test_the_notebook_is_one() -> None:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (found["nbformat"], {cell["cell_type"] for cell in found["cells"]}) == (4, {"code", "markdown"})
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
