"""A corpus reads like its files laid end to end, wherever rows start, from any number of threads."""

import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from corpus_files import MEGATRON_CODES, write_shard
from held import open_files
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes.corpus import Corpus, TokenLocation, open_corpus
from dali_pipes.errors import CorpusError, CorpusReadError, TokenRangeError
from dali_pipes.storage import file_pool

DTYPES = {
    "flat": ["uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"],
    "llmc": ["uint16", "uint32"],
    "npy": ["uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"],
    "megatron": [name for name in MEGATRON_CODES if name != "uint64"],
}
FormatAndDtype = st.sampled_from([(format, dtype) for format, dtypes in DTYPES.items() for dtype in dtypes])


def write_shards(folder: Path, sizes: Sequence[int], format: str, dtype: str, seed: int) -> npt.NDArray[Any]:
    """Shards s_0, s_1 ... of random ids over the whole range of `dtype`; returns them laid end to end."""
    limits = np.iinfo(dtype)
    generator = np.random.default_rng(seed)
    shards = [generator.integers(limits.min, limits.max, size, dtype, endpoint=True) for size in sizes]
    for number, shard in enumerate(shards):
        write_shard(folder / f"s_{number}.{'npy' if format == 'npy' else 'bin'}", shard, format)
    return np.concatenate(shards)


@settings(max_examples=examples(35))
@given(
    kind=FormatAndDtype,
    sizes=st.lists(st.integers(0, 60), min_size=1, max_size=8).filter(any),
    seed=st.integers(0, 2**32),
    rows=st.integers(0, 9),
    data=st.data(),
)
def test_rows_equal_the_files_laid_end_to_end(
    tmp_path_factory: pytest.TempPathFactory,
    kind: tuple[str, str],
    sizes: list[int],
    seed: int,
    rows: int,
    data: st.DataObject,
) -> None:
    format, dtype = kind
    folder = tmp_path_factory.mktemp("shards")
    expected = write_shards(folder, sizes, format, dtype, seed)
    length = data.draw(st.integers(0, len(expected)))
    starts = data.draw(st.lists(st.integers(0, len(expected) - length), min_size=rows, max_size=rows))
    # Said, because random bytes may look like another format, and flat files do not tell their type.
    with open_corpus(folder, format=format, dtype=dtype) as corpus:
        assert (corpus.num_tokens, corpus.format, corpus.dtype) == (len(expected), format, np.dtype(dtype))
        out = np.full((rows, length), 77, corpus.dtype)
        corpus.read_rows(np.array(starts, data.draw(st.sampled_from(["int64", "int32", "uint64"]))), out)
        for row, start in zip(out, starts, strict=True):
            np.testing.assert_array_equal(row, expected[start : start + length])
        start = data.draw(st.integers(0, len(expected)))
        count = data.draw(st.integers(0, len(expected) - start))
        tokens = corpus.tokens(start, count)
        np.testing.assert_array_equal(tokens, expected[start : start + count])
        assert tokens.dtype == corpus.dtype
        assert tokens.flags.owndata
        assert tokens.flags.writeable


def test_small_corpus_by_hand(tmp_path: Path) -> None:
    np.array([10, 11, 12], "uint16").tofile(tmp_path / "a.bin")
    np.array([], "uint16").tofile(tmp_path / "b.bin")
    np.array([13], "uint16").tofile(tmp_path / "c.bin")
    np.array([14, 15], "uint16").tofile(tmp_path / "d.bin")
    with open_corpus(tmp_path, eos_id=15) as corpus:
        out = np.zeros((4, 3), "uint16")
        corpus.read_rows([2, 0, 1, 3], out)
        assert out.tolist() == [[12, 13, 14], [10, 11, 12], [11, 12, 13], [13, 14, 15]]
        assert [corpus.locate(position) for position in range(6)] == [
            TokenLocation(tmp_path / "a.bin", 0),
            TokenLocation(tmp_path / "a.bin", 1),
            TokenLocation(tmp_path / "a.bin", 2),
            TokenLocation(tmp_path / "c.bin", 0),
            TokenLocation(tmp_path / "d.bin", 0),
            TokenLocation(tmp_path / "d.bin", 1),
        ]
        assert corpus.files == tuple(tmp_path / f"{name}.bin" for name in "abcd")
        assert (corpus.num_documents, corpus.document_offsets, corpus.eos_id) == (None, None, 15)
        assert repr(corpus) == f"<Corpus flat uint16: 6 tokens, 4 files, fingerprint {corpus.fingerprint}>"


@pytest.mark.parametrize("format", ["flat", "npy"])
@pytest.mark.parametrize("dtype", [">u2", ">u4", ">i4", ">i8"])
def test_big_endian_files_are_swapped(tmp_path: Path, format: str, dtype: str) -> None:
    expected = np.arange(1, 50) * 257
    for number, part in enumerate(np.split(expected, [20])):
        write_shard(tmp_path / f"s_{number}.{format}", part.astype(dtype), format)
    with open_corpus(tmp_path, dtype=dtype if format == "flat" else None) as corpus:
        assert corpus.dtype.isnative
        np.testing.assert_array_equal(corpus.tokens(0, 49), expected)


@pytest.mark.parametrize(
    ("dtype", "ids"),
    [("uint8", [0, 255]), ("uint16", [32768, 65535]), ("uint32", [2**31, 2**32 - 1]), ("int64", [2**31 + 5, 2**62])],
)
def test_large_ids_keep_their_sign(tmp_path: Path, dtype: str, ids: list[int]) -> None:
    np.array(ids, dtype).tofile(tmp_path / "a.bin")
    with open_corpus(tmp_path / "a.bin", dtype=dtype) as corpus:
        assert corpus.tokens(0, 2).astype(np.int64).tolist() == ids


@pytest.mark.parametrize("dtype", ["<u8", ">u8"])
def test_uint64_ids_are_served_as_int64_or_refused(tmp_path: Path, dtype: str) -> None:
    np.save(tmp_path / "a.npy", np.array([5, 2**63 - 1, 7, 2**63 + 9, 8], dtype))
    np.save(tmp_path / "b.npy", np.array([9], dtype))
    with open_corpus(tmp_path) as corpus:
        assert corpus.dtype == np.int64
        assert corpus.tokens(0, 3).tolist() == [5, 2**63 - 1, 7]
        assert corpus.tokens(4, 2).tolist() == [8, 9]
        with pytest.raises(TokenRangeError, match=rf"a\.npy: token 3 is {2**63 + 9}"):
            corpus.tokens(2, 3)


def test_offsets_beyond_32_bits(tmp_path: Path) -> None:
    """A sparse file of 2^31 + 1000 uint16 ids with marks around 2^31 and at the end."""
    count = 2**31 + 1000
    marks = {
        **{2**31 + shift: 100 + shift for shift in range(-2, 3)},
        **{count - back: 200 + back for back in range(1, 11)},
    }
    path = tmp_path / "large.bin"
    with path.open("wb") as file:
        file.truncate(2 * count)
        for position, mark in marks.items():
            file.seek(2 * position)
            file.write(mark.to_bytes(2, "little"))
    with open_corpus(path) as corpus:
        assert corpus.num_tokens == count
        out = np.ones((3, 20), "uint16")
        corpus.read_rows([2**31 - 10, count - 20, 0], out)
        assert out[0].tolist() == [0] * 8 + [98, 99, 100, 101, 102] + [0] * 7
        assert out[1].tolist() == [0] * 10 + list(range(210, 200, -1))
        assert out[2].tolist() == [0] * 20
        assert corpus.locate(2**31 + 1).offset == 2**31 + 1


def test_row_on_a_page_of_a_file_that_ends_inside_a_page(tmp_path: Path) -> None:
    """Start at a multiple of 4096 bytes, file size not one."""
    expected = np.random.default_rng(0).integers(0, 50257, 4096 + 300).astype("uint16")
    expected.tofile(tmp_path / "a.bin")
    with open_corpus(tmp_path / "a.bin") as corpus:
        np.testing.assert_array_equal(corpus.tokens(4096, 300), expected[4096:])


@pytest.fixture
def hundred(tmp_path: Path) -> Path:
    """Ids 0 to 99 in files of 60 and 40."""
    np.arange(60, dtype="uint16").tofile(tmp_path / "a.bin")
    np.arange(60, 100, dtype="uint16").tofile(tmp_path / "b.bin")
    return tmp_path


@pytest.mark.parametrize(("start", "count"), [(0, 101), (100, 1), (101, 0), (-1, 1), (5, -1), (2**63, 1), (99, 2**70)])
def test_ranges_outside_the_corpus_are_refused(hundred: Path, start: int, count: int) -> None:
    with open_corpus(hundred) as corpus, pytest.raises(CorpusError, match="the corpus has 100 tokens"):
        corpus.tokens(start, count)


def test_positions_outside_the_corpus_are_refused(hundred: Path) -> None:
    with open_corpus(hundred) as corpus:
        for position in (-1, 100):
            with pytest.raises(CorpusError, match=f"position {position}:"):
                corpus.locate(position)
        for starts in ([0, 91], [-1, 0], [2**62, 0]):
            with pytest.raises(CorpusError, match="the corpus has 100 tokens"):
                corpus.read_rows(starts, np.zeros((2, 10), "uint16"))
        with pytest.raises(CorpusError):
            corpus.read_rows(np.array([2**64 - 1], "uint64"), np.zeros((1, 10), "uint16"))


@pytest.mark.parametrize(
    ("starts", "out"),
    [
        ([0, 1], np.zeros((2, 4), "uint32")),
        ([0, 1], np.zeros((2, 4), ">u2")),
        ([0, 1], np.zeros((4, 2), "uint16").T),
        ([0, 1], np.zeros((2, 8), "uint16")[:, ::2]),
        ([0, 1], np.zeros(8, "uint16")),
        ([0], np.zeros((2, 4), "uint16")),
        ([0.0, 1.0], np.zeros((2, 4), "uint16")),
        ([[0], [1]], np.zeros((2, 4), "uint16")),
        ([0, 2**70], np.zeros((2, 4), "uint16")),
        ([0, 1], np.frombuffer(bytes(16), "uint16").reshape(2, 4)),
    ],
)
def test_wrong_arrays_are_refused(hundred: Path, starts: Any, out: npt.NDArray[Any]) -> None:
    with open_corpus(hundred) as corpus, pytest.raises(ValueError, match="expected"):
        corpus.read_rows(starts, out)


@pytest.mark.parametrize("split", [False, True], ids=["one file", "two files"])
def test_file_truncated_after_opening_is_an_error(tmp_path: Path, split: bool) -> None:
    expected = np.arange(1, 20_001, dtype="uint16")
    for number, part in enumerate(np.split(expected, [10_000])) if split else [(0, expected)]:
        part.tofile(tmp_path / f"s_{number}.bin")
    last = tmp_path / f"s_{int(split)}.bin"
    size = last.stat().st_size
    with open_corpus(tmp_path) as corpus:
        corpus.tokens(0, 20_000)  # the files are open now
        os.truncate(last, size - 1000)
        np.testing.assert_array_equal(corpus.tokens(0, 19_500), expected[:19_500])
        begin = size - 100 * 2
        with pytest.raises(CorpusReadError, match=rf"{last.name}: ends early: .*200 bytes at byte {begin:,}, got 0"):
            corpus.tokens(19_900, 100)
        begin = size - 600 * 2
        with pytest.raises(CorpusReadError, match=f"1,200 bytes at byte {begin:,}, got 200"):
            corpus.tokens(19_400, 600)


def test_file_truncated_before_the_first_read_is_an_error(hundred: Path) -> None:
    with open_corpus(hundred) as corpus:
        os.truncate(hundred / "b.bin", 10)
        with pytest.raises(CorpusReadError, match=r"b\.bin: .*80 bytes then, 10 now"):
            corpus.tokens(55, 10)


def test_file_removed_before_the_first_read_is_an_error(hundred: Path) -> None:
    with open_corpus(hundred) as corpus:
        (hundred / "a.bin").unlink()
        with pytest.raises(CorpusReadError, match=r"a\.bin: cannot be opened: No such file"):
            corpus.tokens(0, 10)


@pytest.mark.parametrize("names", [["a.bin"], ["a.bin", "b.bin"]])
def test_short_reads_are_continued(hundred: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    preadv = os.preadv
    calls = 0

    def stingy(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        nonlocal calls
        calls += 1
        return preadv(descriptor, [buffers[0][:3]], offset)

    with open_corpus([hundred / name for name in names]) as corpus:
        monkeypatch.setattr(os, "preadv", stingy)
        out = np.zeros((2, 30), "uint16")
        corpus.read_rows([25, 7], out)
        assert out.tolist() == [list(range(25, 55)), list(range(7, 37))]
        assert calls == 40


@pytest.mark.parametrize("names", [["a.bin"], ["a.bin", "b.bin"]])
def test_failing_read_names_file_and_byte(hundred: Path, monkeypatch: pytest.MonkeyPatch, names: list[str]) -> None:
    def broken(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        raise OSError(5, "Input/output error")

    with open_corpus([hundred / name for name in names]) as corpus:
        monkeypatch.setattr(os, "preadv", broken)
        with pytest.raises(CorpusReadError, match=r"a\.bin: .*8 bytes at byte 20: Input/output error"):
            corpus.tokens(10, 4)


def test_one_system_call_a_row_unless_it_crosses_files(hundred: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv = os.preadv
    offsets = []

    def counted(descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        offsets.append(offset)
        return preadv(descriptor, buffers, offset)

    with open_corpus(hundred) as corpus:
        monkeypatch.setattr(os, "preadv", counted)
        out = np.zeros((4, 10), "uint16")
        corpus.read_rows([50, 60, 0, 55], out)
        assert out.tolist() == [list(range(start, start + 10)) for start in (50, 60, 0, 55)]
        assert sorted(offsets) == [0, 0, 0, 100, 110]


def test_closed_corpus_refuses_to_read(hundred: Path) -> None:
    corpus = open_corpus(hundred)
    corpus.tokens(0, 100)
    corpus.close()
    corpus.close()
    with pytest.raises(CorpusError, match="is closed"):
        corpus.tokens(0, 1)
    assert corpus.locate(60) == (hundred / "b.bin", 0)


@pytest.mark.parametrize("end", [Corpus.close, lambda corpus: None], ids=["close", "garbage"])
def test_no_descriptor_is_left(hundred: Path, end: Callable[[Corpus], None]) -> None:
    corpus = open_corpus(hundred)
    assert open_files(hundred) == []
    corpus.tokens(0, 100)
    assert open_files(hundred) == [str(hundred / "a.bin"), str(hundred / "b.bin")]
    end(corpus)
    del corpus
    assert open_files(hundred) == []


def test_eight_threads_read_right_rows_while_files_are_evicted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_pool, "_MOST_DESCRIPTORS", 4)
    expected = write_shards(tmp_path, [500 + 7 * number for number in range(40)], "flat", "uint16", seed=3)
    wrong: list[str] = []

    def read(seed: int) -> None:
        generator = np.random.default_rng(seed)
        out = np.zeros((16, 65), "uint16")
        for _ in range(60):
            starts = generator.integers(0, len(expected) - 65, 16)
            corpus.read_rows(starts, out)
            if not np.array_equal(out, expected[starts[:, None] + np.arange(65)]):
                wrong.append(f"seed {seed}, starts {starts}")

    with open_corpus(tmp_path, format="flat", dtype="uint16") as corpus:
        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert wrong == []
        assert len(open_files(tmp_path)) == 4


@given(data=st.data())
def test_pieces_of_any_length_and_place(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Like rows, but each with its own length and place; what lies between them is left alone."""
    folder = tmp_path_factory.mktemp("pieces")
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=4))
    tokens = np.arange(sum(sizes), dtype=np.uint16)
    for number, part in enumerate(np.split(tokens, np.cumsum(sizes)[:-1])):
        part.tofile(folder / f"{number}.bin")
    pieces, used = [], 0
    for _ in range(data.draw(st.integers(0, 12))):
        start = data.draw(st.integers(0, len(tokens) - 1))
        length = data.draw(st.integers(0, min(20, len(tokens) - start)))
        gap = data.draw(st.integers(0, 3))
        pieces.append((start, length, used + gap))
        used += gap + length
    pieces = data.draw(st.permutations(pieces))
    expected = np.full(used + 2, 65535, np.uint16)
    for start, length, target in pieces:
        expected[target : target + length] = tokens[start : start + length]
    out = np.full_like(expected, 65535)
    columns = np.array(pieces, np.int64).reshape(-1, 3).T
    with open_corpus(str(folder)) as corpus:
        corpus.read_pieces(columns[0], columns[1], columns[2], out)
        assert np.array_equal(out, expected)
        with pytest.raises(ValueError, match="out"):
            corpus.read_pieces(np.array([0]), np.array([1]), np.array([len(out)]), out)
        with pytest.raises(CorpusError, match="the corpus has"):
            corpus.read_pieces(np.array([len(tokens)]), np.array([1]), np.array([0]), out)
