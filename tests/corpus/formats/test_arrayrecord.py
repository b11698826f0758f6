"""ArrayRecord files: raw ids and Examples, in records of any size, in files in their order; damage is told of."""

import contextlib
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from shard_files import tf_example
from shard_files import write_array_record as write

from dali_pipes.corpus import open_corpus
from dali_pipes.corpus.formats import arrayrecord, records
from dali_pipes.corpus.formats.tf_example import NotAnExample, parse_example
from dali_pipes.errors import BackendError, ConfigError, CorpusFormatError, CorpusReadError, DaliPipesError

DOCUMENTS = st.lists(st.lists(st.integers(0, 65535), max_size=300), min_size=1, max_size=12)


@settings(max_examples=examples(8))
@given(
    shards=st.lists(DOCUMENTS, min_size=1, max_size=3).filter(lambda shards: any(map(any, shards))),
    kind=st.sampled_from(["<u2", ">u2", "<i8", "packed", "unpacked"]),
    options=st.sampled_from(["group_size:1", "group_size:5,zstd:3", "group_size:3,uncompressed"]),
    group_bytes=st.sampled_from([1, 100, 1 << 20]),
)
def test_records_are_documents(
    tmp_path_factory: pytest.TempPathFactory,
    shards: list[list[list[int]]],
    kind: str,
    options: str,
    group_bytes: int,
) -> None:
    folder = tmp_path_factory.mktemp("records")
    is_raw = kind[0] in "<>"
    for number, documents in enumerate(shards):
        rows = [
            np.array(ids, kind).tobytes() if is_raw else tf_example({"tokens": ids}, packed=kind == "packed")
            for ids in documents
        ]
        write(folder / f"a.array_record-{number:05}-of-00003", rows, options)
    everything = [ids for documents in shards for ids in documents]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_GROUP_BYTES", group_bytes)
        with open_corpus(folder, dtype=kind if is_raw else None) as corpus:
            ids = [token for document in everything for token in document]
            assert corpus.tokens(0, len(ids)).tolist() == ids
            assert corpus.document_offsets is not None
            assert np.diff(corpus.document_offsets).tolist() == [len(document) for document in everything]
            starts = np.arange(max(1, len(ids) - 20))
            out = np.empty((len(starts), min(20, len(ids))), corpus.dtype)
            corpus.read_rows(starts, out)
            assert out.tolist() == [ids[start : start + out.shape[1]] for start in starts]


@given(
    features=st.dictionaries(
        st.sampled_from(["", "tokens", "a", "ü"]),
        st.none() | st.lists(st.integers(-(2**63), 2**63 - 1), max_size=5),
        max_size=4,
    ),
    packed=st.booleans(),
)
def test_examples_are_parsed(features: dict[str, list[int] | None], packed: bool) -> None:
    found = parse_example(tf_example(features, packed=packed))
    assert {name: np.asarray(ids).tolist() for name, ids in found.items()} == {
        name: ids or [] for name, ids in features.items()
    }


@given(data=st.binary(max_size=60), at=st.integers(0, 60), flip=st.integers(1, 255))
def test_other_bytes_are_no_example_or_some_example(data: bytes, at: int, flip: int) -> None:
    example = bytearray(tf_example({"tokens": [1, 300, -5], "b": None}))
    example[at % len(example)] ^= flip
    for record in (data, bytes(example), bytes(example[:at])):
        try:
            found = parse_example(record)
        except NotAnExample:
            continue
        assert all(isinstance(values, np.ndarray | str) for values in found.values())


def test_choice_of_the_feature(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [tf_example({"a": [1], "b": [2], "labels": [2]}), tf_example({"a": [4], "b": None})])
    with pytest.raises(ConfigError, match=r"token_column.*a \(int64\), b \(int64\), labels \(int64\)"):
        open_corpus(path)
    with open_corpus(path, token_column="b") as corpus:
        assert corpus.tokens(0, 1).tolist() == [2]
    with pytest.raises(ConfigError, match=r"token_column = 'c'.* a"):
        open_corpus(path, token_column="c")
    with pytest.raises(CorpusFormatError, match="ids are int64, but dtype = 'uint16'"):
        open_corpus(path, token_column="a", dtype="uint16")
    odd = write(tmp_path / "b", [tf_example({"tokens": [1]})] * 20 + [tf_example({"other": [1]})])
    with pytest.raises(CorpusFormatError, match=r"record 20: feature 'tokens' .*other"):
        open_corpus(odd)


def test_records_that_are_no_whole_ids(tmp_path: Path) -> None:
    with pytest.raises(CorpusFormatError, match=r"record 1 has 3 bytes, .* uint16"):
        open_corpus(write(tmp_path / "a", [b"abcd", b"abc"]), dtype="uint16")


def test_lengths_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", [bytes(range(100, 110))] * 50)
    monkeypatch.setattr(records, "_KEPT_FROM_BYTES", 0)
    with open_corpus(path, dtype="uint16") as corpus:
        fingerprint = corpus.fingerprint

    def refuse(*_: object) -> None:
        raise AssertionError("the records were read again")

    monkeypatch.setattr(records, "_cells", refuse)
    with open_corpus(path, dtype="uint16") as corpus:
        assert (corpus.num_tokens, corpus.num_documents, corpus.fingerprint) == (250, 50, fingerprint)


def test_many_files_keep_few_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrayrecord, "_MOST_OPEN", 2)
    for number in range(6):
        write(tmp_path / f"a{number}", [np.full(5, number, np.uint16).tobytes()])
    with open_corpus(tmp_path, dtype="uint16", cache_bytes=0) as corpus:
        for _ in range(2):
            assert corpus.tokens(0, 30).tolist() == [number for number in range(6) for _ in range(5)]
            assert len(arrayrecord._open) <= 2


def test_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a", [b"abcd"])
    monkeypatch.setitem(sys.modules, "array_record.python", None)
    with pytest.raises(BackendError, match=r"dali-pipes\[arrayrecord\]"):
        open_corpus(path, dtype="uint16")


def test_a_file_that_changes_later(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [b"abcd"] * 10)
    with open_corpus(path, dtype="uint16", cache_bytes=0) as corpus:
        for file in corpus._data_files:
            assert file.decode is not None
            file.decode.args[0]._reader = None  # type: ignore[attr-defined]
        path.write_bytes(path.read_bytes() + b"x")
        with pytest.raises(CorpusReadError, match="after the corpus was opened"):
            corpus.tokens(0, 5)


@settings(max_examples=examples(18))
@given(cut=st.none() | st.integers(0, 200_000), at=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_damage_is_an_error_or_does_no_harm(
    tmp_path_factory: pytest.TempPathFactory, cut: int | None, at: int, flip: int
) -> None:
    records = [bytes([number, 0] * 20) for number in range(10)]
    path = write(tmp_path_factory.mktemp("damage") / "a", records)
    data = bytearray(path.read_bytes())
    # Most of a file is padding: half of the flips are where records or the footer are.
    places = np.flatnonzero(np.frombuffer(bytes(data), np.uint8))
    data[int(places[at % len(places)])] ^= flip
    path.write_bytes(bytes(data[:cut]))
    with (
        contextlib.suppress(DaliPipesError),
        open_corpus(path, dtype="uint16", format="arrayrecord") as corpus,
    ):
        assert corpus.tokens(0, corpus.num_tokens).tolist() == np.frombuffer(b"".join(records), "<u2").tolist()
