"""What `open_corpus` accepts, refuses, and leaves untouched."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from corpus_files import write_shard

from dali_pipes import corpus as corpus_package
from dali_pipes.corpus import open_corpus
from dali_pipes.errors import ConfigError, CorpusFormatError

IDS = np.arange(100, 150, dtype="uint16")
FORMATS = ["flat", "llmc", "npy", "megatron"]

READ_EVERYTHING = """
import json, sys
import numpy as np
from dali_pipes.corpus import open_corpus

calls = []
sys.addaudithook(lambda event, arguments: calls.append((event, [str(argument) for argument in arguments])))
with open_corpus(sys.argv[1]) as corpus:
    out = np.zeros((3, 100), "uint16")
    corpus.read_rows([0, 25, 50], out)
    offsets = corpus.document_offsets
    corpus.locate(120)
calls = [call for call in calls if call[0].split(".")[0] in ("open", "os", "mmap", "shutil", "tempfile")]
print(json.dumps({"format": corpus.format, "row": out[1].tolist(), "offsets": offsets is not None, "calls": calls}))
"""


def state_of(folder: Path) -> dict[str, tuple[str, int, int]]:
    return {
        str(path): (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns, path.stat().st_mode)
        for path in sorted(folder.rglob("*"))
    }


@pytest.mark.parametrize("format", FORMATS)
def test_data_is_opened_read_only_and_left_alone(tmp_path: Path, format: str) -> None:
    """As root a mode protects nothing, so every call that could write or map is looked for."""
    for number in range(3):
        write_shard(tmp_path / f"s_{number}.bin", IDS, format)
    for path in tmp_path.iterdir():
        path.chmod(0o444)
    before = state_of(tmp_path)
    tmp_path.chmod(0o555)
    command = [sys.executable, "-c", READ_EVERYTHING, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    tmp_path.chmod(0o755)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert (seen["format"], seen["offsets"]) == (format, format == "megatron")
    assert seen["row"] == np.tile(IDS, 3)[25:125].tolist()
    opened = [arguments for event, arguments in seen["calls"] if event == "open"]
    assert {path for path, _, _ in opened} >= set(before)
    writes = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    assert [flags for _, _, flags in opened if int(flags) & writes] == []
    assert {event for event, _ in seen["calls"]} <= {"open", "os.listdir", "os.scandir"}
    assert state_of(tmp_path) == before


@pytest.mark.parametrize("other", FORMATS)
@pytest.mark.parametrize("one", FORMATS)
def test_mixed_formats_are_refused_naming_both_files(tmp_path: Path, one: str, other: str) -> None:
    files = [write_shard(tmp_path / f"{name}.bin", IDS, format) for name, format in (("a", one), ("b", other))]
    if one == other:
        with open_corpus(files) as corpus:
            assert corpus.num_tokens == 100
    else:
        with pytest.raises(CorpusFormatError, match=rf"a\.bin is {one} <u2 and .*b\.bin is {other} <u2"):
            open_corpus(files)


@pytest.mark.parametrize("dtype", ["<i2", "<u4", ">u2"])
def test_mixed_types_are_one_corpus(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "a.npy", IDS)
    np.save(tmp_path / "b.npy", IDS.astype(dtype))
    with open_corpus(tmp_path) as corpus:
        assert corpus.tokens(0, 2 * len(IDS)).tolist() == [*IDS.tolist(), *IDS.astype(dtype).tolist()]


def test_empty_file_among_files_with_headers_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "a.bin", IDS, "llmc")
    (tmp_path / "b.bin").write_bytes(b"")
    with pytest.raises(CorpusFormatError, match=r"b\.bin is empty"):
        open_corpus(tmp_path)


def test_format_is_recognised_whatever_the_suffix(tmp_path: Path) -> None:
    for format in ("flat", "llmc", "npy"):
        for suffix in (".bin", ".npy", ".dat", ""):
            with open_corpus(write_shard(tmp_path / f"{format}{suffix}", IDS, format)) as corpus:
                assert corpus.format == format
                np.testing.assert_array_equal(corpus.tokens(0, 50), IDS)


@pytest.mark.parametrize("format", ["Flat", "bin", "hdf5", ""])
def test_unknown_format_names_the_known_ones(format: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown format .*; choose auto, {', '.join(corpus_package.FORMATS)}"):
        open_corpus("a.bin", format=format)


@pytest.mark.parametrize("dtype", ["float32", "bool", "U4", "uint17", "object", "u1,u1"])
def test_types_that_are_no_ids_are_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match="dtype"):
        open_corpus("a.bin", dtype=dtype)


def test_public_names() -> None:
    assert corpus_package.__all__ == ["FORMATS", "Corpus", "LossMask", "TokenLocation", "TokenMask", "open_corpus"]
    others = {"arrayrecord", "arrow", "datatrove", "litdata", "mds", "parquet", "synthetic", "tfrecord"}
    assert {*FORMATS, *others} <= set(corpus_package.FORMATS)
    assert list(corpus_package.FORMATS) == sorted(corpus_package.FORMATS)


@pytest.mark.parametrize("suffix", [".csv", ".json", ".jsonl", ".tsv", ".txt", ".TXT"])
@pytest.mark.parametrize("text", ["a,b\n1,2\n", "{}", "1 2 3 4 5 6 7 8\n" * 90, "hello!\n\n"])
def test_a_file_named_as_text_is_not_read_as_ids(tmp_path: Path, suffix: str, text: str) -> None:
    """Also where it is too short, or of too few characters, to be told from ids by its content."""
    path = tmp_path / f"a{suffix}"
    path.write_text(text)
    with pytest.raises(CorpusFormatError, match=r"text.*tokenizer = 'tokenizer.json'"):
        open_corpus(path)
    with open_corpus(path, format="flat", dtype="uint16") as corpus:
        assert corpus.num_tokens == len(text) // 2
