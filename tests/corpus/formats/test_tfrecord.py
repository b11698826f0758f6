"""TFRecord files: raw ids and Examples, in shards in their order; damage is told of, with file, record and byte."""

import contextlib
import gzip
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from shard_files import tf_example, tfrecord_frame, write_tfrecord

from dali_pipes.corpus import open_corpus
from dali_pipes.corpus.formats import record_content, records, tfrecord
from dali_pipes.errors import ConfigError, CorpusError, CorpusFormatError, CorpusReadError, DaliPipesError

DOCUMENTS = st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=60), max_size=12)


@settings(max_examples=examples(12))
@given(
    shards=st.lists(DOCUMENTS, min_size=1, max_size=3).filter(lambda shards: any(map(any, shards))),
    is_packed=st.booleans(),
    group_bytes=st.sampled_from([1, 100, 1 << 20]),
    window_bytes=st.sampled_from([12, 13, 40, 1 << 16]),
    name=st.sampled_from(["a.tfrecord-{:05}-of-00003", "{}.tfrecords", "{}.TFRecord"]),
)
def test_records_are_documents(
    tmp_path_factory: pytest.TempPathFactory,
    shards: list[list[list[int]]],
    is_packed: bool,
    group_bytes: int,
    window_bytes: int,
    name: str,
) -> None:
    """Also where a shard is empty, or the records of one; ids of any sign."""
    folder = tmp_path_factory.mktemp("records")
    for number, documents in enumerate(shards):
        rows = [tf_example({"n": [1, 2], "tokens": ids}, packed=is_packed) for ids in documents]
        write_tfrecord(folder / name.format(number), rows)
    everything = [ids for documents in shards for ids in documents]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_GROUP_BYTES", group_bytes)
        patch.setattr(tfrecord, "_WINDOW_BYTES", window_bytes)
        with open_corpus(folder) as corpus:
            ids = [token for document in everything for token in document]
            assert corpus.format == "tfrecord"
            assert corpus.tokens(0, len(ids)).tolist() == ids
            assert corpus.document_offsets is not None
            assert np.diff(corpus.document_offsets).tolist() == [len(document) for document in everything]


def test_records_of_raw_ids(tmp_path: Path) -> None:
    path = write_tfrecord(tmp_path / "a", [np.arange(n, dtype=">u2").tobytes() for n in (3, 0, 40)])
    with open_corpus(path, dtype=">u2") as corpus:
        assert corpus.tokens(0, 43).tolist() == [*range(3), *range(40)]
    with pytest.raises(CorpusFormatError, match=r"a: record 1 at byte 22 has 3 bytes, .* uint16"):
        open_corpus(write_tfrecord(tmp_path / "a", [b"abcdef", b"abc"]), dtype="uint16")


@pytest.mark.parametrize(
    ("features", "column"),
    [
        ({"inputs": [1], "length": [5]}, "inputs"),
        ({"targets": [1], "length": [5]}, "targets"),
        ({"inputs": [5], "input_ids": [1], "tokens": [5]}, "input_ids"),
        ({"tokens": [1], "targets": [5], "text": ["a"]}, "tokens"),
        ({"other": [1], "text": ["a"], "score": [0.5], "labels": [1]}, "other"),
    ],
)
def test_choice_of_the_feature(tmp_path: Path, features: dict[str, list[int | str | float]], column: str) -> None:
    path = write_tfrecord(tmp_path / "a", [tf_example(features)])
    for named in (None, column):
        with open_corpus(path, token_column=named) as corpus:
            assert corpus.tokens(0, 1).tolist() == [1]


def test_features_that_are_refused(tmp_path: Path) -> None:
    path = write_tfrecord(tmp_path / "a", [tf_example({"inputs": [1], "targets": [2], "text": ["b"]})])
    with pytest.raises(ConfigError, match=r"token_column.*inputs \(int64\), targets \(int64\), text \(bytes\)"):
        open_corpus(path)
    with pytest.raises(ConfigError, match=r"token_column = 'c'.* inputs"):
        open_corpus(path, token_column="c")
    with pytest.raises(CorpusFormatError, match=r"record 0 at byte 0: feature 'text' is a bytes list"):
        open_corpus(path, token_column="text")
    late = tf_example({"tokens": [1]})
    for record, message in (
        (tf_example({"tokens": ["a"]}), "feature 'tokens' is a bytes list, expected an int64 list"),
        (tf_example({"other": [1]}), r"feature 'tokens' is missing \(found other\)"),
        (late[:-1], "is not a tf.train.Example"),
    ):
        path = write_tfrecord(tmp_path / "b", [late] * 20 + [record])
        with pytest.raises(CorpusFormatError, match=rf"b: record 20 at byte {20 * (len(late) + 16)}:? {message}"):
            open_corpus(path)


def test_an_empty_shard(tmp_path: Path) -> None:
    """0 bytes are a shard without records, by its name or where the format is given."""
    write_tfrecord(tmp_path / "a.tfrecord-00000-of-00002", [])
    with pytest.raises(CorpusError, match="tokens"):
        open_corpus(tmp_path)
    write_tfrecord(tmp_path / "a.tfrecord-00001-of-00002", [tf_example({"tokens": [1, 2]})])
    with open_corpus(tmp_path) as corpus:
        assert (corpus.num_tokens, corpus.num_documents, len(corpus.files)) == (2, 1, 2)
    (tmp_path / "a.tfrecord-00000-of-00002").rename(tmp_path / "0")
    with open_corpus(tmp_path, format="tfrecord") as corpus:
        assert corpus.num_tokens == 2
    with pytest.raises(CorpusFormatError, match="same format"):
        open_corpus(tmp_path)


@pytest.mark.parametrize("name", ["a.tfrecord", "a.tfrecords.gz", "b"])
@pytest.mark.parametrize("method", ["gzip", "zlib"])
def test_files_compressed_as_a_whole(tmp_path: Path, name: str, method: str) -> None:
    data = write_tfrecord(tmp_path / "a", [tf_example({"tokens": list(range(500))})] * 9).read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(data) if method == "gzip" else zlib.compress(data))
    with pytest.raises(CorpusFormatError, match=rf"{name}: is compressed with {method} as a whole.*Decompress"):
        open_corpus(tmp_path / name, format="tfrecord")
    with pytest.raises(CorpusFormatError, match=f"{name}: is compressed with {method}"):
        open_corpus(tmp_path / name)


ROWS = [tf_example({"tokens": list(range(number, 3 * number))}) for number in range(10)]
STARTS = np.cumsum([0, *(len(row) + 16 for row in ROWS)]).tolist()


@pytest.mark.parametrize(
    ("at", "message"),
    [
        (STARTS[4], rf"record 4 at byte {STARTS[4]}: the checksum of its length"),
        (STARTS[4] + 7, rf"record 4 at byte {STARTS[4]}: the checksum of its length"),
        (STARTS[4] + 8, rf"record 4 at byte {STARTS[4]}: the checksum of its length"),
        (STARTS[4] + 12, rf"record 4 at byte {STARTS[4]}: the checksum of its data"),
        (STARTS[5] - 1, rf"record 4 at byte {STARTS[4]}: the checksum of its data"),
        (0, "record 0 at byte 0: the checksum of its length"),
    ],
)
def test_checksums_that_differ(tmp_path: Path, at: int, message: str) -> None:
    path = write_tfrecord(tmp_path / "a.tfrecord", ROWS)
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)
    with pytest.raises(CorpusFormatError, match=rf"a\.tfrecord: {message}"):
        open_corpus(path)


def test_every_truncation(tmp_path: Path) -> None:
    data = write_tfrecord(tmp_path / "a.tfrecord", ROWS).read_bytes()
    path = tmp_path / "b.tfrecord"
    for size in range(1, len(data)):
        path.write_bytes(data[:size])
        number = np.searchsorted(STARTS, size, "right") - 1
        if size in STARTS:
            if number > 1:  # the first document is empty
                with open_corpus(path) as corpus:
                    assert corpus.num_documents == number
        else:
            place = rf"b\.tfrecord: record {number} at byte {STARTS[number]}: .* after {size - STARTS[number]} of"
            with pytest.raises(CorpusFormatError, match=place):
                open_corpus(path)


def test_a_length_beyond_the_file(tmp_path: Path) -> None:
    """A valid checksum does not make it true; nothing that large is read."""
    data = tfrecord_frame(tf_example({"tokens": [1]}))
    for length in (2**40, 2**63, 2**64 - 17, 2**64 - 1):
        header = tfrecord_frame(length.to_bytes(8, "little"))[12:-4]
        crc = tfrecord_frame(header)[-4:]
        (tmp_path / "a.tfrecord").write_bytes(data + header + crc + b"abc")
        with pytest.raises(CorpusFormatError, match=rf"record 1 at byte {len(data)}: .* 15 of its bytes"):
            open_corpus(tmp_path)


def test_places_and_lengths_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tfrecord(tmp_path / "a", ROWS)
    monkeypatch.setattr(records, "_KEPT_FROM_BYTES", 0)
    with open_corpus(path) as corpus:
        expected = corpus.tokens(0, corpus.num_tokens).tolist()
    read = tfrecord.TFRecords.read
    seen: list[int] = []

    def watched(self: tfrecord.TFRecords, first: int, last: int) -> list[bytes]:
        seen.extend(range(first, last))
        return read(self, first, last)

    monkeypatch.setattr(tfrecord, "find_starts", None)
    monkeypatch.setattr(tfrecord.TFRecords, "read", watched)
    monkeypatch.setattr(records, "_SCAN_BYTES", 1)
    monkeypatch.setattr(record_content, "_FIRST_RECORDS", 2)
    with open_corpus(path) as corpus:
        assert seen == [0, 1]
        assert corpus.tokens(0, corpus.num_tokens).tolist() == expected
    seen.clear()
    with open_corpus(path, verify=True):
        assert sorted(seen[2:]) == list(range(len(ROWS)))


def test_a_file_that_changes_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "_GROUP_BYTES", 1)
    path = write_tfrecord(tmp_path / "a", ROWS)
    with open_corpus(path, cache_bytes=0) as corpus:
        assert corpus.tokens(0, 1).tolist() == [1]
        write_tfrecord(path, [*ROWS, b""])
        with pytest.raises(CorpusReadError, match="after the corpus was opened"):
            corpus.tokens(0, 50)
    starts = tfrecord.TFRecords(path, np.array([0, *STARTS[2:], path.stat().st_size]))
    with pytest.raises(CorpusReadError, match=r"record 0 at byte 0: its length is"):
        starts.read(0, 2)


@settings(max_examples=examples(40))
@given(cut=st.none() | st.integers(0, 400), at=st.integers(0, 10**6), flip=st.integers(1, 255))
def test_damage_is_an_error_or_whole_records(
    tmp_path_factory: pytest.TempPathFactory, cut: int | None, at: int, flip: int
) -> None:
    """Only a cut between two records goes unnoticed: nothing in the file tells how many there were."""
    path = write_tfrecord(tmp_path_factory.mktemp("damage") / "a.tfrecord", ROWS)
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= flip
    path.write_bytes(bytes(data[:cut]))
    with contextlib.suppress(DaliPipesError), open_corpus(path) as corpus:
        assert cut is not None
        assert cut in STARTS
        assert cut <= at % len(data)
        ids = [token for number in range(STARTS.index(cut)) for token in range(number, 3 * number)]
        assert corpus.tokens(0, corpus.num_tokens).tolist() == ids
