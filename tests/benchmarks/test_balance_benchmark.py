"""The benchmark of balanced steps runs at small size; its other methods do what they say, and lost tokens are told."""

import json
from pathlib import Path
from typing import Any

import balance
import numpy as np
import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes.rows.cost_balance import CostBalance


def run(folder: Path) -> None:
    balance.main(4096, ranks=8, batch_size=2, seq_len=1024, hidden_size=64, num_layers=2, rounds=1, seed=0, out=folder)


@pytest.mark.slow
def test_it_draws_a_chart(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run(tmp_path)
    assert (tmp_path / "balance.png").read_bytes()[:4] == b"\x89PNG"


@pytest.fixture
def without_chart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balance, "_save_chart", lambda *arguments: None)


@pytest.mark.usefixtures("without_chart")
def test_it_compares_all_methods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["failed"] == []
    assert json.loads((tmp_path / "balance.json").read_text())["entries"] == last["entries"]
    assert [(entry["corpus"], entry["rows"]) for entry in last["entries"]] == [
        (corpus, mode) for corpus in balance.CORPORA for mode in ("pad", "pack")
    ]
    for entry in last["entries"]:
        methods = entry["methods"]
        packed = ["even rows", "even, sorted"] if entry["rows"] == "pack" else []
        assert list(methods) == ["none", balance.OURS, "sorted", "verl", "WLB-LLM", *packed]
        assert 1 <= methods[balance.OURS]["ratio"] < methods["none"]["ratio"]
        assert methods["verl"]["ratio"] < methods["none"]["ratio"]
        assert entry["speed"][balance.OURS]["median"] > 0


@pytest.mark.usefixtures("without_chart")
def test_lost_tokens_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = balance.by_differencing

    def losing(*arguments: Any) -> Any:
        work = real(*arguments)
        return work._replace(left=work.left - 1)

    monkeypatch.setattr(balance, "by_differencing", losing)
    with pytest.raises(typer.Exit):
        run(tmp_path)


@given(st.integers(1, 5), st.integers(1, 4), st.data())
def test_differencing_divides_evenly(parts: int, each: int, data: st.DataObject) -> None:
    costs = data.draw(st.lists(st.integers(1, 50), min_size=parts * each, max_size=parts * each))
    found = balance.largest_differencing(costs, parts)
    assert sorted(item for part in found for item in part) == list(range(len(costs)))
    assert {len(part) for part in found} == {each}
    sums = [sum(costs[item] for item in part) for part in found]
    assert max(sums) - min(sums) <= max(costs)


def test_differencing_by_hand() -> None:
    """8 7 | 6 5: the widest spread is 1 in both, so the larger goes to the smaller."""
    assert sorted(map(sorted, balance.largest_differencing([8, 7, 6, 5], 2))) == [[0, 3], [1, 2]]


def test_even_rows_by_hand() -> None:
    """7 | 5, then 4 to the cheaper row, which then costs least, but does not have room for 2."""
    costs, tokens = balance.even_rows(np.array([4, 7, 5, 2]), 2, 10, CostBalance(0, 1))
    assert (costs.tolist(), tokens.tolist()) == ([49 + 4, 25 + 16], [9, 9])


@given(st.lists(st.integers(1, 20), min_size=1, max_size=40), st.integers(1, 6))
def test_even_rows_hold_each_document_once(lengths: list[int], num_rows: int) -> None:
    costs, tokens = balance.even_rows(np.array(lengths), num_rows, 20, CostBalance(0, 1))
    assert tokens.max() <= 20
    assert (tokens.sum(), costs.sum()) == (sum(lengths), sum(length**2 for length in lengths))


def test_outliers_wait_until_each_rank_gets_one() -> None:
    lengths = np.array([5000, 10, 10, 6000, 20, 20, 990])
    work = balance.by_wlb_llm(lengths, 6000, 2, CostBalance(1, 0), [4096, 2048])
    assert work.tokens.sum() + work.left == lengths.sum()
    (step,) = [step for step in work.tokens.tolist() if max(step) > 1000]
    assert min(step) >= 5000, "both long ones in one step, on different ranks"
