"""What programs leave beside data is named in an error or a line, and never becomes data."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shard_files import tf_example, tfrecord_frame
from table_files import list_array, table_of, write_arrow

from dali_pipes import LoaderConfig, TokenLoader
from dali_pipes.corpus import open_corpus
from dali_pipes.corpus.discovery.file_names import finished_name, is_side_file
from dali_pipes.corpus.discovery.find_files import find_files
from dali_pipes.errors import CorpusError
from dali_pipes.text import find_text_files
from dali_pipes.tools.reports import check_corpus, inspect_corpus

UNFINISHED = [
    "{}.incomplete", "{}.aria2", "{}.crdownload", "{}.download", "{}.filepart", "{}.tmp", "{}.temp", "{}.part",
    "{}.partial", "{}_temp", "{}_.gstmp", "{}.1a2b3c4d.partial", ".{}.Xy12Zq", ".{}.tmp", "{}.9aF3b21c", "{}.!qB",
    "{}.PART",
]  # fmt: skip
COPIES = ["a{}.1", "a (1){}", "a copy{}", "a copy 2{}", "a - Copy{}", "a - Copy (3){}", "Copy of a{}"]
BACKUPS = ["a{}~", "a{}.bak", "a{}.orig", "#a{}#", "a{}.old"]
LITTER = ["Thumbs.db", "desktop.ini", ".DS_Store", "._a{}", "ehthumbs.db", "Icon\r"]


class Kind:
    """tokens or texts: files, and what is found among them."""

    def __init__(self, suffix: str, content: bytes, find: Callable[..., Any]) -> None:
        self.suffix, self.content, self.find = suffix, content, find


def _texts(paths: Any, notes: list[str]) -> list[str]:
    return [file.path.name for file in find_text_files(paths, notes)]


def _tokens(paths: Any, notes: list[str]) -> list[str]:
    with open_corpus(paths) as corpus:
        notes += corpus.notes
        return [path.name for path in corpus.files]


KINDS = [Kind(".bin", b"\1\0\2\0", _tokens), Kind(".jsonl", b'{"text": "a"}\n', _texts)]
KINDS += [Kind(".tfrecord-00001-of-00002", tfrecord_frame(tf_example({"tokens": [1, 2]})), _tokens)]
KINDS += [Kind(".jsonl.gz", b'{"text": "a"}\n', _texts), Kind(".csv", b"text\na\n", _texts)]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.suffix)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


def fill(folder: Path, kind: Kind, *names: str) -> None:
    for name in ("a{}", *names):
        (folder / name.format(kind.suffix)).write_bytes(kind.content)


@pytest.mark.parametrize("form", UNFINISHED)
def test_an_unfinished_download_is_an_error_in_folders_and_patterns(tmp_path: Path, kind: Kind, form: str) -> None:
    name = form.format(f"b{kind.suffix}")
    fill(tmp_path, kind, name)
    for entry in (tmp_path, tmp_path / "*", tmp_path / f"*{kind.suffix}"):  # the last one: what it will become matches
        with pytest.raises(CorpusError, match="looks like an unfinished download") as caught:
            kind.find(str(entry), [])
        assert name in str(caught.value)
        assert "list the files" in str(caught.value)
    assert kind.find([str(tmp_path / f"a{kind.suffix}")], []) == [f"a{kind.suffix}"]
    assert kind.find(str(tmp_path / f"a*{kind.suffix}"), []) == [f"a{kind.suffix}"]


@pytest.mark.parametrize("name", ["README.md.part", "run.log.tmp", "x.tmp", "notes.json.partial", "_a.bin.tmp"])
def test_what_becomes_no_data_is_not_missed(tmp_path: Path, kind: Kind, name: str) -> None:
    fill(tmp_path, kind, name)
    assert kind.find(str(tmp_path), []) == [f"a{kind.suffix}"]


def test_a_mask_that_is_not_finished_is_missed(tmp_path: Path) -> None:
    fill(tmp_path, KINDS[0], "a{}.loss.part")
    with pytest.raises(CorpusError, match=r"a\.bin\.loss\.part: looks like an unfinished"):
        open_corpus(tmp_path)


@pytest.mark.parametrize("form", COPIES)
def test_a_second_copy_is_an_error_beside_the_first(tmp_path: Path, kind: Kind, form: str) -> None:
    name = form.format(kind.suffix)
    fill(tmp_path, kind, name)
    with pytest.raises(CorpusError, match="looks like a copy of a"):
        kind.find(str(tmp_path), [])
    (tmp_path / f"a{kind.suffix}").unlink()
    assert kind.find(str(tmp_path), []) == [name]


def test_numbered_shards_are_data(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"a.bin.{number}").write_bytes(b"\1\0")
    assert _tokens(str(tmp_path), []) == ["a.bin.0", "a.bin.1", "a.bin.2"]


@pytest.mark.parametrize("form", BACKUPS)
def test_a_backup_is_left_out_and_mentioned(tmp_path: Path, kind: Kind, form: str) -> None:
    name, notes = form.format(kind.suffix), list[str]()
    fill(tmp_path, kind, name)
    assert kind.find(str(tmp_path), notes) == [f"a{kind.suffix}"]
    assert len(notes) == 1
    assert name in notes[0]


@pytest.mark.parametrize("form", LITTER)
def test_litter_of_file_managers_is_left_out(tmp_path: Path, kind: Kind, form: str) -> None:
    fill(tmp_path, kind, form)
    notes: list[str] = []
    assert kind.find(str(tmp_path), notes) == [f"a{kind.suffix}"]
    assert not notes


@given(st.text("abz019-_", min_size=1), st.sampled_from([".bin", ".npy", ".parquet", ".jsonl.zst", ".tar"]))
def test_plain_names_of_data_are_neither(stem: str, suffix: str) -> None:
    assert finished_name(stem + suffix) is None
    assert is_side_file(stem + suffix) == stem.startswith("_")


def results_of_datasets(folder: Path) -> list[str]:
    """Data of two rows, and the results of a filter and of a map with two processes."""
    names = ["cache-0123456789abcdef.arrow", *(f"cache-aabbccddeeff0011_0000{at}_of_00002.arrow" for at in range(2))]
    write_arrow(folder / "json-train.arrow", table_of([list_array([[1, 2], [3]])]))
    for name in names:
        write_arrow(folder / name, table_of([list_array([[1, 2]])]))
    (folder / "tmpabcd12_x").write_bytes(b"half")
    return names


@pytest.mark.parametrize("pattern", ["", "*", "*.arrow"])
def test_results_of_datasets_beside_its_data_are_left_out(
    tmp_path: Path, pattern: str, capsys: pytest.CaptureFixture[str]
) -> None:
    names = results_of_datasets(tmp_path)
    with open_corpus(str(tmp_path / pattern)) as corpus:
        assert corpus.tokens(0, corpus.num_tokens).tolist() == [1, 2, 3]
        assert names[0] in corpus.notes[0]
        assert inspect_corpus(corpus).notes == corpus.notes
    assert names[0] in check_corpus([str(tmp_path / pattern)]).notes[0]
    config = LoaderConfig(corpus=str(tmp_path / pattern), batch_size=1, seq_len=1, device="cpu")
    with TokenLoader(config) as loader:
        assert len(list(loader)) == 2
    assert names[0] in capsys.readouterr().err


def test_results_of_datasets_that_are_named_or_alone_are_data(tmp_path: Path) -> None:
    names = results_of_datasets(tmp_path)
    assert [path.name for path in find_files([str(tmp_path / name) for name in names])] == names
    assert [path.name for path in find_files(str(tmp_path / "cache-aab*"))] == names[1:]
    with pytest.raises(CorpusError, match="results of several Hugging Face datasets calls"):
        find_files(str(tmp_path / "cache-*"))


FILES = {"a.bin": [1, 2, 3], "b.bin": [4, 5]}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, ids in FILES.items():
        np.array(ids, np.uint16).tofile(folder / name)
    (tmp_path / "link.bin").symlink_to(folder / "b.bin")
    (tmp_path / "hard.bin").hardlink_to(folder / "b.bin")
    (tmp_path / "folder").symlink_to(folder)
    return tmp_path


TWICE = r"is listed twice|is the same file as"
REPEATED = [
    ["data/a.bin", "data/b.bin", "data/b.bin"], ["data", "data/a.bin"], ["data/a.bin", "data/*"], ["data", "folder"],
    ["data/b.bin", "link.bin"], ["hard.bin", "data/b.bin"], ["link.bin", "hard.bin"],
    ["data/../data/a.bin", "data/a.bin"], ["*.bin"],
]  # fmt: skip


@pytest.mark.parametrize("named", REPEATED, ids=" ".join)
def test_a_file_that_is_there_twice_is_refused_with_both_entries(data: Path, named: list[str]) -> None:
    with pytest.raises(CorpusError, match=TWICE) as caught:
        open_corpus([str(data / name) for name in named])
    for name in {named[0], named[-1]} if len(named) == 2 else {named[-1]}:
        assert str(data / name) in str(caught.value)
    with pytest.raises(CorpusError, match=TWICE):
        TokenLoader(
            LoaderConfig(
                corpus=[str(data / name) for name in named],
                batch_size=1,
                seq_len=2,
                device="cpu",
                validation_fraction=0.3,
                quiet=True,
            )
        )


def test_tables_and_texts_that_are_there_twice_are_refused(tmp_path: Path) -> None:
    table = write_arrow(tmp_path / "a.arrow", table_of([list_array([[1, 2], [3]])]))
    (tmp_path / "b.arrow").symlink_to(table)
    with pytest.raises(CorpusError, match="is the same file as"):
        open_corpus(str(tmp_path / "*.arrow"))
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "b.txt").hardlink_to(tmp_path / "a.txt")
    for named in ([tmp_path / "a.txt"] * 2, str(tmp_path / "*.txt")):
        with pytest.raises(CorpusError, match=TWICE):
            find_text_files(named)


def test_files_of_the_same_content_are_not_one_file(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.bin").write_bytes(b"\1\0" if name != "c" else b"")
    (tmp_path / "d.bin").hardlink_to(tmp_path / "c.bin")  # empty: nothing is there twice
    assert _tokens(str(tmp_path), []) == ["a.bin", "b.bin", "c.bin", "d.bin"]
