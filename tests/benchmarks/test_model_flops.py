"""Model FLOPs against every product counted by hand and by torch, the peaks of cards, and what the demo reports."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import train_gpt
from gpt import GPT, ModelShape
from hypothesis import given
from hypothesis import strategies as st
from model_flops import CARDS, find_peak, flops_per_token, peak_of_card
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from training_report import History, save_metrics
from typer.testing import CliRunner

from dali_pipes.tools.reports import FollowedLog
from dali_pipes.tools.reports.page.run_log import read_log
from dali_pipes.tools.reports.page.run_section import run_section

shapes = st.builds(
    lambda layers, heads, head_width, vocabulary, tokens: ModelShape(
        layers, heads, heads * head_width, vocabulary, tokens
    ),
    *(st.integers(1, 4), st.integers(1, 4), st.integers(1, 16), st.integers(2, 300), st.integers(1, 40)),
)


def product(rows: int, inner: int, columns: int) -> int:
    """FLOPs of (rows, inner) @ (inner, columns) and of both products of its backward pass, one by one."""
    gradient_of_left = (rows, columns, inner)
    gradient_of_right = (inner, rows, columns)
    total = 0
    for m, k, n in ((rows, inner, columns), gradient_of_left, gradient_of_right):
        for _ in range(m):
            total += 2 * k * n
    return total


def by_hand(shape: ModelShape, rows: int) -> int:
    """FLOPs of a step, product by product."""
    width, tokens, head_width = shape.width, shape.seq_len, shape.width // shape.heads
    total = 0
    for _ in range(shape.layers):
        for _ in ("query", "key", "value", "output"):
            total += product(rows * tokens, width, width)
        for _ in range(rows * shape.heads):
            total += product(tokens, head_width, tokens)  # weights of attention
            total += product(tokens, tokens, head_width)  # the values by these weights
        total += product(rows * tokens, width, 4 * width)
        total += product(rows * tokens, 4 * width, width)
    return total + product(rows * tokens, width, shape.vocab_size)


@given(shape=shapes, rows=st.integers(1, 3))
def test_as_counted_by_hand(shape: ModelShape, rows: int) -> None:
    assert rows * shape.seq_len * flops_per_token(shape, shape.seq_len) == by_hand(shape, rows)


def test_of_shorter_rows() -> None:
    shape = ModelShape(2, 2, 8, 30, 64)
    assert 5 * flops_per_token(shape, 5) == by_hand(ModelShape(2, 2, 8, 30, 5), 1)


def test_gpt2_124m_has_the_figure_of_the_docstring() -> None:
    assert flops_per_token(ModelShape(12, 12, 768, 50304, 1024), 1024) == 854_654_976


@pytest.mark.parametrize("shape", [ModelShape(1, 1, 8, 40, 12), ModelShape(3, 4, 32, 100, 24)])
def test_as_torch_counts_the_model_itself(shape: ModelShape) -> None:
    """Forward and backward, with the output as on a GPU: torch does not count the sums in place of the sliced loss."""
    rows = 2
    model = GPT(shape)
    ids = torch.randint(shape.vocab_size, (rows, shape.seq_len))
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        logits = F.linear(model.hidden_states(ids), model.token_embedding.weight)
        torch.autograd.backward(F.cross_entropy(logits.flatten(0, 1), ids.flatten()))
    assert counter.get_total_flops() == rows * shape.seq_len * flops_per_token(shape, shape.seq_len)


def test_cards_are_found_by_their_whole_name() -> None:
    for name, bfloat16, tf32, float32 in (
        ("NVIDIA A100-SXM4-80GB", 312, 156, 19.5),
        ("NVIDIA H100 80GB HBM3", 989.5, 494.5, 67),
        ("NVIDIA H100 PCIe", 756.5, 378, 51),
        ("NVIDIA H200", 989.5, 494.5, 67),
        ("NVIDIA L4", 121, 60, 30.3),
    ):
        found = [peak_of_card(name, precision).flops for precision in ("bfloat16", "tf32", "float32")]
        assert found == [1e12 * bfloat16, 1e12 * tf32, 1e12 * float32]
        assert CARDS[name].source in peak_of_card(name, "tf32").about


@pytest.mark.parametrize(
    "name", ["NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", "H100", ""]
)
def test_another_card_is_not_taken_for_a_known_one(name: str) -> None:
    peak = peak_of_card(name, "bfloat16")
    assert peak.flops is None
    assert name in peak.about
    assert "--peak-flops" in peak.about


def test_every_card_is_plausible() -> None:
    """Tensor cores multiply bfloat16 at twice the rate of TF32, and neither slower than the other cores float32."""
    for name, card in CARDS.items():
        assert card.bfloat16 == pytest.approx(2 * card.tf32, rel=0.03), name
        assert card.tf32 >= card.float32, name
        assert card.source.startswith("NVIDIA "), name


def test_the_precision_is_the_one_that_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-80GB")
    cuda = torch.device("cuda")
    assert find_peak(cuda).flops == 312e12
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "highest")
    assert find_peak(cuda, autocast=False).flops == 19.5e12
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert find_peak(cuda, autocast=False).flops == 156e12
    assert find_peak(cuda, 5e12).flops == 5e12
    assert find_peak(torch.device("cpu"), 5e12).flops == 5e12


def test_flops_of_a_history() -> None:
    history = History(step_s=[4.0, 1.0, 1.0], step_flops=[10, 10, 20])
    assert history.flops_per_s() == pytest.approx(40 / 6)
    assert history.flops_per_s(2) == 15
    assert History().flops_per_s() == 0


@pytest.mark.parametrize("peak", [None, 1e12])
def test_the_demo_reports_it(tmp_path: Path, peak: float | None) -> None:
    path = tmp_path / "corpus.bin"
    np.random.default_rng(0).integers(0, 128, 193).astype("<u2").tofile(path)
    options = ["--model", "tiny", "--device", "cpu", "--corpus", path, "--steps", "3", "--out", tmp_path / "run"]
    options += [] if peak is None else ["--peak-flops", peak]
    result = CliRunner().invoke(train_gpt.app, [str(option) for option in options])
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["peak_flops"] == peak
    assert summary["model_flops_per_s"] == pytest.approx(
        summary["tokens_per_s"] * flops_per_token(ModelShape(1, 2, 16, 50304, 16), 16)
    )
    lines = result.stdout
    if peak is None:
        assert summary["mfu"] is None
        assert "peak not known" in lines
    else:
        assert summary["mfu"] == pytest.approx(summary["model_flops_per_s"] / peak)
        assert f"{summary['mfu']:.1%}" in lines
    assert (tmp_path / "run" / "training.png").stat().st_size > 0
    assert_its_log_has_it(tmp_path / "run" / "metrics.jsonl", summary)


def assert_its_log_has_it(log: Path, summary: dict[str, Any]) -> None:
    """In each step, and in what `watch` and the page of `report` show; without a peak, they say why there is no MFU."""
    steps = [line for line in map(json.loads, log.read_text().splitlines()) if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert [line.get("mfu") is None for line in steps] == [summary["mfu"] is None] * 3
    assert steps[-1]["model_flops_per_s"] == pytest.approx(summary["model_flops_per_s"])
    followed = FollowedLog(log)
    followed.poll()
    now = followed.now()
    assert now.model_flops_per_s == steps[-1]["model_flops_per_s"]
    assert now.mfu == steps[-1].get("mfu") == pytest.approx(summary["mfu"])
    (part,) = run_section(read_log(log)).parts
    shown = {fact.key: fact.value.raw for fact in part.facts}
    name, other = ("model_flops_per_s", "mfu") if now.mfu is None else ("mfu", "model_flops_per_s")
    assert (shown[name], other in shown) == (steps[-1][name], False)
    assert any("peak" in note for note in part.notes) == (now.mfu is None)


def test_the_log_of_a_run_that_had_no_times_before_a_resume(tmp_path: Path) -> None:
    history = History(losses=[3.0, 2.0, 1.0], data_wait_s=[0.0, 0.0, 0.0], step_s=[2.0, 1.0], step_flops=[10, 20])
    save_metrics(history, tmp_path / "log.jsonl", peak_flops=100)
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line.get("model_flops_per_s") for line in lines] == [None, 5, 10]
    assert [line.get("mfu") for line in lines] == [None, 0.05, 0.1]
