"""CSV and TSV: one column is the text, however it is quoted and cut; what does not fit is refused with its line."""

import csv
import gzip
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from dali_pipes import open_corpus
from dali_pipes.errors import CorpusError, CorpusFormatError
from dali_pipes.text import find_text_files
from dali_pipes.text.formats.delimited import read_delimited
from dali_pipes.text.reading import read_batches

PATH = Path("in.csv")
CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)


def chunked(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    places = sorted({cut for cut in cuts if 0 < cut < len(data)})
    return (data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True) if a < b)


def texts(data: bytes, key: str | None = "text", delimiter: str = ",") -> list[Any]:
    return [document.content for document in read_delimited(PATH, iter([data]), delimiter, key)]


@given(
    rows=st.lists(st.tuples(CELLS, CELLS), max_size=6),
    delimiter=st.sampled_from([",", "\t"]),
    end=st.sampled_from(["\n", "\r\n"]),
    quoting=st.sampled_from([csv.QUOTE_ALL, csv.QUOTE_MINIMAL]),
    mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
    has_last=st.booleans(),
    cuts=st.lists(st.integers(0, 200)),
)
def test_cells_come_back_as_they_were(
    rows: list[tuple[str, str]], delimiter: str, end: str, quoting: Any, mark: bytes, has_last: bool, cuts: list[int]
) -> None:
    """As Python's own writer makes them, with line ends, quotes and delimiters in the cells."""
    if any("\r" in cell for row in rows for cell in row):
        quoting = csv.QUOTE_ALL  # the writer of Python 3.11 leaves one bare, which is a line end then
    file = io.StringIO(newline="")
    writer = csv.writer(file, delimiter=delimiter, lineterminator=end, quoting=quoting)
    writer.writerows([("id", "text"), *rows])
    content = file.getvalue() if has_last else file.getvalue().removesuffix(end)
    data = mark + content.encode()
    found = [document.content for document in read_delimited(PATH, chunked(data, cuts), delimiter, "text")]
    assert found == [text for _, text in rows]
    records = [document.content for document in read_delimited(PATH, chunked(data, cuts), delimiter, None)]
    assert records == [{"id": number, "text": text} for number, text in rows]


def test_places_are_lines_of_the_file() -> None:
    data = b'text\n"a\nb"\n\nc\n'
    assert [document.place for document in read_delimited(PATH, iter([data]), ",", "text")] == [
        "in.csv: line 2",
        "in.csv: line 5",
    ]


def test_a_long_text() -> None:
    assert texts(b"text\n" + b"a" * 300_000 + b"\n") == ["a" * 300_000]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"id,body\n1,a\n", r"line 1: .*'text'.*'id', 'body'.*text_key"),
        (b"id;text\n1;a\n", r"line 1: .*'text'.*'id;text'"),
        (b"text,id\na,1\nb\n", r"line 3: .*1 fields.* 2 columns"),
        (b'id,text\n1,"a\nb"\n2,c,d\n', r"line 4: .*3 fields.* 2 columns"),
        (b'text\n"a\n', r"line 2: .*unexpected end of data"),
        (b'text\n"a" b\n', r"line 2: .*',' expected after '\"'"),
        (b"text\na\rb\n", r"line 2: "),
        (b"text\na\xffb\n", r"line 2: byte 1 \(0xff\)"),
        (b"text,text\na,b\n", r"line 1: 2 columns .*'text'"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_line(data: bytes, message: str) -> None:
    with pytest.raises(CorpusFormatError, match=rf"^in\.csv: {message}"):
        texts(data)


def test_compressed_files_in_a_folder_beside_lines_of_json(tmp_path: Path) -> None:
    data = b'id,text\n1,"Hello, ""world"""\n2,Bye\n'
    (tmp_path / "a.csv").write_bytes(data)
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(data))
    (tmp_path / "c.tsv.zst").write_bytes(zstandard.compress(data.replace(b",", b"\t").replace(b"\t ", b", ")))
    (tmp_path / "d.jsonl").write_text(json.dumps({"text": "json"}))
    (tmp_path / "e.csv.1").write_bytes(data)
    notes: list[str] = []
    files = find_text_files(tmp_path, notes)
    assert [file.kind for file in files] == ["csv", "csv", "tsv", "jsonl", "csv"]
    found = [document.content for batch in read_batches(files, "text", None, 0, 10**6) for document in batch.documents]
    assert found == [*['Hello, "world"', "Bye"] * 3, "json", 'Hello, "world"', "Bye"]
    assert ".csv or .tsv files" in notes[0]


def test_a_table_of_facts_beside_token_files_is_no_text(tmp_path: Path, small: Path) -> None:
    (tmp_path / "stats.csv").write_text("shard,tokens\na,3\n")
    (tmp_path / "a.bin").write_bytes(b"\1\0\2\0")
    with open_corpus(tmp_path, tokenizer=small) as corpus:
        assert corpus.tokens(0, 2).tolist() == [1, 2]
    with pytest.raises(CorpusError, match=r"column 'text'.*'shard', 'tokens'"):
        open_corpus(tmp_path / "stats.csv", tokenizer=small)
