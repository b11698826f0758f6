"""Text in TFRecord files, also compressed as a whole: what counts as text, and what is refused."""

import gzip
import json
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
import zstandard

from dali_pipes import open_corpus
from dali_pipes.corpus.formats import tfrecord
from dali_pipes.errors import CorpusFormatError
from dali_pipes.text import find_text_files
from dali_pipes.text.reading import read_batches

sys.path.insert(0, str(Path(__file__).parents[1] / "corpus"))
from shard_files import tf_example, write_tfrecord

TEXTS = ["one", "", "three \n", "日本", "five\0", "x" * 3000, "{", "last"]
KINDS = {
    "text": [text.encode() for text in TEXTS],
    "json": [json.dumps({"id": 1, "text": text}).encode() for text in TEXTS],
    "example": [tf_example({"id": [1, 2], "text": [text], "score": [0.5]}) for text in TEXTS],
}


@pytest.fixture(autouse=True)
def kept(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path_factory.mktemp("kept")))


def contents(path: Path) -> list[Any]:
    batches = read_batches(find_text_files(path), "text", None, 0, 1 << 20)
    return [document.content for batch in batches for document in batch.documents]


@pytest.mark.parametrize("stream_bytes", [1, 500, 1 << 20])
@pytest.mark.parametrize("kind", KINDS)
def test_records(tmp_path: Path, kind: str, stream_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfrecord, "_STREAM_BYTES", stream_bytes)
    data = write_tfrecord(tmp_path / "a.tfrecord-00000-of-00002", KINDS[kind]).read_bytes()
    write_tfrecord(tmp_path / "a.tfrecord-00001-of-00002", [])
    (tmp_path / "b").write_bytes(gzip.compress(data))
    (tmp_path / "c.tfrecords.zst").write_bytes(zstandard.compress(data))
    assert contents(tmp_path) == TEXTS * 3


def test_ids_and_texts_are_told_apart(tmp_path: Path, gpt2: Path) -> None:
    path = write_tfrecord(tmp_path / "a.tfrecord", [tf_example({"tokens": [7, 8], "text": ["some text"]})])
    with open_corpus(path, tokenizer=gpt2) as corpus:
        assert (corpus.format, corpus.tokens(0, 2).tolist()) == ("tfrecord", [7, 8])
    with open_corpus(path, tokenizer=gpt2, text_key="text") as corpus:
        assert corpus.tokens(0, corpus.num_tokens).tolist() == [11246, 2420, 50256]
    path = write_tfrecord(tmp_path / "b.tfrecord", [tf_example({"text": ["some text"], "length": [9]})])
    with open_corpus(path, tokenizer=gpt2) as corpus:
        assert corpus.tokens(0, corpus.num_tokens).tolist() == [11246, 2420, 50256]
    with open_corpus(write_tfrecord(tmp_path / "ids", [bytes(range(20))]), tokenizer=gpt2, dtype="uint16") as corpus:
        assert corpus.num_tokens == 10


@pytest.mark.parametrize("record", [{"tokens": [7, 8, 9]}, {"text": ["some text"]}])
def test_an_empty_shard_beside_others(tmp_path: Path, gpt2: Path, record: dict[str, Any]) -> None:
    """It is of the kind of the others."""
    write_tfrecord(tmp_path / "a.tfrecord-00000-of-00002", [])
    write_tfrecord(tmp_path / "a.tfrecord-00001-of-00002", [tf_example(record)])
    with open_corpus(tmp_path, tokenizer=gpt2) as corpus:
        assert corpus.num_tokens == 3


@pytest.mark.parametrize("stream_bytes", [1, 1 << 20])
def test_damage(tmp_path: Path, stream_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every flipped bit and every cut is an error that names record and byte, but a cut between records."""
    monkeypatch.setattr(tfrecord, "_STREAM_BYTES", stream_bytes)
    path = tmp_path / "a.tfrecord"
    data = write_tfrecord(path, [b"one", b"", b"three"]).read_bytes()
    starts = [0, 19, 35, 56]
    for at in range(len(data)):
        number = sum(start <= at for start in starts)
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        with pytest.raises(CorpusFormatError, match=rf"record {number} at byte {starts[number - 1]}: .*checksum"):
            contents(path)
        path.write_bytes(data[:at])
        if at in starts:
            assert contents(path) == ["one", "", "three"][: number - 1]
        else:
            with pytest.raises(CorpusFormatError, match=rf"record {number} at byte {starts[number - 1]}: .*truncated"):
                contents(path)
    path.write_bytes(zlib.compress(data * 30))
    with pytest.raises(CorpusFormatError, match=r"a\.tfrecord: is compressed with zlib"):
        contents(path)
