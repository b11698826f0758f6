"""How a command ends: no traceback, a status that says why, and nothing that names and texts of the data can break."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import one_line_error, run, run_json, run_well

AT_ONCE = "import dali_pipes.runtime.progress as progress; progress.SHOWN_AFTER_S = 0"
COMMAND = [sys.executable, "-c", f"{AT_ONCE}\nfrom dali_pipes.tools.cli import app; app()"]
HOSTILE = "[red]a\x1b[31m\n:smile:\u202e\x9b" + os.fsdecode(b"\xff") + ".bin"


def start(*arguments: object, **settings: object) -> "subprocess.Popen[bytes]":
    command = [*COMMAND, *map(os.fsencode, map(str, arguments))]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **settings}
    return subprocess.Popen(command, **streams)  # type: ignore[call-overload,no-any-return]


def finish(process: "subprocess.Popen[bytes]") -> tuple[int, bytes, bytes]:
    """Status and what came through pipes."""
    out, err = (stream or b"" for stream in process.communicate())
    assert b"Traceback" not in err + out
    return process.returncode, out, err


def strings_in(value: Any) -> set[str]:
    """All strings of a JSON value, names of fields left out."""
    if isinstance(value, dict):
        return strings_in(list(value.values()))
    if isinstance(value, list):
        return {text for part in value for text in strings_in(part)}
    return {value} if isinstance(value, str) else set()


def read_terminal(terminal: int) -> bytes:
    """All that was written to a terminal until its last writer closed it."""
    parts: list[bytes] = []
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:
            part = b""
        if not part:
            return b"".join(parts)
        parts.append(part)


@pytest.fixture
def many_files(tmp_path: Path) -> Path:
    """More names than a pipe holds."""
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(1500):
        (folder / f"{'name' * 20}_{number}.bin").write_bytes(b"\1\0")
    return folder


@pytest.fixture
def terminal() -> Iterator[tuple[int, int]]:
    """What reads and what writes a terminal."""
    reader, writer = pty.openpty()
    yield reader, writer
    os.close(reader)


def test_a_reader_that_goes_away_is_no_fault(many_files: Path) -> None:
    process = start("inspect", many_files, "--json")
    assert process.stdout is not None
    process.stdout.read(10)
    process.stdout.close()
    process.stdout = None
    status, _, err = finish(process)
    assert (status, err) == (141, b"")


@pytest.mark.parametrize("options", [["--json"], ["--vocab-size", 1]])
def test_a_full_disk_is_told(tmp_path: Path, options: list[object]) -> None:
    """Not with the status of problems found, which the second has."""
    (tmp_path / "a.bin").write_bytes(b"\1\0")
    with open("/dev/full", "wb") as full:
        status, _, err = finish(start("check", tmp_path / "a.bin", *options, stdout=full))
    assert (status, err) == (2, b"error: standard output: No space left on device\n")


def test_a_closed_output_leaves_the_status(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"\1\0")
    script = f'exec {sys.executable} -c "{COMMAND[-1]}" check "$0" --vocab-size "$1" >&-'
    for vocab_size, status in (("2", 0), ("1", 1)):
        command = ["bash", "-c", script, str(tmp_path / "a.bin"), vocab_size]
        done = subprocess.run(command, capture_output=True, check=False)
        assert (done.returncode, done.stderr) == (status, b"")


def test_ctrl_c_ends_a_check_with_its_own_status(tmp_path: Path, terminal: tuple[int, int]) -> None:
    """In the middle of a file that would take minutes to read; the bar on the terminal says that it has begun."""
    path = tmp_path / "holes.bin"
    with path.open("wb") as file:
        file.truncate(10**13)
    reader, writer = terminal
    process = start("check", path, "--dtype", "uint16", "--json", stderr=writer)
    os.close(writer)
    seen = b""
    while b"reading ids" not in seen:
        seen += os.read(reader, 1 << 16)
    process.send_signal(signal.SIGINT)
    status, out, _ = finish(process)
    assert (status, out) == (130, b"")
    assert read_terminal(reader).rstrip().endswith(b"interrupted")


def test_a_bar_is_for_a_terminal_and_never_in_the_output(tmp_path: Path, terminal: tuple[int, int]) -> None:
    np.ones(1 << 22, np.uint16).tofile(tmp_path / "a.bin")
    quiet = finish(start("check", tmp_path, "--json"))
    assert quiet[2] == b""
    reader, writer = terminal
    process = start("check", tmp_path, "--json", stderr=writer)
    os.close(writer)
    shown = read_terminal(reader)
    assert b"ids" in shown
    assert finish(process)[:2] == quiet[:2]
    assert json.loads(quiet[1])["is_clean"]


def test_colours_are_for_a_terminal(tmp_path: Path, terminal: tuple[int, int]) -> None:
    np.full(9, 7, np.uint16).tofile(tmp_path / "a.bin")
    arguments = ("check", tmp_path / "a.bin", "--vocab-size", 7)
    status, plain, _ = finish(start(*arguments))
    assert (status, b"\x1b" in plain) == (1, False)
    reader, writer = terminal
    environment = {**os.environ, "TERM": "xterm-256color"}
    environment.pop("NO_COLOR", None)
    process = start(*arguments, stdout=writer, env=environment)
    os.close(writer)
    assert re.search(rb"\x1b\[1;31m[a-z ]+: 9\b", read_terminal(reader))
    assert finish(process)[0] == 1


@pytest.mark.parametrize("command", ["inspect", "check", "locate", "explain", "preview"])
def test_a_hostile_name_is_shown_and_not_obeyed(tmp_path: Path, command: str) -> None:
    """Markup, emoji codes, escapes, newlines, a bidirectional override, bytes that are no text."""
    path = tmp_path / HOSTILE
    np.array([1, 2, 9000, 3] * 5, np.uint16).tofile(path)
    (tmp_path / "config.toml").write_text(
        f"corpus = {json.dumps(str(path.with_name('*.bin')))}\nbatch_size = 1\nseq_len = 4\n"
    )
    arguments: list[object] = [path, "--vocab-size", 9000]
    if command in ("locate", "explain", "preview"):
        arguments = [tmp_path / "config.toml", "--step", 0, *(["--row", 0] if command == "locate" else [])]
    result = run(command, *arguments)
    assert (result.exit_code, result.stderr) == (int(command == "check"), "")
    assert not (set(result.stdout) - {"\n"}) & set(map(chr, [*range(32), *range(127, 160), 0x202E]))
    joined = "".join(line.strip("│ \n") for line in result.stdout.splitlines())  # a cell of a table may be folded
    assert r"[red]a\x1b[31m\n:smile:\u202e\x9b\udcff.bin" in joined
    found = run_json(command, *arguments, status=result.exit_code)
    assert str(path) in strings_in(found)


@pytest.mark.parametrize("command", ["check", "preview"])
def test_a_terminal_that_knows_only_ascii_gets_ascii(tmp_path: Path, command: str) -> None:
    path = tmp_path / "é.bin"
    np.array([1, 2, 9000, 3] * 5, np.uint16).tofile(path)
    (tmp_path / "config.toml").write_text(
        f'corpus = "{path}"\nbatch_size = 1\nseq_len = 4\nrows = "pad"\neos_id = 2\n', encoding="utf-8"
    )
    arguments = [path, "--vocab-size", 9000] if command == "check" else [tmp_path / "config.toml"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    status, out, err = finish(start(command, *arguments, env=environment))
    assert (status, err) == (int(command == "check"), b"")
    assert out.isascii()
    assert rb"\xe9.bin" in out
    assert command == "check" or b"1 [[2]]" in out


def test_an_error_about_a_hostile_name_is_one_clean_line(tmp_path: Path) -> None:
    status, out, err = finish(start("inspect", tmp_path / HOSTILE))
    assert (status, out) == (2, b"")
    assert re.fullmatch(rb"error: [\x20-\x7e]+\n", err)


def test_text_of_a_hostile_corpus_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    words = {"[red]": 1, "\x1b[2J": 2, "a\nb": 3, ":smile:": 4, "\u202e": 5, "é": 6, "\x9b": 7, "x": 0}
    Tokenizer(models.WordLevel(words, "x")).save(str(tmp_path / "tokenizer.json"))
    np.array([1, 2, 3, 4, 5, 6, 7, 0], np.uint16).tofile(tmp_path / "a.bin")
    (tmp_path / "config.toml").write_text(f'corpus = "{tmp_path}/a.bin"\nbatch_size = 1\nseq_len = 7\n')
    arguments = ("preview", tmp_path / "config.toml", "--tokenizer", tmp_path / "tokenizer.json")
    assert "\n[red] \\x1b[2J a↵\nb :smile: \\u202e é \\x9b\n" in run_well(*arguments)
    (row,) = run_json(*arguments)["rows"]
    assert row["pieces"][0]["text"] == "[red] \x1b[2J a\nb :smile: \u202e é \x9b"
    ascii_only = {**os.environ, "PYTHONIOENCODING": "ascii"}
    status, out, _ = finish(start(*arguments, env=ascii_only))
    assert status == 0
    assert b"\n[red] \\x1b[2J a\\n\nb :smile: \\u202e \\xe9 \\x9b\n" in out


def test_a_configuration_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "bad.toml").write_bytes(b"\xff\xfe\x00")
    for arguments in (["config"], ["preview", "--json"]):
        assert re.search(r"bad\.toml: .*\bbyte 0\b", one_line_error(*arguments, tmp_path / "bad.toml"))


def test_a_configuration_in_json_loads_again(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('corpus = "a.bin"\nbatch_size = 2\nseq_len = 8\n')
    found = run_json("config", tmp_path / "a.toml", "--set", "seed=5")
    (tmp_path / "b.json").write_text(json.dumps(found))
    assert run_json("config", tmp_path / "b.json") == found
    assert (found["seed"], found["seq_len"]) == (5, 8)


@pytest.mark.parametrize("command", ["inspect", "check", "config", "locate", "explain", "preview"])
def test_help_tells_the_exit_statuses(command: str) -> None:
    text = " ".join(run_well(command, "--help").split())
    assert re.findall(r"\b\d+\b", text[text.index("Exit status") :]) == ["0", "1", "2", "130", "141"]
