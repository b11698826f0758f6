"""The training demo at tiny size: what it leaves behind, exact resume, refusals, and that it learns."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import train_gpt
from checkpoint import NAME, load_checkpoint, save_checkpoint
from trainer import Plan, Trainer, learning_rate
from typer.testing import CliRunner

from dali_pipes import LoaderConfig, TokenLoader

SCRIPT = Path(train_gpt.__file__)
SOURCES = ["words", "noise"]
TINY = ["--model", "tiny", "--device", "cpu", "--val-batches", "2"]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Threads that wait for each other make tiny steps slow on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """193 tokens of 128 different ones: 174 for training, which are 10 rows of 16, 5 batches an epoch."""
    path = tmp_path / "corpus.bin"
    np.random.default_rng(0).integers(0, 128, 193).astype("<u2").tofile(path)
    return path


@pytest.fixture
def config(tmp_path: Path, corpus: Path) -> Path:
    path = tmp_path / "loader.toml"
    path.write_text(
        f'corpus = "{corpus}"\nvocab_size = 128\nvalidation_fraction = 0.1\nbatch_size = 2\nseq_len = 16\nseed = 3\n'
    )
    return path


@pytest.fixture
def mixture_config(tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Beside the corpus, which it names by a path that is relative to the working directory."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mixture.toml"
    path.write_text(
        "vocab_size = 128\nvalidation_fraction = 0.1\nbatch_size = 2\nseq_len = 16\nseed = 3\ntotal_steps = 12\n"
        f'[mixture.words]\ncorpus = "{corpus.name}"\nweight = 0.5\n'
        '[mixture.noise]\ncorpus = "synthetic:400"\nweight = 0.5\n'
    )
    return path


def run(*options: str | Path, code: int = 0) -> dict[str, Any]:
    """Run the script in this process; returns its line of JSON, or the error under "error"."""
    result = CliRunner().invoke(train_gpt.app, [str(option) for option in options])
    assert result.exit_code == code, result.output + repr(result.exception)
    if code:
        return {"error": result.stderr}
    summary: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return summary


def metrics(folder: Path) -> list[tuple[int, str, float]]:
    """(step, kind, loss) of every line: all that must be equal in two runs."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], kind, line[kind]) for line in lines for kind in ("loss", "val_loss") if kind in line]


def by_source(folder: Path) -> list[tuple[int, dict[str, float], dict[str, float]]]:
    """(step, training losses, validation losses) of every line that has them."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    names = ("step", "loss_by_source", "val_loss_by_source")
    return [(line[names[0]], line[names[1]], line[names[2]]) for line in lines if names[1] in line]


def losses(folder: Path) -> list[float]:
    return [loss for _, kind, loss in metrics(folder) if kind == "loss"]


def assert_same_run(left: Path, right: Path) -> None:
    """Equal losses, and equal parameters, optimizer and place in the data at the end; bit for bit."""
    assert metrics(left) == metrics(right)
    a, b = load_checkpoint(left), load_checkpoint(right)
    assert a["loader"] == b["loader"]
    assert a["model"].keys() == b["model"].keys()
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])
    assert a["optimizer"]["param_groups"] == b["optimizer"]["param_groups"]
    for parameter, state in a["optimizer"]["state"].items():
        assert all(torch.equal(value, b["optimizer"]["state"][parameter][name]) for name, value in state.items())


def test_the_script_runs_from_any_folder_and_leaves_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `make demo` runs it, but for the size: the shipped mixture, the results under the working directory."""
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(train_gpt.app, [*TINY, "--steps", "4", "--val-every", "2"])
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert any("sample of the trained model" in line for line in lines)
    summary = json.loads(lines[-1])
    assert {name: summary[name] for name in ("model", "device", "steps", "finished", "tokens")} == {
        "model": "tiny",
        "device": "cpu",
        "steps": 4,
        "finished": True,
        "tokens": 4 * 2 * 16,
    }
    assert summary["rating"] == "not rated", "four steps are too few"
    assert 0 <= summary["data_wait_pct"] <= 100
    folder = tmp_path / "runs" / "demo"
    assert sorted(path.name for path in folder.iterdir()) == [NAME, "metrics.jsonl", "training.png"]
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [(step, kind) for step, kind, _ in metrics(folder)] == [
        (0, "val_loss"),
        (1, "loss"),
        (2, "loss"),
        (2, "val_loss"),
        (3, "loss"),
        (4, "loss"),
        (4, "val_loss"),
    ]
    assert summary["val_loss"] == metrics(folder)[-1][2]
    assert summary["train_loss"] == pytest.approx(np.mean(losses(folder)))
    checkpoint = load_checkpoint(tmp_path / summary["checkpoint"])
    assert checkpoint["step"] == 4
    assert checkpoint["loader"]["mixture"]["place"] == 8
    sources = summary["sources"]
    assert {name: use["asked_share"] for name, use in sources.items()} == {"plays": 0.6, "code": 0.4}
    assert sum(use["tokens"] for use in sources.values()) == summary["tokens"]
    assert sum(use["share"] for use in sources.values()) == pytest.approx(1)
    for name, use in sources.items():
        assert use["share"] == use["tokens"] / summary["tokens"]
        assert [line for line in lines if name in line and f"{use['val_loss']:.3f}" in line]


def test_interrupted_and_resumed_twice_equals_unbroken(tmp_path: Path, config: Path) -> None:
    """Stops within the first epoch of 5 batches and within the second; one resume goes over the border."""
    options = [*TINY, "--config", str(config), "--steps", "12", "--val-every", "4"]
    run(*options, "--out", tmp_path / "unbroken")
    broken = tmp_path / "broken"
    first = run(*options, "--out", broken, "--stop-after", "3")
    assert (first["steps"], first["finished"]) == (3, False)
    assert losses(broken) == losses(tmp_path / "unbroken")[:3]
    second = run("--resume", broken, "--device", "cpu", "--stop-after", "7")
    assert (second["steps"], second["finished"]) == (7, False)
    third = run("--resume", broken / NAME, "--device", "cpu")
    assert (third["steps"], third["finished"]) == (12, True)
    assert len(losses(broken)) == 12
    assert_same_run(tmp_path / "unbroken", broken)


def test_a_mixture_resumed_from_another_folder_equals_unbroken(
    tmp_path: Path, mixture_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its corpora are relative paths and generated tokens. Stops where losses by source have just been shown."""
    options = [*TINY, "--config", mixture_config.name, "--steps", "12", "--val-every", "3"]
    run(*options, "--out", tmp_path / "unbroken")
    run(*options, "--out", tmp_path / "broken", "--stop-after", "6")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    summary = run("--resume", tmp_path / "broken", "--device", "cpu")
    assert (summary["steps"], summary["finished"]) == (12, True)
    assert_same_run(tmp_path / "unbroken", tmp_path / "broken")
    assert by_source(tmp_path / "broken") == by_source(tmp_path / "unbroken")
    assert [step for step, *_ in by_source(tmp_path / "broken")] == [0, 3, 6, 9, 12]


def test_losses_by_source_are_those_of_its_rows(tmp_path: Path, mixture_config: Path) -> None:
    """With a line after every step: its losses, weighted by the rows of their sources, are the loss of the step."""
    summary = run(*TINY, "--config", mixture_config, "--steps", "10", "--val-every", "1", "--out", tmp_path / "run")
    outputs = ("source_ids",)
    with TokenLoader(LoaderConfig.from_file(mixture_config), outputs=outputs, repeat=True, quiet=True) as loader:
        expected = [Counter(batch["source_ids"].tolist()) for batch in itertools.islice(loader, 10)]
    lines = by_source(tmp_path / "run")[1:]
    for rows, loss, (_, training, _) in zip(expected, losses(tmp_path / "run"), lines, strict=True):
        assert list(training) == [SOURCES[number] for number in sorted(rows)]
        assert sum(training[SOURCES[number]] * count for number, count in rows.items()) == pytest.approx(2 * loss)
    assert len({len(rows) for rows in expected}) == 2, "some steps have rows of both sources"
    used = sum(expected, Counter())
    assert {name: use["tokens"] for name, use in summary["sources"].items()} == {
        name: 16 * used[number] for number, name in enumerate(SOURCES)
    }


def test_validation_by_source_is_that_of_the_source_alone(tmp_path: Path, mixture_config: Path) -> None:
    """Before the first step, when the models are equal; and both together are the validation loss."""
    run(*TINY, "--config", mixture_config, "--steps", "1", "--out", tmp_path / "mixed")
    _, training, together = by_source(tmp_path / "mixed")[0]
    assert training == {}
    text = mixture_config.read_text()
    labels = {}
    for name, corpus in {"words": tmp_path / "corpus.bin", "noise": "synthetic:400"}.items():
        alone = tmp_path / f"{name}.toml"
        alone.write_text(f'corpus = "{corpus}"\n{text[: text.index("[")].replace("total_steps = 12", "")}')
        run(*TINY, "--config", alone, "--steps", "1", "--out", tmp_path / name)
        assert by_source(tmp_path / name) == []
        assert metrics(tmp_path / name)[0][:2] == (0, "val_loss")
        assert metrics(tmp_path / name)[0][2] == pytest.approx(together[name])
        with TokenLoader(LoaderConfig.from_file(alone), split="validation", shuffle=False, drop_last=False) as loader:
            found = [int((batch["labels"] != -100).sum()) for batch in loader]
        labels[name] = sum(found[:2])
    mean = sum(labels[name] * together[name] for name in labels) / sum(labels.values())
    assert metrics(tmp_path / "mixed")[0][2] == pytest.approx(mean)


def test_a_mixture_without_validation_shows_training_losses(tmp_path: Path, mixture_config: Path) -> None:
    mixture_config.write_text(mixture_config.read_text().replace("validation_fraction = 0.1\n", ""))
    summary = run(*TINY, "--config", mixture_config, "--steps", "4", "--val-every", "2", "--out", tmp_path / "run")
    assert summary["val_loss"] is None
    assert {use["val_loss"] for use in summary["sources"].values()} == {None}
    assert [(step, validation) for step, _, validation in by_source(tmp_path / "run")] == [(2, {}), (4, {})]


def test_a_checkpoint_from_the_middle_replays_the_rest(tmp_path: Path, config: Path) -> None:
    """A run that died after its checkpoint loses the steps behind it, and makes the same ones again."""
    options = [*TINY, "--config", str(config), "--steps", "10", "--checkpoint-every", "4"]
    run(*options, "--out", tmp_path / "unbroken")
    run(*options, "--out", tmp_path / "died", "--stop-after", "4")
    kept = (tmp_path / "died" / NAME).read_bytes()
    run("--resume", tmp_path / "died", "--device", "cpu", "--stop-after", "6")
    (tmp_path / "died" / NAME).write_bytes(kept)
    run("--resume", tmp_path / "died", "--device", "cpu", "--out", tmp_path / "again")
    assert_same_run(tmp_path / "unbroken", tmp_path / "again")


def assert_it_goes_on(options: Sequence[str], folder: Path, stopped: dict[str, Any]) -> None:
    """From the checkpoint that a signal left in folder / "broken"."""
    assert stopped["steps"] >= 1
    assert not stopped["finished"]
    until = str(stopped["steps"] + 3)
    run("--resume", folder / "broken", "--device", "cpu", "--stop-after", until)
    run(*options, "--out", folder / "unbroken", "--stop-after", until)
    assert_same_run(folder / "unbroken", folder / "broken")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_with_a_checkpoint_that_goes_on_exactly(
    tmp_path: Path, config: Path, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*TINY, "--config", str(config), "--steps", "1000000", "--val-every", "1000000"]
    train_step = Trainer._train_step

    def signalled(self: Trainer, batch: dict[str, torch.Tensor]) -> None:
        train_step(self, batch)
        if self.step == 4:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "_train_step", signalled)
        result = CliRunner().invoke(train_gpt.app, [*options, "--out", str(tmp_path / "broken")])
    assert result.exit_code == 128 + number
    assert_it_goes_on(options, tmp_path, json.loads(result.stdout.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_process(tmp_path: Path, config: Path, number: signal.Signals) -> None:
    options = [*TINY, "--config", str(config), "--steps", "1000000", "--val-every", "1000000"]
    command = [sys.executable, str(SCRIPT), *options, "--out", str(tmp_path / "broken")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as in this process: sums depend on how they are split
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("step"):  # the first validation: training has begun
                break
        process.send_signal(number)
        output = process.stdout.read()
    assert process.returncode == 128 + number
    assert_it_goes_on(options, tmp_path, json.loads(output.splitlines()[-1]))


def test_a_finished_run_resumed_has_nothing_left_to_do(tmp_path: Path, config: Path) -> None:
    run(*TINY, "--config", config, "--steps", "3", "--out", tmp_path / "run")
    before = metrics(tmp_path / "run")
    summary = run("--resume", tmp_path / "run", "--device", "cpu")
    assert (summary["steps"], summary["finished"]) == (3, True)
    assert metrics(tmp_path / "run") == before


def test_a_new_run_in_the_same_folder_keeps_the_old_checkpoint(tmp_path: Path, config: Path) -> None:
    run(*TINY, "--config", config, "--steps", "2", "--out", tmp_path / "run")
    first = load_checkpoint(tmp_path / "run")
    run(*TINY, "--config", config, "--steps", "3", "--out", tmp_path / "run")
    assert load_checkpoint(tmp_path / "run")["step"] == 3
    assert load_checkpoint(tmp_path / "run" / f"previous_{NAME}")["step"] == first["step"] == 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--batch-size", "4"], ["batch_size: saved 2, now 4"]),
        (["--model", "small", "--batch-size", "2"], ["model: saved 'tiny', now 'small'"]),
        (["--seq-len", "8"], ["seq_len: saved 16, now 8"]),
        (["--seed", "4"], ["seed: saved 3, now 4"]),
        (["--learning-rate", "1"], ["learning_rate: saved 0.003, now 1.0"]),
    ],
)
def test_options_that_would_change_the_run_are_refused(
    tmp_path: Path, config: Path, options: Sequence[str], expected: Sequence[str]
) -> None:
    run(*TINY, "--config", config, "--steps", "4", "--stop-after", "2", "--out", tmp_path / "run")
    kept = (tmp_path / "run" / NAME).read_bytes()
    error = run("--resume", tmp_path / "run", "--device", "cpu", *options, code=1)["error"]
    assert "\nerror: " in f"\n{error}"  # behind the start line, where a loader was built by then
    assert all(text in error for text in expected), error
    assert (tmp_path / "run" / NAME).read_bytes() == kept


def test_another_corpus_is_refused_by_the_loader(tmp_path: Path, config: Path, corpus: Path) -> None:
    run(*TINY, "--config", config, "--steps", "4", "--stop-after", "2", "--out", tmp_path / "run")
    tokens = np.fromfile(corpus, "<u2")
    tokens[0] ^= 1
    tokens.tofile(corpus)
    error = run("--resume", tmp_path / "run", "--device", "cpu", code=1)["error"]
    assert "corpus.bin" in error
    assert "changed" in error


def test_damaged_and_foreign_checkpoints_are_refused(tmp_path: Path, config: Path) -> None:
    run(*TINY, "--config", config, "--steps", "2", "--out", tmp_path / "run")
    whole = (tmp_path / "run" / NAME).read_bytes()
    (tmp_path / "cut.pt").write_bytes(whole[: len(whole) // 2])
    middle = len(whole) // 2
    (tmp_path / "flipped.pt").write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    torch.save({"state_dict": {}}, tmp_path / "foreign.pt")
    for name in ("cut.pt", "flipped.pt", "foreign.pt", "missing.pt"):
        error = run("--resume", tmp_path / name, "--device", "cpu", code=1)["error"]
        assert error.startswith(f"error: {tmp_path / name}: "), error


def test_a_checkpoint_of_another_vocabulary_is_refused(tmp_path: Path, config: Path) -> None:
    run(*TINY, "--config", config, "--steps", "2", "--out", tmp_path / "run")
    content = load_checkpoint(tmp_path / "run")
    content["job"]["loader"]["vocab_size"] = 500
    save_checkpoint(tmp_path / "other.pt", content)
    error = run("--resume", tmp_path / "other.pt", "--device", "cpu", code=1)["error"]
    assert "vocab_size: saved 128, now 512" in error


def test_bad_settings_are_one_line_and_no_traceback(tmp_path: Path) -> None:
    for options, expected in (
        (["--corpus", str(tmp_path / "none.bin")], "none.bin"),
        (["--batch-size", "0"], "batch_size"),
        (["--config", str(tmp_path / "none.toml")], "none.toml"),
    ):
        error = run(*TINY, *options, "--out", tmp_path / "run", code=1)["error"]
        assert error.startswith("error: ")
        assert expected in error


def test_without_a_validation_share_there_is_no_validation(tmp_path: Path, config: Path) -> None:
    config.write_text(config.read_text().replace("validation_fraction = 0.1\n", ""))
    summary = run(*TINY, "--config", config, "--steps", "3", "--out", tmp_path / "run")
    assert summary["val_loss"] is None
    assert [kind for _, kind, _ in metrics(tmp_path / "run")] == ["loss"] * 3


def test_the_model_learns_a_corpus_that_repeats(tmp_path: Path) -> None:
    """Ten ids in a fixed circle: from log(128) = 4.85 nats nearly to none."""
    np.tile(np.arange(10, dtype="<u2"), 400).tofile(tmp_path / "circle.bin")
    (tmp_path / "loader.toml").write_text(
        'corpus = "circle.bin"\nvocab_size = 128\nvalidation_fraction = 0.1\nbatch_size = 8\nseq_len = 16\n'
    )
    here = Path.cwd()
    os.chdir(tmp_path)
    try:
        options = [*TINY, "--config", "loader.toml", "--steps", "150", "--learning-rate", "0.02", "--out", "run"]
        summary = run(*options)
    finally:
        os.chdir(here)
    assert losses(tmp_path / "run")[0] > 4
    assert summary["val_loss"] < 0.2
    assert summary["train_loss"] < 0.2


def test_the_learning_rate_rises_and_falls_as_documented() -> None:
    plan = Plan(steps=100, learning_rate=1.0, beta2=0.99, val_every=1, val_batches=1)
    rates = [learning_rate(plan, step) for step in range(101)]
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates[5 + 95 // 2] == pytest.approx(0.55, abs=0.01)
    assert rates[100] == pytest.approx(0.1)
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert learning_rate(Plan(1, 1.0, 0.99, 1, 1), 0) == 1.0
