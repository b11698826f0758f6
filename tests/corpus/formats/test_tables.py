"""Every kind of list column in Parquet and Arrow gives the ids and documents of the Python lists it was made of."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from corpus_files import write_megatron
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from table_files import INTEGERS, LISTS, Rows, list_array, table_of, write_arrow, write_parquet

from dali_pipes import TokenLoader
from dali_pipes.corpus import Corpus, open_corpus
from dali_pipes.errors import ConfigError, CorpusFormatError, TokenRangeError

ENCODINGS = ("", "values", "rows")


def check(corpus: Corpus, rows: Rows, element: str) -> None:
    """The corpus against the lists; every position is read once whole and once in windows."""
    ids = [token for row in rows for token in row or []]
    assert corpus.dtype == np.dtype("int64" if element == "uint64" else element)
    assert corpus.num_documents == len(rows)
    assert corpus.document_offsets is not None
    assert np.diff(corpus.document_offsets).tolist() == [len(row or []) for row in rows]
    assert corpus.tokens(0, corpus.num_tokens).tolist() == ids
    length = min(3, len(ids))
    starts = np.arange(len(ids) - length + 1)[::-1]
    out = np.empty((len(starts), length), corpus.dtype)
    corpus.read_rows(starts, out)
    assert out.tolist() == [ids[start : start + length] for start in starts]
    for position in (0, len(ids) - 1):
        assert corpus.locate(position) == (corpus.files[0], position)


@st.composite
def columns(draw: st.DrawFn, lists: tuple[str, ...], encodings: tuple[str, ...]) -> tuple[Any, ...]:
    """Rows, type of the ids, and the chunks of a column of them; at least one id."""
    element, kind = draw(st.sampled_from(INTEGERS)), draw(st.sampled_from(lists))
    encoding = draw(st.sampled_from(encodings))
    limits = np.iinfo(element)
    token = st.integers(int(limits.min), int(min(limits.max, 2**63 - 1)))
    size = draw(st.integers(1, 4))
    row = st.lists(token, min_size=size if kind == "fixed" else 0, max_size=size if kind == "fixed" else 6)
    parts = draw(st.lists(st.lists(st.none() | row, max_size=5), min_size=1, max_size=4))
    parts[-1].append(draw(st.lists(token, min_size=size, max_size=size)))
    if kind == "fixed":  # chunks of a column are of one type
        parts = [part or [None] for part in parts]
        chunks = [list_array([[0] * size, *part], element, kind, encoding)[1:] for part in parts]
    else:
        chunks = [list_array(part, element, kind, encoding, draw(st.booleans())) for part in parts]
    return [row for part in parts for row in part], element, chunks


@settings(max_examples=examples(25))
@given(
    column=columns(lists=("list", "large_list", "fixed"), encodings=("", "values")),
    options=st.fixed_dictionaries(
        {
            "row_group_size": st.integers(1, 8),
            "compression": st.sampled_from(["none", "snappy", "gzip", "zstd", "lz4", "brotli"]),
            "data_page_version": st.sampled_from(["1.0", "2.0"]),
            "data_page_size": st.sampled_from([64, 1 << 20]),
            "version": st.sampled_from(["1.0", "2.6"]),
            "store_schema": st.booleans(),
            "write_statistics": st.booleans(),
            "write_page_checksum": st.booleans(),
        }
    ),
    encoding=st.sampled_from(["PLAIN", "DELTA_BINARY_PACKED", "dictionary"]),
)
def test_parquet(
    tmp_path_factory: pytest.TempPathFactory, column: tuple[Any, ...], options: dict[str, Any], encoding: str
) -> None:
    rows, element, chunks = column
    if element == "uint32" and options["version"] == "1.0":
        element = "int64"  # as which it is stored there
    if encoding == "dictionary" or pa.types.is_dictionary(chunks[0].type.value_type):
        options["use_dictionary"] = True
    else:
        options |= {"use_dictionary": False, "column_encoding": dict.fromkeys(_leaves(chunks[0]), encoding)}
    path = write_parquet(
        tmp_path_factory.mktemp("parquet") / "a", pa.table({"tokens": pa.chunked_array(chunks)}), **options
    )
    with open_corpus(path) as corpus:
        assert corpus.format == "parquet"
        check(corpus, rows, element)


@settings(max_examples=examples(25))
@given(
    column=columns(lists=LISTS, encodings=ENCODINGS),
    compression=st.sampled_from([None, "lz4", "zstd"]),
    stream=st.booleans(),
)
def test_arrow(
    tmp_path_factory: pytest.TempPathFactory, column: tuple[Any, ...], compression: str | None, stream: bool
) -> None:
    rows, element, chunks = column
    if not stream:  # a file has one dictionary for all batches
        chunks = pa.chunked_array(chunks).unify_dictionaries().chunks if _unifies(chunks[0]) else chunks[-1:]
        rows = rows if len(chunks) > 1 else rows[-len(chunks[0]) :]
    path = write_arrow(tmp_path_factory.mktemp("arrow") / "a", table_of(chunks), compression, stream)
    with open_corpus(path) as corpus:
        assert corpus.format == "arrow"
        is_plain = compression is None and "dictionary" not in str(chunks[0].type)
        assert (corpus.cache_stats() is None) == is_plain
        check(corpus, rows, element)


def _leaves(array: Any) -> list[str]:
    table = pa.table({"tokens": array.slice(0, 0)})
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink)
    schema = pa.parquet.ParquetFile(sink.getvalue()).schema
    return [schema.column(number).path for number in range(len(schema))]


def _unifies(array: Any) -> bool:
    return not pa.types.is_dictionary(array.type)


@pytest.mark.parametrize("kind", ["parquet", "arrow", "zstd"])
def test_batches_are_those_of_the_flat_file(tmp_path: Path, kind: str) -> None:
    """Through the loader, with documents packed and as a stream: what is in a row does not depend on the format."""
    random = np.random.default_rng(1)
    rows = [random.integers(0, 60000, random.integers(0, 40)).tolist() for _ in range(200)]
    rows[3] = rows[-1] = []
    chunks = [list_array(rows[:77], "uint16"), list_array(rows[77:], "uint16")]
    if kind == "parquet":
        table = write_parquet(tmp_path / "a.parquet", table_of(chunks), row_group_size=30)
    else:
        table = write_arrow(tmp_path / "a.arrow", table_of(chunks), None if kind == "arrow" else kind)
    flat = tmp_path / "a.bin"
    np.array([token for row in rows for token in row], np.uint16).tofile(flat)
    settings: dict[str, Any] = {"batch_size": 3, "seq_len": 16, "device": "cpu", "seed": 5, "drop_last": False}
    with (
        TokenLoader(corpus=str(table), decoded_cache_bytes=500, **settings) as ours,
        TokenLoader(corpus=str(flat), **settings) as theirs,
    ):
        ours_batches, theirs_batches = list(ours), list(theirs)
        assert len(ours_batches) == len(theirs_batches) > 10
        for one, other in zip(ours_batches, theirs_batches, strict=True):
            assert (one["input_ids"] == other["input_ids"]).all()
            assert (one["labels"] == other["labels"]).all()
        stats = ours.stats().cache
        assert (stats is None) == (kind == "arrow")
        if stats is not None:
            assert stats.misses >= 2
            assert (stats.most_bytes, stats.all_bytes) == (500, 2 * ours.corpus.num_tokens)
    prefix = tmp_path / "documents"
    write_megatron(prefix, [np.array(row, np.uint16) for row in rows])
    packs: list[list[Any]] = []
    for corpus in (table, prefix):
        with TokenLoader(corpus=str(corpus), rows="pack", **settings) as packed:
            packs.append([batch[name].tolist() for batch in packed for name in ("input_ids", "labels")])
    assert packs[0] == packs[1]


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
def test_documents_without_ids(tmp_path: Path, write: Any) -> None:
    """The nine ids are served once each, wherever empty and null documents stand."""
    rows: Rows = [[], [1, 2, 3, 4, 5], None, [], [6, 7, 8], [9], []]
    with open_corpus(write(tmp_path / "a", table_of([list_array(rows)]))) as corpus:
        check(corpus, rows, "int32")
    nothing = write(tmp_path / "b", table_of([list_array([[], None, []])]))
    with pytest.raises(ValueError, match="the corpus is empty: 0 tokens in 1 file"):
        open_corpus(nothing)
    as_much = write(tmp_path / "c", table_of([list_array([[], None, []])]))
    with open_corpus([nothing, tmp_path / "a", as_much]) as corpus:
        assert corpus.tokens(0, 9).tolist() == list(range(1, 10))
        assert corpus.num_documents == 13


@pytest.mark.parametrize(
    ("write", "encoding"),
    [(write_parquet, ""), (write_parquet, "values"), *((write_arrow, encoding) for encoding in ENCODINGS)],
)
def test_a_null_id_is_refused_with_its_row(tmp_path: Path, write: Any, encoding: str) -> None:
    rows: Rows = [[1, 2], None, [3, 4, None, 5], [6]]
    path = write(tmp_path / "a", table_of([list_array(rows, encoding=encoding)]))
    with pytest.raises(CorpusFormatError, match=r"a: row 2: column input_ids .*null at token 2"):
        open_corpus(path)


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
def test_a_uint64_that_int64_cannot_hold(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path / "a", table_of([list_array([[5], [1, 2**63 + 7]], "uint64")]))
    with open_corpus(path) as corpus, pytest.raises(TokenRangeError, match=rf"token 2 is {2**63 + 7}"):
        corpus.tokens(0, 3)


ID_LISTS = {"int": [[1]], "other": [[2]]}
TEXTS = {"text": ["a"]}


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
@pytest.mark.parametrize(
    ("columns", "wanted", "first"),
    [
        ({"input_ids": [[1]], "tokens": [[2]]}, None, 1),
        ({"tokens": [[2]], **ID_LISTS}, None, 2),
        ({"input_ids": [[1]], "tokens": [[2]]}, "tokens", 2),
        ({"text": ["a"], "ids.of x": [[3]], "attention_mask": [[1]], "labels": [[3]]}, None, 3),
        ({"tokens": [["a", "b"]], "ids": [[3]]}, None, 3),
        ({"labels": [[4]], "input_ids": [[1]]}, "labels", 4),
        ({"a": [[1]], "a.b": [[2]]}, "a.b", 2),
        ({"a": [[1]], "a.b": [[2]]}, "a", 1),
    ],
)
def test_the_column_that_is_read(
    tmp_path: Path, write: Any, columns: dict[str, Any], wanted: str | None, first: int
) -> None:
    with open_corpus(write(tmp_path / "a", pa.table(columns)), token_column=wanted) as corpus:
        assert corpus.tokens(0, 1).tolist() == [first]


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
@pytest.mark.parametrize(
    ("columns", "wanted", "error", "message"),
    [
        (
            TEXTS,
            None,
            CorpusFormatError,
            "no column is a list of integers.*columns are text: string.*tokenizer",
        ),
        (ID_LISTS, None, CorpusFormatError, "2 columns are lists of integers.*int: list<.*int64>.*token_column"),
        ({"x": [[1.5]]}, None, CorpusFormatError, "no column is a list"),
        ({"input_ids": [[[1]]]}, None, CorpusFormatError, "no column is a list"),
        ({"input_ids": [{"a": [1]}]}, None, CorpusFormatError, "no column is a list"),
        (ID_LISTS, "tokens", ConfigError, "a: does not have a column 'tokens'; its columns are int"),
        (TEXTS, "text", CorpusFormatError, "column text has type string"),
        ({"input_ids": [[True]]}, "input_ids", CorpusFormatError, "expected a list of integers"),
    ],
)
def test_columns_that_hold_no_ids(
    tmp_path: Path, write: Any, columns: dict[str, Any], wanted: str | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        open_corpus(write(tmp_path / "a", pa.table(columns)), token_column=wanted)


def test_a_column_for_files_that_have_none(tmp_path: Path) -> None:
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(ConfigError, match="files of format flat"):
        open_corpus(tmp_path / "a.bin", token_column="tokens")


def test_the_type_that_was_said_is_compared(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a", table_of([list_array([[1]], "uint16")]))
    with pytest.raises(CorpusFormatError, match="parquet file holds uint16 ids, but dtype = 'int32'"):
        open_corpus(path, dtype="int32")
    with open_corpus(path, dtype="uint16", format="parquet") as corpus:
        assert corpus.num_tokens == 1


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
def test_many_files_are_in_their_order(tmp_path: Path, write: Any) -> None:
    for number in range(30):
        write(tmp_path / f"part_{number}.x", table_of([list_array([[number], [number, number]])]))
    with open_corpus(tmp_path) as corpus:
        assert corpus.tokens(0, 90).tolist() == np.repeat(np.arange(30), 3).tolist()


@pytest.mark.parametrize("write", [write_parquet, write_arrow])
def test_the_fingerprint_tells_columns_apart(tmp_path: Path, write: Any) -> None:
    path = write(tmp_path / "a", pa.table({"input_ids": [[1]], "tokens": [[2]]}))
    prints = []
    for column in ("input_ids", "tokens", "input_ids"):
        with open_corpus(path, token_column=column) as corpus:
            prints.append(corpus.fingerprint)
    assert prints[0] == prints[2] != prints[1]
