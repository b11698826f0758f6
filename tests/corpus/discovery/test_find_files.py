"""Which files a corpus is made of, and in which order: the same on every machine."""

import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_files import write_megatron
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes import LoaderConfig
from dali_pipes import open_corpus as open_any_corpus
from dali_pipes.corpus import open_corpus
from dali_pipes.corpus.discovery.file_names import is_side_file
from dali_pipes.corpus.discovery.find_files import find_files, natural_key
from dali_pipes.errors import ConfigError, CorpusError, CorpusReadError
from dali_pipes.text import find_text_files
from dali_pipes.uris import FilePath

SHARDS = ["s_1", "s_2", "s_10", "s_03"]
IN_ORDER = ["s_1.bin", "s_2.bin", "s_03.bin", "s_10.bin"]


def make(folder: Path, names: list[str]) -> Path:
    """Files whose one token tells which name they have."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / f"{name}.bin").write_bytes(int(name.split("_")[1]).to_bytes(2, "little"))
    return folder


def names(found: list[FilePath]) -> list[str]:
    return [path.name for path in found]


def tokens(paths: Any) -> list[int]:
    with open_corpus(paths) as corpus:
        return [int(token) for token in corpus.tokens(0, corpus.num_tokens)]


@pytest.mark.parametrize("order", [reversed, lambda names: random.Random(5).sample(names, len(names))])
def test_order_of_the_directory_plays_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: Callable[[list[Any]], Any]
) -> None:
    """Two folders made in opposite order, listing functions that shuffle."""
    one, other = make(tmp_path / "one", SHARDS), make(tmp_path / "other", SHARDS[::-1])
    listdir, scandir = os.listdir, os.scandir

    class Entries:
        def __init__(self, path: Any) -> None:
            with scandir(path) as entries:
                self._entries = iter(list(order(list(entries))))

        def __enter__(self) -> "Entries":
            return self

        def __exit__(self, *_: object) -> None: ...

        def __iter__(self) -> "Entries":
            return self

        def __next__(self) -> Any:
            return next(self._entries)

    monkeypatch.setattr(os, "listdir", lambda path: list(order(listdir(path))))
    monkeypatch.setattr(os, "scandir", Entries)
    for folder in (one, other):
        assert tokens(folder) == [1, 2, 3, 10]
        assert tokens(str(folder / "*.bin")) == [1, 2, 3, 10]
        assert tokens(f"{folder}/**/s_?*") == [1, 2, 3, 10]
        assert tokens([folder / f"{name}.bin" for name in SHARDS]) == [1, 2, 10, 3]
    fingerprints = set()
    for folder in (one, other):
        with open_corpus(folder) as corpus:
            fingerprints.add(corpus.fingerprint)
    assert len(fingerprints) == 1


def test_names_that_tie_go_by_code_point() -> None:
    paths = [
        Path(name) for name in ("s_3", "s_03", "S_1", "s_1a", "s_1", "s_003", "s_20", "t/1", "s", "s_3/10", "s_3/9")
    ]
    assert [str(path) for path in sorted(paths, key=natural_key)] == [
        "S_1", "s", "s_1", "s_1a", "s_003", "s_03", "s_3", "s_3/9", "s_3/10", "s_20", "t/1",
    ]  # fmt: skip


@given(st.lists(st.lists(st.text("ab01289_.", min_size=1), min_size=1, max_size=3).map("/".join), unique=True))
def test_natural_order_is_total(texts: list[str]) -> None:
    paths = {Path(text) for text in texts}
    keys = [natural_key(path) for path in paths]
    assert all((one < other) + (other < one) + (one is other) == 1 for one in keys for other in keys)


def test_folder_leaves_out_side_files_and_folders_below(tmp_path: Path) -> None:
    make(tmp_path, ["s_1"])
    make(tmp_path / "below", ["s_2"])
    for name in (
        ".hidden.bin",
        "_SUCCESS",
        "meta.pkl",
        "a.json",
        "part-0.csv.gz",
        "README.md",
        "input.txt",
        "x.tmp",
        "Thumbs.db",
        ".DS_Store",
    ):
        (tmp_path / name).write_bytes(b"side")
    for name in ("x.bin.lock", "prepare.py", "s_1.bin~", "LICENSE", "a.ds.metadata"):
        (tmp_path / name).write_bytes(b"side")
    assert names(find_files(tmp_path)) == ["s_1.bin"]
    assert names(find_files(str(tmp_path / "*"))) == ["s_1.bin"]
    assert find_files(str(tmp_path / "**")) == [tmp_path / "below" / "s_2.bin", tmp_path / "s_1.bin"]


@pytest.mark.parametrize(
    "name", ["a.bin", "a.npy", "json.bin", "a.gz", "a.parquet", "a_meta.bin", "tmp", "a.jsonl", "1"]
)
def test_possible_data_is_not_left_out(name: str) -> None:
    assert not is_side_file(name)


def test_list_keeps_its_order(tmp_path: Path) -> None:
    make(tmp_path / "a", SHARDS)
    make(tmp_path / "b", ["s_7"])
    entries = [tmp_path / "b", tmp_path / "a" / "s_10.bin", str(tmp_path / "a" / "s_0*")]
    assert tokens(entries) == [7, 10, 3]


def test_relative_paths_hold_when_the_process_moves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, SHARDS)
    monkeypatch.chdir(tmp_path)
    with open_corpus("*.bin") as corpus:
        monkeypatch.chdir("/")
        assert corpus.tokens(0, 4).tolist() == [1, 2, 3, 10]
        assert corpus.files == tuple(tmp_path / name for name in IN_ORDER)


def test_name_with_the_signs_of_a_glob_is_taken_as_written(tmp_path: Path) -> None:
    make(tmp_path / "data[1]", ["s_1"])
    assert names(find_files(tmp_path / "data[1]" / "s_1.bin")) == ["s_1.bin"]


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    make(tmp_path, ["s_1"])
    assert find_files("~/s_*.bin") == [tmp_path / "s_1.bin"]


def test_megatron_pair_is_found_by_prefix_and_named_once(tmp_path: Path) -> None:
    pair = write_megatron(tmp_path / "my.data_text", [np.arange(3, dtype="uint16")])
    index = pair.with_suffix(".idx")
    assert find_files(tmp_path / "my.data_text") == [pair]
    assert find_files(tmp_path) == [pair]
    assert find_files(str(tmp_path / "*")) == [pair]
    assert find_files([pair, index]) == [pair]
    assert tokens([index, pair]) == [0, 1, 2]
    for repeated in ([pair, pair], [index, pair, pair], [index, index], [pair, tmp_path / "my.data_text"]):
        with pytest.raises(CorpusError, match="is listed twice"):
            tokens(repeated)
    pair.unlink()
    assert find_files(tmp_path / "my.data_text") == [index]


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    make(tmp_path, ["s_1"])
    for missing in ("none.bin", "none/x.bin", "s_1.bin/x", "s_1"):
        with pytest.raises(CorpusReadError, match=f"{tmp_path / missing}: no such file, folder or Megatron pre"):
            find_files([tmp_path / "s_1.bin", tmp_path / missing])
    with pytest.raises(CorpusReadError, match=r"x\*\.bin: no file matches this pattern"):
        find_files([str(tmp_path / "s_*"), str(tmp_path / "x*.bin")])


def test_folder_and_glob_without_data_say_what_is_there(tmp_path: Path) -> None:
    make(tmp_path / "below", ["s_1"])
    (tmp_path / "a.json").write_text("{}")
    for entry in (tmp_path, str(tmp_path / "*")):
        with pytest.raises(CorpusError, match=r"1 auxiliary file \(a\.json\) and 1 folder \(below\)"):
            find_files(entry)


def test_broken_links_and_pipes_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.bin").symlink_to(tmp_path / "none.bin")
    with pytest.raises(CorpusReadError, match=r"a\.bin: .*broken link"):
        find_files(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(CorpusReadError, match="pipe: is neither a regular file nor a folder"):
        find_files(tmp_path / "pipe")


@pytest.mark.parametrize("find", [find_files, find_text_files, partial(open_any_corpus, tokenizer="none.json")])
@pytest.mark.parametrize("weight", [0.7, 1, "0.7", "3", ".5", "1e-3"])
def test_weights_are_said_to_be_not_there(tmp_path: Path, find: Callable[[Any], object], weight: object) -> None:
    make(tmp_path, ["s_1"])
    with pytest.raises((ConfigError, CorpusReadError), match="mixture = "):
        find([weight, str(tmp_path / "s_1.bin")])
    with pytest.raises((ConfigError, CorpusReadError), match="mixture = "):
        find({str(tmp_path / "s_1.bin"): weight})


def test_a_file_may_be_named_like_a_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "0.7").write_bytes(b"abcd")
    monkeypatch.chdir(tmp_path)
    assert find_files(["0.7"]) == [tmp_path / "0.7"]


@pytest.mark.parametrize("find", [find_files, find_text_files, partial(open_any_corpus, tokenizer="none.json")])
@pytest.mark.parametrize(
    ("address", "said"),
    [("s4://bucket/a.bin", "s4"), ("htps://host/a.bin", "https://"), (Path("s3://b/a"), "'s3://b/a'")],
    ids=str,
)
def test_an_address_with_a_mistake_is_refused(find: Callable[[Any], object], address: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find(address)


@pytest.mark.parametrize("paths", [[], (), {"a.bin"}, {"a.bin": 1}, 5, b"a.bin", None])
def test_what_is_no_path_is_refused(paths: Any) -> None:
    with pytest.raises(ConfigError, match="corpus: "):
        find_files(paths)


@pytest.mark.parametrize("empty", ["", [""], ["s_1.bin", ""], ("", "s_1.bin")])
def test_an_empty_path_is_not_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empty: str | list[str] | tuple[str, ...]
) -> None:
    """As a variable gives that is not set: the run would train on whatever lies where it was started."""
    monkeypatch.chdir(make(tmp_path, SHARDS))
    (tmp_path / "text.txt").write_text("a")
    for look in (open_corpus, find_text_files, lambda paths: LoaderConfig(corpus=paths, batch_size=1, seq_len=1)):
        with pytest.raises(ConfigError, match=r"corpus: .*path is empty"):
            look(empty)
    with open_corpus(".") as corpus:
        assert [path.name for path in corpus.files] == IN_ORDER
