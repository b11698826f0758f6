"""One corpus of files whose ids are of several types and byte orders: read as the type that holds all."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from table_files import list_array, table_of, write_parquet

from dali_pipes.corpus import open_corpus
from dali_pipes.errors import CorpusFormatError, TokenRangeError
from dali_pipes.tools.reports import check_corpus, inspect_corpus

TYPES = ["|u1", "|i1", "<u2", ">u2", "<i2", ">i2", "<u4", ">u4", "<i4", ">i4", "<i8", ">i8", "<u8", ">u8"]


@settings(max_examples=examples(35))
@given(data=st.data(), format=st.sampled_from(["npy", "parquet", "mixed lists"]))
def test_files_of_any_types_are_one_after_another(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, format: str
) -> None:
    folder, draw = tmp_path_factory.mktemp("types"), data.draw
    types = draw(st.lists(st.sampled_from(TYPES), min_size=1, max_size=5))
    parts = []
    for number, name in enumerate(types):
        stored = np.dtype(name)
        limits = np.iinfo(stored)
        values = st.integers(int(limits.min), min(int(limits.max), 2**63 - 1))
        part = np.array(draw(st.lists(values, min_size=number == 0, max_size=9)), stored)
        parts.append(part)
        if format == "npy":
            np.save(folder / f"s_{number}.npy", part)
        else:
            kind = "large_list" if format == "mixed lists" and number % 2 else "list"
            rows = [list_array([part.tolist()], stored.name, kind)]
            write_parquet(folder / f"s_{number}.parquet", table_of(rows))
    expected = [int(token) for part in parts for token in part]
    served = [np.dtype(np.int64) if part.dtype.name == "uint64" else part.dtype for part in parts]
    with open_corpus(folder) as corpus:
        assert corpus.dtype == np.result_type(*served)
        assert corpus.dtype.isnative
        assert corpus.tokens(0, len(expected)).tolist() == expected
        places = st.integers(0, len(expected) - 1)
        starts = np.array(draw(st.lists(places, min_size=1, max_size=12)))
        lengths = np.array([draw(st.integers(0, len(expected) - start)) for start in starts.tolist()])
        targets = np.cumsum(lengths) - lengths
        out = np.empty(int(lengths.sum()), corpus.dtype)
        corpus.read_pieces(starts, lengths, targets, out)
        runs = zip(starts.tolist(), lengths.tolist(), strict=True)
        assert out.tolist() == [token for start, length in runs for token in expected[start : start + length]]
        offsets = [at for part in parts for at in range(len(part))]
        files = [number for number, part in enumerate(parts) for _ in part]
        for position in set(starts.tolist()):
            place = corpus.locate(position)
            assert (place.file, place.offset) == (corpus.files[files[position]], offsets[position])
        assert len({part.dtype.name for part in parts}) == 1 or corpus.notes[-1].endswith(f"{corpus.dtype.name} ids")


def test_a_type_is_said_and_compared(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2, 70000], np.uint32))
    np.save(tmp_path / "b.npy", np.array([3, 4], np.uint16))
    with open_corpus(tmp_path) as corpus:
        assert corpus.dtype == np.uint32
        assert corpus.notes == ("files with uint16, uint32 ids are read as one corpus of uint32 ids",)
        assert inspect_corpus(corpus).dtype == "uint32"
    report = check_corpus([str(tmp_path)])
    assert report.is_clean
    assert (report.tokens, report.largest_id) == (5, 70000)
    with pytest.raises(CorpusFormatError, match=r"b\.npy: the npy file holds uint16 ids, but dtype = 'uint32'"):
        open_corpus(tmp_path, dtype="uint32")


def test_an_id_too_large_is_named_among_other_types(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2], np.uint16))
    np.save(tmp_path / "b.npy", np.array([3, 2**63 + 7], np.uint64))
    with open_corpus(tmp_path) as corpus:
        assert corpus.tokens(0, 3).tolist() == [1, 2, 3]
        with pytest.raises(TokenRangeError, match=rf"b\.npy: token 1 is {2**63 + 7}"):
            corpus.tokens(0, 4)


def test_files_of_two_formats_are_no_corpus(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([1, 2], np.uint16))
    write_parquet(tmp_path / "b.parquet", table_of([list_array([[1]])]))
    with pytest.raises(
        CorpusFormatError, match=r"the same format, but .*a\.npy is npy <u2 and .*b\.parquet is parquet"
    ):
        open_corpus(tmp_path)


def test_megatron_pairs_of_two_types(tmp_path: Path) -> None:
    """An index that leaves ids out is found by the type of its own file."""

    def write(name: str, code: int, ids: Any, firsts: list[int], lengths: list[int]) -> None:
        count = len(lengths)
        offsets = ids.itemsize * np.array(firsts)
        index = b"MMIDIDX\0\0" + np.array([1], "<i8").tobytes() + bytes([code])
        index += np.array([count, count + 1], "<i8").tobytes() + np.array(lengths, "<i4").tobytes()
        index += offsets.astype("<i8").tobytes() + np.arange(count + 1, dtype="<i8").tobytes()
        (tmp_path / f"{name}.idx").write_bytes(index)
        (tmp_path / f"{name}.bin").write_bytes(ids.tobytes())

    write("a", 4, np.arange(10, dtype="<i4"), [0, 4], [4, 6])
    write("b", 8, np.arange(20, 26, dtype="<u2"), [0, 4], [3, 2])  # id 23 is in neither
    with open_corpus(tmp_path) as corpus:
        assert corpus.tokens(0, 15).tolist() == [*range(10), 20, 21, 22, 24, 25]
        assert corpus.document_offsets is not None
        assert corpus.document_offsets.tolist() == [0, 4, 10, 13, 15]
    assert check_corpus([str(tmp_path)]).problem_counts == {"index": 1}
