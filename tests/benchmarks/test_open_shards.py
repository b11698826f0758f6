"""The benchmark of many files opens what it wrote, in every format, as the corpus it should be."""

import json
import subprocess
import sys
from pathlib import Path

import open_shards
import pytest

from dali_pipes import open_corpus


def test_it_opens_every_format() -> None:
    command = [sys.executable, str(Path(open_shards.__file__)), "--files", "5", "--rounds", "2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert [entry["format"] for entry in report["entries"]] == list(open_shards.FORMATS)
    assert all(entry["open_s"]["low"] > 0 for entry in report["entries"])


@pytest.mark.parametrize("name", open_shards.FORMATS)
def test_what_it_writes(tmp_path: Path, name: str) -> None:
    open_shards.FORMATS[name](tmp_path, 3)
    with open_corpus(tmp_path) as corpus:
        assert corpus.format == name
        assert corpus.num_tokens == 3 * open_shards.DOCUMENTS * open_shards.TOKENS
        assert corpus.num_documents == (None if name == "flat" else 3 * open_shards.DOCUMENTS)
