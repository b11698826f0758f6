"""What a command makes of its arguments: configuration files, presets, data; and whom it blames for a mistake."""

import json
import re
import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import one_line_error, run, run_json, run_well
from counting import CountingCorpus
from row_oracle import END, write_documents
from shard_files import write_litdata

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.config.settings_files import presets
from dali_pipes.errors import ConfigError

Counting = Callable[..., CountingCorpus]
COMMANDS = ["preview", "explain", "locate", "config", "inspect", "check", "tokenize"]
STEPS = {"preview": [], "explain": ["--step", 0], "locate": ["--step", 0, "--row", 0], "config": []}
SHAPE = ["--batch-size", 2, "--seq-len", 8]


@pytest.fixture
def base(tmp_path: Path, counting: Counting) -> Path:
    path = tmp_path / "base.toml"
    path.write_text(f'corpus = "{counting(100, 50).pattern}"\nbatch_size = 4\nseq_len = 16\ndtype = "uint32"\n')
    return path


def first_ids(shown: dict[str, Any]) -> list[list[int]]:
    return [row["input_ids"] for row in shown["rows"]]


def test_data_needs_no_configuration(counting: Counting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file, several, a folder, a pattern, or what is by formula: as a loader on the same serves it."""
    corpus = counting(60, 70, dtype="uint16")
    folder = Path(corpus.files[0]).parent
    monkeypatch.chdir(folder.parent)
    for data in ([*corpus.files], [folder], [corpus.pattern], [f"{folder.name}/*.bin"], ["synthetic:1K"]):
        shown = run_json("preview", *data, *SHAPE, "--step", 1)
        with TokenLoader(corpus=[str(path) for path in data], batch_size=2, seq_len=8, device="cpu") as loader:
            assert first_ids(shown) == list(loader)[1]["input_ids"].tolist()
        assert run_json("explain", *data, *SHAPE, "--step", 1)["rows"][0]["pieces"] != []
        assert run_json("locate", *data, *SHAPE, "--step", 1, "--row", 1)["row"] == 1
        assert run_json("config", *data, *SHAPE)["corpus"] == [str(path) for path in data]


def test_data_takes_the_place_of_that_of_a_file_or_preset(base: Path, counting: Counting) -> None:
    other = counting(500, dtype="uint32")
    shown = run_json("preview", base, *other.files, "--set", "shuffle=false", "--rows", 1)
    assert first_ids(shown) == [other.tokens[:16].tolist()]
    printed = tomllib.loads(run_well("config", *other.files, "gpt2_124m", "--batch-size", 3))
    assert (printed["corpus"], printed["batch_size"]) == ([str(path) for path in other.files], 3)
    assert (printed["seq_len"], printed["eos_id"]) == (1024, 50256)


@pytest.mark.parametrize("command", STEPS)
def test_data_without_the_shape_of_a_batch_is_told_from_a_configuration(
    command: str, counting: Counting, tmp_path: Path
) -> None:
    file = counting(100).files[0]
    indexed = tmp_path / "set"
    write_litdata(indexed, [[np.arange(5)]])
    for data in (file, Path(file).parent, indexed, indexed / "index.json", "data/*.bin", "synthetic:1B"):
        message = one_line_error(command, data, *STEPS[command])
        assert message.startswith(f"error: {data}: ")
        assert f"`dali-pipes {command} {data} --batch-size 8 --seq-len 1024`" in message
    assert f"dali-pipes {command} {file}" in one_line_error(command, file, *STEPS[command], "--batch-size", 2)


@pytest.mark.parametrize("command", STEPS)
def test_tokens_of_a_batch_stand_for_its_rows(command: str, tmp_path: Path) -> None:
    write_documents(tmp_path / "data", [[1] * length + [END] for length in (3, 7, 2, 9)])
    shape = {"dtype": "uint16", "eos_id": END, "rows": "pad", "batch_tokens": 16, "seq_len": 8}
    run_well(command, tmp_path / "data", *STEPS[command], *(f"--set={name}={value}" for name, value in shape.items()))


@pytest.mark.parametrize("command", STEPS)
@pytest.mark.parametrize(
    ("wrong", "meant"), [("seqlen", "seq_len"), ("batchsize", "batch_size"), ("shufle", "shuffle")]
)
def test_a_misspelled_setting_of_data_is_named(command: str, counting: Counting, wrong: str, meant: str) -> None:
    """Not the shape of a batch, which is missing for no other reason."""
    for more in ([], ["--set", "batch_size=2"], ["--batch-size", 2]):
        message = one_line_error(command, counting(100).files[0], *STEPS[command], "--set", f"{wrong}=4", *more)
        assert message.startswith(f"error: --set {wrong}=4: ")
        assert meant in message


@pytest.mark.parametrize("command", STEPS)
@pytest.mark.parametrize("given", ["seq_len=16", "batch_size=2", "corpus=my data"])
def test_a_setting_without_its_option_is_told_the_option(command: str, counting: Counting, given: str) -> None:
    message = one_line_error(command, counting(100).files[0], given, *STEPS[command])
    assert message.startswith(f"error: {given}: ")
    assert message.strip().endswith(f"--set {shlex.quote(given)}")


@pytest.mark.parametrize("command", STEPS)
def test_an_argument_that_is_nothing_is_told_the_presets(command: str) -> None:
    message = one_line_error(command, "h1000", *STEPS[command])
    assert message.startswith("error: h1000: ")
    assert all(name in message for name in presets())


def test_data_of_text_is_previewed_with_its_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    library = Tokenizer(models.WordLevel({"<|endoftext|>": 0, "one": 1, "two": 2, "?": 3}, "?"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.jsonl").write_text('{"text": "one two two one"}\n' * 4)
    given = [tmp_path / "a.jsonl", "--batch-size", 1, "--seq-len", 5, "--set", "shuffle=false"]
    assert first_ids(run_json("preview", *given, "--tokenizer", tmp_path / "tokenizer.json")) == [[1, 2, 2, 1, 0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "batch_size=0"], "--set batch_size=0: batch_size: "),
        (["--set", "batch_sise=3"], "--set batch_sise=3: "),
        (["--set", "num_workers=3"], "--set num_workers=3: "),
        (["--set", "seq_len=none"], "--set seq_len=none: seq_len: "),
        (["--set", "seed=1", "--set", "seed=-1"], "--set seed=-1: seed: "),
        (["--set", "rows=pack", "--set", "stride=4"], "--set rows=pack, --set stride=4: "),
        (["--set", "split=validation"], "--set split=validation: "),
        (["--set", "mtp=1", "--set", "label_shift=false"], "--set mtp=1, --set label_shift=false: "),
        (["--batch-size", 0], "--batch-size 0: batch_size: "),
        (["--seq-len", -3], "--seq-len -3: seq_len: "),
    ],
)
@pytest.mark.parametrize("command", STEPS)
def test_a_mistake_on_the_command_line_is_not_blamed_on_the_file(
    base: Path, command: str, arguments: list[object], message: str
) -> None:
    assert one_line_error(command, base, *STEPS[command], *arguments).startswith(f"error: {message}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rank", 2, "--world-size", 2], "--rank 2, --world-size 2: "),
        (["--rank", -1, "--world-size", 2], "--rank -1: rank: "),
        (["--rank", 0, "--world-size", 0], "--world-size 0: world_size: "),
        (["--rank", 1], "--rank 1: "),
        (["--set", "rank=1"], "--set rank=1: "),
    ],
)
@pytest.mark.parametrize("command", ["preview", "explain", "locate"])
def test_a_wrong_rank_is_not_blamed_on_the_file(
    base: Path, command: str, arguments: list[object], message: str
) -> None:
    assert one_line_error(command, base, *STEPS[command], *arguments).startswith(f"error: {message}")


def test_half_a_rank_is_blamed_on_the_file_that_has_it(base: Path) -> None:
    with base.open("a") as file:
        file.write("rank = 0\n")
    assert one_line_error("preview", base).startswith(f"error: {base}: ")


def test_the_rank_of_a_file_may_be_replaced_alone(base: Path) -> None:
    with base.open("a") as file:
        file.write("rank = 0\nworld_size = 2\n")
    assert run_json("preview", base, "--rank", 1)["rank"] == 1


def test_a_mistake_is_blamed_on_the_file_that_has_it(base: Path, tmp_path: Path) -> None:
    """On the last one that says it, also where the command line says other things."""
    worse = tmp_path / "worse.json"
    worse.write_text('{"batch_size": -1, "num_threads": 0}')
    message = one_line_error("config", base, worse, "--set", "seed=1")
    assert message.startswith(f"error: {worse}: batch_size: ")
    assert re.search(r"\b-?1\b.*; num_threads: ", message)
    assert str(base) not in message
    assert one_line_error("config", base, worse, "--batch-size", 1).startswith(f"error: {worse}: num_threads: ")
    mixed = one_line_error("config", base, worse, "--batch-size", 0)
    assert re.match(rf"error: --batch-size 0: batch_size: .*; {worse}: num_threads: ", mixed)
    worse.write_text('{"rows": "pack"}')
    assert one_line_error("config", base, worse, "--set", "stride=3").startswith(f"error: {worse}, --set stride=3: ")
    worse.write_text('{"label_shift": false, "shuffle": false}')
    for name in ("rows=pack", "mtp=1", 'outputs=["loss_mask"]'):
        assert one_line_error("config", base, worse, "--set", "seed=1", "--set", name).startswith(
            f"error: {worse}, --set {name}: "
        )
    worse.write_text('{"batch_sise": 1}')
    assert one_line_error("config", base, worse).startswith(f"error: {worse}: ")


def test_what_is_missing_is_missing_in_all_files(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.toml").write_text("batch_size = 2\n")
    message = one_line_error("config", tmp_path / "a.toml", tmp_path / "b.toml")
    assert message.startswith(f"error: {tmp_path}/a.toml, {tmp_path}/b.toml: corpus: ")
    assert "; seq_len: " in message


def test_keywords_are_not_blamed_on_the_file(base: Path) -> None:
    with pytest.raises(ConfigError, match=r"^batch_size: .*0$"):
        LoaderConfig.from_file(base, batch_size=0)
    with pytest.raises(ConfigError, match=r"^unknown .*batch_sise"):
        LoaderConfig.from_file(base, batch_sise=0)
    with pytest.raises(ConfigError, match=r"^rank .*world_size"):
        LoaderConfig.from_file(base, rank=0)


def test_data_as_a_configuration_is_told_what_it_is(counting: Counting) -> None:
    file = counting(10).files[0]
    with pytest.raises(ConfigError, match=rf"'\.bin'.*corpus='{file}'"):
        LoaderConfig.from_file(file)


def test_presets_are_listed_and_combined_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = run_well("config")
    for name, about in presets().items():
        assert re.search(rf"^{name} +{re.escape(about)}$", listed, re.MULTILINE)
    assert run_json("config")["presets"] == presets()
    monkeypatch.chdir(tmp_path)
    printed = run_well("config", "gpt2_124m", "h100", "--set", "seed=3")
    (tmp_path / "again.toml").write_text(printed)
    assert LoaderConfig.from_file("again.toml") == LoaderConfig.from_preset("gpt2_124m", "h100", seed=3)
    assert run_json("preview", "cpu_test", "synthetic:10K")["rows"][0]["input_ids"] != []


def test_what_is_there_goes_before_a_preset_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.arange(99, dtype=np.uint16).tofile("h100")
    assert run_json("config", "h100", *SHAPE)["corpus"] == ["h100"]


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_shows_flags_as_flags_and_cuts_nothing_off(command: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run(*([] if command is None else [command]), "--help").output
    assert "bool" not in shown
    assert "…" not in shown
    assert max(map(len, shown.splitlines())) <= 80
    if command not in (None, "tokenize"):
        assert re.search(r"--json +--no-json", shown)


def test_a_flag_can_be_taken_back(base: Path) -> None:
    assert json.loads(run_well("config", base, "--no-json", "--json"))["batch_size"] == 4
    assert tomllib.loads(run_well("config", base, "--json", "--no-json"))["batch_size"] == 4


def test_synthetic_corpora_are_inspected_and_checked_without_being_read() -> None:
    for command in ("inspect", "check"):
        report = run_json(command, "synthetic:1000T", "--vocab-size", 1000, "--eos", 7)
        assert (report["tokens"], report["largest_id"]) == (10**15, 999)
        assert report["ids_looked_at"] < 10**7
        assert any("are generated by a formula" in note for note in report["notes"])
        assert not report["problems"]
        report = run_json(command, "synthetic:3M")
        assert report["documents"] == int(np.count_nonzero(ids_of("synthetic:3M") == 50_256))
    assert run_json("inspect", "synthetic:1000T", "--full")["is_full"] is False


def ids_of(name: str) -> Any:
    from dali_pipes import open_corpus

    with open_corpus(name) as corpus:
        return corpus.tokens(0, corpus.num_tokens)
