"""Files without a header: the size must fit the width, and ids of another width are noticed where they can be."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dali_pipes.corpus import open_corpus
from dali_pipes.errors import CorpusError, CorpusFormatError

random = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (np.arange(1000, dtype="uint32"), "uint32 or int32"),
        (np.arange(1, 12, dtype="int32"), "uint32 or int32"),
        (random.integers(0, 50257, 300_000, "uint32"), "uint32 or int32"),
        (random.integers(0, 65, 30_000, "uint32"), "uint32 or int32"),
        (random.integers(0, 128_256, 1000, "uint32"), "uint32 or int32"),
        (random.integers(0, 1_000_000, 300_000, "int32"), "uint32 or int32"),
        (random.integers(0, 50257, 5000, "int64"), "int64 or uint64"),
        (random.integers(0, 128_256, 100_000, "uint64"), "int64 or uint64"),
    ],
)
def test_wider_ids_are_not_read_as_uint16(
    tmp_path: Path, ids: np.ndarray[tuple[int], np.dtype[np.int_]], message: str
) -> None:
    path = tmp_path / "a.bin"
    ids.tofile(path)
    expected = rf"a\.bin: .*uint16.* {message}.*dtype = 'uint16'.*a\.idx"
    with pytest.raises(CorpusFormatError, match=expected):
        open_corpus(path)
    with open_corpus(path, dtype=ids.dtype if ids.dtype != np.uint64 else "int64") as corpus:
        np.testing.assert_array_equal(corpus.tokens(0, len(ids)), ids)
    with open_corpus(path, dtype="uint16") as corpus:
        assert corpus.num_tokens == len(ids) * ids.itemsize // 2


@pytest.mark.parametrize(
    "ids",
    [
        np.arange(70_000) % 65536,
        np.zeros(1000),
        np.arange(1000) % 2,
        (np.arange(1000) + 1) % 2,
        random.integers(0, 16, 1000),
        random.integers(0, 65, 1000),
        random.integers(0, 50257, 300_000),
        np.tile([3, 0], 500),
        np.where(np.arange(1000) % 100, 0, 777),
    ],
)
def test_uint16_ids_are_read_as_such(tmp_path: Path, ids: np.ndarray[tuple[int], np.dtype[np.int_]]) -> None:
    ids.astype("<u2").tofile(tmp_path / "a.bin")
    with open_corpus(tmp_path / "a.bin") as corpus:
        assert corpus.dtype == np.uint16
        np.testing.assert_array_equal(corpus.tokens(0, len(ids)), ids)


@given(st.lists(st.integers(0, 65535), min_size=64, max_size=300))
def test_most_uint16_files_are_read_as_such(tmp_path_factory: pytest.TempPathFactory, ids: list[int]) -> None:
    path = tmp_path_factory.mktemp("flat") / "a.bin"
    np.array(ids, "<u2").tofile(path)
    assume(any(token > 15 for token in ids[1::2]))  # else they look like wider ids
    with open_corpus(path) as corpus:
        assert corpus.tokens(0, len(ids)).tolist() == ids


@pytest.mark.parametrize(("size", "dtype", "width"), [(7, None, 2), (10, "uint32", 4), (12, "int64", 8)])
def test_size_that_is_no_multiple_of_the_width_is_refused(
    tmp_path: Path, size: int, dtype: str | None, width: int
) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(size))
    with pytest.raises(CorpusFormatError, match=rf"a\.bin: {size} bytes are not a multiple of {width}, the width of"):
        open_corpus(tmp_path / "a.bin", dtype=dtype)


def test_empty_files_hold_no_tokens(tmp_path: Path) -> None:
    for number in (1, 3):
        (tmp_path / f"s_{number}.bin").write_bytes(b"")
    with pytest.raises(CorpusError, match=r"the corpus is empty: 0 tokens in 2 files.*s_1\.bin"):
        open_corpus(tmp_path)
    (tmp_path / "s_2.bin").write_bytes(b"\5\0")
    with open_corpus(tmp_path) as corpus:
        assert len(corpus.files) == 3
        assert corpus.tokens(0, 1).tolist() == [5]


def test_uint64_needs_a_format_that_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(16))
    with pytest.raises(CorpusFormatError, match=r"a\.bin: .*uint64.* dtype = 'int64'"):
        open_corpus(tmp_path / "a.bin", dtype="uint64")
