"""The commands take URIs: what they print of a corpus behind one is what they print of its copy."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from commands import one_line_error, run_json, run_well
from counting import CountingCorpus
from range_server import RangeServer

pytestmark = pytest.mark.needs("obstore")


@pytest.fixture
def both(counting: Callable[..., CountingCorpus]) -> Iterator[tuple[list[str], list[str], Path]]:
    corpus = counting(3000, 2001, dtype="uint16")
    with RangeServer.of_folder(corpus.folder) as server:
        yield list(map(str, corpus.files)), [f"{server.url}/{file.name}" for file in corpus.files], corpus.folder


@pytest.mark.parametrize(
    "command",
    [
        ["inspect"],
        ["check", "--vocab-size", "60000"],
        ["preview", "--batch-size", "4", "--seq-len", "32"],
        ["explain", "--step", "3", "--set", "batch_size=4", "--set", "seq_len=32"],
    ],
    ids=lambda command: str(command[0]),
)
def test_a_command_prints_the_same(both: tuple[list[str], list[str], Path], command: list[str]) -> None:
    near, far, folder = both
    local, remote = (run_json(command[0], *paths, *command[1:]) for paths in (near, far))
    base = far[0].rpartition("/")[0]
    assert json.loads(json.dumps(remote).replace(base, str(folder))) == local


def test_copy(both: tuple[list[str], list[str], Path], tmp_path: Path) -> None:
    near, far, _ = both
    assert "2 files copied (10,002 bytes), 0 already there" in run_well("copy", *far, tmp_path / "copy")
    assert run_json("copy", *far, tmp_path / "copy")["found"] == 2
    assert [(tmp_path / "copy" / Path(file).name).read_bytes() for file in near] == [Path(f).read_bytes() for f in near]
    assert "URI" in one_line_error("copy", far[0])


def test_errors_show_no_credentials(both: tuple[list[str], list[str], Path]) -> None:
    _, far, _ = both
    secret = far[0].replace("//", "//me:hunter2@") + "?X-Amz-Signature=5f2c"
    size = ["--batch-size", "4", "--seq-len", "32"]
    for arguments in (
        ["preview", secret],
        ["preview", secret, *size, "--set", "stride=-1"],
        ["preview", "gpt2_124m", "--set", f"corpus={secret}", "--set", "mixture=5"],
        ["inspect", secret.replace("shard", "none")],
        ["check", secret, secret],
        ["copy", secret],
        ["copy", secret, secret],
    ):
        said = one_line_error(*arguments)
        assert "hunter2" not in said
        assert "5f2c" not in said
