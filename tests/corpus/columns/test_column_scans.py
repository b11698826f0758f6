"""Files that are opened side by side: the error is that of the damaged one, and no thread outlives it."""

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from held import Held
from table_files import list_array, table_of, write_arrow, write_parquet

from dali_pipes.corpus import document_offsets, open_corpus
from dali_pipes.corpus import opener as opening
from dali_pipes.corpus.columns import scans as column_scans
from dali_pipes.corpus.columns.scans import ColumnScans
from dali_pipes.corpus.formats import parquet
from dali_pipes.errors import CorpusFormatError
from dali_pipes.runtime.threads import ReaderThreads

KINDS = ("parquet", "file", "file-zstd", "stream", "stream-zstd", "stream-dictionary")
FILES = 5


def write(path: Path, kind: str) -> Path:
    name, _, option = kind.partition("-")
    encoding = "values" if option == "dictionary" else ""
    rows = [[number, *range(number % 7)] for number in range(60)]
    table = table_of([list_array(rows[first : first + 20], encoding=encoding) for first in (0, 20, 40)])
    if name == "parquet":
        return write_parquet(path, table, row_group_size=20, write_page_checksum=True)
    return write_arrow(path, table, "zstd" if option == "zstd" else None, name == "stream")


@pytest.fixture
def side_by_side(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are opened as large ones are: in threads, and their chunks read in others."""
    for module in (opening, document_offsets):
        monkeypatch.setattr(module, "LARGE_TABLE_BYTES", 0)
    monkeypatch.setattr(column_scans, "_FEWEST_BYTES_EACH", 0)


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Set once the scans have begun to stop their threads."""
    event = threading.Event()

    class Threads(ReaderThreads):
        def stop(self, wait_s: float | None = None) -> None:
            event.set()
            super().stop(wait_s)

    monkeypatch.setattr(column_scans, "ReaderThreads", Threads)
    yield event
    event.set()


@pytest.mark.usefixtures("side_by_side")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("are_late", [True, False])
def test_the_error_names_the_damaged_file(
    tmp_path: Path, kind: str, are_late: bool, stopping: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any place in the list, though the files behind it come to their rows only when the threads are being ended."""
    files = [write(tmp_path / f"{number}.table", kind) for number in range(FILES)]
    whole = files[0].read_bytes()
    open_corpus(files).close()
    inspect, damaged = opening._inspect, 0

    def wait(path: Path, *arguments: Any, **options: Any) -> Any:
        if are_late and files.index(path) > damaged:
            stopping.wait()
        return inspect(path, *arguments, **options)

    monkeypatch.setattr(opening, "_inspect", wait)
    before = Held.now()
    for damaged in range(FILES):
        stopping.clear()
        files[damaged].write_bytes(whole[: len(whole) * 2 // 5])
        with pytest.raises(CorpusFormatError, match=rf"{damaged}\.table: "):
            open_corpus(files)
        assert before.left() == {}
        files[damaged].write_bytes(whole)
    stopping.set()
    open_corpus(files).close()


@pytest.mark.usefixtures("side_by_side")
@pytest.mark.parametrize("is_deferred", [False, True])
def test_the_error_names_the_file_with_a_damaged_chunk(
    tmp_path: Path, stopping: threading.Event, monkeypatch: pytest.MonkeyPatch, is_deferred: bool
) -> None:
    """What is found only in the threads that read the rows of a file, at opening or when documents are needed."""
    if not is_deferred:
        monkeypatch.setattr(parquet, "_parse", lambda footer, options: None)
    files = [write(tmp_path / f"{number}.parquet", "parquet") for number in range(FILES)]
    whole = files[0].read_bytes()
    column = pyarrow.parquet.ParquetFile(files[0]).metadata.row_group(1).column(1)
    flipped = bytearray(whole)
    flipped[(column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size - 3] ^= 4

    def opened_with_documents(files: list[Path]) -> None:
        with open_corpus(files) as corpus:
            assert is_deferred == (files[damaged].read_bytes() == flipped)
            assert corpus.document_offsets is not None

    open_corpus(files).close()
    before = Held.now()
    for damaged in range(FILES):
        files[damaged].write_bytes(flipped)
        with pytest.raises(CorpusFormatError, match=rf"{damaged}\.parquet: .*row group 1: "):
            opened_with_documents(files)
        assert stopping.is_set()
        assert before.left() == {}
        files[damaged].write_bytes(whole)


@pytest.mark.usefixtures("side_by_side")
def test_scans_that_have_ended_make_no_thread() -> None:
    before = Held.now()
    with ColumnScans("") as scans:
        assert scans.for_chunks(str, [1, 1, 1]) == ["0", "1", "2"]
    for _ in range(2):
        with pytest.raises(CancelledError, match="scans"):
            scans.for_chunks(str, [1, 1, 1])
        with pytest.raises(CancelledError, match="scans"):
            scans.for_files(str, [1, 1, 1])
        scans.__exit__()
    assert before.left() == {}
