import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from commands import one_line_error, run, run_well
from counting import CountingCorpus

from dali_pipes import LoaderConfig, TokenLoader, __version__, open_corpus

Counting = Callable[..., CountingCorpus]
BASE = 'corpus = "data/*.bin"\nbatch_size = 4\nseq_len = 16\ndtype = "uint32"\n'


@pytest.fixture
def base(tmp_path: Path) -> Path:
    path = tmp_path / "base.toml"
    path.write_text(BASE)
    return path


def test_version() -> None:
    assert run_well("--version") == f"dali-pipes {__version__}\n"


def test_no_command_shows_the_commands() -> None:
    result = run()
    assert result.exit_code == 2
    assert all(
        name in result.output for name in ("inspect", "check", "config", "locate", "explain", "preview", "tokenize")
    )


def test_inspect_shows_what_the_corpus_says(counting: Counting) -> None:
    corpus = counting(100, 50, 25, dtype="uint16")
    rows = dict(re.findall(r"^│ ([\w ]+?) +│ (.*?) +│$", run_well("inspect", corpus.pattern), re.MULTILINE))
    assert rows == {
        "format": "flat",
        "files": "3 (shard_000.bin to shard_002.bin)",
        "tokens": "175",
        "bytes": "350",
        "documents": rows["documents"],
        "dtype": "uint16",
        "largest id": rows["largest id"],
        "fingerprint": open_corpus(corpus.pattern).fingerprint,
    }
    assert rows["documents"].startswith("unknown")
    assert rows["largest id"].startswith("174 ")


def test_inspect_takes_several_paths_a_format_and_a_dtype(counting: Counting) -> None:
    corpus = counting(6, 4, dtype="int64")
    shown = run_well("inspect", *corpus.files, "--format", "flat", "--dtype", "int64")
    assert re.search(r"tokens +│ 10 ", shown)
    assert re.search(r"dtype +│ int64 ", shown)


def test_inspect_takes_brackets_in_a_name_as_they_are(tmp_path: Path) -> None:
    """The table is drawn by a library that has a markup of its own."""
    path = tmp_path / "a[red]b.bin"
    np.arange(9, dtype=np.uint16).tofile(path)
    assert "1 (a[red]b.bin)" in run_well("inspect", path)


def test_config_prints_a_file_that_loads_again(base: Path, tmp_path: Path) -> None:
    (tmp_path / "more.json").write_text('{"num_threads": 3, "seed": 1}')
    printed = run_well("config", base, tmp_path / "more.json", "--set", "seed=7", "--set", "split=train")
    again = tmp_path / "again.toml"
    again.write_text(printed)
    assert LoaderConfig.from_file(again) == LoaderConfig.from_file(base, num_threads=3, seed=7)


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("seed=0x10", "seed", 16),
        ("shuffle=false", "shuffle", False),
        ("validation_fraction=0.25", "validation_fraction", 0.25),
        ('outputs=["labels"]', "outputs", ["labels"]),
        ("corpus=/a/b=c.bin", "corpus", ["/a/b=c.bin"]),  # the first = separates
        ('corpus="17"', "corpus", ["17"]),
        ("format = flat", "format", "flat"),
    ],
)
def test_a_setting_is_toml_or_else_text(base: Path, text: str, name: str, value: object) -> None:
    assert tomllib.loads(run_well("config", base, "--set", text))[name] == value


def test_none_takes_a_setting_back_to_its_default(base: Path) -> None:
    assert "dtype" not in tomllib.loads(run_well("config", base, "--set", "dtype=none"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "batch_sise=3"], "did you mean 'batch_size'"),
        (["--set", "num_workers=3"], "did you mean 'num_threads'"),
        (["--set", "pin_memory=true"], "pin_memory"),
        (["--set", "batch_size=0"], "batch_size"),
        (["--set", "batch_size=0", "--set", "seq_len=none"], "seq_len"),
        (["--set", "batch_size"], "--set batch_size: "),
        (["missing.toml"], r"missing\.toml: "),
    ],
)
def test_a_bad_configuration_is_one_line(base: Path, arguments: list[str], message: str) -> None:
    assert re.search(message, one_line_error("config", base, *arguments))


def test_a_parser_that_reports_on_several_lines_gets_one(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("a: [1,\nb: }")
    message = one_line_error("config", tmp_path / "bad.yaml")
    assert "bad.yaml: " in message
    assert "YAML" in message


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("inspect", "nothing/here.bin"), "nothing/here.bin"),
        (("inspect", __file__, "--format", "nonesuch"), "nonesuch"),
    ],
)
def test_a_bad_corpus_is_one_line(command: tuple[str, ...], message: str) -> None:
    assert message in one_line_error(*command)


@pytest.mark.parametrize("epoch", [0, 3])
def test_locate_finds_the_tokens_that_the_loader_serves(base: Path, counting: Counting, epoch: int) -> None:
    corpus = counting(300, 500)
    config = LoaderConfig.from_file(base, corpus=corpus.pattern, device="cpu", rank=1, world_size=2)
    with TokenLoader(config) as loader:
        loader.load_state_dict({**loader.state_dict(), "epoch": epoch})
        batches = list(loader)
    for step, row in [(0, 0), (2, 3), (len(batches) - 1, 1)]:
        settings = ["--set", f"corpus={corpus.pattern}", "--rank", 1, "--world-size", 2, "--epoch", epoch]
        printed = run_well("locate", base, *settings, "--step", step, "--row", row)
        place = dict(line.split(maxsplit=1) for line in printed.replace(",", "").splitlines())
        assert list(place) == ["file", "offset", "source", "position", "row_id"]
        first = batches[step]["input_ids"][row, 0].item()
        assert np.fromfile(place["file"], np.uint32)[int(place["offset"])] == first
        assert int(place["position"]) == first  # in a counting corpus a token is its own position


def test_locate_needs_no_gpu_even_for_a_gpu_preset(base: Path, counting: Counting) -> None:
    corpus = counting(100)
    settings = ["--set", f"corpus={corpus.pattern}", "--set", "device=cuda", "--set", "placement=device"]
    assert "position" in run_well("locate", base, *settings, "--step", 0, "--row", 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", 99, "--row", 0], "step 99"),
        (["--step", 0, "--row", 4], "row 4"),
        (["--step", 0, "--row", 0, "--epoch", -1], "epoch -1"),
        (["--step", 0, "--row", 0, "--rank", 1], "--rank 1: "),
        (["--step", 0, "--row", 0, "--set", "seq_len=5000"], "5000"),
    ],
)
def test_a_row_that_does_not_exist_is_one_line(
    base: Path, counting: Counting, arguments: list[object], message: str
) -> None:
    corpus = counting(100)
    assert message in one_line_error("locate", base, "--set", f"corpus={corpus.pattern}", *arguments)


def test_the_installed_command_reports_without_a_traceback(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).with_name("dali-pipes")), "inspect", "none.bin"]
    result = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env={"PATH": os.defpath}
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"error: .*none\.bin: [^\n]+\n", result.stderr)
