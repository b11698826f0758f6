"""Every format reads through `ByteFile`: files that are elsewhere than on a disk give the same corpus."""

import json
import stat
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import numpy as np
import pytest
from corpus_files import write_shard
from shard_files import write_datatrove, write_litdata, write_mds
from table_files import list_array, table_of, write_arrow, write_parquet

from dali_pipes.corpus import Corpus, open_corpus
from dali_pipes.corpus.discovery import find_files
from dali_pipes.errors import CorpusReadError
from dali_pipes.storage import local
from dali_pipes.storage.byte_file import ByteFile, Range
from dali_pipes.storage.retries import ReadRetries

DOCUMENTS = [np.arange(start, start + count, dtype="uint16") for start, count in ((5, 7), (300, 20), (90, 1), (7, 400))]


class MemoryFile:
    """A `ByteFile` without a descriptor. Counts the ranges that are read."""

    ranges = 0

    def __init__(self, path: Path, retries: ReadRetries | None = None) -> None:
        try:
            self.path, self._data = path, path.read_bytes()
        except OSError as error:
            raise CorpusReadError(f"{path}: cannot be opened: {error.strerror}") from error
        self.size, self.identity = len(self._data), local.file_identity(path)

    def read_ranges(self, ranges: Iterable[Range], out: memoryview) -> None:
        for offset, count, place in ranges:
            assert offset + count <= self.size
            out[place : place + count] = self._data[offset : offset + count]
            MemoryFile.ranges += 1

    def read(self, offset: int, count: int) -> bytes:
        assert offset + count <= self.size
        return self._data[offset : offset + count]

    def close(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def _simple(format: str) -> Callable[[Path], Any]:
    return lambda folder: write_shard(folder / "a.bin", np.concatenate(DOCUMENTS), format)


def _table(folder: Path) -> Any:
    return table_of([list_array([document.tolist() for document in DOCUMENTS])])


WRITERS: dict[str, Callable[[Path], Any]] = {
    "flat": _simple("flat"),
    "llmc": _simple("llmc"),
    "npy": _simple("npy"),
    "megatron": _simple("megatron"),
    "mds": lambda folder: write_mds(folder, {"tokens": "ndarray:uint16"}, [[{"tokens": ids} for ids in DOCUMENTS]]),
    "litdata": lambda folder: write_litdata(folder, [DOCUMENTS]),
    "datatrove": lambda folder: write_datatrove(folder / "a.ds", DOCUMENTS),
    "parquet": lambda folder: write_parquet(folder / "a.parquet", _table(folder)),
    "arrow": lambda folder: write_arrow(folder / "a.arrow", _table(folder)),
    "arrow lz4": lambda folder: write_arrow(folder / "a.arrow", _table(folder), "lz4"),
}


def facts(corpus: Corpus) -> list[Any]:
    with corpus:
        starts = np.arange(0, corpus.num_tokens - 30, 17)
        rows = np.zeros((len(starts), 30), corpus.dtype)
        corpus.read_rows(starts, rows)
        offsets = corpus.document_offsets
        return [corpus.format, corpus.fingerprint, rows.tolist(), None if offsets is None else offsets.tolist()]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_without_a_descriptor_gives_the_same_corpus(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    WRITERS[kind](tmp_path)
    expected = facts(open_corpus(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(local, "LocalFile", MemoryFile)
        MemoryFile.ranges = 0
        assert facts(open_corpus(tmp_path)) == expected
        assert MemoryFile.ranges > 0


@pytest.mark.parametrize("kind", ["flat", "mds", "litdata"])
def test_side_files_are_found_where_the_data_is(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks, manifests and the indexes of sets: one that was not looked for in the storage would be left out."""
    (tmp_path / "data").mkdir()
    WRITERS[kind](tmp_path / "data")
    if kind == "flat":
        (tmp_path / "data" / "a.bin.loss").write_bytes(bytes([0, 1] * (sum(map(len, DOCUMENTS)) // 2)))
        size = (tmp_path / "data" / "a.bin").stat().st_size
        listed_file = {"name": "a.bin", "bytes": size, "sha256": ""}
        manifest = {"settings": {"format": "flat", "eos_id": 9}, "files": [listed_file]}
        (tmp_path / "data" / "manifest.json").write_text(json.dumps(manifest))
    index = tmp_path / "data" / ("a.bin" if kind == "flat" else "index.json")
    with open_corpus(index) as corpus:
        expected = corpus.fingerprint, corpus.eos_id, corpus.mask_digests
    assert (kind == "flat") == (corpus.eos_id == 9) == bool(corpus.mask_digests)
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "data").rename(elsewhere)

    def moved(path: Path) -> Path:
        return elsewhere / path.relative_to(tmp_path / "data")

    class MovedFile(MemoryFile):
        def __init__(self, path: Path, retries: ReadRetries | None = None) -> None:
            super().__init__(moved(path), retries)
            self.path = path

    size_of, listed = local.file_size, local.is_listed
    monkeypatch.setattr(local, "LocalFile", MovedFile)
    monkeypatch.setattr(local, "file_size", lambda path: size_of(moved(path)))
    monkeypatch.setattr(local, "is_listed", lambda path: listed(moved(path)))
    monkeypatch.setattr(find_files, "_mode", lambda path: stat.S_IFREG)  # what a folder lists is not asked here
    with open_corpus(index) as corpus:
        assert (corpus.fingerprint, corpus.eos_id, corpus.mask_digests) == expected


def test_both_are_byte_files(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789")
    files: list[ByteFile] = [local.LocalFile(tmp_path / "a"), MemoryFile(tmp_path / "a")]
    for file in files:
        with file:
            out = bytearray(b"......")
            file.read_ranges([(7, 3, 0), (0, 2, 4)], memoryview(out))
            assert bytes(out) == b"789.01"
            assert file.read(2, 4) == b"2345"
            assert (file.size, file.identity) == (10, str((tmp_path / "a").stat().st_mtime_ns))
