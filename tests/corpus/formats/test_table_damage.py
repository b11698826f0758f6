"""Damaged tables are an error that names the file, never wrong ids, a crash or a hang; so are files that change."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples
from table_files import list_array, table_of, write_arrow, write_parquet

from dali_pipes.corpus import Corpus, open_corpus
from dali_pipes.errors import CorpusError, CorpusFormatError, CorpusReadError

ROWS = [[number, 70000 + number, *range(number % 5)] for number in range(40)]
IDS = [token for row in ROWS for token in row]
KINDS = ("parquet", "parquet-checked", "file", "stream", "file-zstd", "stream-dictionary")


def write(path: Path, kind: str) -> Path:
    name, _, option = kind.partition("-")
    table = table_of(
        [
            list_array(ROWS[:25], encoding="values" * (option == "dictionary")),
            list_array(ROWS[25:], encoding="values" * (option == "dictionary")),
        ]
    )
    if name == "parquet":
        return write_parquet(path, table, row_group_size=25, write_page_checksum=option == "checked")
    return write_arrow(path, table, "zstd" if option == "zstd" else None, name == "stream")


def read(path: Path) -> tuple[list[int], list[int]]:
    with open_corpus(path) as corpus:
        assert corpus.document_offsets is not None
        return corpus.tokens(0, corpus.num_tokens).tolist(), corpus.document_offsets.tolist()


def read_or_refuse(path: Path) -> tuple[list[int], list[int]] | None:
    """None for an error of ours that names the file; other errors are not expected."""
    try:
        return read(path)
    except CorpusError as error:
        if path.name in str(error):
            return None
        raise


@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_seen(tmp_path: Path, kind: str) -> None:
    """A stream may also end where a batch ends: it says nowhere how many there are."""
    data = write(tmp_path / "whole", kind).read_bytes()
    path = tmp_path / f"cut.{'parquet' if kind.startswith('parquet') else 'arrow'}"
    for size in range(0, len(data), 29):
        path.write_bytes(data[:size])
        found = read_or_refuse(path)
        if found is not None:
            assert kind.startswith("stream")
            assert found[0] in (IDS, [token for row in ROWS[:25] for token in row])


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bits(tmp_path: Path, kind: str, data: st.DataObject) -> None:
    """An error of ours, or as many ids as there were: a flip in what is not checked is another id, or another cut."""
    path = tmp_path / "whole"
    whole = path.read_bytes() if path.exists() else write(path, kind).read_bytes()
    changed = bytearray(whole)
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    flipped = tmp_path / f"flipped.{'parquet' if kind.startswith('parquet') else 'arrow'}"
    flipped.write_bytes(changed)
    found = read_or_refuse(flipped)
    if found is not None:
        ids, offsets = found
        assert (offsets[0], offsets[-1]) == (0, len(ids))
        assert (np.diff(offsets) >= 0).all()


def test_a_flipped_page_is_seen_by_its_checksum(tmp_path: Path) -> None:
    path = write(tmp_path / "a", "parquet-checked")
    column = pa.parquet.ParquetFile(path).metadata.row_group(1).column(1)
    place = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size - 3
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    path.write_bytes(data)
    with open_corpus(path) as corpus:
        middle = corpus.num_tokens // 2
        assert corpus.tokens(0, 10).tolist() == IDS[:10]
        for read in (lambda: corpus.tokens(middle, corpus.num_tokens - middle), lambda: corpus.document_offsets):
            with pytest.raises(CorpusFormatError, match=r"a: .*row group 1: .*checksum"):
                read()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"PAR1" + b"x" * 100 + b"PARE", "encrypted"),
        (b"PAR1" + b"x" * 100, "it is truncated or damaged"),
        (b"PAR1" + b"x" * 100 + b"\xff\xff\xff\xffPAR1", "it is truncated or damaged"),
        (b"PAR1" + b"x" * 100 + b"\x10\0\0\0PAR1", "footer: .*damaged"),
        (b"ARROW1\0\0" + b"x" * 100, "an Arrow message at byte 8"),
        (b"\xff\xff\xff\xff\x40\0\0\0\x10\0\0\0" + bytes(500), "Arrow"),
    ],
)
def test_files_that_only_look_like_tables(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a").write_bytes(data)
    with pytest.raises(CorpusFormatError, match=rf"a: .*{message}"):
        open_corpus(tmp_path / "a")


def test_two_streams_in_one_file(tmp_path: Path) -> None:
    data = write(tmp_path / "a", "stream").read_bytes()
    (tmp_path / "b").write_bytes(data + data)
    with pytest.raises(CorpusFormatError, match=r"several streams"):
        open_corpus(tmp_path / "b")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["truncated", "replaced", "removed", "emptied"])
def test_a_file_that_changes_after_it_was_opened(tmp_path: Path, kind: str, how: str) -> None:
    path = write(tmp_path / "a", kind)
    with open_corpus(path, cache_bytes=0) as corpus:
        assert corpus.tokens(0, 3).tolist() == IDS[:3]
        if how == "truncated":
            os.truncate(path, path.stat().st_size // 2)
        elif how == "emptied":
            os.truncate(path, 0)
        else:
            path.unlink()
            if how == "replaced":
                table = table_of([list_array([[row, 1] for row in range(40)])])
                write_parquet(path, table) if kind.startswith("parquet") else write_arrow(path, table)
        if corpus.cache_stats() is None and how in ("removed", "replaced"):
            assert corpus.tokens(0, len(IDS)).tolist() == IDS  # the descriptor is held: it is still the old file
            return
        with pytest.raises(CorpusReadError, match=r"/a: "):
            _read_all(corpus)


@pytest.mark.parametrize("kind", ["parquet", "file-zstd"])
def test_a_file_of_the_same_size_with_other_contents(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / "a", kind)
    with open_corpus(path, cache_bytes=0) as corpus:
        data = bytearray(path.read_bytes())
        at = 8 + 300 if kind == "file-zstd" else len(data) - 40
        data[at : at + 20] = bytes(20)
        if kind == "file-zstd":
            data[8:] = bytes(len(data) - 8)
        path.write_bytes(data)
        with pytest.raises(CorpusReadError, match=r"/a: .*after the corpus was opened"):
            _read_all(corpus)


def _read_all(corpus: Corpus) -> Any:
    return corpus.tokens(0, corpus.num_tokens)


@pytest.mark.parametrize("kind", KINDS)
def test_read_only_data(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    path = write(folder / "a", kind)
    before = path.stat()
    path.chmod(0o400)
    folder.chmod(0o500)
    try:
        assert read(path)[0] == IDS
    finally:
        folder.chmod(0o700)
    after = path.stat()
    assert os.listdir(folder) == ["a"]
    assert (before.st_size, before.st_mtime_ns) == (after.st_size, after.st_mtime_ns)
