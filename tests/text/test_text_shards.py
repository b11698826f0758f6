"""Text in MosaicML MDS shards and ArrayRecord files: every layout, what counts as text, and what is refused."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from corpus_truth import Truth, read_documents
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from typer.testing import CliRunner

from dali_pipes import TokenLoader, open_corpus
from dali_pipes.errors import BackendError, ConfigError, CorpusError, CorpusFormatError, CorpusReadError, DaliPipesError
from dali_pipes.text import find_text_files
from dali_pipes.text.documents import Document
from dali_pipes.text.reading import read_batches
from dali_pipes.tools import cli

sys.path.insert(0, str(Path(__file__).parents[1] / "corpus"))
from shard_files import mds_shard, tf_example, write_mds
from shard_files import write_array_record as write_records

TEXTS = ["one", "", "three \n", "日本", "five\0", "x" * 3000, "{", "last"]
EOS = 50256


def documents(path: Path, key: str | None = "text") -> list[Document]:
    batches = read_batches(find_text_files(path), key, None, 0, 1 << 20)
    return [document for batch in batches for document in batch.documents]


def contents(path: Path, key: str | None = "text") -> list[Any]:
    return [document.content for document in documents(path, key)]


@pytest.fixture(autouse=True)
def kept(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path_factory.mktemp("kept")))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mds/text", 150),
        ("mds/text/index.json", 150),
        ("arrayrecord/text.arrayrecord", 150),
        ("tfrecord/text.tfrecord", 40),
    ],
)
def test_the_samples(samples: Path, gpt2: Path, truth: Truth, name: str, count: int) -> None:
    assert contents(samples / name) == truth.texts[:count]
    with open_corpus(samples / name, tokenizer=gpt2) as corpus:
        offsets = corpus.document_offsets
        assert offsets is not None
        parts = np.split(corpus.tokens(0, corpus.num_tokens), offsets[1:-1])
        assert [part.tolist() for part in parts] == truth.with_eos(EOS, count=count)


def test_the_loader_and_the_command_line(samples: Path, gpt2: Path, truth: Truth, tmp_path: Path) -> None:
    folder = samples / "mds" / "text"
    with TokenLoader(
        corpus=str(folder), tokenizer=str(gpt2), batch_size=1, seq_len=32, shuffle=False, device="cpu", quiet=True
    ) as loader:
        stream = [token for ids in truth.with_eos(EOS, count=150) for token in ids]
        assert next(iter(loader))["labels"][0].tolist() == stream[1:33]
    command = ["tokenize", str(folder), "--tokenizer", str(gpt2), "--out", str(tmp_path / "tokens")]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    assert read_documents(tmp_path / "tokens") == truth.with_eos(EOS, count=150)


@pytest.mark.parametrize("compression", [None, "zstd", "gz"])
@pytest.mark.parametrize("encoding", ["str", "bytes"])
def test_columns_beside_the_text(tmp_path: Path, compression: str | None, encoding: str) -> None:
    """Before and after it, of fixed size and not; shards in the order of the index, which their names do not have."""
    columns = {"a": "str", "id": "int", "text": encoding, "vector": "ndarray:uint16:3", "z": "json"}
    rows: list[dict[str, Any]] = [
        {
            "a": "é" * number,
            "id": number,
            "text": text.encode() if encoding == "bytes" else text,
            "vector": np.zeros(3, np.uint16),
            "z": [number],
        }
        for number, text in enumerate(TEXTS)
    ]
    folder = write_mds(tmp_path / "set", columns, [rows[:3], [], rows[3:]], compression=[compression, "gz", None])
    assert contents(folder) == TEXTS
    index = json.loads((folder / "index.json").read_text())
    index["shards"].reverse()
    (folder / "index.json").write_text(json.dumps(index))
    assert contents(folder) == TEXTS[3:] + TEXTS[:3]
    assert documents(folder)[5].place == f"{find_text_files(folder)[2].path}: sample 1"
    (folder / "index.json").unlink()  # shards tell themselves what they hold; their names then give the order
    assert contents(folder) == TEXTS


def test_whole_records_of_a_set(tmp_path: Path, small: Path) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    columns = {"id": "int", "messages": "json", "picture": "bytes", "source": "str"}
    rows = [{"id": 7, "messages": messages, "picture": b"\xff", "source": "web"}]
    folder = write_mds(tmp_path / "set", columns, [rows])
    unread = {"id": "a column of 'int'", "picture": "a column of 'bytes'"}
    assert contents(folder, None) == [{"messages": messages, "source": "web"} | unread]
    pairs = [{"prompt": "Hi", "completion": "Hello"}]
    as_set = write_mds(tmp_path / "pairs", {"prompt": "str", "completion": "str"}, [pairs])
    lines = tmp_path / "pairs.jsonl"
    lines.write_text(json.dumps(pairs[0]))
    for number, source in enumerate((as_set, lines)):
        options = [
            "--tokenizer",
            str(small),
            "--out",
            str(tmp_path / f"out{number}"),
            "--chat",
            "--chat-template",
            "chatml",
        ]
        result = CliRunner().invoke(cli.app, ["tokenize", str(source), *options])
        assert result.exit_code == 0, result.output
    assert read_documents(tmp_path / "out0") == read_documents(tmp_path / "out1") != []


KINDS = {
    "text": [text.encode() for text in TEXTS],
    "json": [json.dumps({"id": 1, "text": text}).encode() for text in TEXTS],
    "example": [tf_example({"id": [1, 2], "text": [text], "score": [0.5]}) for text in TEXTS],
}


@pytest.mark.parametrize("options", ["group_size:1", "group_size:3,zstd:3"])
@pytest.mark.parametrize("kind", KINDS)
def test_records(tmp_path: Path, kind: str, options: str) -> None:
    """Those without a byte are texts without a letter, also in front of all others, where they tell nothing."""
    for number, records in enumerate((KINDS[kind], [b"", b"", *KINDS[kind]])):
        path = write_records(tmp_path / f"{number}.array_record", records, options)
        assert contents(path) == [""] * 2 * number + TEXTS
    folder = tmp_path / "set"
    folder.mkdir()
    for number, part in enumerate((KINDS[kind][:3], KINDS[kind][3:])):
        write_records(folder / f"a.array_record-{number:05}-of-00002", part)
    assert contents(folder) == TEXTS
    assert documents(folder)[5].place.endswith("-00001-of-00002: record 3")


def test_features_without_a_value(tmp_path: Path) -> None:
    examples = [tf_example({"text": values}) for values in (["a"], None, [])]
    assert contents(write_records(tmp_path / "a", examples)) == ["a", "", ""]
    assert contents(write_records(tmp_path / "none", [])) == []
    assert contents(write_records(tmp_path / "b", [tf_example({"text": ["a", "b"]})]), None) == [{"text": ["a", "b"]}]


@pytest.mark.parametrize(
    ("records", "error"),
    [
        ([tf_example({"body": ["a"]})], "record 1: .*'text'.*'body'.*text_key"),
        ([tf_example({"text": [5]})], r"record 1: 'text' is \[5\] \(list\)"),
        ([tf_example({"text": [0.5]})], r"record 1: 'text' is \[\] \(list\)"),
        ([tf_example({"text": ["a", "b"]})], r"record 1: 'text' is \['a', 'b'\] \(list\)"),
        ([tf_example({"text": ["a"]}), b"plain"], "record 2: .*tf.train.Example"),
        ([b'{"text": "a"}', b"plain"], "record 2: .*'plain'"),
        ([b'{"text": "a"}', b"[1]"], r"record 2: .*\[1\] \(list\)"),
        ([b"plain", b"\xff\xfe"], r"record 2: byte 0 \(0xff\)"),
    ],
)
def test_records_that_are_refused(tmp_path: Path, records: list[bytes], error: str) -> None:
    with pytest.raises(CorpusFormatError, match=error):
        documents(write_records(tmp_path / "a.array_record", records))


@pytest.mark.parametrize(
    "record",
    [b"\n\x0bhello world\x12\x08http://x", np.arange(5, 90, dtype=np.uint16).tobytes(), tf_example({})],
    ids=["another message", "ids", "an example without features"],
)
def test_records_that_are_no_text_are_not_read_as_one(tmp_path: Path, small: Path, record: bytes) -> None:
    path = write_records(tmp_path / "a.array_record", [record or b"\n\x00", tf_example({"text": ["a"]})])
    with pytest.raises(CorpusFormatError, match=r"a\.array_record: record 1 .*dtype"):
        open_corpus(path, tokenizer=small)


def test_bare_texts_have_no_key(tmp_path: Path, small: Path) -> None:
    path = write_records(tmp_path / "a.array_record", [b"plain"])
    with pytest.raises(ConfigError, match=r"'body'.*text_key"):
        open_corpus(path, tokenizer=small, text_key="body")


def test_integers_beside_a_text_are_no_tokens(tmp_path: Path, gpt2: Path) -> None:
    """A length, a label, an embedding: unless it is named as ids are, or asked for, the text is what is meant."""
    expected = [11246, 2420, EOS]
    examples = write_records(tmp_path / "a.array_record", [tf_example({"text": ["some text"], "length": [9]})])
    rows: list[dict[str, Any]] = [{"text": "some text", "emb": np.array([0, 1, 2], np.uint16)}]
    as_set = write_mds(tmp_path / "set", {"text": "str", "emb": "ndarray:uint16:3"}, [rows])
    table = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["some text"], "emb": [[0, 1, 2]]}), table)
    for path, column, ids in ((examples, "length", [9]), (as_set, "emb", [0, 1, 2]), (table, "emb", [0, 1, 2])):
        with open_corpus(path, tokenizer=gpt2) as corpus:
            assert corpus.tokens(0, corpus.num_tokens).tolist() == expected
        for how in ({"token_column": column}, {"token_column": column, "tokenizer": gpt2}, {}):
            with open_corpus(path, **how) as corpus:
                assert corpus.tokens(0, corpus.num_tokens).tolist() == ids
    other = write_records(tmp_path / "b.array_record", [tf_example({"content": ["a"], "n": [3]})])
    with pytest.raises(CorpusFormatError, match=r"'text' .*'content', 'n'"):
        open_corpus(other, tokenizer=gpt2)


@pytest.mark.parametrize("named", ["", "*", "*.mds*"])
def test_a_shard_that_is_there_twice(tmp_path: Path, named: str) -> None:
    """Compressed, and as a reader has left it decompressed: once by its index, refused where nothing tells."""
    folder = write_mds(
        tmp_path / "set", {"text": "str"}, [[{"text": "a"}], [{"text": "b"}]], compression=["zstd", None]
    )
    data = zstandard.decompress((folder / "shard.00000.mds.zstd").read_bytes(), 1 << 20)
    (folder / "shard.00000.mds").write_bytes(data)
    assert contents(folder) == contents(folder / "index.json") == ["a", "b"]
    (folder / "index.json").unlink()
    with pytest.raises(CorpusError, match=r"shard\.00000\.mds\.zstd and .*shard\.00000\.mds .*index\.json"):
        documents(folder / named if named else folder)


def test_a_merged_index_that_is_named_takes_all(tmp_path: Path) -> None:
    """Its shards in folders named train and val: the index is what was named."""
    folder = write_mds(tmp_path / "set", {"text": "str"}, [[{"text": "a"}], [{"text": "b"}]])
    text = (folder / "index.json").read_text()
    for number, name in enumerate(("train", "val")):
        (folder / name).mkdir()
        (folder / f"shard.{number:05}.mds").rename(folder / name / f"shard.{number:05}.mds")
        text = text.replace(f'"shard.{number:05}.mds"', f'"{name}/shard.{number:05}.mds"')
    (folder / "index.json").write_text(text)
    assert contents(folder / "index.json") == ["a", "b"]


def test_texts_are_no_conversations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a\.array_record: .*conversations"):
        documents(write_records(tmp_path / "a.array_record", [b"plain"]), None)


@pytest.mark.parametrize("token_encoding", ["ndarray:uint16", "bytes"])
def test_a_set_of_tokens_is_text_only_by_name(tmp_path: Path, gpt2: Path, token_encoding: str) -> None:
    rows = [{"text": "some text", "tokens": np.array([1, 2, 3], np.uint16)}]
    folder = write_mds(tmp_path / "set", {"text": "str", "tokens": token_encoding}, [rows])
    dtype = "uint16" if token_encoding == "bytes" else None
    for column in (None, "tokens"):
        with open_corpus(folder, dtype=dtype, tokenizer=gpt2, token_column=column) as corpus:
            assert corpus.tokens(0, 3).tolist() == [1, 2, 3]
    with open_corpus(folder, tokenizer=gpt2, text_key="text") as corpus:
        assert corpus.tokens(0, corpus.num_tokens).tolist() == [11246, 2420, EOS]


def test_a_column_that_is_named_is_one_of_tokens(tmp_path: Path, small: Path) -> None:
    """Where two columns may be that of the tokens, only the name tells."""
    ids = np.array([4, 5], np.uint16)
    columns = {"first": "ndarray:uint16", "second": "ndarray:uint16"}
    folder = write_mds(tmp_path / "set", columns, [[{"first": ids, "second": ids}]])
    with open_corpus(folder, tokenizer=small, token_column="second") as corpus:
        assert corpus.tokens(0, 2).tolist() == [4, 5]


def test_records_of_tokens_are_no_text(tmp_path: Path, gpt2: Path) -> None:
    raw = write_records(tmp_path / "raw", [np.arange(65, 91, dtype=np.uint16).tobytes()])
    with open_corpus(raw, dtype="uint16", tokenizer=gpt2) as corpus:
        assert corpus.tokens(0, 2).tolist() == [65, 66]
    examples = write_records(tmp_path / "examples", [b"", tf_example({"tokens": [7, 8], "text": ["text"]})])
    with open_corpus(examples, tokenizer=gpt2) as corpus:
        assert corpus.tokens(0, 2).tolist() == [7, 8]
    with open_corpus(examples, tokenizer=gpt2, text_key="text") as corpus:
        assert corpus.tokens(0, corpus.num_tokens).tolist() == [5239, EOS]


def test_columns_that_are_refused(tmp_path: Path) -> None:
    columns = {"body": "str", "id": "int", "picture": "jpeg", "thing": "pkl"}
    shard = mds_shard({"body": "str", "id": "int"}, [{"body": "a", "id": 1}])
    folder = write_mds(tmp_path / "set", {"body": "str", "id": "int"}, [[{"body": "a", "id": 1}]])
    with pytest.raises(CorpusFormatError, match=r"'text' .*'body', 'id'.*text_key"):
        documents(folder)
    with pytest.raises(CorpusFormatError, match=r"'id' .*'int'"):
        documents(folder, "id")
    path = folder / "shard.00000.mds"
    for name in ("picture", "thing"):
        path.write_bytes(shard.replace(b'"int"', json.dumps(columns[name]).encode(), 1))
        with pytest.raises(DaliPipesError):
            documents(path, "id")
    bad = write_mds(tmp_path / "bad", {"text": "bytes", "z": "json"}, [[{"text": b"a\xff", "z": 1}]])
    with pytest.raises(CorpusFormatError, match=r"sample 1: column 'text': byte 1 \(0xff\)"):
        documents(bad)
    bad = write_mds(tmp_path / "worse", {"text": "str", "z": "json"}, [[{"text": "a", "z": 1}]])
    (bad / "shard.00000.mds").write_bytes((bad / "shard.00000.mds").read_bytes()[:-1] + b"{")
    with pytest.raises(CorpusFormatError, match=r"sample 1: column 'z': .*'\{'"):
        documents(bad / "shard.00000.mds", None)


def test_shards_that_are_missing_or_of_another_size(tmp_path: Path) -> None:
    folder = write_mds(
        tmp_path / "set", {"text": "str"}, [[{"text": "a"}], [{"text": "b"}]], compression=["zstd", None]
    )
    path = folder / "shard.00001.mds"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    with pytest.raises(CorpusFormatError, match=r"shard\.00001\.mds: "):
        documents(folder)
    path.unlink()
    with pytest.raises(CorpusFormatError, match=r"shard\.00001\.mds: "):
        documents(folder)
    (folder / "index.json").write_text('{"version": 2, "shards": []}')
    with pytest.raises(CorpusError, match=r"index\.json"):
        documents(folder)


def test_names_that_leave_the_folder(tmp_path: Path) -> None:
    folder = write_mds(tmp_path / "set", {"text": "str"}, [[{"text": "a"}]])
    (folder / "shard.00000.mds").rename(tmp_path / "shard.00000.mds")
    index = (folder / "index.json").read_text().replace("shard.00000.mds", "../shard.00000.mds")
    (folder / "index.json").write_text(index)
    with pytest.raises(CorpusFormatError, match=r"basename .*'\.\./shard\.00000\.mds'"):
        documents(folder)


@pytest.mark.parametrize("compression", ["", ".zstd"])
def test_a_shard_that_is_cut_off(tmp_path: Path, compression: str) -> None:
    """At every byte: never fewer texts, always an error that names the file."""
    texts = [{"id": number, "text": f"text {number} " * number} for number in range(6)]
    method = compression[1:] or None
    folder = write_mds(tmp_path / "set", {"id": "int", "text": "str"}, [texts], compression=[method])
    path = folder / f"shard.00000.mds{compression}"
    whole = path.read_bytes()
    for size in range(0, len(whole), 1 if compression else 3):
        path.write_bytes(whole[:size])
        with pytest.raises(CorpusFormatError, match=str(path)):
            documents(path)


@settings(max_examples=examples(60))
@given(data=st.data())
def test_a_shard_with_wrong_bytes(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """An error, or texts; nothing else comes out, and it takes no more memory than the file has."""
    rows = [{"id": number, "text": f"text {number} " * number, "z": [number]} for number in range(4)]
    shard = bytearray(mds_shard({"id": "int", "text": "str", "z": "json"}, rows))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(shard) - 1))
        shard[at] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("wrong") / "a.mds"
    path.write_bytes(shard)
    for key in ("text", None):
        try:
            found = contents(path, key)
        except DaliPipesError as error:
            found = [str(error)] if str(path) in str(error) else [error]
        assert all(isinstance(content, str if key else str | dict) for content in found)


def test_a_file_that_changes_while_it_is_read(tmp_path: Path) -> None:
    path = write_records(tmp_path / "a.array_record", [b"one"] * 2000)
    files = find_text_files(path)
    write_records(path, [b"two!"] * 20000)
    with pytest.raises(CorpusReadError, match=str(path)):
        list(read_batches(files, "text", None, 0, 1000))


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_records(tmp_path / "a.array_record", [b"one"])
    monkeypatch.setitem(sys.modules, "array_record.python", None)
    with pytest.raises(BackendError, match=r"dali-pipes\[arrayrecord\]"):
        documents(path)
