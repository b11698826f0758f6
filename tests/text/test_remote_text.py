"""Text by URI: the documents of the local files, in every format, also over a server with faults."""

import gzip
import itertools
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zstandard
from corpus_truth import words_tokenizer, write_jsonl
from range_server import RangeServer

from dali_pipes.errors import ConfigError, CorpusError, CorpusFormatError, CorpusReadError
from dali_pipes.storage import stores
from dali_pipes.storage.retries import ReadRetries
from dali_pipes.text import Document, find_text_files, load_tokenizer
from dali_pipes.text import streams as streams_module
from dali_pipes.text.reading import read_batches
from dali_pipes.text.streams import ByteMeter, read_chunks
from dali_pipes.uris import Uri

sys.path.insert(0, str(Path(__file__).parents[1] / "corpus"))
from shard_files import write_array_record, write_mds

pytestmark = pytest.mark.needs("obstore", "pyarrow")

NAMES = [
    "cases.jsonl",
    "cases.jsonl.gz",
    "cases.jsonl.zst",
    "empty.jsonl",
    "text.parquet",
    "text_stream.arrow",
    "text_file.arrow",
    "webdataset/shk-000000.tar",
    "rows.csv",
    "rows.tsv.zst",
    "plain.txt",
    "text.tfrecord",
    "text.tfrecord.gz",
]


@pytest.fixture(scope="module")
def texts(text_samples: Path, samples: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of every format, each of several kilobytes."""
    import pyarrow as pa

    folder = tmp_path_factory.mktemp("texts")
    for path in text_samples.rglob("*"):
        if path.is_file():
            target = folder / path.relative_to(text_samples)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    lines = (folder / "cases.jsonl").read_bytes()
    (folder / "cases.jsonl.gz").write_bytes(gzip.compress(lines))
    (folder / "cases.jsonl.zst").write_bytes(zstandard.compress(lines))
    (folder / "empty.jsonl").write_bytes(b"")
    with pa.OSFile(str(folder / "text_stream.arrow"), "rb") as source:
        table = pa.ipc.open_stream(source).read_all()
    with pa.OSFile(str(folder / "text_file.arrow"), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    rows = "id\ttext\n" + "".join(f"{n}\tthe text of row {n}\n" for n in range(900))
    (folder / "rows.csv").write_text(rows.replace("\t", ","))
    (folder / "rows.tsv.zst").write_bytes(zstandard.compress(rows.encode()))
    (folder / "plain.txt").write_text("é" * 30_000)
    records = (samples / "tfrecord" / "text.tfrecord").read_bytes()
    (folder / "text.tfrecord").write_bytes(records)
    (folder / "text.tfrecord.gz").write_bytes(gzip.compress(records))
    write_mds(
        folder / "set", {"text": "str"}, [[{"text": f"text {n}"}] * 300 for n in range(3)], compression=["zstd"] * 3
    )
    return folder


@pytest.fixture
def memory(texts: Path) -> Iterator[Any]:
    """The store of `memory://` with the texts, emptied after the test."""
    store = stores.memory_store()
    for path in texts.rglob("*"):
        if path.is_file():
            store.put(f"t/{path.relative_to(texts)}", path.read_bytes())
    yield store
    for some in store.list():
        for one in some:
            store.delete(one["path"])


def documents(*paths: object) -> list[tuple[object, str, str, int]]:
    """Of all files, with the names that they come from."""
    files = find_text_files([str(path) if isinstance(path, Path) else path for path in paths])  # type: ignore[misc]
    batches = read_batches(files, "text", None, 0, 1 << 20)
    found: list[Document] = [document for batch in batches for document in batch.documents]
    return [(one.content, one.file.name, one.unit, one.number) for one in found]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_reads_as_its_copy(texts: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """In small steps, with and without faults."""
    monkeypatch.setattr(streams_module, "_READ_BYTES", 900)
    monkeypatch.setattr(streams_module, "_ZSTD_READ_BYTES", 700)
    monkeypatch.setattr(streams_module, "_MOST_REQUESTED_BYTES", 5000)
    expected, chance = documents(texts / name), random.Random(1)
    faults = ["503", "429", "short", "whole", "reset"]
    with RangeServer.of_folder(texts) as server:
        assert documents(f"{server.url}/{name}") == expected
        server.fault = lambda request: chance.choice(faults) if chance.random() < 0.2 else None
        with ReadRetries(12).in_use():
            files = find_text_files(f"{server.url}/{name}")
            batches = read_batches(files, "text", None, 0, 1 << 20)
            assert [one.content for batch in batches for one in batch.documents] == [one[0] for one in expected]
    (local,), (remote,) = find_text_files(texts / name), files
    assert (local.kind, local.compression, local.size, local.digest) == (
        remote.kind,
        remote.compression,
        remote.size,
        remote.digest,
    )


@pytest.mark.parametrize("size", [0, 1, 99, 100, 101, 499, 500, 501, 4321])
def test_chunks_of_any_size(monkeypatch: pytest.MonkeyPatch, memory: Any, size: int) -> None:
    monkeypatch.setattr(streams_module, "_READ_BYTES", 100)
    monkeypatch.setattr(streams_module, "_MOST_REQUESTED_BYTES", 500)
    data = random.Random(size).randbytes(size)
    memory.put("t/a.txt", data)
    meter = ByteMeter()
    chunks = list(read_chunks(Uri("memory://x/t/a.txt"), "", meter))
    assert b"".join(chunks) == data
    assert meter.done == size
    assert all(0 < len(chunk) <= 100 for chunk in chunks)


@pytest.mark.parametrize(
    "pattern", ["*.csv", "webdataset", "webdataset/*.tar", "**/*.t*r", "set", "set/index.json", "c*"]
)
def test_folders_and_patterns(texts: Path, memory: Any, pattern: str) -> None:
    assert documents(f"memory://x/t/{pattern}") == documents(texts / pattern)


def test_local_files_and_uris_in_one_list(texts: Path, memory: Any) -> None:
    assert documents(texts / "rows.csv", "memory://x/t/cases.jsonl") == documents(
        texts / "rows.csv", texts / "cases.jsonl"
    )
    with pytest.raises(CorpusError, match=r"memory://x/t/cases\.jsonl: .*twice"):
        documents("memory://x/t/cases.jsonl", "memory://x/t/cas*.jsonl")


@pytest.mark.needs("array_record")
def test_what_cannot_be_read_says_so(tmp_path: Path, memory: Any) -> None:
    memory.put("t/a.array_record", write_array_record(tmp_path / "a", [b"text"]).read_bytes())
    with pytest.raises(CorpusFormatError, match=r"memory://x/t/a\.array_record: .*dali-pipes copy"):
        documents("memory://x/t/a.array_record")


@pytest.mark.parametrize(
    ("path", "error", "said"),
    [
        ("memory://x/t/gone.jsonl", CorpusReadError, r"memory://x/t/gone\.jsonl: "),
        ("memory://x/gone/*", CorpusReadError, r"memory://x/gone/\*: "),
        ("memory://x/t/*.bin", CorpusReadError, r"memory://x/t/\*\.bin: "),
        ("s4://x/a.txt", ConfigError, "s4"),
        ("URL/gone.jsonl", CorpusReadError, r"\*\*\*@.*/gone\.jsonl: .*listings"),
        ("URL/*.jsonl", CorpusReadError, r"\*\*\*@.*/\*\.jsonl: .*list"),
    ],
)
def test_what_is_not_there(texts: Path, memory: Any, path: str, error: type[Exception], said: str) -> None:
    with RangeServer.of_folder(texts) as server:
        address = server.url.replace("http://", "http://someone:s3cr3t@")
        with pytest.raises(error, match=said) as raised:
            documents(path.replace("URL", address))
    assert "s3cr3t" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "request_number"),
    [("rows.csv", 0), ("rows.csv", 3), ("text.parquet", 0), ("text.parquet", 1), ("cases.jsonl.gz", 0)],
)
def test_an_object_that_is_replaced(
    texts: Path, monkeypatch: pytest.MonkeyPatch, name: str, request_number: int
) -> None:
    """After it was found, and in the middle of reading."""
    monkeypatch.setattr(streams_module, "_READ_BYTES", 900)
    monkeypatch.setattr(streams_module, "_MOST_REQUESTED_BYTES", 900)
    with RangeServer.of_folder(texts) as server:
        files = find_text_files(f"{server.url}/{name}")
        numbers = itertools.count()
        server.fault = lambda request: "etag" if next(numbers) == request_number else None
        with pytest.raises(CorpusReadError, match=rf"/{name}: was replaced or modified"):
            list(read_batches(files, "text", None, 0, 1 << 20))


def test_a_tokenizer_by_uri(tmp_path: Path, memory: Any) -> None:
    path = words_tokenizer(tmp_path / "tokenizer.json", {"?": 0, "a": 1})
    memory.put("t/tokenizer.json", path.read_bytes())
    local = load_tokenizer(path)
    for uri in ("memory://x/t", "memory://x/t/tokenizer.json"):
        assert load_tokenizer(uri).sha256 == local.sha256
    with pytest.raises(ConfigError, match=r"tokenizer: memory://x/gone/tokenizer\.json: "):
        load_tokenizer("memory://x/gone")


def test_many_inputs_are_looked_up_together(tmp_path: Path) -> None:
    names = [f"{number}.jsonl" for number in range(40)]
    for name in names:
        write_jsonl(tmp_path / name, ["a"])
    with RangeServer.of_folder(tmp_path) as server:
        server.latency_s = 0.02
        assert [file.path.name for file in find_text_files([f"{server.url}/{name}" for name in names])] == names
        assert server.counts()["most_in_flight"] > 8
