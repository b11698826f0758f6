"""llm.c files: what their header says is checked against the file."""

import struct
from pathlib import Path

import numpy as np
import pytest
from corpus_files import write_llmc

from dali_pipes.corpus import open_corpus
from dali_pipes.errors import CorpusFormatError

IDS = np.arange(100, 130, dtype="uint16")


@pytest.mark.parametrize(("dtype", "magic", "version"), [("uint16", 20240520, 1), ("uint32", 20240801, 7)])
def test_known_header_by_hand(tmp_path: Path, dtype: str, magic: int, version: int) -> None:
    ids = np.array([50256, 7, 8], dtype)
    (tmp_path / "a.bin").write_bytes(struct.pack("<3i", magic, version, 3) + bytes(1012) + ids.tobytes())
    with open_corpus(tmp_path / "a.bin") as corpus:
        assert (corpus.format, corpus.dtype.name, corpus.num_tokens) == ("llmc", dtype, 3)
        assert corpus.tokens(0, 3).tolist() == [50256, 7, 8]
        assert corpus.locate(2).offset == 2


@pytest.mark.parametrize(
    ("magic", "version", "message"),
    [
        (20240520, 7, "magic 20240520 and version 7; .*20240520 version 1"),
        (20240801, 1, "magic 20240801 and version 1"),
        (20240520, 2, "magic 20240520 and version 2"),
        (20240522, 1, "multiple-choice evaluation file"),
    ],
)
def test_other_headers_are_refused(tmp_path: Path, magic: int, version: int, message: str) -> None:
    (tmp_path / "a.bin").write_bytes(struct.pack("<3i", magic, version, 30) + bytes(1012) + IDS.tobytes())
    with pytest.raises(CorpusFormatError, match=rf"a\.bin: .*{message}"):
        open_corpus(tmp_path / "a.bin")


@pytest.mark.parametrize("claimed", [29, 31, 2**31 - 1])
def test_count_that_disagrees_with_the_size_is_refused(tmp_path: Path, claimed: int) -> None:
    """A header count larger than the file, and smaller."""
    path = write_llmc(tmp_path / "a.bin", IDS, count=claimed)
    with pytest.raises(
        CorpusFormatError, match=rf"{1024 + 2 * claimed:,} bytes .*{claimed:,} ids.* the file has 1,084"
    ):
        open_corpus(path)


def test_negative_count_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorpusFormatError, match="claims -30 ids"):
        open_corpus(write_llmc(tmp_path / "a.bin", IDS, count=-30))


def test_header_cut_short_is_refused(tmp_path: Path) -> None:
    path = write_llmc(tmp_path / "a.bin", IDS)
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CorpusFormatError, match=r"1,000 bytes, .*1,024"):
        open_corpus(path)


def test_other_dtype_is_refused(tmp_path: Path) -> None:
    path = write_llmc(tmp_path / "a.bin", IDS)
    with pytest.raises(CorpusFormatError, match="llmc file holds uint16 ids, but dtype = 'uint32'"):
        open_corpus(path, dtype="uint32")
    with open_corpus(path, dtype="uint16") as corpus:
        assert corpus.num_tokens == 30


def test_shard_without_ids_among_others(tmp_path: Path) -> None:
    write_llmc(tmp_path / "a_1.bin", IDS[:0])
    write_llmc(tmp_path / "a_2.bin", IDS)
    with open_corpus(tmp_path) as corpus:
        assert corpus.num_tokens == 30
