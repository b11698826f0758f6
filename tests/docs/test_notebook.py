"""The notebook of the manual runs from its first cell to its last, and what cells end with shows itself in HTML."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from manual import DOCS

NOTEBOOK = DOCS / "see-your-data.ipynb"


@pytest.mark.needs("tokenizers")
def test_the_notebook_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a kernel runs it: the value of the last line of a cell is shown."""
    monkeypatch.chdir(folder)
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    names: dict[str, Any] = {}
    shown = []
    for cell in cells:
        if cell["cell_type"] != "code":
            continue
        assert cell["outputs"] == []
        body = ast.parse("".join(cell["source"])).body
        last = body.pop() if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), NOTEBOOK.name, "exec"), names)
        value = None
        if last is not None:
            assert isinstance(last, ast.Expr)
            value = eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), names)
        if value is not None:
            shown.append((type(value).__name__, value._repr_html_()))
    expected = ["TokenLoader", "Corpus", "PlanReport", "BatchPreview", "LoaderStats", "MixtureReport"]
    assert [name for name, _ in shown] == expected
    assert all(html.startswith("<div") and "<script" not in html for _, html in shown)


def test_the_notebook_is_one() -> None:
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (found["nbformat"], {cell["cell_type"] for cell in found["cells"]}) == (4, {"code", "markdown"})
    assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
