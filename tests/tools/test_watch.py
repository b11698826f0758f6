"""`watch`: what the last lines of a log say, while it is written."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from commands import one_line_error, run_json, run_well

from dali_pipes.tools.reports import FollowedLog


def line(step: int, **more: Any) -> str:
    counters = {"data/tokens": 1000.0 * step * step, "data/wall_seconds": 2.0 * step}
    counters |= {"data/data_wait_seconds": 0.5 * step, "data/tokens_per_second": 7.0, "data/ready_blocks": 3.0}
    return json.dumps({"step": step, "epoch": 1, "loss": 4.0, "mfu": 0.4, **counters, **more}) + "\n"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "stats.jsonl"
    path.write_text(line(1) + line(2, source_rows={"web": 30, "code": 10}, warning="\x1b[2Jlow") + '{"step": 3')
    return path


def test_the_last_lines_are_told(log: Path) -> None:
    told = run_json("watch", log)
    assert told == {
        "lines": 2,
        "step": 2,
        "epoch": 1,
        "tokens_per_second": 1000 * (4 - 1) / 2,
        "data_wait_ratio": 0.25,
        "ready_blocks": 3,
        "loss": 4,
        "mfu": 0.4,
        "model_flops_per_s": None,
        "shares": {"web": 0.75, "code": 0.25},
        "warnings": ["\x1b[2Jlow"],
    }
    shown = run_well("watch", log, "--once")
    assert all(part in shown for part in ("1,500", "25.00%", "web", "75.0%", r"\x1b[2Jlow"))
    assert "\x1b" not in shown


def test_new_lines_are_read_as_they_come(log: Path) -> None:
    """A line in parts, one that is not JSON, and a file that begins anew."""
    followed = FollowedLog(log)
    assert followed.poll()
    assert not followed.poll()
    with log.open("a") as file:
        file.write(', "loss": 3.5')
    assert not followed.poll()
    assert followed.now().step == 2
    with log.open("a") as file:
        file.write("}\nnot JSON\n[1]\n")
    assert followed.poll()
    now = followed.now()
    assert (now.lines, now.step, now.loss, now.tokens_per_second) == (3, 3, 3.5, 1500)
    log.write_text(line(1))
    assert followed.poll()
    assert (followed.now().step, followed.now().tokens_per_second) == (1, 7)


def test_lines_may_have_different_figures(tmp_path: Path) -> None:
    """As those of a trainer that logs each loss, and the loader's metrics from time to time."""
    path = tmp_path / "mixed.jsonl"
    path.write_text(line(1) + '{"step": 2, "loss": 3.0}\n' + line(3, loss=2.0) + '{"step": 4, "val_loss": 9.0}\n')
    told = run_json("watch", path)
    assert (told["step"], told["loss"], told["tokens_per_second"]) == (4, 2, 1000 * (9 - 1) / 4)


def test_without_a_peak_there_is_no_mfu(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"step": 1, "model_flops_per_s": 2.5e12}\n')
    shown = run_well("watch", tmp_path / "log.jsonl", "--once")
    assert all(part in shown for part in ("MFU", "peak not known", "2.5 model TFLOP/s"))


def test_names_are_those_of_the_report(tmp_path: Path) -> None:
    (tmp_path / "log.jsonl").write_text('{"_step": 7, "val/loss": 9.0, "train/loss": 2.0}\n')
    told = run_json("watch", tmp_path / "log.jsonl")
    assert (told["step"], told["loss"]) == (7, 2)


def test_of_a_long_log_the_end_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text("".join(map(line, range(1, 2001))))
    monkeypatch.setattr("dali_pipes.tools.reports.followed_log._TAIL_BYTES", 10 * len(line(1000)) + 5)
    followed = FollowedLog(path)
    followed.poll()
    assert followed.now().step == 2000
    assert 5 < followed.now().lines < 12


def test_a_log_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert "none.jsonl" in one_line_error("watch", tmp_path / "none.jsonl")
    assert str(tmp_path) in one_line_error("watch", tmp_path, "--once")


@pytest.mark.parametrize("text", ["hello\n[1]\n", "hello\nworld"])
def test_a_file_that_is_not_a_log_is_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "notes.txt").write_text(text)
    message = one_line_error("watch", tmp_path / "notes.txt", "--once")
    assert "notes.txt" in message
    assert "2 lines" in message
    assert "JSON" in message


def test_an_interrupt_ends_it_well(log: Path) -> None:
    """On a terminal: the figures are shown, follow the file, and Ctrl-C is a normal end."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "dali_pipes", "watch", str(log)], stdin=theirs, stdout=theirs, stderr=subprocess.PIPE
    )
    os.close(theirs)
    try:
        read_until(ours, b"1,500")
        log.write_text(line(70_001))
        read_until(ours, b"70,001")
        process.send_signal(signal.SIGINT)
        _, complaints = process.communicate(timeout=60)
    finally:
        process.kill()
        os.close(ours)
    assert (process.returncode, complaints) == (0, b"")


def read_until(terminal: int, text: bytes) -> None:
    seen, limit = b"", time.monotonic() + 60
    while text not in seen:
        assert time.monotonic() < limit, seen
        if select.select([terminal], [], [], 1)[0]:
            seen += os.read(terminal, 4096)
