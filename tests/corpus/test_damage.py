"""Damaged headers and indexes give an error of ours, or the data that is there, within the memory of the files."""

import struct
import tracemalloc
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from corpus_files import LLMC_HEADERS, npy_bytes, write_llmc, write_megatron
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes.corpus import open_corpus
from dali_pipes.errors import CorpusError

IDS = np.arange(300, 360, dtype="uint16")
MOST_BYTES = 2_000_000  # the parsers' own needs; a damaged count would ask for gigabytes
EXTREMES = [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1]


@st.composite
def damaged(draw: st.DrawFn, content: bytes, header_bytes: int) -> bytes:
    """`content` with one to three changes within its first `header_bytes`, or cut or lengthened."""
    changed = bytearray(content)
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, min(header_bytes, len(changed)) - 1)))
        kind = draw(st.sampled_from(["byte", "number", "cut", "insert", "append"]))
        if kind == "byte":
            changed[at : at + 1] = bytes([draw(st.integers(0, 255))])
        elif kind == "number":
            number = struct.pack("<Q", draw(st.sampled_from(EXTREMES)))
            width = draw(st.sampled_from([2, 4, 8]))
            changed[at : at + width] = number[:width]
        elif kind == "cut":
            del changed[at : at + draw(st.integers(1, 100))]
        elif kind == "insert":
            changed[at:at] = draw(st.binary(min_size=1, max_size=8))
        else:
            changed += draw(st.binary(min_size=1, max_size=40))
    return bytes(changed)


def read_all(path: Path, format: str) -> npt.NDArray[np.int64] | None:
    """The ids, or None for an error of ours, within the allowed memory."""
    tracemalloc.start()
    try:
        with open_corpus(path, format=format) as corpus:
            tokens = corpus.tokens(0, corpus.num_tokens).astype(np.int64)
            if corpus.document_offsets is not None:
                assert corpus.document_offsets[[0, -1]].tolist() == [0, corpus.num_tokens]
                assert (np.diff(corpus.document_offsets) >= 0).all()
            return tokens
    except CorpusError:
        return None
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST_BYTES


def check(path: Path, format: str, expected: npt.NDArray[np.int64] | None) -> None:
    """Reading as `format` gives what a slow reader found, or an error; "auto" raises nothing else either."""
    found = read_all(path, format)
    if found is not None:
        assert expected is not None
        np.testing.assert_array_equal(found, expected)
    read_all(path, "auto")


@settings(max_examples=examples(35))
@given(data=st.data())
def test_llmc(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = write_llmc(tmp_path_factory.mktemp("llmc") / "a.bin", IDS)
    content = data.draw(damaged(path.read_bytes(), 16))
    path.write_bytes(content)
    expected: npt.NDArray[np.int64] | None = None
    for dtype, mark in LLMC_HEADERS.items():
        if struct.pack("<2i", *mark) == content[:8]:
            count = struct.unpack_from("<i", content, 8)[0]
            if len(content) == 1024 + count * np.dtype(dtype).itemsize:
                expected = np.frombuffer(content[1024:], dtype).astype(np.int64)
    check(path, "llmc", expected)


@pytest.mark.filterwarnings("ignore::SyntaxWarning", "ignore::DeprecationWarning")  # of Python, about a damaged literal
@settings(max_examples=examples(35))
@given(data=st.data(), version=st.sampled_from([1, 2, 3]))
def test_npy(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, version: int) -> None:
    path = tmp_path_factory.mktemp("npy") / "a.npy"
    path.write_bytes(data.draw(damaged(npy_bytes("'<u2'", "(6, 10)", IDS.tobytes(), version=version), 130)))
    try:
        array = np.load(path, allow_pickle=False)
        expected = array.astype(np.int64).reshape(-1)
    except Exception:  # whatever NumPy makes of it; then there is nothing to compare with
        expected = None
    check(path, "npy", expected)


def read_pair_slowly(path: Path) -> npt.NDArray[np.int64] | None:
    """The ids of a pair, sequence by sequence; None if the index cannot be followed."""
    index, content = path.with_suffix(".idx").read_bytes(), path.read_bytes()
    try:
        code, count = struct.unpack_from("<BQ", index, 17)
        dtype = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}[code]
        start = 26 if len(index) == 26 + 12 * count else 34
        lengths = struct.unpack_from(f"<{count}i", index, start)
        pointers = struct.unpack_from(f"<{count}q", index, start + 4 * count)
        pieces = [
            np.frombuffer(content, dtype, length, pointer) if length else np.zeros(0, dtype)
            for length, pointer in zip(lengths, pointers, strict=True)
        ]
    except (struct.error, ValueError, KeyError, OverflowError, MemoryError):
        return None
    return np.concatenate(pieces).astype(np.int64) if pieces else None


@settings(max_examples=examples(60))
@given(data=st.data(), fairseq=st.booleans(), modes=st.booleans())
def test_megatron(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, fairseq: bool, modes: bool) -> None:
    pieces = [IDS[:10], IDS[10:10], IDS[10:25], IDS[25:]]
    path = write_megatron(
        tmp_path_factory.mktemp("pair") / "a", pieces, [0, 1, 1, 4], fairseq=fairseq, modes=modes and not fairseq
    )
    index = path.with_suffix(".idx")
    index.write_bytes(data.draw(damaged(index.read_bytes(), index.stat().st_size)))
    check(path, "megatron", read_pair_slowly(path))
