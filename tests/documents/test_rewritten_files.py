"""A file that is rewritten under its name, size and sampled pieces has other documents, which the next start finds."""

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from shard_files import write_mds, write_tfrecord
from table_files import list_array, table_of, write_arrow, write_parquet

from dali_pipes import TokenLoader
from dali_pipes.corpus import open_corpus
from dali_pipes.corpus.columns import kept_tables, row_chunks
from dali_pipes.corpus.formats import records
from dali_pipes.corpus.formats.mds import shard_set as mds
from dali_pipes.documents import find_documents
from dali_pipes.runtime import offset_cache
from dali_pipes.storage import fingerprint
from dali_pipes.tools.reports import check_corpus

E = 9
LENGTHS = [[3, 5, 8, 2], [8, 2, 3, 5]]
"""Before and after."""
Write = Callable[[Path, Sequence[int]], Path]


def write_flat(folder: Path, lengths: Sequence[int]) -> Path:
    path = folder / "a.bin"
    ids = np.full(sum(lengths), 7, np.uint16)
    ids[np.cumsum(lengths) - 1] = E
    ids.tofile(path)
    return path


def documents_of(lengths: Sequence[int]) -> list[list[int]]:
    """The same ids, cut otherwise: so files are of one size, compressed too."""
    return [part.tolist() for part in np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])]


def write_parquet_file(folder: Path, lengths: Sequence[int]) -> Path:
    table = table_of([list_array(documents_of(lengths), "uint16")])
    plain: dict[str, Any] = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    return write_parquet(folder / "a.parquet", table, **plain)


def write_arrow_file(folder: Path, lengths: Sequence[int]) -> Path:
    return write_arrow(folder / "a.arrow", table_of([list_array(documents_of(lengths), "uint16")]), "zstd")


def write_mds_set(folder: Path, lengths: Sequence[int]) -> Path:
    samples = [{"tokens": np.array(document, np.uint16)} for document in documents_of(lengths)]
    write_mds(folder, {"tokens": "ndarray:uint16"}, [samples])
    return next(folder.glob("*.mds"))


def write_mds_types(folder: Path, lengths: Sequence[int]) -> Path:
    """Each value says its own type, so that all of the shard is read."""
    samples = [{"tokens": np.array(document, np.uint16)} for document in documents_of(lengths)]
    write_mds(folder, {"tokens": "ndarray"}, [samples])
    return next(folder.glob("*.mds"))


def write_records(folder: Path, lengths: Sequence[int]) -> Path:
    module = pytest.importorskip("array_record.python.array_record_module")
    path = folder / "a.arrayrecord"
    writer = module.ArrayRecordWriter(str(path), "group_size:4,uncompressed")
    for document in documents_of(lengths):
        writer.write(np.array(document, np.uint16).tobytes())
    writer.close()
    return path


def write_tfrecords(folder: Path, lengths: Sequence[int]) -> Path:
    documents = [np.array(document, np.uint16).tobytes() for document in documents_of(lengths)]
    return write_tfrecord(folder / "a.tfrecord", documents)


WRITERS: dict[str, Write] = {
    "flat": write_flat,
    "parquet": write_parquet_file,
    "arrow": write_arrow_file,
    "mds": write_mds_set,
    "mds types": write_mds_types,
    "arrayrecord": write_records,
    "tfrecord": write_tfrecords,
}


@pytest.fixture(autouse=True)
def _all_is_kept_and_nothing_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files are kept too, and lie as a whole between the pieces that are sampled of large ones."""
    monkeypatch.setattr(fingerprint, "sample_places", lambda size: [])
    monkeypatch.setattr(row_chunks, "LEAST_KEPT_BYTES", 0)
    monkeypatch.setattr(kept_tables, "LEAST_FILES", 1)
    monkeypatch.setattr(mds, "_KEPT_FROM_BYTES", 1)
    monkeypatch.setattr(records, "_KEPT_FROM_BYTES", 0)


def found(folder: Path) -> tuple[list[int], str]:
    """Lengths of the documents, and the fingerprint."""
    is_bytes = any(folder.glob("*record"))
    is_flat = any(folder.glob("*.bin"))
    with open_corpus(folder, dtype="uint16" if is_bytes else None, eos_id=E if is_flat else None) as corpus:
        return np.diff(find_documents(corpus).offsets).tolist(), corpus.fingerprint


def rewritten(folder: Path, kind: str) -> tuple[str, int]:
    """A file that was opened, and then written anew under its name and size: the fingerprint, and its old time."""
    folder.mkdir()
    path = WRITERS[kind](folder, LENGTHS[0])
    os.utime(path, ns=(10**18, 10**18))
    size = path.stat().st_size
    lengths, before = found(folder)
    assert lengths == LENGTHS[0]
    WRITERS[kind](folder, LENGTHS[1])
    assert path.stat().st_size == size
    return before, 10**18


@pytest.mark.parametrize("kind", WRITERS)
def test_a_rewritten_file_is_read_again(tmp_path: Path, kind: str) -> None:
    before, _ = rewritten(tmp_path / "data", kind)
    lengths, after = found(tmp_path / "data")
    assert lengths == LENGTHS[1]
    assert after == before  # it sees pieces, not times: states stay valid where files are copied


@pytest.mark.parametrize("kind", WRITERS)
def test_check_reads_what_was_kept_again(tmp_path: Path, kind: str) -> None:
    """Also where even the time of the file is the old one; what the check found is there for the next start."""
    folder = tmp_path / "data"
    _, old_time = rewritten(folder, kind)
    for path in folder.iterdir():
        os.utime(path, ns=(old_time, old_time))
    settings: dict[str, dict[str, Any]] = {"flat": {"eos_id": E}, "arrayrecord": {"dtype": "uint16"}}
    settings["tfrecord"] = settings["arrayrecord"]
    report = check_corpus([str(folder)], **settings.get(kind, {}))
    assert (report.documents, report.problems) == (len(LENGTHS[1]), ())
    assert found(folder)[0] == LENGTHS[1]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_that_is_rewritten_in_place_under_its_old_time_is_read_again(tmp_path: Path, kind: str) -> None:
    folder = tmp_path / "data"
    _, old_time = rewritten(folder, kind)
    for path in folder.iterdir():
        os.utime(path, ns=(old_time, old_time))
    assert found(folder)[0] == LENGTHS[1]


@pytest.mark.parametrize("kind", WRITERS)
def test_a_copy_with_its_time_shares_what_was_kept(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is stored for the copy, nor for the original after it."""
    (tmp_path / "data").mkdir()
    WRITERS[kind](tmp_path / "data", LENGTHS[0])
    before = found(tmp_path / "data")
    shutil.copytree(tmp_path / "data", tmp_path / "copy")
    monkeypatch.setattr(offset_cache, "store", None)
    assert found(tmp_path / "copy") == found(tmp_path / "data") == before
    monkeypatch.setattr(offset_cache, "_machine", lambda: "another machine")
    (tmp_path / "data").chmod(0o755)
    assert found(tmp_path / "data") == before


def test_one_rewritten_file_among_others_is_noticed(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / "data" / name).mkdir(parents=True)
        write_flat(tmp_path / "data" / name, LENGTHS[0]).rename(tmp_path / "data" / f"{name}.bin")
        (tmp_path / "data" / name).rmdir()
    assert found(tmp_path / "data")[0] == LENGTHS[0] * 3
    path = tmp_path / "data" / "b.bin"
    about = path.stat()
    ids = np.fromfile(path, np.uint16)
    path.write_bytes(ids[::-1].tobytes())
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    (tmp_path / "data" / "a.bin").rename(tmp_path / "moved")  # another inode under the same name and time
    shutil.copy2(tmp_path / "moved", tmp_path / "data" / "a.bin")
    ends = np.flatnonzero(np.concatenate([np.fromfile(tmp_path / "data" / f"{n}.bin", np.uint16) for n in "abc"]) == E)
    assert found(tmp_path / "data")[0] == np.diff(ends, prepend=-1).tolist()


def test_a_report_of_a_plan_is_that_of_the_file(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"batch_size": 1, "seq_len": 8, "eos_id": E, "rows": "pack", "long_documents": "drop"}
    settings |= {"device": "cpu", "quiet": True}

    def dropped() -> int:
        with TokenLoader(corpus=tmp_path / "data", **settings) as loader:
            return loader.plan_report().dropped_tokens

    (tmp_path / "data").mkdir()
    write_flat(tmp_path / "data", [8, 8, 2])
    assert dropped() == 0
    path = write_flat(tmp_path / "data", [2, 12, 4])
    os.utime(path, ns=(10**18, 10**18))
    assert dropped() == 12
