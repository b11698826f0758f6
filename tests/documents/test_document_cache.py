"""Offsets are scanned for once: kept whole or not at all, never trusted blindly, never a reason to fail."""

import errno
import fcntl
import hashlib
import io
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes.corpus import Corpus, open_corpus
from dali_pipes.documents import Documents, cache, find_documents, scan
from dali_pipes.runtime import offset_cache as kept_files
from dali_pipes.runtime import user_cache

E = 9
TOKENS = [7, 8, E, 6, E, E, 5] * 30
OFFSETS = np.unique([0, *(np.flatnonzero(np.array(TOKENS) == E) + 1), len(TOKENS)])
CHUNKS = 7


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    np.array(TOKENS, "uint16").tofile(folder / "tokens.bin")
    return folder


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with each read of tokens."""
    monkeypatch.setattr(scan, "CHUNK_BYTES", 2 * len(TOKENS) // CHUNKS)
    return count_reads(monkeypatch)


def count_reads(monkeypatch: pytest.MonkeyPatch, wait_s: float = 0) -> list[int]:
    counted: list[int] = []
    read_rows, tokens = Corpus.read_rows, Corpus.tokens

    def counting(self: Corpus, starts: Any, out: Any) -> None:
        counted.append(out.size)
        time.sleep(wait_s)
        read_rows(self, starts, out)

    def counting_tokens(self: Corpus, start: int, count: int) -> Any:
        counted.append(count)
        return tokens(self, start, count)

    monkeypatch.setattr(Corpus, "read_rows", counting)
    monkeypatch.setattr(Corpus, "tokens", counting_tokens)
    return counted


def find(data: Path, end: int | None = E, start: int | None = None, cache_dir: Path | None = None) -> Documents:
    with open_corpus(data, format="flat", eos_id=end) as corpus:
        return find_documents(corpus, start_id=start, cache_dir=cache_dir)


def kept(folder: Path) -> Path:
    [path] = folder.glob("*.npy")
    return path


def memory_of(array: Any) -> Any:
    """What the array's numbers lie in."""
    while isinstance(array, np.ndarray | memoryview):
        array = array.base if isinstance(array, np.ndarray) else array.obj
    return array


def names(folder: Path) -> list[str]:
    return sorted(path.suffix for path in folder.iterdir())


@pytest.mark.parametrize("mapped_from", [1, kept_files.MAPPED_FROM_BYTES])
def test_the_second_call_reads_nothing(
    tmp_path: Path, data: Path, reads: list[int], monkeypatch: pytest.MonkeyPatch, mapped_from: int
) -> None:
    monkeypatch.setattr(kept_files, "MAPPED_FROM_BYTES", mapped_from)
    before = sorted(data.iterdir())
    first = find(data)
    assert len(reads) == CHUNKS
    second = find(data)
    assert len(reads) == CHUNKS
    for documents in (first, second):
        np.testing.assert_array_equal(documents.offsets, OFFSETS)
        assert (documents.source, documents.warning) == ("end id 9", None)
        assert not documents.offsets.flags.writeable
        assert isinstance(memory_of(documents.offsets), mmap.mmap if mapped_from == 1 else bytes)
        with pytest.raises(ValueError, match="WRITEABLE"):
            documents.offsets.flags.writeable = True
    assert sorted(data.iterdir()) == before
    assert names(tmp_path / "cache") == [".lock", ".npy"]
    np.testing.assert_array_equal(np.load(kept(tmp_path / "cache"), allow_pickle=False), OFFSETS)


def test_few_offsets_outlive_a_file_that_is_cut_short(tmp_path: Path, data: Path) -> None:
    """In place, as no one should; a page of a map that is gone would end the process."""
    find(data)
    documents = find(data)
    with kept(tmp_path / "cache").open("r+b") as file:
        file.truncate(0)
    np.testing.assert_array_equal(documents.offsets, OFFSETS)


def test_ids_kinds_and_corpora_are_kept_apart(tmp_path: Path, data: Path, reads: list[int]) -> None:
    found = [find(data), find(data, end=6), find(data, end=None, start=E)]
    np.array([E, *TOKENS[1:]], "uint16").tofile(data / "tokens.bin")
    found.append(find(data))
    assert len(reads) == 4 * CHUNKS
    assert len({tuple(documents.offsets.tolist()) for documents in found}) == 4
    assert len(list((tmp_path / "cache").glob("*.npy"))) == 4


def test_the_folder_of_the_data_may_move(tmp_path: Path, data: Path, reads: list[int]) -> None:
    find(data)
    data.rename(tmp_path / "elsewhere")
    find(tmp_path / "elsewhere")
    assert len(reads) == CHUNKS


def test_one_document_is_looked_at_once_more(tmp_path: Path, data: Path, reads: list[int]) -> None:
    """Whether it has the id at its end cannot be told from its offsets."""
    np.array([1, 2, E], "uint16").tofile(data / "tokens.bin")
    assert find(data).warning is None
    reads.clear()
    assert find(data).warning is None
    assert reads == [1]


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.setenv("DALI_PIPES_CACHE", "~/own")
    assert user_cache.default_cache_dir() == tmp_path / "home" / "own"
    monkeypatch.setenv("DALI_PIPES_CACHE", "")
    assert user_cache.default_cache_dir() == tmp_path / "xdg" / "dali_pipes"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert user_cache.default_cache_dir() == tmp_path / "home" / ".cache" / "dali_pipes"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert user_cache.default_cache_dir() == tmp_path / "home" / ".cache" / "dali_pipes"


def test_a_folder_named_in_the_call_comes_first(tmp_path: Path, data: Path) -> None:
    assert find(data, cache_dir=tmp_path / "named" / "deeply").warning is None
    assert kept(tmp_path / "named" / "deeply").is_file()
    assert not (tmp_path / "cache").exists()


def test_without_a_home(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("DALI_PIPES_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    documents = find(data)
    np.testing.assert_array_equal(documents.offsets, OFFSETS)
    assert documents.warning is not None
    assert ": Could not determine home directory." in documents.warning


@pytest.mark.parametrize("way", ["itself", "link", "relative"])
def test_nothing_is_written_where_the_data_is(
    tmp_path: Path, data: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A .npy file there would be one more shard of a corpus of such files."""
    (tmp_path / "link").symlink_to(data)
    monkeypatch.chdir(data)
    folder = {"itself": data, "link": tmp_path / "link", "relative": Path()}[way]
    documents = find(data, cache_dir=folder)
    np.testing.assert_array_equal(documents.offsets, OFFSETS)
    assert documents.warning is not None
    assert "contains the data" in documents.warning
    assert [path.name for path in data.iterdir()] == ["tokens.bin"]


def cut(to: int) -> Callable[[bytes], bytes]:
    return lambda whole: whole[:to]


def offsets_changed(at: int, value: int) -> Callable[[bytes], bytes]:
    def change(whole: bytes) -> bytes:
        offsets = np.frombuffer(whole[128:], "<i8").copy()
        offsets[at] = value
        return whole[:128] + offsets.tobytes()

    return change


def npy_of(array: Any) -> Callable[[bytes], bytes]:
    def change(_: bytes) -> bytes:
        file = io.BytesIO()
        np.save(file, array, allow_pickle=True)
        return file.getvalue()

    return change


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": cut(0),
    "in the header": cut(60),
    "header alone": cut(128),
    "an offset short": lambda whole: whole[:-8],
    "a byte short": lambda whole: whole[:-1],
    "an offset long": lambda whole: whole + whole[-8:],
    "a byte long": lambda whole: whole + b"\0",
    "zeros": lambda whole: bytes(len(whole)),
    "zeros behind the header": lambda whole: whole[:128] + bytes(len(whole) - 128),
    "text": lambda whole: b"not an array\n" * 40,
    "zip": lambda whole: b"PK\3\4" + whole[4:],
    "first offset": offsets_changed(0, 1),
    "last offset": offsets_changed(-1, len(TOKENS) + 1),
    "an offset repeated": offsets_changed(3, int(OFFSETS[2])),
    "falling": offsets_changed(5, 1),
    "negative": offsets_changed(1, -1),
    "too large": offsets_changed(7, 2**62),
    "int32": npy_of(OFFSETS.astype("int32")),
    "float64": npy_of(OFFSETS.astype("float64")),
    "big-endian": npy_of(OFFSETS.astype(">i8")),
    "two axes": npy_of(OFFSETS[:, None]),
    "objects": npy_of(OFFSETS.astype(object)),
    "of no document": npy_of(OFFSETS[:1]),
    "of another corpus": npy_of(OFFSETS[:-3]),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_file_is_replaced(tmp_path: Path, data: Path, reads: list[int], damage: str) -> None:
    find(data)
    path = kept(tmp_path / "cache")
    whole = path.read_bytes()
    path.write_bytes(DAMAGE[damage](whole))
    reads.clear()
    documents = find(data)
    assert len(reads) == CHUNKS
    np.testing.assert_array_equal(documents.offsets, OFFSETS)
    assert documents.warning is None
    assert path.read_bytes() == whole
    assert names(tmp_path / "cache") == [".lock", ".npy"]


@settings(max_examples=examples(45), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_what_a_flipped_bit_leaves_usable_is_still_plausible(tmp_path: Path, data: st.DataObject) -> None:
    path = tmp_path / "offsets.npy"
    kept_files.store(path, OFFSETS)
    whole = bytearray(path.read_bytes())
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(whole)
    found = load(path, len(TOKENS))
    if found is not None:
        assert found.shape == OFFSETS.shape
        assert (found[0], found[-1]) == (0, len(TOKENS))
        assert (np.diff(found) > 0).all()


def test_files_are_what_numpy_writes(tmp_path: Path) -> None:
    kept_files.store(tmp_path / "a.npy", OFFSETS)
    np.save(tmp_path / "b.npy", OFFSETS)
    assert (tmp_path / "a.npy").read_bytes() == (tmp_path / "b.npy").read_bytes()


def test_order_is_checked_in_long_files(tmp_path: Path) -> None:
    offsets = np.arange(300_000)
    for at, wrong in ((5, 3), (150_000, -7), (299_990, 0)):
        changed = offsets.copy()
        changed[at] = wrong
        if at == 150_000:  # not every offset there is looked at: a page of them
            changed[at - 512 : at + 512] = wrong
        kept_files.store(tmp_path / "a.npy", changed)
        assert load(tmp_path / "a.npy", 299_999) is None
    kept_files.store(tmp_path / "a.npy", offsets)
    assert load(tmp_path / "a.npy", 299_999) is not None


def is_of_tokens(offsets: npt.NDArray[np.int64]) -> bool:
    return cache.is_plausible(offsets, len(TOKENS))


def load(path: Path, num_tokens: int) -> npt.NDArray[np.int64] | None:
    return kept_files.load(path, lambda offsets: cache.is_plausible(offsets, num_tokens))


def check_kept_in_memory(documents: Documents, reason: str) -> None:
    np.testing.assert_array_equal(documents.offsets, OFFSETS)
    assert not documents.offsets.flags.writeable
    assert documents.warning is not None
    assert "\n" not in documents.warning
    assert reason in documents.warning
    assert documents.warning.endswith("DALI_PIPES_CACHE to a writable folder.")


def test_a_file_where_the_folder_should_be(tmp_path: Path, data: Path) -> None:
    (tmp_path / "cache").write_text("mine")
    check_kept_in_memory(find(data), "cache: ")
    check_kept_in_memory(find(data, cache_dir=tmp_path / "cache" / "below"), "Not a directory")
    assert (tmp_path / "cache").read_text() == "mine"


def test_a_folder_where_the_file_should_be(tmp_path: Path, data: Path) -> None:
    find(data)
    path = kept(tmp_path / "cache")
    path.unlink()
    path.mkdir()
    check_kept_in_memory(find(data), "directory")
    assert names(tmp_path / "cache") == [".lock", ".npy"]


def test_a_folder_that_cannot_be_written(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_CREAT:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return opened(path, flags, *rest, **named)

    def refuse_new(self: Path, mode: str = "r", **named: Any) -> Any:
        if "x" in mode:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return open(self, mode, **named)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(Path, "open", refuse_new)
    check_kept_in_memory(find(data), "Read-only file system")
    assert names(tmp_path / "cache") == []


def test_a_full_disk(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    check_kept_in_memory(find(data), "No space left on device")
    assert names(tmp_path / "cache") == [".lock"]
    monkeypatch.undo()
    assert find(data, cache_dir=tmp_path / "cache").warning is None


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(
    tmp_path: Path, data: Path, reads: list[int], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    for _ in range(2):
        documents = find(data)
        np.testing.assert_array_equal(documents.offsets, OFFSETS)
        assert documents.warning is None
    assert len(reads) == CHUNKS


def test_what_a_killed_process_left_is_removed(tmp_path: Path, data: Path) -> None:
    find(data)
    path = kept(tmp_path / "cache")
    path.unlink()
    path.with_suffix(".0123.tmp").write_bytes(b"half")
    (tmp_path / "cache" / "documents-of-others.0123.tmp").write_bytes(b"half")
    find(data)
    assert sorted(p.name for p in (tmp_path / "cache").glob("*.tmp")) == ["documents-of-others.0123.tmp"]


def test_what_one_of_several_left_is_removed_by_those_that_waited(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process that had the lock was killed while it wrote; another writes its own file, which stays."""
    find(data)
    path = kept(tmp_path / "cache")
    path.unlink()
    path.with_suffix(".0123.tmp").write_bytes(b"half")
    with path.with_suffix(".lock").open() as of_killed, path.with_suffix(".4567.tmp").open("xb") as of_another:
        fcntl.flock(of_killed, fcntl.LOCK_EX)
        fcntl.flock(of_another, fcntl.LOCK_EX)
        flock, waits = fcntl.flock, threading.Event()

        def noticed(descriptor: int, operation: int) -> None:
            if operation == fcntl.LOCK_EX:
                waits.set()
            flock(descriptor, operation)

        monkeypatch.setattr(fcntl, "flock", noticed)
        waiting = threading.Thread(target=find, args=(data,))
        waiting.start()
        waits.wait()
        flock(of_killed, fcntl.LOCK_UN)
        waiting.join()
    assert [leftover.name.split(".")[1] for leftover in path.parent.glob("*.tmp")] == ["4567"]


def scan_in_process(data: Path, start: Barrier, results: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "CHUNK_BYTES", 2 * len(TOKENS) // CHUNKS)
        counted = count_reads(patch, wait_s=0.1)
        with open_corpus(data, format="flat", eos_id=E) as corpus:
            start.wait()
            documents = find_documents(corpus)
        results.put((len(counted), hashlib.sha256(documents.offsets.tobytes()).hexdigest(), documents.warning))


def test_of_four_processes_that_start_at_once_one_scans(tmp_path: Path, data: Path) -> None:
    context = multiprocessing.get_context("fork")  # imports would take seconds
    start, results = context.Barrier(4), context.Queue()
    processes = [context.Process(target=scan_in_process, args=(data, start, results)) for _ in range(4)]
    for process in processes:
        process.start()
    found = [results.get() for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert sorted(reads for reads, _, _ in found) == [0, 0, 0, CHUNKS]
    assert {digest for _, digest, _ in found} == {hashlib.sha256(OFFSETS.astype(np.int64).tobytes()).hexdigest()}
    assert {warning for _, _, warning in found} == {None}
    assert names(tmp_path / "cache") == [".lock", ".npy"]


def test_those_that_waited_for_nothing_scan_side_by_side(tmp_path: Path) -> None:
    """If the one that scanned could not keep its offsets, the others do not take turns at the same."""
    path = tmp_path / "a.npy"
    holder = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
    fcntl.flock(holder, fcntl.LOCK_EX)
    both_scan = threading.Barrier(2)

    def make() -> Any:
        both_scan.wait()
        return OFFSETS

    found: list[Any] = []
    waiting = [
        threading.Thread(target=lambda: found.append(kept_files.load_or_make(path, is_of_tokens, make)))
        for _ in range(2)
    ]
    for thread in waiting:
        thread.start()
    time.sleep(0.3)
    assert found == []
    os.close(holder)
    for thread in waiting:
        thread.join()
    assert [why for _, why in found] == [None, None]
    np.testing.assert_array_equal(found[0][0], OFFSETS)
    assert names(tmp_path) == [".lock", ".npy"]


def test_an_error_in_the_scan_lets_the_others_go_on(tmp_path: Path) -> None:
    path = tmp_path / "a.npy"

    def fail() -> Any:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        kept_files.load_or_make(path, is_of_tokens, fail)
    assert names(tmp_path) == [".lock"]
    offsets, why = kept_files.load_or_make(path, is_of_tokens, lambda: OFFSETS)
    np.testing.assert_array_equal(offsets, OFFSETS)
    assert why is None


def test_an_interrupt_in_the_scan(tmp_path: Path, data: Path) -> None:
    """Control-C while threads read: the process ends, only the empty lock file stays, the next run works."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, sys, time
            from dali_pipes.corpus import Corpus, open_corpus
            from dali_pipes.documents import find_documents, scan

            scan.CHUNK_BYTES = 2
            read_rows = Corpus.read_rows

            def slow(self, starts, out):
                os.write(1, b"reading\\n")
                while not os.path.exists("interrupted"):
                    time.sleep(0.01)
                read_rows(self, starts, out)

            Corpus.read_rows = slow
            find_documents(open_corpus(sys.argv[1], format="flat", eos_id=9))
            """
        )
    )
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, str(script), str(data)], cwd=tmp_path, text=True, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "reading\n"
        process.send_signal(signal.SIGINT)
        (tmp_path / "interrupted").touch()
        _, errors = process.communicate()
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in errors
    assert names(tmp_path / "cache") == [".lock"]
    np.testing.assert_array_equal(find(data).offsets, OFFSETS)


def test_an_interrupt_while_writing(tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(descriptor: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            find(data)
    assert names(tmp_path / "cache") == [".lock"]
    assert find(data).warning is None
