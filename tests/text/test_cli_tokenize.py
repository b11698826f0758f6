"""The command: what it prints, its exit codes, and what a user's mistakes give."""

import gzip
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest
from corpus_truth import Truth, files_of, read_documents, words_tokenizer, write_jsonl
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from dali_pipes import open_corpus
from dali_pipes.text.shard_task import is_in
from dali_pipes.tools.cli import app

EOS = 50256


def tokenize(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["tokenize", *map(str, arguments)])


def one_line_error(*arguments: object) -> str:
    result = tokenize(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "Traceback" not in result.stderr
    return last


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", ["Hello world", "", "a<|endoftext|>b"])


def test_text_to_a_corpus(source: Path, gpt2: Path, tmp_path: Path) -> None:
    result = tokenize(source, "--tokenizer", gpt2, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.stderr
    assert re.fullmatch(r"13 tokens, 3 documents \(1 empty\), 1 shard, \d+\.\d s\n", result.stdout)
    assert re.search(r"1 input .*uint16.*<\|endoftext\|>.*50256", result.stderr)
    expected = [[15496, 995, EOS], [], [64, 27, 91, 437, 1659, 5239, 91, 29, 65, EOS]]
    assert read_documents(tmp_path / "out") == expected
    assert tokenize(source, "--tokenizer", gpt2, "--out", tmp_path / "out").exit_code == 0  # nothing left to do


@pytest.mark.filterwarnings("ignore")
def test_megatron_core_reads_what_it_writes(source: Path, gpt2: Path, tmp_path: Path) -> None:
    """With `pip install --no-deps megatron-core`."""
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", exc_type=ImportError)
    assert tokenize(source, "--tokenizer", gpt2, "--out", tmp_path / "out").exit_code == 0
    (index,) = (tmp_path / "out").glob("*.idx")
    sequences = indexed.IndexedDataset(str(index.with_suffix("")))
    borders = sequences.document_indices.tolist()
    found = [[sequences[s].tolist() for s in range(*span)] for span in itertools.pairwise(borders)]
    assert found == [[[15496, 995, EOS]], [], [[64, 27, 91, 437, 1659, 5239, 91, 29, 65, EOS]]]


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (["--format", "flat"], [15496, 995, EOS, EOS, 64, 27, 91, 437, 1659, 5239, 91, 29, 65, EOS]),
        (["--format", "flat", "--no-eos"], [15496, 995, 64, 27, 91, 437, 1659, 5239, 91, 29, 65]),
        (["--format", "flat", "--eos", "7"], [15496, 995, 7, 7, 64, 27, 91, 437, 1659, 5239, 91, 29, 65, 7]),
    ],
)
def test_what_follows_documents(source: Path, gpt2: Path, tmp_path: Path, options: list[str], ids: list[int]) -> None:
    assert tokenize(source, "--tokenizer", gpt2, "--out", tmp_path / "out", *options).exit_code == 0
    with open_corpus(tmp_path / "out") as corpus:
        assert corpus.tokens(0, corpus.num_tokens).tolist() == ids


def test_a_separator_and_another_key(gpt2: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("Hello world\n--\nHello world")
    lines = write_jsonl(tmp_path / "in.jsonl", ["Hello world"], "content")
    arguments = [tmp_path / "in.txt", lines, "--separator", "\n--\n", "--text-key", "content"]
    assert tokenize(*arguments, "--tokenizer", gpt2.parent, "--out", tmp_path / "out").exit_code == 0
    assert read_documents(tmp_path / "out") == [[15496, 995, EOS]] * 3


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize(
    ("separator", "found"), [("\n\n", True), ("\u2028", True), (r"\n\n", False), ("\n--\n", False)]
)
def test_a_separator_is_in_some_text(tmp_path: Path, separator: str, found: bool, compressed: bool) -> None:
    """Before anything is written, else the documents of each file would silently become one."""
    tokenizer = words_tokenizer(tmp_path / "t.json", {"?": 0, "a": 1}, {"<|endoftext|>": 2})
    lines = write_jsonl(tmp_path / "in.jsonl", [r"a\n\na"])
    for number, text in enumerate(("a", "a a\n\na\n-- \u2028 \n")):
        content = text.encode()
        path = tmp_path / f"{number}.txt{'.gz' * compressed}"
        path.write_bytes(gzip.compress(content) if compressed else content)
    inputs = [lines, *tmp_path.glob("*.txt*")]
    arguments = [*inputs, "--tokenizer", tokenizer, "--out", tmp_path / "out", "--separator", separator]
    if found:
        assert tokenize(*arguments).exit_code == 0
        assert len(read_documents(tmp_path / "out")) == 4
    else:
        message = one_line_error(*arguments)
        assert f"--separator {separator!r}: " in message
        assert "2 .txt files" in message
        assert r"$'\n'" in message
        assert not (tmp_path / "out").exists()


@given(st.binary(max_size=40), st.binary(min_size=1, max_size=3), st.integers(1, 5))
def test_a_separator_is_found_over_the_borders_of_what_is_read(text: bytes, separator: bytes, size: int) -> None:
    chunks = [text[at : at + size] for at in range(0, len(text), size)]
    assert is_in(chunks, separator) == (separator in text)


def test_a_separator_of_escapes_is_taken_as_it_is_and_said_to_be(tmp_path: Path) -> None:
    tokenizer = words_tokenizer(tmp_path / "t.json", {"?": 0, "a": 1}, {"<|endoftext|>": 2})
    (tmp_path / "in.txt").write_text(r"a\na")
    arguments = [tmp_path / "in.txt", "--tokenizer", tokenizer, "--out", tmp_path / "out", "--separator"]
    result = tokenize(*arguments, r"\n")
    assert result.exit_code == 0
    assert result.stderr.startswith(r"warning: --separator \n: ")
    assert r"$'\n'" in result.stderr.splitlines()[0]
    assert len(read_documents(tmp_path / "out")) == 2


def test_a_separator_without_any_text_file_is_refused(source: Path, tmp_path: Path) -> None:
    tokenizer = words_tokenizer(tmp_path / "t.json", {"?": 0}, {"<|endoftext|>": 1})
    assert "0 .txt files" in one_line_error(
        source, "--tokenizer", tokenizer, "--out", tmp_path / "o", "--separator", "\n"
    )


def test_parts_say_what_is_left(gpt2: Path, tmp_path: Path, truth: Truth) -> None:
    for at in range(4):
        write_jsonl(tmp_path / f"in-{at}.jsonl", truth.texts[at * 5 : at * 5 + 5])
    arguments = [tmp_path / "in-*.jsonl", "--tokenizer", gpt2, "--out", tmp_path / "out"]
    first = tokenize(*arguments, "--shard", "1/2")
    assert first.exit_code == 0, first.stderr
    assert re.search(rf"^2 inputs left .*{tmp_path / 'out'}", first.stdout, re.MULTILINE)
    last = tokenize(*arguments, "--shard", "0/2")
    assert "20 documents (1 empty), 4 shards" in last.stdout
    assert "inputs left" not in last.stdout
    assert read_documents(tmp_path / "out") == truth.with_eos(EOS, count=20)


def test_mistakes_are_one_line(source: Path, tmp_path: Path) -> None:
    tokenizer = words_tokenizer(tmp_path / "t.json", {"?": 0}, {"<|endoftext|>": 1})  # quicker to load
    base = ["--tokenizer", tokenizer, "--out", tmp_path / "out"]
    assert str(tmp_path / "gone.jsonl") in one_line_error(tmp_path / "gone.jsonl", *base)
    assert "--shard 2/2: expected I/N" in one_line_error(source, *base, "--shard", "2/2")
    assert "--eos 7: " in one_line_error(source, *base, "--eos", 7, "--no-eos")
    assert "60000" in one_line_error(source, *base, "--eos", 60_000)
    empty = one_line_error(source, *base, "--separator", "")
    assert "--separator: " in empty
    assert "--shard-tokens" not in empty
    none = one_line_error(source, *base, "--shard-tokens", 0)
    assert "--shard-tokens 0: " in none
    assert "--separator" not in none
    for option, value in (("--chat-template", "chatml"), ("--chat-template", "none"), ("--learn", "assistant")):
        assert re.search(rf"{option} {value}: .*--chat\b", one_line_error(source, *base, option, value))
    assert not (tmp_path / "out").exists()
    where = ["--tokenizer", tokenizer, "--out", "/proc/x"]
    assert re.search("/proc/x: .*No such file", one_line_error(source, *where))
    assert re.search("'body'.*'text'.*--text-key", one_line_error(source, *base, "--text-key", "body"))
    assert "gone.json" in one_line_error(source, "--tokenizer", "gone.json", "--out", tmp_path / "o")
    np.arange(60_000, dtype=np.uint16).tofile(tmp_path / "ids.bin")
    assert "ids.bin" in one_line_error(tmp_path / "ids.bin", "--tokenizer", tokenizer, "--out", tmp_path / "o")
    (tmp_path / "data").mkdir()
    assert str(tmp_path / "data") in one_line_error(
        tmp_path / "data", "--tokenizer", tokenizer, "--out", tmp_path / "o"
    )
    other = tmp_path / "other.jsonl"
    write_jsonl(other, ["other"])
    corrected = tokenize(other, *base)  # nothing was finished there
    assert corrected.exit_code == 0, corrected.output
    assert other.name in one_line_error(source, *base)


def test_an_edit_after_a_finished_run_is_refused(source: Path, gpt2: Path, tmp_path: Path) -> None:
    """Whatever its size and bytes are: no old tokens under the name of the new text."""
    arguments = [source, "--tokenizer", gpt2, "--out", tmp_path / "out"]
    assert tokenize(*arguments).exit_code == 0
    before = files_of(tmp_path / "out")
    changed = source.stat().st_mtime_ns + 1
    os.utime(source, ns=(0, changed))
    assert re.search(rf"input 0: in\.jsonl .*{changed - 1}.*{changed}", one_line_error(*arguments))
    assert files_of(tmp_path / "out") == before
    os.utime(source, ns=(0, changed - 1))
    assert tokenize(*arguments).exit_code == 0


def test_an_interrupt_leaves_a_run_to_go_on_with(gpt2: Path, tmp_path: Path, truth: Truth) -> None:
    for at in range(3):
        write_jsonl(tmp_path / f"in-{at}.jsonl", truth.texts[at * 5 : at * 5 + 5])
    script = tmp_path / "slow.py"
    script.write_text(
        textwrap.dedent(
            """
            import pathlib, time
            from dali_pipes.tools.cli import app
            from dali_pipes.text.encoder import TextEncoder
            encode = TextEncoder.encode
            def slow(self, documents):
                if documents[0].file.name == "in-1.jsonl":
                    print("here", flush=True)
                    while not pathlib.Path("interrupted").exists():
                        time.sleep(0.01)
                return encode(self, documents)
            TextEncoder.encode = slow
            app()
            """
        )
    )
    arguments = ["tokenize", f"{tmp_path}/in-*.jsonl", "--tokenizer", gpt2, "--out", tmp_path / "out"]
    command = [sys.executable, script, *arguments]
    running = subprocess.Popen(
        list(map(str, command)), cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    assert running.stdout.readline() == "here\n"
    time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    (tmp_path / "interrupted").touch()
    out, error = running.communicate()
    assert running.returncode == 130
    assert out == ""
    assert [line.partition(";")[0] for line in error.splitlines()[1:]] == ["interrupted"]
    assert sorted(path.name for path in (tmp_path / "out" / "_tokenize").glob("tokens-*.bin*")) == [
        "tokens-00000-0000.bin"
    ]
    assert tokenize(*arguments[1:]).exit_code == 0
    assert tokenize(*arguments[1:4], "--out", tmp_path / "whole").exit_code == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    assert read_documents(tmp_path / "out") == truth.with_eos(EOS, count=15)


def test_the_manifest_says_what_it_was_made_of(source: Path, gpt2: Path, tmp_path: Path) -> None:
    assert tokenize(source, "--tokenizer", gpt2, "--out", tmp_path / "out").exit_code == 0
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["made_by"].startswith("dali_pipes ")
    assert manifest["paths"] == [str(source)]
    assert manifest["inputs"][0]["bytes"] == os.path.getsize(source)
    assert manifest["inputs"][0]["modified_ns"] == source.stat().st_mtime_ns
    assert manifest["settings"]["eos_id"] == EOS
    assert manifest["settings"]["id_type"] == "uint16"
    assert len(manifest["settings"]["tokenizer"]) == 64
