"""The examples of the manual run, from the top of a page to its end, and print what the page says.

CONTRIBUTING.md ("Examples") has the rules. A page's folder begins with the files of `conftest.py`.
"""

import contextlib
import glob
import importlib.util
import io
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from pathlib import Path
from types import CodeType
from unittest.mock import patch

import pytest
import yaml
from manual import Block, blocks_of, pages, recipes
from typer.testing import CliRunner

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.runtime.messages import say_once
from dali_pipes.tools.cli import app

RUN_HERE = ("python", "bash", "toml")
SAVED = (*RUN_HERE, "json", "yaml")
NOT_RUN = ("console", "text")
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
WITH_BLOCKS = [page for page in pages() if blocks_of(page)]
WITH_SLOW_ONES = [page for page in WITH_BLOCKS if any("slow" in block.marks for block in blocks_of(page))]


class PageRun:
    """The blocks of one page, run one after another in one namespace and one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.names: dict[str, object] = {"__name__": "__main__"}
        self.printed = ""
        """What the last block printed."""

    def take(self, block: Block) -> None:
        """Run a block, save it as a file, or compare it with what was printed."""
        if "output" in block.marks:
            if not is_output(block.code, self.printed):
                pytest.fail(f"{block.place} says:\n{block.code}\nprinted:\n{self.printed}", pytrace=False)
        elif block.title:
            path = self.folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.code, encoding="utf-8")
        elif block.language == "python":
            self._run_python(block)
        elif block.language == "bash":
            self._run_bash(block)

    def _run_python(self, block: Block) -> None:
        with io.StringIO() as output:
            with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
                exec(compiled(block), self.names)
            self.printed = output.getvalue()

    def _run_bash(self, block: Block) -> None:
        lines = block.code.splitlines()
        if all(re.fullmatch(r"dali-pipes [^|<>&;$`\\]*", line) for line in lines):
            self._run_commands(block, lines)
            return
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        ended = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.code],
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        self.printed = ended.stdout
        if ended.returncode:
            pytest.fail(f"{block.place} ended with {ended.returncode}:\n{block.code}\n{ended.stdout}", pytrace=False)

    def _run_commands(self, block: Block, lines: list[str]) -> None:
        """Lines that need no shell, in this process, which has made the imports."""
        self.printed = ""
        for line in lines:
            say_once.cache_clear()
            words = shlex.split(line)[1:]
            words = [word for pattern in words for word in sorted(glob.glob(pattern)) or [pattern]]
            ended = CliRunner().invoke(app, words)
            self.printed += ended.output
            if ended.exit_code:
                pytest.fail(f"{block.place}: {line} ended with {ended.exit_code}:\n{self.printed}", pytrace=False)

    def close(self) -> None:
        for value in self.names.values():
            if isinstance(value, TokenLoader):
                value.close()


def is_output(expected: str, printed: str) -> bool:
    """Whether a text is what the page says: `...` stands for anything, and white space is not compared."""
    parts = (re.escape(" ".join(part.split())) for part in expected.split("..."))
    return re.fullmatch(r".*".join(parts), " ".join(printed.split()), re.DOTALL) is not None


def compiled(block: Block) -> CodeType:
    """The code, whose errors name the line of the page."""
    return compile("\n" * block.line + block.code, block.page, "exec")


def check_as_written(block: Block) -> None:
    """What can be said of any block without running it."""
    if block.language == "python":
        compiled(block)
    elif block.language == "bash":
        ended = subprocess.run(["bash", "-n", "-c", block.code], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, f"{block.place}: {ended.stderr}"
    elif block.language == "toml":
        settings = tomllib.loads(block.code)
        required = {"batch_size": 8, "seq_len": 1024} | ({} if "mixture" in settings else {"corpus": "data/*.bin"})
        LoaderConfig(**{**required, **settings})
    elif block.language == "json":
        json.loads(block.code)
    elif block.language == "yaml":
        yaml.safe_load(block.code)


def run_page(page: str, folder: Path, *, slow: bool) -> None:
    say_once.cache_clear()
    run = PageRun(folder)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    }
    environment |= {"CUDA_VISIBLE_DEVICES": "", "COLUMNS": "120", "NO_COLOR": "1", "TERM": "dumb"}
    environment |= {"HF_HUB_OFFLINE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    handlers = {number: signal.getsignal(number) for number in HANDLED}
    runs = False
    """Whether the block at hand is run, or the one whose output it is."""
    try:
        with contextlib.chdir(folder), patch.dict(os.environ, environment, clear=True):
            for block in blocks_of(page):
                needed = [name.strip() for name in block.marks.get("needs", "").split(",") if name.strip()]
                if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
                    pytest.skip(f"{block.place}: not installed: {', '.join(missing)}")
                if "output" not in block.marks:
                    runs = not {"not run", "recipe"} & set(block.marks) and (slow or "slow" not in block.marks)
                if runs:
                    run.take(block)
    finally:
        run.close()
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_examples_run(page: str, folder: Path) -> None:
    run_page(page, folder, slow=False)


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SLOW_ONES)
def test_slow_examples_run(page: str, folder: Path) -> None:
    run_page(page, folder, slow=True)


@pytest.mark.parametrize("page", WITH_BLOCKS)
def test_blocks_are_well_formed(page: str) -> None:
    """Each names a language that is known, can be parsed, is run or says why not; a saved file is used."""
    blocks = blocks_of(page)
    for number, block in enumerate(blocks):
        assert block.language in (*SAVED, *NOT_RUN), f"{block.place}: language {block.language!r}"
        if block.language in ("json", "yaml"):
            assert block.title, f"{block.place}: is neither run nor saved: give it a title, or take `text`"
        if "not run" in block.marks:
            assert block.marks["not run"], f"{block.place}: a block that is not run says why"
        if "output" in block.marks:
            before = blocks[number - 1] if number else block
            assert before.language in ("python", "bash"), f"{block.place}: the output of what?"
            assert not {"not run", "recipe"} & set(before.marks), (
                f"{block.place}: the output of a block that is not run"
            )
        if block.title and block.language in ("python", "bash") and "not run" not in block.marks:
            used = any(block.title in later.code for later in blocks[number + 1 :] if later.language == "bash")
            assert used, f"{block.place}: {block.title} is saved and never run"
        check_as_written(block)


def test_every_recipe_has_its_test() -> None:
    """Names of recipes, and the tests that run them."""
    run_elsewhere = {
        path: path.read_text(encoding="utf-8")
        for folder in ("trainers", "cases", "text")
        for path in (Path(__file__).parents[1] / folder).glob("*.py")
    }
    for name, block in recipes().items():
        assert any(f'"{name}"' in text for text in run_elsewhere.values()), f"{block.place}: no test runs {name!r}"


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a  b\nc", "a b c\n", True),
        ("a ... c\n...", "a b b\nc\n", True),
        ("...b", "a\nb", True),
        ("a ... c", "a b", False),
        ("a", "a b", False),
        ("a.c", "abc", False),
    ],
)
def test_outputs_are_compared(expected: str, printed: str, same: bool) -> None:
    assert is_output(expected, printed) is same


def test_an_example_that_fails_is_noticed(tmp_path: Path) -> None:
    """Its error names the line of the page."""
    run = PageRun(tmp_path)
    run.take(Block("page.md", 3, "python", "x = 1\nprint(x)\n"))
    assert run.printed == "1\n"
    with pytest.raises(pytest.fail.Exception, match=r"page\.md:7 says"):
        run.take(Block("page.md", 7, "text", "2\n", marks={"output": ""}))
    with pytest.raises(ZeroDivisionError) as found:
        run.take(Block("page.md", 9, "python", "\nx / 0\n"))
    assert found.traceback[-1].lineno == 10  # counted from 0: the second line of the block
    with pytest.raises(pytest.fail.Exception, match=r"page\.md:20 ended with 3"):
        run.take(Block("page.md", 20, "bash", "exit 3\n"))
