"""The comparison runs at tiny size, and its checker really fails on data that is wrong."""

import importlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from hypothesis import given
from hypothesis import strategies as st

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

alternatives = importlib.import_module("comparison.alternatives")
check = importlib.import_module("comparison.check")
child = importlib.import_module("comparison.child")
compare = importlib.import_module("compare")
measuring = importlib.import_module("comparison.measure")
process = importlib.import_module("comparison.process")
report = importlib.import_module("comparison.report")
start_resume = importlib.import_module("start_resume")
working = importlib.import_module("comparison.work")

T = 4


def make_work(folder: Path, tokens: Any, batch_size: int, seq_len: int = T) -> Any:
    path = folder / "corpus.bin"
    np.asarray(tokens, np.uint16).tofile(path)
    return working.Work(str(path), len(tokens), batch_size, seq_len, str(folder))


def cut(work: Any, windows: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The batch made of these windows, the slow way."""
    tokens = np.fromfile(work.corpus, np.uint16).astype(np.int64).tolist()
    rows = [tokens[window * work.seq_len : window * work.seq_len + work.seq_len + 1] for window in windows]
    return torch.tensor([row[:-1] for row in rows]), torch.tensor([row[1:] for row in rows])


@pytest.fixture
def counting_work(tmp_path: Path) -> Any:
    """Tokens 0 to 40 in rows of 4: ten windows, batches of two."""
    return make_work(tmp_path, range(41), batch_size=2)


@given(data=st.data(), words=st.integers(1, 6), seed=st.integers(0, 1000))
def test_every_order_of_the_windows_passes_whatever_repeats_in_the_corpus(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, words: int, seed: int
) -> None:
    tokens = np.random.default_rng(seed).integers(0, words, data.draw(st.integers(T + 1, 60)))
    work = make_work(tmp_path_factory.mktemp("corpus"), tokens, batch_size=1)
    order = data.draw(st.permutations(range(work.windows)))
    checker = check.Checker(work)
    for window in order:
        checker.check(*cut(work, [window]))
    assert (checker.rows, checker.batches) == (work.windows, work.windows)
    with pytest.raises(check.CheckError, match="already delivered"):
        checker.check(*cut(work, [order[0]]))


def equal_to_inputs(inputs: torch.Tensor, labels: torch.Tensor) -> None:
    labels[:] = inputs


def shifted_twice(inputs: torch.Tensor, labels: torch.Tensor) -> None:
    labels += 1


def wrong_last_label(inputs: torch.Tensor, labels: torch.Tensor) -> None:
    labels[1, -1] += 1


def token_that_is_not_there(inputs: torch.Tensor, labels: torch.Tensor) -> None:
    inputs[1, 2] = labels[1, 1] = 999


def window_between_two(inputs: torch.Tensor, labels: torch.Tensor) -> None:
    inputs[1] += 1
    labels[1] += 1


def same_row_twice(inputs: torch.Tensor, labels: torch.Tensor) -> None:
    inputs[1], labels[1] = inputs[0], labels[0]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (equal_to_inputs, r"row 0: labels\[0\] is 12, but the next input is 13"),
        (shifted_twice, r"row 0: labels\[0\] is 14, but the next input is 13"),
        (wrong_last_label, "row 1: no window of the corpus"),
        (token_that_is_not_there, "row 1: no window of the corpus"),
        (window_between_two, "row 1: no window of the corpus"),
        (same_row_twice, "row 1: window 3 was already delivered"),
    ],
)
def test_wrong_data_is_refused(counting_work: Any, spoil: Callable[..., None], message: str) -> None:
    inputs, labels = cut(counting_work, [3, 7])
    spoil(inputs, labels)
    checker = check.Checker(counting_work)
    checker.check(*cut(counting_work, [0, 1]))
    with pytest.raises(check.CheckError, match=f"batch 1, {message}"):
        checker.check(inputs, labels)


def test_a_row_of_an_earlier_batch_is_refused_until_the_next_epoch(counting_work: Any) -> None:
    checker = check.Checker(counting_work)
    checker.check(*cut(counting_work, [3, 7]))
    with pytest.raises(check.CheckError, match="batch 1, row 1: window 7 was already delivered"):
        checker.check(*cut(counting_work, [0, 7]))
    checker.restart()
    checker.check(*cut(counting_work, [0, 7]))
    assert checker.rows == 2


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch.to(torch.int32),
        lambda batch: batch[:1],
        lambda batch: batch[:, :-1],
        lambda batch: batch.t().contiguous().t(),
    ],
    ids=["dtype", "rows", "tokens", "strides"],
)
@pytest.mark.parametrize("which", [0, 1])
def test_another_shape_or_type_is_refused(counting_work: Any, change: Callable[..., torch.Tensor], which: int) -> None:
    batch = list(cut(counting_work, [3, 7]))
    batch[which] = change(batch[which])
    with pytest.raises(check.CheckError, match=r"expected \(2, 4\) torch.int64 on cpu, contiguous"):
        check.Checker(counting_work).check(*batch)


def test_random_windows_are_compared_where_the_loader_says_they_begin(counting_work: Any) -> None:
    inputs = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8]])
    checker = check.Checker(counting_work, anywhere=True)
    checker.check(inputs, inputs + 1, np.array([5, 5]))
    with pytest.raises(check.CheckError, match=r"row 1: .* from 6 on"):
        checker.check(inputs, inputs + 1, np.array([5, 6]))
    with pytest.raises(check.CheckError, match="where its"):
        checker.check(inputs, inputs + 1)


@pytest.mark.parametrize(
    "name",
    ["numpy", "numpy_view", "numpy_gather", "memmap", "gather_loop", "torch_dataloader_0", "torch_batches_0",
     "torch_gather_0", "dali_pipes", "dali_pipes_mapped", "dali_pipes_dali", "dali_plain"],
)  # fmt: skip
def test_two_epochs_of_the_alternatives_that_need_no_extra(tmp_path: Path, name: str) -> None:
    """Each epoch is right, and a shuffled alternative has another order in the second."""
    tokens = np.random.default_rng(0).integers(0, 5000, 8 * 50 + 1)
    work = make_work(tmp_path, tokens, batch_size=3, seq_len=8)
    alternative = alternatives.ALTERNATIVES[name]
    loader = alternative.load()
    checker = check.Checker(work, anywhere=alternative.random_windows)
    stream = loader.open(work)
    epochs: list[torch.Tensor] = []
    for _ in range(2):
        checker.restart()
        for _ in range(work.epoch_batches):
            inputs, labels = next(stream)
            checker.check(inputs, labels, getattr(loader, "positions", None))
            epochs.append(inputs.clone())
    stream.close()
    assert checker.rows == 48
    assert not torch.equal(torch.cat(epochs[:16]), torch.cat(epochs[16:]))


@pytest.mark.slow
def test_the_whole_comparison_at_tiny_size(tmp_path: Path) -> None:
    names = ["numpy", "dali_pipes", "torch_dataloader_0"]
    options = {"--only": ",".join(names), "--batch-size": "4", "--seq-len": "32", "--tokens": "20001", "--rounds": "1"}
    options |= {"--batches": "5", "--min-seconds": "0", "--data-dir": str(tmp_path / "data"), "--out": str(tmp_path)}
    words = [word for pair in options.items() for word in pair]
    command = [sys.executable, str(BENCHMARKS / "compare.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    last = json.loads(done.stdout.splitlines()[-1])
    assert last["failed"] == []
    assert sorted(last["tokens_per_s"]["4x32"]) == sorted(names)
    written = json.loads((tmp_path / "compare.json").read_text())
    assert written["machine"]["cores"] >= 1
    (run,) = written["runs"]
    assert run["epoch_batches"] == 156
    for name in names:
        result = run["alternatives"][name]
        (figures,) = result["rounds"]
        assert figures["batches"] == 5
        assert all(figures[figure.key] is None or figures[figure.key] >= 0 for figure in report.FIGURES), figures
        assert result["median"]["tokens_per_s"] == figures["tokens_per_s"] > 0
        assert result["check"] == {
            "batches": 156,
            "rows": 624,
            "whole_epoch": True,
            "resume_exact": True if name == "dali_pipes" else None,
        }
    assert run["alternatives"]["dali_pipes"]["median"]["resume_s"] > 0
    assert len(run["goals"]) == 7, run["goals"]
    assert (tmp_path / "compare-4x32.png").read_bytes().startswith(b"\x89PNG")


def test_start_and_resume_at_tiny_size(tmp_path: Path) -> None:
    start_resume.main(tokens=["1e5"], rounds=1, sizes=False, data_dir=None, out=tmp_path)
    (entry,) = json.loads((tmp_path / "start_resume.json").read_text())["entries"]
    assert entry["rounds"][0]["tokens"] == 100_000
    assert entry["median"]["state_bytes"] < 1024


class _Wrong:
    """Delivers labels that equal the inputs."""

    def prepare(self, work: Any) -> None: ...

    def state_after(self, work: Any, batches: int) -> None: ...

    def open(self, work: Any, state: Any = None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            inputs, _ = cut(work, [0, 1])
            yield inputs, inputs.clone()


def test_wrong_data_fails_the_alternative(counting_work: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = alternatives.Alternative("wrong", "loader", "wrong labels", "nowhere:Nothing")
    monkeypatch.setitem(measuring.ALTERNATIVES, "wrong", wrong)
    monkeypatch.setattr(alternatives.Alternative, "load", lambda self: _Wrong())
    limits = {"batches": 2, "min_s": 0, "max_s": 1, "check_s": 0}
    result = measuring.run({"name": "wrong", "work": counting_work.as_dict(), "limits": limits})
    assert list(result) == ["failed"]
    assert result["failed"].startswith("wrong data: batch 0, row 0: labels[0]")


@pytest.mark.slow
def test_children_that_leave_no_result_are_failures_with_the_reason(tmp_path: Path) -> None:
    order = child.Order("comparison.start", {"files": [str(tmp_path / "none.bin")], "batch_size": 2, "seq_len": 4})
    missing, gone = child.run_children([child.Order("comparison.nowhere", {}), order], 60)
    assert "without a result: " in missing["failed"]
    assert "No module named comparison.nowhere" in missing["failed"]
    assert "none.bin" in gone["failed"]
    assert child.run_children([order], 0.01) == [{"failed": "not finished after 0 s"}]


def test_a_failed_alternative_fails_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = {"numpy": {"kind": "yardstick", "summary": "", "rounds": [], "failed": "wrong data: row 7"}}
    monkeypatch.setattr(compare, "run_rounds", lambda *arguments: bad)
    with pytest.raises(typer.Exit) as stopped:
        compare.main(only=["numpy"], tokens=20_000, data_dir=tmp_path, out=tmp_path)
    assert stopped.value.exit_code == 1
    output = capsys.readouterr().out
    assert "numpy failed: wrong data: row 7" in output
    assert json.loads(output.splitlines()[-1])["failed"] == ["numpy"]


def test_the_readme_describes_every_alternative_and_every_column() -> None:
    first_cells = {
        name.strip(" `")
        for line in (BENCHMARKS / "README.md").read_text().splitlines()
        if line.startswith("| ")
        for name in line.split("|")[1].split(",")
    }
    columns = {figure.heading.replace("\n", " ").replace(" /", "/") for figure in report.FIGURES}
    columns = {column for column in columns if not column.startswith("next()")} | {"next() p50"}
    assert set(alternatives.ALTERNATIVES) | columns <= first_cells


def test_a_missing_package_is_named() -> None:
    alternative = alternatives.Alternative("x", "loader", "", "nowhere:Nothing", ("json", "no_such_package.part"))
    assert alternative.missing_package() == "no_such_package"


def test_names_are_chosen_in_the_list_s_order_and_unknown_ones_refused() -> None:
    chosen = alternatives.choose(["memmap", "numpy", "grain"], ["grain"])
    assert [alternative.name for alternative in chosen] == ["numpy", "memmap"]
    with pytest.raises(ValueError, match="nump; expected some of numpy, "):
        alternatives.choose(["nump"], [])


def test_medians_spread_noise_and_goals(tmp_path: Path) -> None:
    """Three rounds written by hand, the whole summary worked out by hand."""

    def figures(rate: float, cpu: float, main: float, resume: float | None) -> dict[str, Any]:
        return {
            "tokens_per_s": rate,
            "cpu_s_per_mtok": cpu,
            "main_thread_cpu_s_per_batch": main,
            "first_batch_s": 0.2,
            "resume_s": resume,
            "unshared_added_mb": 120.0 if resume else 90.0,
            "close_s": 0.004,
        }

    def entry(kind: str, *rounds: dict[str, Any]) -> dict[str, Any]:
        return {"kind": kind, "summary": "", "rounds": list(rounds)}

    results = {
        "numpy": entry("yardstick", *(figures(rate, 0.004, 0.1, None) for rate in (90.0, 100.0, 110.0))),
        "dali_pipes": entry("ours", *(figures(rate, 0.005, 0.02, 0.01) for rate in (84.0, 60.0, 90.0))),
        "dali_pipes_mapped": entry("ours", figures(100.0, 0.0048, 0.02, 0.01)),
        "torch_batches_0": entry("loader", figures(60.0, 0.004, 0.1, None)),
        "torch_dataloader_0": entry("loader", figures(80.0, 0.004, 0.1, None)),
    }
    work = make_work(tmp_path, range(41), batch_size=2)
    run = report.summarise(work, results)
    assert (work.epoch_batches, work.resume_batch) == (5, 4)
    assert results["numpy"]["skip_to_resume_s_estimate"] == 4 * 2 * T / 100
    ours = run["alternatives"]["dali_pipes"]
    assert [ours[part]["tokens_per_s"] for part in ("low", "median", "high")] == [60.0, 84.0, 90.0]
    assert run["noise"] == {"numpy": pytest.approx(0.2), "dali_pipes": pytest.approx(30 / 84)}
    assert [(goal["goal"], goal["measured"], goal["wanted"], goal["met"]) for goal in run["goals"]] == [
        ("first batch, s", 0.2, "<= 0.015", False),
        ("resume at 80 %, s", 0.01, "<= 0.015", True),
        ("close, s", 0.004, "<= 0.005", True),
        ("memory added beyond the smallest other loader's, MB", 30.0, "<= 20", False),
        ("CPU s per Mtok against numpy", pytest.approx(1.25), "<= 1.5", True),
        ("tokens/s against torch_dataloader_0 (fastest other loader)", pytest.approx(1.05), ">= 1.2", False),
        (
            "tokens/s against torch_dataloader_0 (fastest other loader), reads mapped",
            pytest.approx(1.25),
            ">= 1.1",
            True,
        ),
        ("CPU s per Mtok against numpy, reads mapped", pytest.approx(1.2), "<= 1.1", False),
        ("main-thread CPU a batch against torch_dataloader_0", pytest.approx(0.2), "<= 0.333", True),
    ]


def test_the_tree_s_memory_and_processes_are_seen() -> None:
    before = process.tree_memory_bytes()
    held = np.ones(1 << 23)  # 64 MiB
    after = process.tree_memory_bytes()
    assert after["unshared"] - before["unshared"] >= 0.9 * held.nbytes
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        assert other.pid in process.descendants()
        other.communicate(b"\n")
    assert other.pid not in process.descendants()


def test_a_meter_counts_our_work_and_that_of_ended_children() -> None:
    meter = process.CpuMeter()
    script = "import time\nwhile time.process_time() < 0.3: pass"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert meter.elapsed_s() >= 0.28


def test_a_sparse_corpus_has_its_length_and_no_blocks(tmp_path: Path) -> None:
    (path,) = start_resume.sparse_corpus(tmp_path, 10**8)
    assert path.stat().st_size == 2 * 10**8
    assert path.stat().st_blocks * 512 < 10**6
