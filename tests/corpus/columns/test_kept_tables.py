"""What opening found in tables is there for the next start, unless a file changed, and is not trusted blindly."""

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples
from table_files import list_array, table_of, write_parquet

from dali_pipes.corpus import Corpus, open_corpus, opener
from dali_pipes.corpus.columns import kept_tables, row_chunks
from dali_pipes.corpus.formats import parquet
from dali_pipes.runtime import offset_cache
from dali_pipes.storage import fingerprint

PLAIN: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
FILES = 4


@pytest.fixture(autouse=True)
def _few_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_tables, "LEAST_FILES", 1)


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows by the name of each file whose footer pyarrow parses, at opening or later."""
    names: list[str] = []
    opened = parquet._parquet_file

    def counting(file: Any) -> Any:
        names.append(file.path.name)
        return opened(file)

    monkeypatch.setattr(parquet, "_parquet_file", counting)
    return names


def write(path: Path, rows: list[list[int]], **columns: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    return write_parquet(path, table_of([list_array(rows, "uint16")], **columns), row_group_size=2, **PLAIN)


def write_some(folder: Path) -> list[list[list[int]]]:
    """Several files in one folder; their rows."""
    rows = [[[number, 1, 2], [5], [3] * (number + 1), [4], []] for number in range(FILES)]
    for number, some in enumerate(rows):
        write(folder / f"part-{number}.parquet", some)
    return rows


def kept_file(tmp_path: Path) -> Path:
    [path] = (tmp_path / "cache").glob("tables-*")
    return path


def everything(corpus: Corpus) -> Any:
    """All that a corpus says of its files, and all that it reads, without their folder."""
    offsets = corpus.document_offsets
    assert offsets is not None
    mask = np.ones(corpus.num_tokens, np.uint8)
    if corpus.loss_mask is not None:
        zero = np.zeros(1, np.int64)
        corpus.loss_mask.read_pieces(zero, zero + corpus.num_tokens, zero, mask)
    where = [corpus.locate(place) for place in range(corpus.num_tokens)]
    return (
        (corpus.fingerprint, corpus.content_key, corpus.file_digests, corpus.mask_digests, corpus.notes, corpus.dtype),
        [[part.tolist() for part in corpus.extents], offsets.tolist(), corpus.num_documents],
        (corpus.tokens(0, corpus.num_tokens).tolist(), mask.tolist(), [(one.file.name, one.offset) for one in where]),
    )


def read(folder: Path, **options: Any) -> Any:
    with open_corpus(folder, **options) as corpus:
        return everything(corpus)


def rows_in(folder: Path) -> list[list[int]]:
    with open_corpus(folder) as corpus:
        offsets = corpus.document_offsets
        assert offsets is not None
        return [part.tolist() for part in np.split(corpus.tokens(0, corpus.num_tokens), offsets[1:-1])]


def opened(folder: Path, parsed: list[str], **options: Any) -> list[str]:
    """The names of the files that opening the folder parses."""
    parsed.clear()
    open_corpus(folder, **options).close()
    return list(parsed)


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_later_start_finds_the_same(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """With any rows, with masks and padding, in small tables and in those whose offsets have a file of their own."""
    folder, cache = tmp_path_factory.mktemp("data"), tmp_path_factory.mktemp("cache")
    id_lists = st.lists(st.integers(0, 60_000), max_size=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DALI_PIPES_CACHE", str(cache))
        patch.setattr(row_chunks, "LEAST_KEPT_BYTES", data.draw(st.sampled_from([0, 1 << 16])))
        patch.setattr(parquet, "_HELD_BYTES", data.draw(st.sampled_from([0, 1 << 16])))
        for number in range(data.draw(st.integers(1, 3))):
            rows = [*data.draw(st.lists(id_lists, max_size=6)), [5]]
            others: dict[str, Any] = {}
            for name in data.draw(st.sets(st.sampled_from(["loss_mask", "attention_mask"]))):
                zeros = [data.draw(st.integers(0, max(0, len(row) - 1))) for row in rows]
                flags = [[0] * count + [1] * (len(row) - count) for row, count in zip(rows, zeros, strict=True)]
                others[name] = pa.array(flags, pa.list_(pa.int8()))
            write(folder / f"{number}.parquet", rows, **others)
        first = read(folder)
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(parquet, "choose_columns", None)  # what parses a footer would fail
            assert read(folder) == first
        shutil.rmtree(cache)
        assert read(folder) == first


def test_a_later_start_parses_nothing(tmp_path: Path, parsed: list[str]) -> None:
    write_some(tmp_path / "data")
    assert len(opened(tmp_path / "data", parsed)) == FILES
    assert opened(tmp_path / "data", parsed) == []


def test_files_that_are_opened_in_threads_are_kept_as_well(
    tmp_path: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As large tables are."""
    write_some(tmp_path / "data")
    before = read(tmp_path / "data")
    kept_file(tmp_path).unlink()
    monkeypatch.setattr(opener, "LARGE_TABLE_BYTES", 1)
    for expected in (FILES, 0):
        assert len(opened(tmp_path / "data", parsed)) == expected
        assert read(tmp_path / "data") == before


def test_few_files_are_opened_anew(tmp_path: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_tables, "LEAST_FILES", FILES + 1)
    write_some(tmp_path / "data")
    for _ in range(2):
        assert len(opened(tmp_path / "data", parsed)) == FILES
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("held_bytes", [0, 1 << 16])
def test_a_replaced_file_of_the_same_name_and_size_is_seen(
    tmp_path: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch, held_bytes: int
) -> None:
    """Its bytes are sampled at each start, whatever its times are."""
    monkeypatch.setattr(parquet, "_HELD_BYTES", held_bytes)
    rows = write_some(tmp_path / "data")
    path = tmp_path / "data" / "part-1.parquet"
    before, about = read(tmp_path / "data"), path.stat()
    rows[1] = [[9, 8], [7, 6], [5], [4, 3], []]  # as many ids and rows
    write(tmp_path / "other", rows[1]).replace(path)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    assert path.stat().st_size == about.st_size
    assert set(opened(tmp_path / "data", parsed)) == {path.name}
    assert rows_in(tmp_path / "data") == [row for some in rows for row in some]
    assert read(tmp_path / "data")[0][0] != before[0][0]
    assert opened(tmp_path / "data", parsed) == []


@pytest.mark.parametrize("is_old_time", [False, True])
def test_a_change_that_no_sample_sees_is_seen_by_its_time(
    tmp_path: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch, is_old_time: bool
) -> None:
    """That of the content, or if this was restored, that of the inode."""
    monkeypatch.setattr(fingerprint, "sample_places", lambda size: [])
    write_some(tmp_path / "data")
    path = tmp_path / "data" / "part-2.parquet"
    before, about = read(tmp_path / "data"), path.stat()
    changed = [[2], [1, 2, 5], [3, 3, 3], [4], []]
    write(path, changed)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns + (not is_old_time)))
    assert path.stat().st_size == about.st_size
    assert opened(tmp_path / "data", parsed) == [path.name]
    assert rows_in(tmp_path / "data")[10:15] == changed
    assert read(tmp_path / "data")[0][0] == before[0][0]  # the fingerprint sees pieces, not times


def test_the_folder_may_move_or_be_copied(tmp_path: Path, parsed: list[str]) -> None:
    write_some(tmp_path / "data")
    before = read(tmp_path / "data")
    (tmp_path / "data").rename(tmp_path / "moved")
    shutil.copytree(tmp_path / "moved", tmp_path / "copy")
    for folder in (tmp_path / "moved", tmp_path / "copy"):
        assert opened(folder, parsed) == []
        assert read(folder) == before
        with open_corpus(folder) as corpus:
            assert {file.parent for file in corpus.files} == {folder}


def test_only_an_added_file_is_parsed(tmp_path: Path, parsed: list[str]) -> None:
    rows = write_some(tmp_path / "data")
    open_corpus(tmp_path / "data").close()
    write(tmp_path / "data" / "part-9.parquet", [[1], [2]])
    assert opened(tmp_path / "data", parsed) == ["part-9.parquet"]
    assert rows_in(tmp_path / "data") == [*(row for some in rows for row in some), [1], [2]]


def test_settings_are_kept_apart(tmp_path: Path, parsed: list[str]) -> None:
    other = pa.array([[7], [7, 7]], pa.list_(pa.int64()))
    mask = pa.array([[0, 1], [1]], pa.list_(pa.int8()))
    write(tmp_path / "data" / "a.parquet", [[5, 6], [8]], tokens=other, loss_mask=mask)
    choices: list[dict[str, Any]] = [{}, {"token_column": "tokens", "loss_masks": []}, {"loss_masks": []}]
    first = [read(tmp_path / "data", **choice) for choice in choices]
    assert len({str(one) for one in first}) == len(choices)
    for choice, one in zip(choices, first, strict=True):
        assert opened(tmp_path / "data", parsed, **choice) == []
        assert read(tmp_path / "data", **choice) == one


def test_what_was_found_is_made_anew_where_that_is_asked_for(tmp_path: Path, parsed: list[str]) -> None:
    write_some(tmp_path / "data")
    before = read(tmp_path / "data")
    inode = kept_file(tmp_path).stat().st_ino
    with offset_cache.made_anew():
        assert len(opened(tmp_path / "data", parsed)) == FILES
    assert kept_file(tmp_path).stat().st_ino != inode
    assert read(tmp_path / "data") == before


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda whole: b"",
    "cut in the mark": lambda whole: whole[:10],
    "cut in the hash": lambda whole: whole[:40],
    "cut in the head": lambda whole: whole[:70],
    "a byte short": lambda whole: whole[:-1],
    "a byte long": lambda whole: whole + b"\0",
    "zeros": lambda whole: bytes(len(whole)),
    "zeros at the end": lambda whole: whole[:-40] + bytes(40),
    "of another version": lambda whole: whole.replace(b"tables 1\n", b"tables 0\n"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_replaced(tmp_path: Path, parsed: list[str], damage: str) -> None:
    write_some(tmp_path / "data")
    before, path = read(tmp_path / "data"), kept_file(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(DAMAGE[damage](whole))
    assert len(opened(tmp_path / "data", parsed)) == FILES
    assert path.read_bytes() == whole
    assert read(tmp_path / "data") == before


@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_bit_is_noticed(tmp_path: Path, data: st.DataObject) -> None:
    if not (tmp_path / "cache").exists():
        write_some(tmp_path / "data")
        open_corpus(tmp_path / "data").close()
    path = kept_file(tmp_path)
    whole = bytearray(path.read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    flipped = tmp_path / "flipped"
    flipped.write_bytes(whole)
    assert kept_tables._of_bytes(path) != {}
    assert kept_tables._of_bytes(flipped) == {}


def test_a_cache_that_cannot_be_written_or_read_does_not_matter(
    tmp_path: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [row for some in write_some(tmp_path / "data") for row in some]
    (tmp_path / "cache").write_text("mine")
    assert rows_in(tmp_path / "data") == rows
    assert (tmp_path / "cache").read_text() == "mine"
    monkeypatch.setenv("DALI_PIPES_CACHE", str(tmp_path / "data"))
    assert rows_in(tmp_path / "data") == rows
    assert len(list((tmp_path / "data").iterdir())) == FILES


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    write_some(tmp_path / "data")
    open_corpus(tmp_path / "data").close()
    path = kept_file(tmp_path)
    leftover = path.with_suffix(".0123.tmp")
    leftover.write_bytes(b"half")
    path.unlink()
    open_corpus(tmp_path / "data").close()
    assert [one.name for one in (tmp_path / "cache").iterdir()] == [path.name]


def test_failed_writes_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [row for some in write_some(tmp_path / "data") for row in some]

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert rows_in(tmp_path / "data") == rows
    assert list((tmp_path / "cache").iterdir()) == []


def test_processes_that_open_the_folder_at_the_same_time(
    tmp_path: Path, parsed: list[str], run_ranks: Callable[..., list[Any]]
) -> None:
    """All find the same, what they keep is whole, and nothing else stays."""
    rows = write_some(tmp_path / "data")
    source = """
        import json, os, pathlib, sys, time
        from dali_pipes.corpus import open_corpus
        from dali_pipes.corpus.columns import kept_tables

        rank, world_size, folder, start = sys.argv[1:]
        kept_tables.LEAST_FILES = 1
        found = []
        for attempt in range(20):
            time.sleep(max(0, float(start) + attempt / 50 - time.time()))
            for path in pathlib.Path(os.environ["DALI_PIPES_CACHE"]).glob("tables-*"):
                if attempt % 2 and path.suffix == "":
                    path.unlink(missing_ok=True)
            with open_corpus(folder) as corpus:
                tokens = corpus.tokens(0, corpus.num_tokens).tolist()
                found.append([corpus.fingerprint, corpus.document_offsets.tolist(), tokens])
        assert all(one == found[0] for one in found)
        print(json.dumps(found[0]))
    """
    one, *others = run_ranks(source, 3, tmp_path / "data", time.time() + 2, forked=True)
    assert others == [one, one]
    assert one[2] == [value for some in rows for row in some for value in row]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [kept_file(tmp_path).name]
    assert opened(tmp_path / "data", parsed) == []


def test_a_large_table_keeps_its_totals_here_and_its_offsets_elsewhere(
    tmp_path: Path, parsed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_chunks, "LEAST_KEPT_BYTES", 0)
    rows = [row for some in write_some(tmp_path / "data") for row in some]
    open_corpus(tmp_path / "data").close()
    for path in (tmp_path / "cache").glob("rows-*"):
        path.unlink()
    assert opened(tmp_path / "data", parsed) == []
    assert rows_in(tmp_path / "data") == rows  # the offsets are found once more, when they are needed
    assert len(list((tmp_path / "cache").glob("rows-*.npy"))) == FILES
