"""NumPy files: every header NumPy writes for token ids is read, everything else is refused by name."""

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_files import npy_bytes

from dali_pipes.corpus import open_corpus
from dali_pipes.errors import CorpusError, CorpusFormatError

DATA = np.arange(6, dtype="<u2").tobytes()


def opened(path: Path, content: bytes) -> list[int]:
    path.write_bytes(content)
    with open_corpus(path) as corpus:
        assert corpus.format == "npy"
        return [int(token) for token in corpus.tokens(0, corpus.num_tokens)]


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("dtype", ["|u1", "<u2", ">u2", "<i4", ">i8", "<u8"])
@pytest.mark.parametrize("shape", [(12,), (3, 4), (12, 1), (1, 12)])
def test_what_numpy_writes(tmp_path: Path, version: tuple[int, int], dtype: str, shape: tuple[int, ...]) -> None:
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # versions 2 and 3 are written only when asked for, with a warning
        np.lib.format.write_array(file, np.arange(12, dtype=dtype).reshape(shape), version=version)
    assert opened(tmp_path / "a.npy", file.getvalue()) == list(range(12))


@pytest.mark.parametrize("version", [1, 2, 3])
def test_header_by_hand(tmp_path: Path, version: int) -> None:
    assert opened(tmp_path / "a.npy", npy_bytes("'<u2'", "(6,)", DATA, version=version)) == [0, 1, 2, 3, 4, 5]


def test_old_alignment_and_other_suffix(tmp_path: Path) -> None:
    header = b"{'descr': '<u2', 'shape': (2, 3), 'fortran_order': False}\n"
    assert opened(tmp_path / "a.bin", b"\x93NUMPY\x01\x00" + bytes([len(header), 0]) + header + DATA) == list(range(6))


@pytest.mark.parametrize(
    ("descr", "shape", "fortran", "message"),
    [
        ("'|O'", "(6,)", False, "pickled Python objects"),
        ("'<f4'", "(3,)", False, "holds '<f4' .*token ids are integers"),
        ("'|b1'", "(12,)", False, "token ids are integers"),
        ("'|V2'", "(6,)", False, "token ids are integers"),
        ("[('a', '<u2')]", "(6,)", False, "token ids are integers"),
        ("'<u2'", "(2, 3)", True, "fortran_order is True"),
        ("'<u2'", "(6,)", 0, "fortran_order is 0"),
        ("'<u2'", "()", False, r"shape \(\)"),
        ("'<u2'", "(1, 2, 3)", False, r"shape \(1, 2, 3\)"),
        ("'<u2'", "(-6,)", False, "invalid shape"),
        ("'<u2'", "(True, 6)", False, "invalid shape"),
        ("'<u2'", "6", False, "invalid shape"),
        ("'<u2'", "(6.0,)", False, "invalid shape"),
        ("'<u2'", "(7,)", False, "142 bytes .*the file has 140"),
        ("'<u2'", "(5,)", False, "138 bytes .*the file has 140"),
        ("'<u2'", "(2**60, 4)", False, "damaged"),
        ("'<u2'", f"({2**60}, {2**60})", False, "but the file has"),
        ("__import__('os').getcwd()", "(6,)", False, "header is damaged"),
        ("'<u2'", "(6,), 'more': 1", False, "expected descr, fortran_order and shape"),
        ("'<u2", "(6,)", False, "header is damaged"),
    ],
)
def test_what_is_no_flat_array_of_integers_is_refused(
    tmp_path: Path, descr: str, shape: str, fortran: Any, message: str
) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(npy_bytes(descr, shape, DATA, fortran))
    with pytest.raises(CorpusFormatError, match=rf"a\.npy: .*{message}"):
        open_corpus(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x93NUMPY", "does not start with a NumPy header"),
        (b"\x93NUMPY\x01\x00\x40\x00", "claims 64 bytes"),
        (b"\x93NUMPY\x02\x00\x40\x00\x00", "claims"),
        (b"\x93NUMPY\x02\x00\xff\xff\xff\xff{}", "claims 4,294,967,295 bytes"),
        (b"\x93NUMPY\x04\x00\x40\x00" + bytes(64), r"version 4\.0"),
        (b"\x93NUMPY\x00\x00\x40\x00" + bytes(64), r"version 0\.0"),
        (b"\x93NUMPY\x01\x01\x40\x00" + bytes(64), r"version 1\.1"),
        (b"\x93NUMPY\x01\x00\x40\x00" + bytes(64), "damaged"),
        (b"\x93NUMPY\x03\x00\x04\x00\x00\x00\xff\xff\xff\xff", "damaged"),
        (b"\x93NUMPY\x01\x00\x28\x23" + b"(" * 9000, "damaged"),
        (b"\x93NUMPY\x01\x00\x02\x00[]", "expected descr"),
    ],
)
def test_damaged_headers_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(content)
    with pytest.raises(CorpusFormatError, match=message):
        open_corpus(path)


def test_file_without_header_is_not_read_as_npy_when_that_was_said(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(DATA * 10)
    with pytest.raises(CorpusFormatError, match=r"a\.npy: .*NumPy header \(120 bytes\).*format = 'flat'"):
        open_corpus(tmp_path / "a.npy", format="npy")
    with open_corpus(tmp_path / "a.npy") as corpus:
        assert (corpus.format, corpus.num_tokens) == ("flat", 60)


def test_array_without_ids_is_an_empty_corpus(tmp_path: Path) -> None:
    (tmp_path / "a.npy").write_bytes(npy_bytes("'<u2'", "(0, 5)", b""))
    with pytest.raises(CorpusError, match="the corpus is empty"):
        open_corpus(tmp_path / "a.npy")
