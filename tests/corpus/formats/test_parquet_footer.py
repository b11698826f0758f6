"""What opening reads in the footers of Parquet files is what pyarrow finds there, and what their columns hold."""

import itertools
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from profiles import examples
from range_server import RangeServer
from table_files import INTEGERS, LISTS, list_array, table_of, write_parquet

from dali_pipes.corpus import Corpus, open_corpus
from dali_pipes.corpus.columns import kept_tables
from dali_pipes.corpus.columns.row_facts import RowTotals
from dali_pipes.corpus.columns.scans import ColumnScans
from dali_pipes.corpus.formats import parquet
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.corpus.formats.parquet_footer import MOST_BYTES, read_footer
from dali_pipes.errors import CorpusError, CorpusFormatError, CorpusReadError

NO_FIXTURE = [HealthCheck.function_scoped_fixture]
ROWS = [[1, 2, 3], [4], [5, 6], [7, 8, 9, 10]]


def footer_of(content: bytes) -> bytes:
    (length,) = struct.unpack("<I", content[-8:-4])
    return content[-8 - length : -8]


def with_footer(content: bytes, footer: bytes) -> bytes:
    return content[: -8 - len(footer_of(content))] + footer + struct.pack("<I", len(footer)) + content[-4:]


def by_pyarrow(footer: bytes) -> Any:
    """The metadata. Of a damaged footer, ask it for nothing in columns: that may end the process."""
    whole = b"PAR1" + footer + struct.pack("<I", len(footer)) + b"PAR1"
    return pa.parquet.ParquetFile(pa.BufferReader(whole)).metadata


def parsed(path: Path, **options: Any) -> Any:
    """What opening takes from the footer alone; None if it reads more."""
    with ColumnScans("") as scans:
        given = OpenOptions(scans, kept_tables.KeptTables([path], None), **options)
        return parquet._parse(footer_of(path.read_bytes()), given)


def read_all(path: Path) -> list[int]:
    with open_corpus(path) as corpus:
        return [int(one) for one in corpus.tokens(0, corpus.num_tokens)]


def row_lengths(corpus: Corpus) -> list[int]:
    offsets = corpus.document_offsets
    assert offsets is not None
    return [int(length) for length in np.diff(offsets)]


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.Table, dict[str, Any]]:
    """A table with a column of ids, and how to write it."""
    kind = draw(st.sampled_from(LISTS[:3]))
    ids = st.integers(0, 100) | (st.none() if draw(st.booleans()) else st.nothing())
    some = st.lists(ids, min_size=2, max_size=2) if kind == "fixed" else st.lists(ids, max_size=4)
    rows = draw(st.lists(some | st.none() if draw(st.booleans()) else some, min_size=1, max_size=12))
    encoding = draw(st.sampled_from(["", "values"]))
    table = table_of([list_array(rows, draw(st.sampled_from(INTEGERS)), kind, encoding)])
    nested = pa.array([[{"a": [1, None], "b": "x"}, None]] * len(rows))
    others = {"nested": nested, "long": pa.array(["word " * 900] * len(rows)), "numbers": pa.array(range(len(rows)))}
    for name in draw(st.sets(st.sampled_from(sorted(others)))):
        table = table.add_column(draw(st.integers(0, table.num_columns)), name, others[name])
    if draw(st.booleans()):
        table = table.replace_schema_metadata({"about": "x" * draw(st.integers(0, 300))})
    return table, {
        "compression": draw(st.sampled_from(["none", "snappy", "gzip", "zstd", "lz4", "brotli"])),
        "use_dictionary": draw(st.booleans()),
        "write_statistics": draw(st.sampled_from([True, True, False])),
        "row_group_size": draw(st.integers(1, 5)),
        "data_page_version": draw(st.sampled_from(["1.0", "2.0"])),
        "store_schema": draw(st.booleans()),
        "write_page_index": draw(st.booleans()),
        "write_page_checksum": draw(st.booleans()),
    }


@settings(max_examples=examples(40), suppress_health_check=NO_FIXTURE, deadline=None)
@given(made=tables())
def test_a_footer_says_what_pyarrow_reads_in_it(tmp_path: Path, made: tuple[pa.Table, dict[str, Any]]) -> None:
    table, options = made
    path = write_parquet(tmp_path / "a.parquet", table, **options)
    footer = footer_of(path.read_bytes())
    found, expected = read_footer(footer), by_pyarrow(footer)
    assert found is not None
    assert found.rows == expected.num_rows
    groups = [expected.row_group(number) for number in range(expected.num_row_groups)]
    assert [(group.rows, group.size) for group in found.groups] == [
        (one.num_rows, one.total_byte_size) for one in groups
    ]
    for group, one in zip(found.groups, groups, strict=True):
        columns = [one.column(number) for number in range(one.num_columns)]
        assert [leaf.values for leaf in group.leaves] == [column.num_values for column in columns]
        nulls = [column.statistics.null_count if column.is_stats_set else None for column in columns]
        assert [leaf.nulls for leaf in group.leaves] == nulls
    empty = by_pyarrow(found.without_groups)
    assert (empty.num_rows, empty.num_row_groups) == (0, 0)
    assert empty.schema.to_arrow_schema().equals(expected.schema.to_arrow_schema(), check_metadata=True)


@settings(max_examples=examples(40), suppress_health_check=NO_FIXTURE, deadline=None)
@given(made=tables())
def test_opening_by_footers_finds_what_reading_the_columns_finds(
    tmp_path: Path, made: tuple[pa.Table, dict[str, Any]]
) -> None:
    """Also for empty and null rows, which values of a footer count, and null ids, which are an error."""
    table, options = made
    path = write_parquet(tmp_path / "a.parquet", table, **options)

    def outcome() -> Any:
        try:
            with open_corpus(path, token_column="input_ids") as corpus:
                offsets = corpus.document_offsets
                assert offsets is not None
                return corpus.fingerprint, corpus.tokens(0, corpus.num_tokens).tolist(), offsets.tolist(), corpus.notes
        except CorpusError as error:
            return str(error)

    first = parsed(path, token_column="input_ids")
    lists = table.column("input_ids").to_pylist()
    if first is not None:
        bounds = np.cumsum([0, *first.rows])
        counts = [sum(map(len, lists[begin:end])) for begin, end in itertools.pairwise(bounds)]
        assert first.totals.counts.tolist() == counts
        assert all(lists)
    elif options["write_statistics"] and options["compression"] != "none":
        assert not all(lists) or None in itertools.chain(*lists) or len(footer_of(path.read_bytes())) > MOST_BYTES
    found = outcome()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "_parse", lambda footer, options: None)
        assert outcome() == found


@settings(max_examples=examples(150), suppress_health_check=NO_FIXTURE, deadline=None)
@given(data=st.data())
def test_a_damaged_footer_is_left_to_pyarrow_or_read_as_it_reads_it(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "whole"
    if not path.exists():
        write_parquet(path, table_of([list_array(ROWS)]), row_group_size=2)
    footer = footer_of(path.read_bytes())
    changed = bytearray(footer)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(footer) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    found = read_footer(bytes(changed))
    assume(found is not None)
    assert found is not None
    try:
        expected = by_pyarrow(bytes(changed))
    except (pa.ArrowException, OSError, ValueError):
        damaged = tmp_path / "damaged.parquet"
        damaged.write_bytes(with_footer(path.read_bytes(), bytes(changed)))
        with pytest.raises(CorpusError, match=r"damaged\.parquet"):
            read_all(damaged)  # opening may not see it, but reading does
        return
    assert found.rows == expected.num_rows
    groups = [expected.row_group(number) for number in range(expected.num_row_groups)]
    assert [(group.rows, group.size) for group in found.groups] == [
        (one.num_rows, one.total_byte_size) for one in groups
    ]


def test_no_part_of_a_footer_is_a_footer(tmp_path: Path) -> None:
    content = write_parquet(tmp_path / "a", table_of([list_array(ROWS)]), row_group_size=2).read_bytes()
    footer = footer_of(content)
    whole = read_footer(footer)
    assert whole is not None
    end = len(footer) - len(whole.tail)
    assert all(read_footer(footer[:size]) is None for size in range(end))
    assert read_footer(b"\x15\x04" + b"\x1c" * 5000) is None  # structures in structures
    assert read_footer(footer + bytes(MOST_BYTES)) is None


@pytest.mark.parametrize(
    "writer", ["parquet-mr version 1.13.1 (build 0)", "parquet-cpp-arrow version 5.0.01", "x" * 32]
)
def test_statistics_of_other_writers_are_not_used(tmp_path: Path, writer: str) -> None:
    path = write_parquet(tmp_path / "a.parquet", table_of([list_array(ROWS)]), row_group_size=2)
    content = path.read_bytes()
    assert parsed(path) is not None
    own = by_pyarrow(footer_of(content)).created_by.encode()
    changed = footer_of(content).replace(bytes([0x18, len(own)]) + own, bytes([0x18, len(writer)]) + writer.encode())
    path.write_bytes(with_footer(content, changed))
    assert by_pyarrow(changed).created_by == writer
    assert parsed(path) is None
    assert read_all(path) == [*range(1, 11)]


def test_a_writer_that_is_not_text(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", table_of([list_array(ROWS)]))
    content = path.read_bytes()
    own = by_pyarrow(footer_of(content)).created_by.encode()
    path.write_bytes(with_footer(content, footer_of(content).replace(own, b"\xff" * len(own))))
    assert parsed(path) is None
    assert read_all(path) == [*range(1, 11)]


def test_columns_next_to_the_ids_are_read(tmp_path: Path) -> None:
    """Whether they make a difference is in no footer."""
    mask = pa.array([[1] * len(row) for row in ROWS], pa.list_(pa.int8()))
    path = write_parquet(tmp_path / "a.parquet", table_of([list_array(ROWS)], loss_mask=mask))
    assert parsed(path) is None
    assert parsed(path, use_masks=False).totals.counts.tolist() == [10]


@pytest.mark.parametrize("change", [1, -1])
def test_a_wrong_count_is_an_error_where_ids_or_documents_are_read(
    tmp_path: Path, change: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "a.parquet", table_of([list_array(ROWS)]), row_group_size=2)
    parse = parquet._parse

    def wrong(footer: bytes, options: OpenOptions) -> Any:
        found = parse(footer, options)
        assert found is not None
        assert found.totals is not None
        return found._replace(totals=RowTotals(found.totals.counts + np.array([0, change]), found.totals.documents))

    monkeypatch.setattr(parquet, "_parse", wrong)
    with open_corpus(path) as corpus:
        assert corpus.num_tokens == 10 + change
        assert corpus.tokens(0, 4).tolist() == [1, 2, 3, 4]
        with pytest.raises(CorpusReadError, match=r"a\.parquet: chunk 1 .*\b6\b"):
            corpus.tokens(4, 5)
        with pytest.raises(CorpusFormatError, match=rf"a\.parquet: chunk 1 .*\b6\b.*\b{6 + change}\b"):
            corpus.document_offsets  # noqa: B018


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose columns are read from here on."""
    names: list[str] = []
    batches: Callable[..., Any] = parquet.ParquetChunks.batches

    def counting(self: Any, chunk: int, columns: Any) -> Any:
        names.append(self.path.name)
        return batches(self, chunk, columns)

    monkeypatch.setattr(parquet.ParquetChunks, "batches", counting)
    return names


def test_documents_of_many_small_files_are_found_once(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All together, until a file changes."""
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_tables, "LEAST_FILES", 3)
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [[[number] * 3, [5], [6, number]] for number in range(3)]

    def offsets() -> list[int]:
        reads.clear()
        with open_corpus(folder) as corpus:
            assert reads == []
            found = corpus.document_offsets
            assert found is not None
            return [int(one) for one in found]

    def expected() -> list[int]:
        return [0, *itertools.accumulate(len(row) for some in rows for row in some)]

    for number, some in enumerate(rows):
        write_parquet(folder / f"{number}.parquet", table_of([list_array(some)]))
    assert offsets() == expected()
    assert sorted(reads) == ["0.parquet", "1.parquet", "2.parquet"]
    assert offsets() == expected()
    assert reads == []
    rows[1] = [[7], [7, 7], [7, 7, 7]]
    write_parquet(folder / "1.parquet", table_of([list_array(rows[1])]))
    assert offsets() == expected()
    assert len(reads) == 3


def test_cached_documents_that_do_not_fit_the_files_are_found_again(
    tmp_path: Path, reads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_tables, "LEAST_FILES", 2)
    files = [write_parquet(tmp_path / name, table_of([list_array(ROWS)])) for name in ("a.parquet", "b.parquet")]
    for number in range(2):
        reads.clear()
        with open_corpus(files) as corpus:
            assert row_lengths(corpus) == [*map(len, ROWS)] * 2
        assert len(reads) == 2, number
        (kept,) = (tmp_path / "cache").rglob("rows-*.npy")
        content = bytearray(kept.read_bytes())
        content[128 + 8 * len(ROWS)] += 1  # where the second file begins
        kept.write_bytes(content)


def test_a_file_replaced_before_its_documents_are_found(tmp_path: Path) -> None:
    """By one with the same footer."""
    plain = {"compression": "none", "use_dictionary": False}
    path, other = (tmp_path / name for name in ("a.parquet", "b.parquet"))
    write_parquet(path, table_of([list_array([[1, 9], [5, 2, 1]])]), **plain)
    write_parquet(other, table_of([list_array([[1, 9, 5], [2, 1]])]), **plain)
    assert footer_of(path.read_bytes()) == footer_of(other.read_bytes())
    os.utime(other, (1, 1))
    with open_corpus(path) as corpus:
        other.replace(path)
        with pytest.raises(CorpusReadError, match=r"a\.parquet.* replaced"):
            corpus.document_offsets  # noqa: B018


def test_documents_of_a_small_object_need_no_more_requests(tmp_path: Path) -> None:
    """It was read whole when it was opened."""
    path = write_parquet(tmp_path / "a.parquet", table_of([list_array(ROWS)]), row_group_size=2)
    with RangeServer.of_folder(tmp_path) as server, open_corpus(f"{server.url}/{path.name}") as corpus:
        server.requests.clear()
        assert row_lengths(corpus) == [*map(len, ROWS)]
        assert server.requests == []
