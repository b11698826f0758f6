"""`dali-pipes plan` shows what `TokenLoader.plan_report` returns, and draws how evenly ranks share a step's cost."""

import json
import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import one_line_error, run_json, run_well
from row_oracle import END, write_documents

from dali_pipes import TokenLoader
from dali_pipes.rows.plan_report import PlanReport
from dali_pipes.rows.step_costs import StepCosts
from dali_pipes.tools.reports import plot_plan

SETTINGS: dict[str, Any] = {"rows": "pad", "dtype": "uint16", "eos_id": END}
BALANCE: dict[str, Any] = {"balance": "cost", "balance_cost": [1, 2]}


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    lengths = np.random.default_rng(0).integers(1, 30, 300).tolist()
    write_documents(tmp_path / "corpus", [[1] * length + [END] for length in lengths])
    return tmp_path / "corpus"


def given(corpus: Path, **settings: Any) -> list[object]:
    named = [argument for name, value in settings.items() for argument in ("--set", f"{name}={value}")]
    return [corpus, "--batch-size", 2, "--seq-len", 16, *named]


@pytest.mark.parametrize("epoch", [0, 3])
def test_it_is_the_report_of_a_loader(corpus: Path, epoch: int) -> None:
    found = run_json("plan", *given(corpus, **SETTINGS, **BALANCE), "--world-size", 4, "--epoch", epoch)
    options = SETTINGS | BALANCE | {"corpus": str(corpus), "batch_size": 2, "seq_len": 16}
    with TokenLoader(**options, rank=1, world_size=4, device="cpu", quiet=True) as loader:
        for _ in range(epoch):
            for _ in loader:
                pass
        report = loader.plan_report()
    assert found == json.loads(json.dumps(report.as_dict()))
    shown = run_well("plan", *given(corpus, **SETTINGS, **BALANCE), "--world-size", 4, "--epoch", epoch)
    for figure in (report.cost_ratio, report.unbalanced_worst_cost_ratio, report.sorted_cost_ratio):
        assert f"{figure:.3f}" in shown
    assert shown.startswith(repr(report))


def test_without_balance_or_steps(corpus: Path) -> None:
    found = run_json("plan", *given(corpus, **SETTINGS))
    assert found["rows"] > 0
    assert found["cost_ratio"] is found["cost_percentiles"] is None
    assert "balance" in one_line_error("plan", *given(corpus, **SETTINGS), "--plot", corpus.parent / "a.svg")
    assert '"stream"' in one_line_error("plan", *given(corpus))
    assert "web" in one_line_error("plan", *given(corpus, **SETTINGS), "--source", "web")
    many = ["plan", *given(corpus, **SETTINGS, **BALANCE, drop_last="false"), "--world-size", 10**6]
    assert run_json(*many)["cost_percentiles"] == []
    shown = run_well(*many)
    assert "fewer than one step" in shown
    assert "100.00% of the steps" not in shown
    message = one_line_error("plan", *given(corpus, **SETTINGS), "--epoch", -1)
    assert "--epoch -1" in message
    assert "--plot" in one_line_error(*many, "--plot", corpus.parent / "a.svg")


def test_a_source_of_a_mixture(corpus: Path) -> None:
    path = corpus.parent / "run.toml"
    lines = ["batch_size = 2", "seq_len = 16", 'rows = "pack"', 'dtype = "uint16"', f"eos_id = {END}"]
    lines += ["total_rows = 100", "[mixture.web]", f'corpus = "{corpus}"', "weight = 1"]
    path.write_text("\n".join(lines))
    assert run_json("plan", path, "--source", "web")["documents"] == 300
    for source in ([], ["--source", "code"]):
        message = one_line_error("plan", path, *source)
        assert "--source" in message
        assert "web" in message


def test_the_plot_has_both_courses(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    command = ["plan", *given(corpus, **SETTINGS, **BALANCE), "--world-size", 4, "--plot"]
    run_well(*command, tmp_path / "plan.svg")
    text = (tmp_path / "plan.svg").read_text()
    ElementTree.fromstring(text)
    courses = [path for path in re.findall(r'<path d="([^"]*)"[^>]*clip-path', text) if path.count("L") > 20]
    assert len(courses) == 2
    assert "plan.unknown" in one_line_error(*command, tmp_path / "plan.unknown")


def test_the_plot_follows_the_figures(tmp_path: Path) -> None:
    """Another distribution is another picture; the same one is the same."""
    pytest.importorskip("matplotlib")
    drawn = []
    for worst in (2, 3, 2):
        steps = StepCosts(2, 1)
        steps.add(np.array([1, 1, 1, worst]))
        counts: dict[str, int] = dict.fromkeys(
            ("epoch", "documents", "tokens", "rows", "padding_tokens", "dropped_documents", "dropped_tokens"), 0
        )
        report = PlanReport(
            **counts,
            fill=1.0,
            split_documents=0,
            truncated_documents=0,
            cost_percentiles=steps.percentiles,
            unbalanced_cost_percentiles=steps.percentiles,
        )
        plot_plan(report, tmp_path / "plan.png")
        drawn.append((tmp_path / "plan.png").read_bytes())
    assert drawn[0] == drawn[2] != drawn[1]
