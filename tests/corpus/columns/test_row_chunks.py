"""Chunks of rows: measured once and then kept, decoded into memory at will, with a loss mask beside the ids."""

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from table_files import list_array, table_of, write_arrow, write_parquet

from dali_pipes import TokenLoader
from dali_pipes.corpus import eager_decoding as eager
from dali_pipes.corpus import open_corpus
from dali_pipes.corpus.columns import row_chunks
from dali_pipes.corpus.columns.kept_tables import KeptTables
from dali_pipes.corpus.columns.row_chunks import RowReader, make_data_file
from dali_pipes.corpus.columns.scans import ColumnScans
from dali_pipes.corpus.columns.token_columns import TokenColumns
from dali_pipes.corpus.corpus import Corpus
from dali_pipes.corpus.formats import arrow, parquet
from dali_pipes.corpus.formats.arrow import batches
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.errors import BackendError, ConfigError, CorpusFormatError
from dali_pipes.storage.byte_file import open_file

ROWS = [list(range(number, 2 * number)) for number in range(30)]
IDS = [token for row in ROWS for token in row]


def write(folder: Path, kind: str) -> Path:
    chunks = [list_array(ROWS[first : first + 4], "uint16") for first in range(0, 30, 4)]
    if kind == "parquet":
        return write_parquet(folder / "a.parquet", table_of(chunks), row_group_size=4)
    return write_arrow(folder / "a.arrow", table_of(chunks), kind if kind != "plain" else None)


@pytest.fixture(autouse=True)
def keep_small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_chunks, "LEAST_KEPT_BYTES", 0)


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The chunks that are read from here on."""
    calls: list[int] = []

    def counted(kind: Any) -> Any:
        read = kind.batches

        def batches(self: Any, chunk: int, names: Sequence[str]) -> Iterator[list[Any]]:
            calls.append(chunk)
            yield from read(self, chunk, names)

        return batches

    for kind in (parquet.ParquetChunks, batches.BatchChunks):
        monkeypatch.setattr(kind, "batches", counted(kind))
    return calls


@pytest.mark.parametrize("kind", ["parquet", "zstd", "plain"])
def test_rows_are_measured_once(tmp_path: Path, kind: str, decodes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path, kind)
    prints = set()
    for _ in range(3):
        with open_corpus(path) as corpus:
            assert sorted(decodes) == ([] if kind == "plain" else list(range(8)))
            assert corpus.num_tokens == len(IDS)
            assert corpus.document_offsets is not None
            assert np.diff(corpus.document_offsets).tolist() == [len(row) for row in ROWS]
            prints.add(corpus.fingerprint)
    assert len(prints) == 1
    assert len(list((tmp_path / "cache").glob("rows-*.npy")) if kind != "plain" else [1]) == 1
    write_parquet(path, table_of([list_array(ROWS[:5])]))  # another file of that name
    with open_corpus(path) as corpus:
        assert corpus.num_tokens == sum(map(len, ROWS[:5]))


def test_small_files_are_measured_each_time(
    tmp_path: Path, decodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(row_chunks, "LEAST_KEPT_BYTES", 1 << 16)
    path = write(tmp_path, "zstd")
    for number in (1, 2):
        with open_corpus(path) as corpus:
            assert corpus.document_offsets is not None
            assert len(decodes) == number * 8
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("kind", ["parquet", "zstd"])
def test_what_is_kept_may_be_lost_or_damaged(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "cache"))
    path = write(tmp_path, kind)
    open_corpus(path).close()
    (kept,) = (tmp_path / "cache").glob("rows-*.npy")
    for damage in (b"", kept.read_bytes()[:-8], b"x" * 500, None):
        kept.unlink() if damage is None else kept.write_bytes(damage)
        with open_corpus(path) as corpus:
            assert corpus.tokens(0, len(IDS)).tolist() == IDS
            assert corpus.num_documents == 30


@pytest.mark.parametrize("where", ["a file", "the data", "no home"])
def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, where: str, decodes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path, "parquet")
    before = sorted(tmp_path.iterdir())
    if where == "no home":
        monkeypatch.delenv("DALI_PIPES_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    else:
        monkeypatch.setenv("DALI_PIPES_CACHE", str(path if where == "a file" else tmp_path))
    with open_corpus(path) as corpus:
        assert corpus.document_offsets is not None
        assert corpus.document_offsets[-1] == len(IDS)
    assert sorted(decodes) == list(range(8))  # measured once, although nothing was kept
    assert sorted(tmp_path.iterdir()) == before


def test_a_row_group_is_decoded_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "BATCH_BYTES", 50)
    path = write_parquet(tmp_path / "a", table_of([list_array(ROWS)]))
    with open_corpus(path) as corpus:
        assert corpus.tokens(0, len(IDS)).tolist() == IDS


@pytest.mark.parametrize("kind", ["parquet", "zstd"])
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_many_threads_read_at_once(tmp_path: Path, kind: str, cache_bytes: int) -> None:
    with open_corpus(write(tmp_path, kind), cache_bytes=cache_bytes) as corpus:

        def read(seed: int) -> bool:
            starts = np.random.default_rng(seed).integers(0, len(IDS) - 40, 50)
            out = np.empty((50, 40), np.uint16)
            corpus.read_rows(starts, out)
            return bool(out.tolist() == [IDS[start : start + 40] for start in starts])

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(40)))


def test_eager(tmp_path: Path, decodes: list[int], capfd: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, "parquet")
    with open_corpus(path, eager=True, cache_bytes=10) as corpus:
        assert f"eager: decoding 1 file into {2 * len(IDS)} bytes of memory" in capfd.readouterr().err
        decodes.clear()
        for _ in range(3):
            assert corpus.tokens(0, len(IDS)).tolist() == IDS
        stats = corpus.cache_stats()
        assert stats is not None
        assert decodes == []
        assert stats.num_bytes == 2 * len(IDS)
    with open_corpus(write(tmp_path, "plain"), eager=True) as corpus:
        assert corpus.tokens(0, len(IDS)).tolist() == IDS
    assert capfd.readouterr().err == ""  # there is nothing to decode


def test_eager_that_memory_does_not_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, "parquet")
    available = eager.available_bytes()
    assert available is not None
    assert available > 1 << 20
    monkeypatch.setattr(eager, "available_bytes", lambda: 100)
    with pytest.raises(ConfigError, match=rf"{2 * len(IDS)} bytes .* but 100 .*available"):
        open_corpus(path, eager=True)


def test_settings_reach_the_corpus(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a", pa.table({"a": [[1, 2, 3]] * 50, "b": [[4, 5, 6]] * 50}), row_group_size=5)
    settings: dict[str, Any] = {"batch_size": 2, "seq_len": 8, "device": "cpu", "shuffle": False}
    with TokenLoader(corpus=str(path), token_column="b", decoded_cache_bytes=77, **settings) as loader:
        assert next(iter(loader))["input_ids"][0].tolist() == [4, 5, 6, 4, 5, 6, 4, 5]
        stats = loader.stats().cache
        assert stats is not None
        assert (stats.most_bytes, stats.all_bytes) == (77, 150 * 8)
    with TokenLoader(corpus=str(path), token_column="a", eager=True, **settings) as loader:
        list(loader)
        stats = loader.stats().cache
        assert stats is not None
        assert stats.num_bytes == stats.all_bytes
        assert stats.misses == 10  # at the start


class RepeatedChunks:
    """One list array many times over, each time a chunk: many ids in little memory."""

    def __init__(self, array: Any, times: int) -> None:
        self.path = Path("repeated")
        self.rows, self.sizes = [len(array)] * times, [1] * times
        self._array = array

    def batches(self, chunk: int, names: Sequence[str]) -> Iterator[list[Any]]:
        yield [self._array]


def test_more_ids_than_32_bits_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks are never joined: 2.4e9 ids, of which the offsets of one list array could not tell."""
    count, times = 60_000_000, 40
    values = np.arange(count, dtype=np.uint32).astype(np.uint8)
    ends = np.array([0, 7, count - 3, count], np.int32)
    array = pa.ListArray.from_arrays(pa.array(ends), pa.array(values))
    reader = RowReader(RepeatedChunks(array, times), TokenColumns("tokens", np.dtype(np.uint8)), b"", None)
    with ColumnScans("") as scans:
        file = make_data_file(reader, "parquet", 0, scans)
    with Corpus([file], cache_bytes=2 * count) as corpus:
        assert corpus.num_tokens == count * times > 2**31
        assert corpus.num_documents == 3 * times
        offsets = corpus.document_offsets
        assert offsets is not None
        assert offsets[-4:].tolist() == [count * 39, count * 39 + 7, count * 40 - 3, count * 40]
        last = corpus.num_tokens - 100
        starts = np.append(np.sort(np.random.default_rng(0).integers(0, last, 5)), last)
        out = np.empty((6, 100), np.uint8)
        corpus.read_rows(starts, out)
        assert (out == ((starts[:, None] + np.arange(100)) % count % 256)).all()


@settings(max_examples=examples(12))
@given(
    rows=st.lists(st.none() | st.lists(st.tuples(st.integers(0, 9), st.booleans()), max_size=5), max_size=12),
    element=st.sampled_from(["bool", "int8", "int64"]),
    kind=st.sampled_from(["parquet", "plain", "zstd"]),
)
def test_loss_masks(tmp_path_factory: pytest.TempPathFactory, rows: list[Any], element: str, kind: str) -> None:
    rows = [*rows, [(1, True)]]
    ids = list_array([row and [token for token, _ in row] for row in rows])
    mask = pa.array(
        [row and [flag if element == "bool" else int(flag) for _, flag in row] for row in rows],
        pa.list_(pa.bool_() if element == "bool" else getattr(pa, element)()),
    )
    table, path = table_of([ids], loss_mask=mask), tmp_path_factory.mktemp("mask") / "a"
    write_parquet(path, table, row_group_size=3) if kind == "parquet" else write_arrow(
        path, table, None if kind == "plain" else kind
    )
    with ColumnScans("") as scans, open_file(path) as source:
        (file,) = (parquet if kind == "parquet" else arrow).inspect(
            source, OpenOptions(scans, KeptTables([path], None))
        )
    assert file.loss_mask is not None
    expected = [int(flag) for row in rows for _, flag in row or []]
    with Corpus([file.loss_mask]) as corpus, Corpus([file]) as tokens:
        assert corpus.dtype == np.uint8
        assert corpus.tokens(0, corpus.num_tokens).tolist() == expected
        assert tokens.tokens(0, tokens.num_tokens).tolist() == [token for row in rows for token, _ in row or []]


@pytest.mark.parametrize("kind", ["parquet", "plain", "zstd"])
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([[1], [0, 1], [1]], r"row 2: column loss_mask has 1 values for 2 ids"),
        ([[1], [0, 1], [1, 2]], r"row 2: column loss_mask holds 2 at token 1; expected 0 .* or 1"),
        ([[1], [0, 1], None], r"row 2: column loss_mask has 0 values for 2 ids"),
        ([[1], [0, None], [1, 1]], r"row 1: column loss_mask .*null at token 1"),
        ([1, 2, 3], r"column loss_mask is int64; a loss mask must be a list"),
    ],
)
def test_masks_that_do_not_fit(tmp_path: Path, kind: str, mask: list[Any], message: str) -> None:
    table = table_of([list_array([[1], [2, 3], [4, 5]])], loss_mask=pa.array(mask))
    path = tmp_path / "a"
    write_parquet(path, table) if kind == "parquet" else write_arrow(path, table, None if kind == "plain" else kind)
    with pytest.raises(CorpusFormatError, match=message):
        open_corpus(path)


@pytest.mark.parametrize("kind", ["parquet", "plain"])
def test_without_pyarrow(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, kind)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(BackendError, match=r'a\.\w+, .*pip install "dali-pipes\[parquet\]"'):
        open_corpus(path)


def test_many_processes_open_at_once(
    tmp_path: Path, run_ranks: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several that open it for the first time all get the same; what they keep is whole."""
    path = write(tmp_path, "parquet")
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "cache"))
    source = """
        import json, sys
        from dali_pipes.corpus import open_corpus
        from dali_pipes.corpus.columns import row_chunks

        row_chunks.LEAST_KEPT_BYTES = 0
        with open_corpus(sys.argv[3]) as corpus:
            print(json.dumps([corpus.document_offsets.tolist(), corpus.tokens(0, 5).tolist()]))
    """
    expected = [[0, *np.cumsum([len(row) for row in ROWS]).tolist()], IDS[:5]]
    assert run_ranks(source, 6, path, forked=True) == [expected] * 6
    assert len(list((tmp_path / "cache").iterdir())) == 2
