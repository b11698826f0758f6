"""Runs on Ray: the bytes of one machine, whatever dies in the middle, on a real cluster of two nodes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from corpus_truth import files_of, words_tokenizer, write_jsonl
from range_server import RangeServer
from typer.testing import CliRunner

from dali_pipes.errors import ConfigError
from dali_pipes.runtime.locks import lock, unlock
from dali_pipes.text import Summary, TokenizeConfig, on_ray, tokenize_shard
from dali_pipes.tools.cli import app

Order = Callable[[str], str]
COMMAND = [sys.executable, "-m", "dali_pipes", "tokenize"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, Order]]:
    """Address of the cluster, and what makes it do something."""
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("ray_cluster.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"},
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        lines = (line for line in stdout if re.fullmatch(r"[\w.]+(:\d+)?\n", line))  # Ray prints, too
        address = next(lines).strip()

        def order(what: str) -> str:
            stdin.write(f"{what}\n")
            stdin.flush()
            return next(lines).strip()

        yield address, order
        stdin.close()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six files of about a second of work each, and a tokenizer."""
    folder = tmp_path_factory.mktemp("texts")
    (folder / "in").mkdir()
    words_tokenizer(folder / "tokenizer.json", {"?": 0, "a": 1, "b": 2}, {"<|endoftext|>": 3})
    for number in range(6):
        write_jsonl(folder / "in" / f"x{number}.jsonl", ["a b " * 100] * (4000 + number))
    return folder


@pytest.fixture(scope="module")
def one_machine(texts: Path) -> dict[str, bytes]:
    """The output without Ray."""
    tokenize_shard(config_of(texts, texts / "one"))
    return files_of(texts / "one")


def config_of(texts: Path, out: Path) -> TokenizeConfig:
    return TokenizeConfig([str(texts / "in")], str(texts / "tokenizer.json"), str(out), shard_tokens=200_000)


def command_of(inputs: Sequence[str], texts: Path, out: Path, *options: str) -> list[str]:
    where = ["--tokenizer", str(texts / "tokenizer.json"), "--out", str(out), "--shard-tokens", "200000"]
    return [*COMMAND, *inputs, *where, *options]


def started(options: Sequence[str], texts: Path, out: Path) -> "subprocess.Popen[str]":
    """A process that has finished its first shard. Its paths are relative, and tasks run in other folders."""
    command = command_of(["in"], Path(), Path(os.path.relpath(out, texts)), *options)
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=texts)
    while not list(out.glob("_tokenize/tokens-*.json")):
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    return process


@pytest.mark.slow
@pytest.mark.needs("ray", "tokenizers")
@pytest.mark.parametrize("victim", ["worker", "node"])
def test_what_dies_is_done_again(
    cluster: tuple[str, Order], texts: Path, one_machine: dict[str, bytes], tmp_path: Path, victim: str
) -> None:
    address, order = cluster
    process = started(["--ray", address], texts, tmp_path / "out")
    assert order(victim)
    assert not (tmp_path / "out" / "manifest.json").exists(), "it was in the middle"
    stdout, stderr = process.communicate()
    assert process.returncode == 0, stderr
    assert re.fullmatch(r"[\d,]+ tokens, 24,015 documents \(0 empty\), 30 shards, [\d.]+ s\n", stdout)
    assert "Traceback" not in stderr
    assert files_of(tmp_path / "out") == one_machine


@pytest.mark.slow
@pytest.mark.needs("ray", "tokenizers", "obstore")
def test_inputs_by_uri(cluster: tuple[str, Order], texts: Path, one_machine: dict[str, bytes], tmp_path: Path) -> None:
    """Credentials reach the tasks, and nothing that is written or said."""
    with RangeServer.of_folder(texts / "in") as server:
        host = server.url.removeprefix("http://")
        inputs = [f"http://someone:s3cr3t@{host}/x{number}.jsonl" for number in range(6)]
        command = command_of(inputs, texts, tmp_path / "out", "--ray", cluster[0])
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        assert all(request.authorization for request in server.requests)
    found = files_of(tmp_path / "out")
    assert {name: data for name, data in found.items() if name != "manifest.json"} == {
        name: data for name, data in one_machine.items() if name != "manifest.json"
    }
    manifest = (tmp_path / "out" / "manifest.json").read_text()
    assert json.loads(manifest)["paths"][0] == f"http://***@{host}/x0.jsonl"
    assert "s3cr3t" not in manifest + result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.needs("ray", "tokenizers")
def test_mistakes_are_one_line(cluster: tuple[str, Order], texts: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": "a"}\n{"text": 5}\n')
    result = subprocess.run(
        command_of([str(texts / "in"), str(bad)], texts, tmp_path / "out", "--ray", cluster[0]),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    assert f"error: {bad}: line 2: 'text' is 5 (int)" in result.stderr.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.needs("ray", "tokenizers")
def test_an_interrupted_run_continues_without_ray(
    cluster: tuple[str, Order], texts: Path, one_machine: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = started(["--ray", cluster[0]], texts, out)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate()
    assert process.returncode == 130, stderr
    assert "interrupted; run the same command again" in stderr
    assert "Traceback" not in stderr
    assert not (out / "manifest.json").exists()
    result = CliRunner().invoke(app, command_of([str(texts / "in")], texts, out)[3:])
    assert result.exit_code == 0, result.stderr
    assert files_of(out) == one_machine


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    result = CliRunner().invoke(app, ["tokenize", "a.txt", "--tokenizer", "t.json", "--out", str(tmp_path), "--ray"])
    assert result.exit_code == 2
    assert 'pip install "dali-pipes[ray]"' in result.stderr


def test_ray_divides_the_inputs(tmp_path: Path) -> None:
    arguments = ["tokenize", "--ray", "a.txt", "--tokenizer", "t.json", "--out", str(tmp_path), "--shard", "1/2"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "--shard 1/2: " in result.stderr
    assert "--ray" in result.stderr


@pytest.mark.needs("tokenizers")
def test_a_lock_that_outlives_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system holds it for a while: the task waits, and an error of the user is its result."""
    words_tokenizer(tmp_path / "tokenizer.json", {"?": 0, "a": 1}, {"<|endoftext|>": 3})
    write_jsonl(tmp_path / "a.jsonl", ["a"] * 5)
    (tmp_path / "out" / "_tokenize").mkdir(parents=True)
    config = TokenizeConfig([str(tmp_path / "a.jsonl")], str(tmp_path / "tokenizer.json"), str(tmp_path / "out"))
    held, _ = lock(tmp_path / "out" / "_tokenize" / "item-00000.lock")
    assert held is not None
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            unlock(held)

    monkeypatch.setattr("dali_pipes.text.on_ray.time.sleep", wait)
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")
    found = on_ray._tokenize_item(config, 0, 1)
    assert len(waits) == 3
    assert isinstance(found, Summary)
    assert (found.documents, found.tokens, found.shards, found.missing) == (5, 10, 1, 0)
    assert not (tmp_path / "out" / "manifest.json").exists()
    assert isinstance(on_ray._tokenize_item(replace(config, text_key="b"), 0, 1), ConfigError)


@pytest.mark.slow
@pytest.mark.needs("ray", "tokenizers")
def test_an_address_where_nothing_answers(texts: Path, tmp_path: Path) -> None:
    arguments = command_of([str(texts / "in")], texts, tmp_path / "out", "--ray", "127.0.0.1:1")[3:]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert "127.0.0.1:1: " in result.stderr.splitlines()[-1]
