"""Parquet, Arrow and WebDataset: every layout of a text column, and what is refused."""

import io
import struct
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from corpus_truth import Truth

from dali_pipes.errors import ConfigError, CorpusFormatError
from dali_pipes.text import find_text_files
from dali_pipes.text.documents import Document
from dali_pipes.text.reading import read_documents
from dali_pipes.text.streams import ByteMeter

WORDS = ["one", "", "three \n", "日本", "five\0", "x" * 3000]


def documents(path: Path, key: str | None = "text") -> list[Document]:
    found: list[Document] = []
    meter = ByteMeter()
    for file in find_text_files(path):
        found += read_documents(file, key, None, meter)
    assert meter.done == sum(file.size for file in find_text_files(path))
    return found


def contents(path: Path, key: str | None = "text") -> list[Any]:
    return [document.content for document in documents(path, key)]


def write(path: Path, table: pa.Table, kind: str) -> Path:
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=4)
    else:
        new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
        with new(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=4)
    return path


@pytest.mark.parametrize("name", ["text.parquet", "text_stream.arrow"])
def test_the_sample_tables(text_samples: Path, truth: Truth, name: str) -> None:
    assert contents(text_samples / name) == truth.texts[:200]


def test_the_sample_webdataset(text_samples: Path, truth: Truth) -> None:
    assert contents(text_samples / "webdataset") == truth.texts[:70]


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
@pytest.mark.parametrize(
    "type",
    [pa.string(), pa.large_string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int8(), pa.string())],
    ids=str,
)
def test_every_type_of_text_column(tmp_path: Path, kind: str, type: pa.DataType) -> None:
    """Chunked and sliced, nulls and all. A null is an empty document, in its place."""
    values = [*WORDS, None, "end"]
    column = pa.chunked_array([pa.array(["skipped", *values]).slice(1), pa.array(values[::-1])])
    chunks = [
        chunk.dictionary_encode() if pa.types.is_dictionary(type) else chunk.cast(type) for chunk in column.chunks
    ]
    table = pa.table({"id": list(range(16)), "text": pa.chunked_array(chunks)}).unify_dictionaries()
    expected = ["" if value is None else value for value in values + values[::-1]]
    assert contents(write(tmp_path / "data.any", table, kind)) == expected


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_tables_without_rows_and_whole_records(tmp_path: Path, kind: str) -> None:
    schema = pa.schema({"text": pa.string(), "messages": pa.list_(pa.struct({"role": pa.string()}))})
    assert contents(write(tmp_path / "none", schema.empty_table(), kind)) == []
    record = {"text": "a", "messages": [{"role": "user"}]}
    found = documents(write(tmp_path / "one", pa.Table.from_pylist([record], schema), kind), None)
    assert [document.content for document in found] == [record]
    assert found[0].place == f"{tmp_path / 'one'}: row 1"


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_bad_columns_are_named(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "data", pa.table({"id": [1], "content": ["a"]}), kind)
    with pytest.raises(CorpusFormatError, match=r"'text' .*'id', 'content'.*text_key"):
        documents(path)
    with pytest.raises(CorpusFormatError, match=r"'id' .*int64"):
        documents(path, "id")
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    if kind != "parquet":
        with pytest.raises(CorpusFormatError, match=r"2 columns .*'text'"):
            documents(write(tmp_path / "twice", twice, kind))
    with pytest.raises(CorpusFormatError, match="row 2: byte "):
        documents(write(tmp_path / "bytes", pa.table({"text": [b"a", b"\xff"]}), kind))


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_cut_off_tables_are_refused(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "data", pa.table({"text": [f"{n} " * 50 for n in range(50)]}), kind)
    whole = path.read_bytes()
    for size in (20, len(whole) // 2, len(whole) - 3 if kind != "stream" else len(whole) // 3):
        path.write_bytes(whole[:size])
        with pytest.raises(CorpusFormatError, match=str(path)):
            documents(path)


@pytest.mark.parametrize("claimed", [0x3FFFFF00, 1 << 20, 500])
def test_what_begins_as_an_arrow_stream_but_claims_too_much_is_none(tmp_path: Path, claimed: int) -> None:
    """Its first message would be larger than the file, and memory for it was taken before that was found."""
    path = tmp_path / "a.gz"
    path.write_bytes(b"\xff\xff\xff\xff" + struct.pack("<iI", claimed, 16) + bytes(480))
    with pytest.raises(CorpusFormatError, match=r"a\.gz: "):
        find_text_files(path)


def test_a_saved_dataset_is_read_in_the_order_of_its_state(tmp_path: Path) -> None:
    for name, text in (("data-00000-of-00002.arrow", "second"), ("data-00001-of-00002.arrow", "first")):
        write(tmp_path / name, pa.table({"text": [text]}), "stream")
    write(tmp_path / "cache-123.arrow", pa.table({"text": ["stale"]}), "stream")
    names = ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"]
    entries = ", ".join(f'{{"filename": "{name}"}}' for name in names)
    (tmp_path / "state.json").write_text(f'{{"_data_files": [{entries}]}}')
    assert contents(tmp_path) == ["first", "second"]


def make_tar(path: Path, members: list[tuple[str, bytes]], mode: str = "w", form: int = tarfile.PAX_FORMAT) -> Path:
    with tarfile.open(path, mode, format=form) as archive:  # type: ignore[call-overload]
        folder = tarfile.TarInfo("part")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size, info.mtime = len(data), 1.5 if form == tarfile.PAX_FORMAT else 1
            archive.addfile(info, io.BytesIO(data))
    return path


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_samples_of_a_tar(tmp_path: Path, mode: str, form: int) -> None:
    """A text first, else a JSON; keys end at the first dot of the name; long names, empty members, other fields."""
    members = [
        ("part.x/0001.json", b'{"text": "not this"}'),
        ("part.x/0001.txt", "één\r\n".encode()),
        ("part.x/0002.jpg", b"\xff" * 5000),
        ("part.x/0002.json", b'{"id": 1, "text": "from json"}'),
        ("part.y/0002.txt", b""),
        ("part.y/0002.b.txt", b"a field named b.txt"),
        (f"{'d' * 120}/{'e' * 120}.txt", b"long"),
    ]
    assert contents(make_tar(tmp_path / "data.any", members, mode, form)) == ["één\r\n", "from json", "", "long"]


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.jpg", b""), ("a.cls", b"")], r"sample a: .*cls, jpg"),
        ([("a.txt", b"\xff")], r"sample a: field txt: byte 0 \(0xff\)"),
        ([("a.json", b"{")], r"sample a: field json: .*character 2"),
        ([("a.json", b"[]")], r"sample a: field json: .*\[\] \(list\)"),
        ([("a.json", b'{"b": 1}')], r"sample a: field json: .*'text' .*'b'"),
        ([("a.json", b'{"messages": []}')], r"sample a: field json: .*'text' .*`dali-pipes tokenize --chat`"),
    ],
)
def test_bad_samples_are_named(tmp_path: Path, members: list[tuple[str, bytes]], message: str) -> None:
    path = make_tar(tmp_path / "data.tar", members)
    with pytest.raises(CorpusFormatError, match=rf"data\.tar: {message}"):
        documents(path)


def test_a_cut_off_tar_is_refused(tmp_path: Path) -> None:
    path = make_tar(tmp_path / "data.tar", [("a.txt", b"x" * 2000), ("b.txt", b"y" * 2000)])
    whole = path.read_bytes()
    for size in (whole.index(b"x") + 700, whole.index(b"y") + 1999, whole.index(b"b.txt") + 100):
        path.write_bytes(whole[:size])
        with pytest.raises(CorpusFormatError, match=r"data\.tar: "):
            documents(path)


def test_files_without_records_refuse_to_give_them(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"a\.txt: .*conversations"):
        documents(tmp_path / "a.txt", None)
