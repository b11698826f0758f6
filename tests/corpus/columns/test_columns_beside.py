"""Columns beside the ids in every format that has columns: padding, masks, rows packed before, and what is said."""

import itertools
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples
from shard_files import tf_example, write_array_record, write_mds, write_tfrecord
from table_files import list_array, write_arrow, write_parquet
from test_row_columns import Refused, Row, read_row, rows_by_structure

from dali_pipes.corpus import Corpus, open_corpus
from dali_pipes.corpus.columns import row_chunks
from dali_pipes.corpus.formats import records
from dali_pipes.corpus.formats.mds import shard_set as mds
from dali_pipes.errors import CorpusError, CorpusFormatError
from dali_pipes.storage.fingerprint import digest_corpus, digest_file
from dali_pipes.tools.reports import check_corpus, inspect_corpus

KINDS = ("parquet", "plain", "zstd", "stream", "saved", "mds", "mds.zstd", "arrayrecord", "tfrecord")
ROWS = [[1, 2, 3, 4, 5, 6], [11, 12, 13, 14]]
MASK = [[0, 0, 0, 1, 1, 1], [0, 0, 1, 1]]
LABELS = [[-100, -100, -100, 4, 5, 6], [-100, -100, 13, 14]]


@pytest.fixture(autouse=True)
def keep_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "LEAST_KEPT_BYTES", 0)
    for module in (mds, records):
        monkeypatch.setattr(module, "_KEPT_FROM_BYTES", 0)


def write(
    folder: Path,
    kind: str,
    columns: Mapping[str, Sequence[Sequence[int]]],
    types: Mapping[str, str] | None = None,
    layout: tuple[str, str] = ("list", ""),
) -> Path:
    """Rows as a file or set of that kind, in chunks of two. types: of the integers, by column."""
    types = types or {}
    count = len(next(iter(columns.values())))
    if kind in ("arrayrecord", "tfrecord"):
        rows = [tf_example({name: list(column[row]) for name, column in columns.items()}) for row in range(count)]
        if kind == "tfrecord":
            return write_tfrecord(folder / "a.tfrecord", rows)
        return write_array_record(folder / "a.array_record", rows, "group_size:2")
    if kind.startswith("mds"):
        samples = [
            {name: np.array(column[row], types.get(name, "int32")) for name, column in columns.items()}
            for row in range(count)
        ]
        encodings = {name: f"ndarray:{types.get(name, 'int32')}" if name != "labels" else "ndarray" for name in columns}
        shards = [samples[first : first + 2] for first in range(0, count, 2)]
        return write_mds(folder / "set", encodings, shards, compression=("zstd",) if kind == "mds.zstd" else (None,))
    arrays = {
        name: pa.chunked_array(
            [
                list_array(list(column[first : first + 2]), types.get(name, "int32"), *layout)
                if types.get(name) != "bool"
                else pa.array([[bool(v) for v in row] for row in column[first : first + 2]], pa.list_(pa.bool_()))
                for first in range(0, count, 2)
            ]
        )
        for name, column in columns.items()
    }
    table = pa.table({"id": list(range(count)), **arrays})
    if kind == "parquet":
        return write_parquet(folder / "a.parquet", table, row_group_size=2)
    if kind == "saved":
        write_arrow(folder / "data-00000-of-00001.arrow", table, stream=True)
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
        (folder / "dataset_info.json").write_text("{}")
        return folder
    return write_arrow(folder / "a.arrow", table, "zstd" if kind == "zstd" else None, kind == "stream")


def learned_of(corpus: Corpus) -> list[bool]:
    out = np.ones(corpus.num_tokens, np.uint8)
    if corpus.loss_mask is not None:
        places = np.arange(corpus.num_tokens)
        corpus.loss_mask.read_pieces(places, np.ones_like(places), places, out)
    return [bool(flag) for flag in out]


def documents_of(corpus: Corpus) -> list[list[tuple[int, bool]]]:
    both = list(zip(corpus.tokens(0, corpus.num_tokens).tolist(), learned_of(corpus), strict=True))
    assert corpus.document_offsets is not None
    assert corpus.num_documents == len(corpus.document_offsets) - 1
    offsets = corpus.document_offsets.tolist()
    return [both[begin:end] for begin, end in itertools.pairwise(offsets)]


@settings(max_examples=examples(35), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    case=rows_by_structure(),
    kind=st.sampled_from(KINDS),
    wide=st.sampled_from(["int32", "int64", "int16", "int8"]),
    layout=st.sampled_from([("list", ""), ("large_list", ""), ("list", "values"), ("list_view", "")]),
    use_masks=st.booleans(),
)
def test_every_format_equals_the_oracle(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[list[list[int]], list[dict[str, list[int]]]],
    kind: str,
    wide: str,
    layout: tuple[str, str],
    use_masks: bool,
) -> None:
    ids, rows = case
    columns = {"input_ids": ids, **{name: [row[name] for row in rows] for name in rows[0]}}
    if (kind == "parquet" and "view" in layout[0]) or (kind in ("plain", "zstd") and layout[1]):
        layout = ("list", "")  # what the writers cannot do
    types = {name: wide for name in columns if name != "input_ids"}
    path = write(tmp_path_factory.mktemp("rows"), kind, columns, types, layout)
    arguments: dict[str, Any] = {} if use_masks else {"loss_masks": []}

    def seen(row: Row) -> Row:
        learning = ("labels", "loss_mask", "completion_mask", "assistant_masks", "assistant_mask")
        hidden = () if use_masks else (*learning, "assistant_tokens_mask")
        return {name: values for name, values in row.items() if name not in hidden}

    try:
        expected = [document for one, row in zip(ids, rows, strict=True) for document in read_row(one, seen(row))]
        check_numbers([seen(row) for row in rows], 2 if kind.startswith("mds") else len(rows))
    except Refused:
        with pytest.raises(CorpusFormatError, match=r"(row|sample|record) \d+: "):
            open_corpus(path, **arguments)
        return
    if not any(expected):
        with pytest.raises(CorpusError, match=r"the corpus is empty|no tokens"):
            open_corpus(path, **arguments)
        return
    prints = set()
    for _ in range(2):  # measured, then from what was kept
        with open_corpus(path, **arguments) as corpus:
            assert documents_of(corpus) == expected
            prints.add(corpus.fingerprint)
            out = np.empty(1, corpus.dtype)
            for at, (token, _) in enumerate(pair for document in expected for pair in document):
                corpus.read_pieces(np.array([at]), np.array([1]), np.array([0]), out)
                assert out[0] == token
    assert len(prints) == 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "columns",
    [
        {"labels": LABELS},
        {"completion_mask": MASK},
        {"assistant_masks": MASK},
        {"labels": LABELS, "attention_mask": [[1] * 6, [1] * 4], "position_ids": [[*range(6)], [*range(4)]]},
    ],
    ids=lambda columns: "-".join(columns),
)
def test_what_is_learned(tmp_path: Path, kind: str, columns: dict[str, Any]) -> None:
    with open_corpus(write(tmp_path, kind, {"input_ids": ROWS, **columns})) as corpus:
        learned = [[token for token, flag in document if flag] for document in documents_of(corpus)]
        assert learned == [[4, 5, 6], [13, 14]]
        assert corpus.loss_mask is not None
        name = next(iter(columns))
        assert corpus.notes == (f"{name}: 5 of 10 tokens are learned",)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_say_nothing_change_nothing(tmp_path: Path, kind: str) -> None:
    """A corpus with them is the corpus without: same places, no mask, nothing decoded that need not be."""
    ones = [[1] * len(row) for row in ROWS]
    extra = {"labels": ROWS, "attention_mask": ones, "position_ids": [[*range(6)], [*range(4)]]}
    for name in "ab":
        (tmp_path / name).mkdir()
    with (
        open_corpus(write(tmp_path / "a", kind, {"input_ids": ROWS})) as plain,
        open_corpus(write(tmp_path / "b", kind, {"input_ids": ROWS, **extra})) as corpus,
    ):
        assert documents_of(corpus) == documents_of(plain)
        assert corpus.loss_mask is None
        assert corpus.notes == ()
        assert (corpus.cache_stats() is None) == (plain.cache_stats() is None)


@pytest.mark.parametrize("kind", ["parquet", "plain", "mds"])
def test_fingerprints_of_columns(tmp_path: Path, kind: str) -> None:
    """What the last release read in the same way keeps its fingerprint; masks and padding change it."""
    columns = {"input_ids": ROWS, "labels": LABELS, "attention_mask": [[1] * 6, [1] * 4]}
    path = write(tmp_path, kind, columns)
    prints = {}
    for name, loss_masks in (("masked", None), ("whole", [])):
        with open_corpus(path, loss_masks=loss_masks) as corpus:
            prints[name] = corpus.fingerprint, corpus.file_digests
    assert prints["masked"][0] != prints["whole"][0]
    assert prints["masked"][1] == prints["whole"][1]  # so that a state can say that the mask is what changed


def test_the_fingerprints_of_the_last_release(tmp_path: Path) -> None:
    """Columns of ones alone, copies and a loss mask, opened as before these columns were read: states fit."""
    ones = [[1] * len(row) for row in ROWS]
    for number, (extra, names) in enumerate(
        [
            ({"attention_mask": ones, "labels": ROWS}, b"input_ids"),
            ({"loss_mask": MASK, "attention_mask": ones}, b"input_ids\0loss_mask"),
        ]
    ):
        (tmp_path / str(number)).mkdir()
        path = write(tmp_path / str(number), "parquet", {"input_ids": ROWS, **extra})
        data = path.read_bytes()
        footer = data[-8 - int.from_bytes(data[-8:-4], "little") : -8]
        digest = digest_file(path, len(data), np.dtype(np.int32), footer + names, [data])
        with open_corpus(path) as corpus:
            digests = [digest] * (1 + (corpus.loss_mask is not None))
            assert corpus.fingerprint == digest_corpus("parquet", np.dtype(np.int32), digests)
    found = []
    for name, extra in (("a", {"loss_mask": MASK}), ("b", {"labels": ROWS})):
        path = write(tmp_path / name, "mds", {"input_ids": ROWS, **extra}, {"loss_mask": "uint8"})
        with open_corpus(path) as corpus:
            found.append(corpus.fingerprint)
    assert found == ["0dc1b6ae498a994d", "af075749637b87af"]


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_left_out_and_said(tmp_path: Path, kind: str) -> None:
    columns = {"input_ids": ROWS, "attention_mask": MASK, "labels": LABELS}
    with open_corpus(write(tmp_path, kind, columns)) as corpus:
        assert documents_of(corpus) == [[(4, True), (5, True), (6, True)], [(13, True), (14, True)]]
        note = corpus.notes[-1]
        assert note.startswith("attention_mask: 5 of 10 tokens are padding")
        assert note in inspect_corpus(corpus).notes


def check_numbers(rows: Sequence[Row], rows_of_a_file: int) -> None:
    """Refuse a row with a document 0 after a row that begins with another number."""
    for begin in range(0, len(rows), rows_of_a_file):
        for name in ("segment_ids", "sequence_id"):
            is_from_one = False
            for row in rows[begin : begin + rows_of_a_file]:
                values = row.get(name, ())
                others = [row[other] for other in ("attention_mask", "segment_ids", "sequence_id") if other in row]
                kept = [all(numbers[at] or numbers[0] == 0 for numbers in others) for at in range(len(values))]
                if "attention_mask" in row:
                    kept = [one and row["attention_mask"][at] != 0 for at, one in enumerate(kept)]
                if is_from_one and any(value == 0 and one for value, one in zip(values, kept, strict=True)):
                    raise Refused(name)
                is_from_one |= bool(values) and values[0] > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["segment_ids", "sequence_id"])
def test_zeros_after_rows_that_begin_with_one_are_padding_or_refused(tmp_path: Path, kind: str, name: str) -> None:
    for folder in ("padded", "masked", "all", "each"):
        (tmp_path / folder).mkdir()
    ids = [[1, 2, 3], [7, 7], [4, 5], [6], [7, 7, 7]]
    numbers = [[1, 1, 2], [0, 0], [1, 1], [2], [0, 0, 0]]
    padded = write(tmp_path / "padded", kind, {"input_ids": ids, name: numbers})
    with pytest.raises(CorpusFormatError, match=rf" \d: .* {name} starts with 0, .* in \w+ 0,"):
        open_corpus(padded)
    mask = [[int(number > 0) for number in row] for row in numbers]
    with open_corpus(
        write(tmp_path / "masked", kind, {"input_ids": ids, name: numbers, "attention_mask": mask})
    ) as one:
        assert [[token for token, _ in document] for document in documents_of(one) if document] == [
            [1, 2],
            [3],
            [4, 5],
            [6],
        ]
    through_all, in_each = [[0, 0, 0], [1, 1], [1, 2], [3], [3, 4, 4]], [[0, 0, 1], [0, 0], [0, 1], [0], [0, 0, 0]]
    for folder, other in (("all", through_all), ("each", in_each)):
        with open_corpus(write(tmp_path / folder, kind, {"input_ids": ids, name: other})) as corpus:
            assert len(documents_of(corpus)) == 7


@pytest.mark.parametrize("kind", KINDS)
def test_rows_packed_before_are_said(tmp_path: Path, kind: str) -> None:
    columns = {"input_ids": ROWS, "seq_lengths": [[2, 4], [4]], "position_ids": [[0, 1, 0, 1, 2, 3], [0, 1, 2, 3]]}
    path = write(tmp_path, kind, columns)
    with open_corpus(path) as corpus:
        assert [len(document) for document in documents_of(corpus)] == [2, 4, 4]
        (note,) = corpus.notes
        assert note == "seq_lengths, position_ids: rows are already packed: 2 rows read as 3 documents"
    assert note in check_corpus([str(path)]).notes


@pytest.mark.parametrize("kind", KINDS)
def test_unknown_columns_are_said_once(tmp_path: Path, kind: str) -> None:
    columns = {"input_ids": ROWS, "weights_of_ids": ROWS, "token_type_ids": ROWS, "special_tokens_mask": MASK}
    with open_corpus(write(tmp_path, kind, columns)) as corpus:
        (note,) = corpus.notes
        assert note.startswith("weights_of_ids: this column is not used in 1 file (first in ")
    if kind not in ("arrayrecord", "tfrecord"):  # whose lists of one number are numbers
        with open_corpus(write(tmp_path, kind, {"input_ids": ROWS, "char_count": [[1], [2]]})) as corpus:
            assert corpus.notes == ()


@pytest.mark.parametrize("element", ["bool", "uint8", "int8", "int64"])
def test_types_of_masks(tmp_path: Path, element: str) -> None:
    path = write(tmp_path, "parquet", {"input_ids": ROWS, "completion_mask": MASK}, {"completion_mask": element})
    with open_corpus(path) as corpus:
        assert learned_of(corpus) == [bool(flag) for row in MASK for flag in row]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"labels": [[1.0, 2.0]]}, r"column labels is list<.*double>; it must be a list of integers or booleans"),
        ({"attention_mask": [[[1, 1]]]}, r"column attention_mask is list<"),
        ({"completion_mask": [1]}, r"column completion_mask is int64; a loss mask must be a list"),
        ({"labels": [None]}, None),
        ({"labels": [7]}, None),
        ({"labels": [["a", "b"]]}, None),
        ({"seq_lengths": [2]}, None),
        ({"labels": pa.array([None], pa.list_(pa.int64()))}, r"row 0: column labels has 0 values for 2 ids"),
        ({"labels": [[1, None]]}, r"row 0: column labels .*null at token 1"),
    ],
)
def test_columns_of_other_types(tmp_path: Path, columns: dict[str, Any], message: str | None) -> None:
    path = write_parquet(tmp_path / "a.parquet", pa.table({"input_ids": [[1, 2]], **columns}))
    if message is None:
        with open_corpus(path) as corpus:
            assert learned_of(corpus) == [True, True]
        return
    with pytest.raises(CorpusFormatError, match=message):
        open_corpus(path)


def test_columns_of_another_column_of_ids(tmp_path: Path) -> None:
    """The mask is that of input_ids, of which nothing is read: it is not taken for that of the ids that are."""
    table = pa.table({"input_ids": [[1, 2, 3]], "attention_mask": [[0, 1, 1]], "rejected_ids": [[4, 5]]})
    with open_corpus(write_parquet(tmp_path / "a.parquet", table), token_column="rejected_ids") as corpus:
        assert corpus.tokens(0, 2).tolist() == [4, 5]
        assert [note.partition(":")[0] for note in corpus.notes] == ["attention_mask"]


def test_records_of_two_kinds(tmp_path: Path) -> None:
    records = [tf_example({"tokens": [1, 2]})] * 20 + [tf_example({"tokens": [1, 2], "labels": [-100, 2]})]
    with pytest.raises(CorpusFormatError, match="record 20 has a feature 'labels'"):
        open_corpus(write_array_record(tmp_path / "a", records))


def test_files_with_and_without_columns(tmp_path: Path) -> None:
    for name, columns in (("a", {"labels": LABELS}), ("b", {}), ("c", {"attention_mask": MASK})):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "parquet", {"input_ids": ROWS, **columns})
    with open_corpus([str(tmp_path / name) for name in "abc"]) as corpus:
        learned = [[token for token, flag in document if flag] for document in documents_of(corpus)]
        assert learned == [[4, 5, 6], [13, 14], *ROWS, [4, 5, 6], [13, 14]]
        assert corpus.loss_mask is not None
        assert corpus.loss_mask.num_files == 1


def test_a_mask_in_columns_and_beside(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet", {"input_ids": ROWS, "labels": LABELS})
    mask = path.with_name(path.name + ".loss")
    mask.write_bytes(bytes([1, 0] * 5))
    with pytest.raises(CorpusFormatError, match=r"\(labels\) .* a\.parquet\.loss"):
        open_corpus(path)
    with open_corpus(path, loss_masks=mask) as corpus:  # labels are not looked at then
        assert learned_of(corpus) == [True, False] * 5
        assert corpus.notes == ()


def test_a_mask_beside_a_padded_table_is_for_what_is_left(tmp_path: Path) -> None:
    path = write(tmp_path, "parquet", {"input_ids": ROWS, "attention_mask": MASK})
    mask = tmp_path / "mask"
    mask.write_bytes(bytes([1, 0, 0, 1, 1]))
    with open_corpus(path, loss_masks=mask) as corpus:
        assert learned_of(corpus) == [True, False, False, True, True]


def test_other_columns_of_an_arrow_file_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to find padding nor for a mask: a table of long texts opens at the price of its mask."""
    count = 2000
    ids, flags = np.arange(count, dtype=np.int32).reshape(20, 100), np.ones((20, 100), np.int8)
    flags[:, :50] = 0
    columns = {name: list_array(flags.tolist(), "int8") for name in ("completion_mask", "loss_mask")}
    texts = pa.array(["x" * 50_000] * 20)
    table = pa.table({"text": texts, "input_ids": list_array(ids.tolist()), **columns})
    path = write_arrow(tmp_path / "a.arrow", table)
    sizes: list[int] = []
    preadv = os.preadv

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        sizes.append(sum(map(len, buffers)))
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", counted)
    with open_corpus(path) as corpus:
        assert sum(learned_of(corpus)) == count // 2
        assert corpus.tokens(0, count).tolist() == list(range(count))
    assert sum(sizes) < 200_000 < texts.nbytes
