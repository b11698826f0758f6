"""The array job of the manual, run as Slurm does: one process for each task, told its number by the environment."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from corpus_truth import files_of, words_tokenizer, write_jsonl
from manual import recipe

from dali_pipes.tokenizing import TokenizeConfig, tokenize_shard

pytestmark = pytest.mark.needs("tokenizers")
TASKS = 2


def submit(script: str, folder: Path) -> None:
    """A stand-in for `sbatch`: runs the tasks of an array at the same time."""
    path = folder / "tokenize.sbatch"
    path.write_text(script)
    # An environment that need not be active; the command that it has.
    command = shutil.which("dali-pipes", path=str(Path(sys.executable).parent))
    assert command is not None
    environment = {
        **os.environ,
        "PATH": f"{Path(command).parent}:{os.environ['PATH']}",
        "SLURM_ARRAY_TASK_COUNT": str(TASKS),
    }
    processes = [
        subprocess.Popen(
            ["bash", str(path)],
            cwd=folder,
            env={**environment, "SLURM_ARRAY_TASK_ID": str(task)},
        )
        for task in range(TASKS)
    ]
    assert [process.wait() for process in processes] == [0] * TASKS


def test_an_array_does_what_one_machine_does(tmp_path: Path) -> None:
    words_tokenizer(tmp_path / "tokenizer.json", {"?": 0, "a": 1, "b": 2}, {"<|endoftext|>": 3})
    (tmp_path / "text").mkdir()
    for number in range(5):
        write_jsonl(tmp_path / "text" / f"x{number}.jsonl", ["a b", "", "b b"] * (number + 1))
    config = TokenizeConfig([str(tmp_path / "text")], str(tmp_path / "tokenizer.json"), str(tmp_path / "one"))
    tokenize_shard(config)
    submit(recipe("slurm-array"), tmp_path)
    assert files_of(tmp_path / "tokens") == files_of(tmp_path / "one")
