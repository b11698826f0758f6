"""Sets of shards give back the documents that were written, whole and by windows: MDS, LitData, datatrove."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from shard_files import TENSOR_NUMBERS, write_datatrove, write_litdata, write_mds

from dali_pipes.corpus import Corpus, open_corpus
from dali_pipes.errors import ConfigError, CorpusError, CorpusFormatError

Documents = list[list[npt.NDArray[Any]]]
"""By shard."""

LENGTHS = st.lists(st.lists(st.sampled_from([0, 1, 2, 5, 255, 256, 300]), max_size=5), min_size=1, max_size=4)
WITH_TOKENS = LENGTHS.filter(lambda shards: sum(map(sum, shards)) > 0)
TYPES = st.sampled_from(["uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"])


def make_documents(lengths: Sequence[Sequence[int]], dtype: str = "uint16") -> Documents:
    """Ids that differ everywhere, up to the largest of the type."""
    most, rng = np.iinfo(dtype).max, np.random.default_rng(len(lengths))
    return [[rng.integers(0, most, count, dtype, endpoint=True) for count in shard] for shard in lengths]


def check(corpus: Corpus, shards: Documents, places: Sequence[tuple[int, int]] = ()) -> None:
    """Against the documents: ids, offsets, windows, places."""
    documents = [document for shard in shards for document in shard]
    ids = np.concatenate(documents) if documents else np.zeros(0)
    assert corpus.num_tokens == len(ids)
    assert corpus.tokens(0, len(ids)).tolist() == ids.tolist()
    if corpus.num_documents is not None:
        assert corpus.num_documents == len(documents)
        assert corpus.document_offsets is not None
        assert corpus.document_offsets.tolist() == np.cumsum([0, *map(len, documents)]).tolist()
    rows = [(start % (len(ids) + 1), count) for start, count in places]
    for length in {count for _, count in rows}:
        starts = [min(start, len(ids) - length) for start, count in rows if count == length and length <= len(ids)]
        out = np.zeros((len(starts), length), corpus.dtype)
        corpus.read_rows(starts, out)
        assert out.tolist() == [ids[start : start + length].tolist() for start in starts]
    before = np.cumsum([0, *(sum(map(len, shard)) for shard in shards)])
    for position in range(0, len(ids), max(1, len(ids) // 20)):
        shard = int(np.searchsorted(before, position, side="right")) - 1
        place = corpus.locate(position)
        assert place.file == corpus.files[shard]
        assert place.offset == position - before[shard]


@settings(max_examples=examples(18))
@given(
    lengths=WITH_TOKENS,
    dtype=TYPES,
    kind=st.sampled_from(["ndarray:TYPE", "ndarray", "bytes"]),
    others=st.sampled_from([{}, {"id": "int"}, {"a": "str", "z": "str"}, {"a": "str", "b": "int", "zz": "int"}]),
    compression=st.lists(
        st.sampled_from([None, None, "zstd", "zstd:7", "gz", "bz2", "br", "snappy"]), min_size=1, max_size=3
    ),
    dim_bytes=st.sampled_from([None, None, 4, 8]),
    places=st.lists(st.tuples(st.integers(0, 10**4), st.sampled_from([1, 3, 400])), max_size=20),
)
def test_mds(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[int]],
    dtype: str,
    kind: str,
    others: dict[str, str],
    compression: list[str | None],
    dim_bytes: int | None,
    places: list[tuple[int, int]],
) -> None:
    documents = make_documents(lengths, dtype)
    if kind != "bytes":  # the format has no arrays without elements
        documents = [[document for document in shard if len(document)] for shard in documents]
    columns = {"tokens": kind.replace("TYPE", dtype), **others}
    samples = [
        [{"tokens": document, "id": 7, "a": "x" * len(document), "b": 1, "z": "ü", "zz": 2} for document in shard]
        for shard in documents
    ]
    folder = write_mds(
        tmp_path_factory.mktemp("mds"), columns, samples, compression=compression, dim_bytes=dim_bytes, hashes=["md5"]
    )
    for _ in range(2):  # the second time with the lengths that were kept
        with open_corpus(folder, dtype=dtype if kind == "bytes" else None, verify=True) as corpus:
            assert (corpus.format, corpus.dtype) == ("mds", np.dtype(dtype))
            check(corpus, documents, places)


@pytest.mark.parametrize("compression", [[None], ["zstd"], [None, "gz"]])
@pytest.mark.parametrize("others", [{}, {"id": "int"}, {"z": "str"}])
def test_mds_of_arrays_of_one_shape(tmp_path: Path, compression: list[str | None], others: dict[str, str]) -> None:
    documents = make_documents([[12] * 3, [12] * 5], "int32")
    samples = [[{"tokens": one, "id": 1, "z": "abc"} for one in shard] for shard in documents]
    write_mds(tmp_path, {"tokens": "ndarray:int32:3,4", **others}, samples, compression=compression)
    with open_corpus(tmp_path) as corpus:
        check(corpus, documents, [(5, 20), (0, 96)])
        if compression == [None] and not others:
            assert len(corpus._starts) == 3, "samples without anything between them are one run each shard"


@pytest.mark.parametrize("compression", [None, "zstd"])
def test_mds_of_several_axes_and_types(tmp_path: Path, compression: str | None) -> None:
    """The narrowest type that holds all; files of that type are read as they lie."""
    arrays: list[Any] = [
        np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.array(-3, np.int32),
        np.array([[[2**31 - 1]]], np.int32),
    ]
    shards = [[{"tokens": np.array([7, -8], np.int32)}], [{"tokens": one} for one in arrays]]
    write_mds(tmp_path, {"tokens": "ndarray"}, shards, compression=[compression], dim_bytes=2)
    with open_corpus(tmp_path) as corpus:
        assert corpus.dtype == np.int32
        assert corpus.tokens(0, corpus.num_tokens).tolist() == [7, -8, 0, 1, 2, 3, 4, 5, -3, 2**31 - 1]
        assert [file.decode is None for file in corpus._data_files] == [compression is None, False]
    write_mds(
        tmp_path / "b", {"tokens": "ndarray"}, [[{"tokens": np.ones(1, np.uint64)}, {"tokens": np.ones(1, "i8")}]]
    )
    with pytest.raises(CorpusFormatError, match="one integer type"):
        open_corpus(tmp_path / "b")


@settings(max_examples=examples(12))
@given(
    lengths=WITH_TOKENS,
    dtype=TYPES,
    kind=st.sampled_from(["numpy", "tensor"]),
    compression=st.sampled_from([None, "zstd", "zstd:7"]),
    inflated=st.sets(st.integers(0, 3)),
    places=st.lists(st.tuples(st.integers(0, 10**4), st.sampled_from([1, 3, 400])), max_size=20),
)
def test_litdata(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[int]],
    dtype: str,
    kind: str,
    compression: str | None,
    inflated: set[int],
    places: list[tuple[int, int]],
) -> None:
    documents = make_documents(lengths, dtype)
    kind = kind if dtype in TENSOR_NUMBERS else "numpy"
    folder = tmp_path_factory.mktemp("litdata")
    write_litdata(folder, documents, kind=kind, compression=compression, inflated=sorted(inflated))
    with open_corpus(folder) as corpus:
        assert (corpus.format, corpus.dtype) == ("litdata", np.dtype(dtype))
        check(corpus, documents, places)


@settings(max_examples=examples(12))
@given(
    lengths=WITH_TOKENS,
    dtype=st.sampled_from(["uint16", "uint32"]),
    tokenizer=st.sampled_from(["gpt2/tokenizer.json", "a|b", "Unknown Tokenizer|2", "", None]),
    index=st.booleans(),
    name=st.sampled_from(["00000_{:05}_doc_shuffled.ds", "00000_{:05}_chunk_shuffled.ds", "{:03}_merged.ds"]),
)
def test_datatrove(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[list[int]],
    dtype: str,
    tokenizer: str | None,
    index: bool,
    name: str,
) -> None:
    folder, documents = tmp_path_factory.mktemp("datatrove"), make_documents(lengths, dtype)
    for number, shard in enumerate(documents):
        write_datatrove(folder / name.format(number), shard, tokenizer=tokenizer if shard else None, index=index)
        if not shard and tokenizer is not None:  # what is left where the last document was too much for its file
            (folder / f"{name.format(number)}.metadata").write_text(f"x|{np.dtype(dtype).itemsize}\n0\n0 T")
    with open_corpus(folder, format="datatrove", dtype=dtype if tokenizer is None else None) as corpus:
        assert (corpus.format, corpus.dtype) == ("datatrove", np.dtype(dtype))
        check(corpus, documents)
        assert (corpus.num_documents is None) == (not index or "chunk_shuffled" in name)


def test_merged_datatrove_files_have_one_metadata(tmp_path: Path) -> None:
    documents = make_documents([[5, 6], [7]], "uint32")
    for number, shard in enumerate(documents):
        write_datatrove(tmp_path / f"{number:03}_all.ds", shard, tokenizer=None)
    (tmp_path / "all.ds.metadata").write_text("x|4\n18\n18 T")
    with open_corpus(tmp_path) as corpus:
        check(corpus, documents)


def test_wider_ids_than_was_said_are_noticed(tmp_path: Path) -> None:
    write_datatrove(tmp_path / "a.ds", [np.arange(1000, 2000, dtype=np.uint32)], tokenizer=None)
    with pytest.raises(
        CorpusFormatError, match=r"a\.ds\.index: the last entry is 1,000, but .* has 2,000 ids of 2 bytes"
    ):
        open_corpus(tmp_path)


def test_zero_length_documents_are_served_once_each(tmp_path: Path) -> None:
    lengths = [0, 5, 0, 0, 3, 1, 0]
    documents = [make_documents([lengths])[0]]
    write_mds(tmp_path / "mds", {"tokens": "bytes"}, [[{"tokens": one} for one in documents[0]]])
    write_litdata(tmp_path / "litdata", documents)
    write_datatrove(tmp_path / "datatrove" / "a.ds", documents[0])
    for name in ("mds", "litdata", "datatrove"):
        with open_corpus(tmp_path / name, dtype="uint16") as corpus:
            check(corpus, documents, [(0, 9), (3, 4)])


def test_a_corpus_of_empty_documents_is_one_clear_error(tmp_path: Path) -> None:
    empty = [np.zeros(0, np.uint16)] * 3
    write_mds(tmp_path / "mds", {"tokens": "bytes"}, [[{"tokens": one} for one in empty]])
    write_litdata(tmp_path / "litdata", [empty])
    write_datatrove(tmp_path / "datatrove" / "a.ds", empty)
    for name in ("mds", "litdata", "datatrove"):
        with pytest.raises(CorpusError, match="the corpus is empty"):
            open_corpus(tmp_path / name, dtype="uint16")


def test_choice_of_the_column(tmp_path: Path) -> None:
    ids, other = np.arange(5, dtype=np.uint16), np.arange(9, dtype=np.uint16)

    def open_columns(columns: dict[str, str], **arguments: Any) -> Corpus:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        sample = {name: 5 if encoding == "int" else other for name, encoding in columns.items()}
        sample |= {name: ids for name in ("tokens", "input_ids", "only", "loss_mask", "labels") if name in columns}
        return open_corpus(write_mds(folder, columns, [[sample]]), **arguments)

    array = "ndarray:uint16"
    for columns, arguments in (
        ({"tokens": array, "labels": array}, {}),
        ({"input_ids": array, "a": array}, {}),
        ({"only": array, "loss_mask": array, "id": "int", "raw": "bytes"}, {}),
        ({"only": "bytes", "id": "int"}, {"dtype": "uint16"}),
        ({"only": array, "tokens": array}, {"token_column": "only"}),
    ):
        with open_columns(columns, **arguments) as corpus:
            assert corpus.tokens(0, 5).tolist() == ids.tolist()
    for columns, arguments, message in (
        ({"a": array, "b": array}, {}, r"token_column.*a \(ndarray:uint16\), b \(ndarray:uint16\)"),
        ({"id": "int"}, {}, r"token_column.* id \(int\)"),
        ({"only": array}, {"token_column": "tokens"}, "token_column = 'tokens'.* only"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_columns(columns, **arguments)
    with pytest.raises(CorpusFormatError, match=r"holds bytes .*dtype"):
        open_columns({"tokens": "bytes"})


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("encoding", ["ndarray:uint8", "ndarray:int64", "ndarray"])
def test_a_mask_column_is_the_loss_mask(tmp_path: Path, encoding: str, compression: str | None) -> None:
    rng, dtype = np.random.default_rng(0), "int64" if encoding.endswith("64") else "uint8"
    samples = [
        {"tokens": np.arange(count, dtype=np.uint16), "loss_mask": rng.integers(0, 2, count).astype(dtype)}
        for count in (3, 300, 1)
    ]
    columns = {"tokens": "ndarray:uint16", "loss_mask": encoding}
    with open_corpus(write_mds(tmp_path / "a", columns, [samples, samples], compression=[compression])) as corpus:
        out = np.zeros(608, np.uint8)
        assert corpus.loss_mask is not None
        corpus.loss_mask.read_pieces(np.array([0]), np.array([608]), np.array([0]), out)
        assert out.tolist() == np.concatenate([one["loss_mask"] for one in samples * 2]).tolist()
    samples[1]["loss_mask"] = np.ones(299, dtype)
    with pytest.raises(CorpusFormatError, match="sample 1: loss_mask has 299 entries, expected 300"):
        open_corpus(write_mds(tmp_path / "b", columns, [samples], compression=[compression]))


def test_splits_are_named(tmp_path: Path) -> None:
    for name in ("train", "val"):
        write_mds(tmp_path / name, {"tokens": "bytes"}, [[{"tokens": np.arange(3)}]])
    with pytest.raises(CorpusError, match=r"sets.* \(train, val\)"):
        open_corpus(tmp_path)


def test_a_shard_that_was_decompressed_beside_is_read_as_it_lies(tmp_path: Path) -> None:
    documents = make_documents([[5, 6]])
    samples = [{"tokens": one} for one in documents[0]]
    write_mds(tmp_path / "raw", {"tokens": "ndarray:uint16"}, [samples])
    write_mds(tmp_path, {"tokens": "ndarray:uint16"}, [samples], compression=["zstd"])
    os.replace(tmp_path / "raw" / "shard.00000.mds", tmp_path / "shard.00000.mds")
    (tmp_path / "shard.00000.mds.zstd").unlink()
    with open_corpus(tmp_path) as corpus:
        check(corpus, documents)
        assert corpus.cache_stats() is None


def test_names_in_sub_folders(tmp_path: Path) -> None:
    documents = make_documents([[5, 6]])
    write_mds(tmp_path, {"tokens": "ndarray:uint16"}, [[{"tokens": one} for one in documents[0]]])
    (tmp_path / "part").mkdir()
    os.replace(tmp_path / "shard.00000.mds", tmp_path / "part" / "shard.00000.mds")
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0]["raw_data"]["basename"] = "part/shard.00000.mds"
    (tmp_path / "index.json").write_text(json.dumps(index))
    with open_corpus(tmp_path / "index.json") as corpus:
        check(corpus, documents)
