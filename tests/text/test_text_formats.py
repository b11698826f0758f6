"""The table of text formats: it alone decides what a file is, and a new format is one entry."""

import gzip
from collections.abc import Iterator
from pathlib import Path

import pytest

from dali_pipes import open_corpus
from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.text import Document, TextFile, find_text_files
from dali_pipes.text.formats.registry import TEXT_FORMATS, recognize
from dali_pipes.text.formats.text_format import TextFormat
from dali_pipes.text.reading import read_documents
from dali_pipes.text.streams import ByteMeter

TFRECORD = b"\3" + bytes(7) + b"\xb0\x99\x49\x0e" + b"abc"
"""A length of 3 with its checksum."""
TAR = b"\0" * 257 + b"ustar" + b"\0" * 250


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("a.jsonl", b"not an object", "jsonl"),
        ("a.jsonl", b"", "jsonl"),
        ("a.csv", b'{"text": 1}', "csv"),
        ("a.TSV", b"text", "tsv"),
        ("a.txt", b'{"text": 1}', "plain"),
        ("a.unknown", b'\xef\xbb\xbf {"text": 1}', "jsonl"),
        ("a.unknown", "é".encode() * 3000, "plain"),
        ("a.unknown", b"a\0b", None),
        ("a.unknown", b"\xff\xff", None),
        ("a.unknown", b"", None),
        ("a.unknown", TAR, "webdataset"),
        ("a.txt", TAR, "webdataset"),
        ("a.mds", TAR, "mds"),
        ("a.tar", b"", "webdataset"),
        ("a.txt", b"PAR1", "parquet"),
        ("a.jsonl", b"ARROW1\0\0", "arrow"),
        ("a.csv", b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f", "arrayrecord"),
        ("a.csv", TFRECORD, "tfrecord"),
        ("a.tfrecord-00000-of-00002", b"", "tfrecord"),
        ("a.tfrecords", b"damaged", "tfrecord"),
    ],
)
def test_first_bytes_come_before_the_suffix_and_both_before_a_guess(
    tmp_path: Path, name: str, content: bytes, kind: str | None
) -> None:
    (tmp_path / name).write_bytes(content)
    assert recognize(tmp_path / name) == (None if kind is None else (kind, ""))
    (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    if kind not in ("parquet", "arrow", "arrayrecord"):  # compressed inside, never as a whole
        assert recognize(tmp_path / f"{name}.gz") == (None if kind is None else (kind, "gzip"))


def test_a_new_format_is_one_entry(tmp_path: Path, small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(file: TextFile, key: str | None, separator: str | None, meter: ByteMeter) -> Iterator[Document]:
        text = b"".join(file.chunks(meter)).decode()
        yield from (Document(word, file.path, "word", n) for n, word in enumerate(text.split(), 1))

    words = TextFormat("words (.words)", lambda start: start.suffix == ".words", read, has_records=False)
    path = tmp_path / "a.words"
    path.write_text("one two")
    assert recognize(path) == ("plain", "")
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "cache"))
    others = dict(TEXT_FORMATS)
    for name in others:
        monkeypatch.delitem(TEXT_FORMATS, name)
    for name, entry in {"words": words, **others}.items():  # the first that matches, before plain text
        monkeypatch.setitem(TEXT_FORMATS, name, entry)
    with open_corpus(path, tokenizer=small) as corpus:
        assert corpus.num_documents == 2
    (file,) = find_text_files(path)
    with pytest.raises(ConfigError, match=r"a\.words: .*words"):
        read_documents(file, None, None, ByteMeter())
    (tmp_path / "bytes").write_bytes(b"\0")
    with pytest.raises(CorpusFormatError, match=r"bytes: .*words \(\.words\)"):
        find_text_files(tmp_path / "bytes")
