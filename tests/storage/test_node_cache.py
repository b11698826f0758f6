"""The cache of the node: entries are made once, checked, replaced when damaged, and never in the way of a run."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dali_pipes.runtime import locks
from dali_pipes.runtime.locks import lock, lock_number, unlock, unlock_number
from dali_pipes.storage import node_cache
from dali_pipes.storage.cache_entries import Content, entry_of
from dali_pipes.storage.cache_folder import CacheFolder
from dali_pipes.storage.eviction import Entry
from dali_pipes.storage.live_jobs import LiveJob, live_jobs
from dali_pipes.storage.node_cache import Ahead, NodeCache

SIZE = 1000
KEY = "5f2c9a01"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


def entry(number: int) -> Entry:
    return entry_of("b", KEY, number * SIZE, (number + 1) * SIZE, SIZE)


def content(number: int) -> bytes:
    return bytes(np.random.default_rng(number).integers(0, 256, SIZE, np.uint8))


def made(number: int) -> Callable[[], memoryview]:
    return lambda: memoryview(content(number))


def never() -> memoryview:
    raise AssertionError("it is there already")


def bytes_of(found: Content | None) -> bytes | None:
    if found is None:
        return None
    out = bytearray(SIZE)
    with found:
        assert found.read(0, memoryview(out))
    return bytes(out)


def in_folder(folder: Path, pattern: str = "*.ids") -> list[str]:
    return sorted(path.name for path in folder.glob(pattern))


def test_an_entry_is_made_once_and_found_by_every_process(folder: Path) -> None:
    first, second = (NodeCache(folder, 10 * SIZE, "cache_bytes") for _ in range(2))
    assert first.find(entry(1)) is None
    assert bytes_of(first.find_or_make(entry(1), made(1))) == content(1)
    assert bytes_of(second.find_or_make(entry(1), never)) == content(1)
    found = second.find(entry(1))
    out = bytearray(10)
    assert found is not None
    with found:
        assert found.read(37, memoryview(out))
        assert not found.read(SIZE - 5, memoryview(bytearray(10)))
    assert bytes(out) == content(1)[37:47]
    stats = [cache.stats(KEY, 7) for cache in (first, second)]
    assert [(one.hits, one.misses, one.fetched_bytes, one.num_bytes) for one in stats] == [
        (0, 1, SIZE, SIZE),
        (2, 0, 0, SIZE),
    ]
    assert stats[0].folder == str(folder)
    assert first.find(entry_of("b", "00ff", 0, SIZE, SIZE)) is None  # another version of the files


def test_threads_wait_for_the_one_that_makes_an_entry(folder: Path) -> None:
    cache, calls = NodeCache(folder, 10 * SIZE, "cache_bytes"), []

    def make() -> memoryview:
        calls.append(threading.get_ident())
        time.sleep(0.05)
        return memoryview(content(3))

    results: list[bytes | None] = []
    threads = [
        threading.Thread(target=lambda: results.append(bytes_of(cache.find_or_make(entry(3), make)))) for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [content(3)] * 6
    assert len(calls) == 1


def test_an_error_of_the_maker_leaves_nothing(folder: Path) -> None:
    cache = NodeCache(folder, SIZE, "cache_bytes")
    with pytest.raises(ZeroDivisionError):
        cache.find_or_make(entry(1), lambda: memoryview(bytes(1 // 0)))
    assert cache.used_bytes() == 0
    assert in_folder(folder, "*.tmp") == in_folder(folder) == []
    assert bytes_of(cache.find_or_make(entry(1), made(1))) == content(1)


def _flip(data: bytearray) -> None:
    data[500] ^= 1


DAMAGE: dict[str, Callable[[bytearray], object]] = {
    "a bit": _flip,
    "cut": lambda data: data.__delitem__(slice(900, None)),
    "cut in the header": lambda data: data.__delitem__(slice(3, None)),
    "empty": bytearray.clear,
    "longer": lambda data: data.extend(b"1"),
    "zeros": lambda data: data.__setitem__(slice(0, None), bytes(len(data))),
    "another entry": lambda data: data.__setitem__(slice(8, 16), bytes(8)),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_entries_are_made_again_and_counted(folder: Path, damage: str) -> None:
    NodeCache(folder, 10 * SIZE, "cache_bytes").find_or_make(entry(1), made(1))
    path = folder / entry(1).name
    data = bytearray(path.read_bytes())
    DAMAGE[damage](data)
    path.write_bytes(data)
    cache = NodeCache(folder, 10 * SIZE, "cache_bytes")
    assert cache.find(entry(1)) is None
    assert in_folder(folder) == []
    assert bytes_of(cache.find_or_make(entry(1), made(1))) == content(1)
    assert cache.stats(KEY, 0).damaged == 1
    assert bytes_of(NodeCache(folder, SIZE, "cache_bytes").find(entry(1))) == content(1)


def test_the_budget_holds_and_the_oldest_go_first(folder: Path) -> None:
    cache = NodeCache(folder, 3 * SIZE, "cache_bytes")
    for number in (0, 1, 2):
        cache.find_or_make(entry(number), made(number))
        os.utime(folder / entry(number).name, (number, number))
    assert bytes_of(cache.find(entry(0))) is not None  # used now
    cache.find_or_make(entry(3), made(3))
    assert in_folder(folder) == sorted(entry(number).name for number in (0, 2, 3))
    assert cache.used_bytes() == 3 * SIZE
    assert cache.stats(KEY, 0).evictions == 1
    assert cache.find_or_make(entry_of("b", KEY, 0, 9, 4 * SIZE), never) is None  # more than all of it


def test_entries_that_are_needed_sooner_stay(folder: Path) -> None:
    """Numbers of entries are their next uses; without room the caller reads what it needs by itself."""
    cache = NodeCache(folder, 3 * SIZE, "cache_bytes", lambda order, begins, ends: begins / SIZE)
    cache.set_orders([{"corpus": KEY}])
    for number in (5, 1, 9):
        cache.find_or_make(entry(number), made(number))
    assert bytes_of(cache.find_or_make(entry(4), made(4))) == content(4)
    assert in_folder(folder) == sorted(entry(number).name for number in (5, 1, 4))
    assert cache.find_or_make(entry(7), never) is None
    assert cache.stats(KEY, 0).misses == 5


def test_entries_are_made_ahead_where_nothing_is_needed_sooner(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of entries are their next uses."""
    monkeypatch.setattr(node_cache, "_LOOK_PART", 10**6)
    cache = NodeCache(folder, 3 * SIZE, "cache_bytes", lambda order, begins, ends: begins / SIZE)
    cache.set_orders([{"corpus": KEY}])
    for number in (5, 1, 9):
        assert cache.make_ahead(entry(number), made(number)) is Ahead.THERE
    assert cache.make_ahead(entry(5), never) is Ahead.THERE
    assert cache.make_ahead(entry(4), made(4)) is Ahead.THERE  # instead of 9
    assert cache.make_ahead(entry(7), never) is Ahead.NO_ROOM
    assert bytes_of(cache.find_or_make(entry(2), made(2))) == content(2)  # instead of 5, without waiting to look again
    assert in_folder(folder) == sorted(entry(number).name for number in (1, 2, 4))
    assert bytes_of(cache.find(entry(4))) == content(4)
    assert (cache.stats(KEY, 0).misses, cache.stats(KEY, 0).evictions) == (5, 2)
    assert cache.make_ahead(entry(0), never) is Ahead.NO_ROOM  # what is not needed yet does
    cache = NodeCache(folder, 10 * SIZE, "cache_bytes")
    with pytest.raises(ZeroDivisionError):
        cache.make_ahead(entry(0), lambda: memoryview(bytes(1 // 0)))
    assert cache.used_bytes() == SIZE * len(in_folder(folder))
    assert in_folder(folder, "*.tmp") == []
    cache.end()
    assert cache.make_ahead(entry(0), never) is Ahead.NO_ROOM


def test_few_entries_are_made_ahead_at_a_time(folder: Path) -> None:
    """However many corpora there are, each with threads of its own."""
    cache, running, most = NodeCache(folder, 10 * SIZE, "cache_bytes"), [0], [0]
    guard = threading.Lock()

    def make() -> memoryview:
        with guard:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.02)
        with guard:
            running[0] -= 1
        return memoryview(content(0))

    threads = [threading.Thread(target=cache.make_ahead, args=(entry(number), make)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(in_folder(folder)) == 8
    assert most[0] <= node_cache.FETCHES_AHEAD


def test_what_another_process_makes_is_not_made_ahead(folder: Path) -> None:
    first, second = (NodeCache(folder, 10 * SIZE, "cache_bytes") for _ in range(2))
    found: list[Ahead] = []

    def make() -> memoryview:
        found.append(second.make_ahead(entry(1), never))
        return memoryview(content(1))

    assert first.make_ahead(entry(1), make) is Ahead.THERE
    assert found == [Ahead.ELSEWHERE]
    assert second.make_ahead(entry(1), never) is Ahead.THERE
    assert second.stats(KEY, 0).misses == 0


def test_the_largest_budget_of_the_jobs_that_live_counts(folder: Path) -> None:
    small, large = NodeCache(folder, SIZE, "cache_bytes"), NodeCache(folder, 3 * SIZE, "cache_bytes")
    for number in range(3):
        assert small.find_or_make(entry(number), made(number)) is not None
    assert len(in_folder(folder)) == 3
    large.close()
    small.find_or_make(entry(3), made(3))
    assert in_folder(folder) == [entry(3).name]
    NodeCache(folder, 3 * SIZE, "cache_bytes").find_or_make(entry(4), made(4))
    small.close()
    NodeCache(folder, SIZE, "cache_bytes")  # the next job with less
    assert len(in_folder(folder)) <= 2


def test_files_of_killed_processes_are_removed(folder: Path) -> None:
    folder.mkdir()
    old, new, held = (folder / f"{name}.tmp" for name in ("old", "new", "held"))
    for path in (old, new, held):
        path.write_bytes(bytes(SIZE))
    for path in (old, held):
        os.utime(path, (0, 0))
    descriptor, _ = lock(held)
    assert descriptor is not None
    (folder / "1-dead.job").write_text('{"most_bytes": 1000000, "orders": []}')
    cache = NodeCache(folder, 10 * SIZE, "cache_bytes")
    assert in_folder(folder, "*.tmp") == ["held.tmp", "new.tmp"]
    assert len(in_folder(folder, "*.job")) == 1
    assert [job["most_bytes"] for job in live_jobs(folder)] == [10 * SIZE]
    unlock(descriptor)
    cache.close()
    assert in_folder(folder, "*.job") == []


def test_what_a_job_says_is_replaced_whole(folder: Path) -> None:
    folder.mkdir()
    job = LiveJob(folder)
    for number in range(3):
        job.publish(number, [{"corpus": "a" * 1000 * number}])
        assert [(one["most_bytes"], len(one["orders"][0]["corpus"])) for one in live_jobs(folder)] == [
            (number, 1000 * number)
        ]
    job.close()
    assert list(folder.iterdir()) == []


def test_a_job_that_goes_on_meanwhile_is_not_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file was opened just before it was replaced, and the lock of that file released."""
    folder.mkdir()
    job = LiveJob(folder)
    job.publish(1, [])

    def locked_late(path: Path, *, wait: bool) -> tuple[int, bool]:
        descriptor = os.open(path, os.O_RDWR)
        job.publish(2, [])
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor, wait

    monkeypatch.setattr(locks, "lock", locked_late)
    assert [one["most_bytes"] for one in live_jobs(folder)] == [2]
    monkeypatch.undo()
    assert [one["most_bytes"] for one in live_jobs(folder)] == [2]
    job.close()


class FullFile:
    """A file on a full disk."""

    def __init__(self, file: Any) -> None:
        self._file, self.name = file, file.name

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_said_once_and_the_run_goes_on(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = NodeCache(folder, 10 * SIZE, "cache_bytes")
    cache.find_or_make(entry(0), made(0))
    real = Path.open

    def full(path: Path, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        file = real(path, mode, *arguments, **named)
        return FullFile(file) if mode == "xb" else file

    monkeypatch.setattr(Path, "open", full)
    assert bytes_of(cache.find_or_make(entry(1), made(1))) == content(1)
    assert cache.find_or_make(entry(2), never) is None
    assert not cache.can_store
    assert bytes_of(cache.find(entry(0))) == content(0)
    said = capsys.readouterr().err
    assert said.count(str(folder)) == 1
    assert "full" in said
    assert in_folder(folder, "*.tmp") == []
    assert cache.used_bytes() == SIZE


def test_a_disk_without_room_gets_nothing_more(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = NodeCache(folder, 10 * SIZE, "cache_bytes", lambda order, begins, ends: np.zeros(len(begins)))
    cache.set_orders([{"corpus": KEY}])
    cache.find_or_make(entry(0), made(0))
    monkeypatch.setattr(CacheFolder, "free_bytes", lambda self: SIZE - 1)
    monkeypatch.setattr(node_cache, "_LOOK_PART", 0)
    for number in (1, 2):
        assert cache.find_or_make(entry(number), never) is None
    assert capsys.readouterr().err.count(str(folder)) == 1
    monkeypatch.undo()
    assert cache.find_or_make(entry(1), made(1)) is not None


@pytest.mark.parametrize("problem", ["a file in its place", "read-only"])
def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, problem: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "cache"
    if problem == "read-only":
        NodeCache(folder, 10 * SIZE, "cache_bytes").find_or_make(entry(1), made(1))
        monkeypatch.setattr(CacheFolder, "locked", _read_only)
    else:
        folder.write_bytes(b"")
    caches = [NodeCache(folder, 10 * SIZE, "cache_bytes") for _ in range(2)]
    for cache in caches:
        assert (bytes_of(cache.find(entry(1))) == content(1)) == (problem == "read-only")
        assert cache.find_or_make(entry(2), never) is None
        cache.set_orders([{"corpus": KEY}])
        cache.close()
    assert capsys.readouterr().err.count(str(folder)) == 1


def _read_only(self: CacheFolder) -> Any:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_a_holder_that_is_stopped_delays_others_for_a_while_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_cache, "LOCK_WAIT_S", 0.05)
    cache, is_made, go_on = NodeCache(folder, 10 * SIZE, "cache_bytes"), threading.Event(), threading.Event()

    def make() -> memoryview:
        is_made.set()
        go_on.wait()
        return memoryview(content(1))

    thread = threading.Thread(target=cache.find_or_make, args=(entry(1), make))
    thread.start()
    is_made.wait()
    assert NodeCache(folder, SIZE, "cache_bytes").find_or_make(entry(1), never) is None
    go_on.set()
    thread.join()
    assert bytes_of(cache.find(entry(1))) == content(1)


def test_numbered_locks_are_of_one_thread_or_process(tmp_path: Path) -> None:
    path = tmp_path / "locks"
    held = lock_number(path, 5)
    other = lock_number(path, 2**56)
    assert held is not None
    assert other is not None
    with pytest.raises(BlockingIOError):
        lock_number(path, 5)
    child = os.fork()  # has the descriptor as well
    if child == 0:
        time.sleep(30)
        os._exit(0)
    try:
        unlock_number(held)
        again = lock_number(path, 5)
        assert again is not None
        unlock_number(again)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        unlock_number(other)


def test_memory_is_given_back_by_the_last_process(folder: Path) -> None:
    first, second = (NodeCache(folder, 10 * SIZE, "decoded_cache_bytes", in_memory=True) for _ in range(2))
    first.find_or_make(entry(1), made(1))
    first.close()
    assert bytes_of(second.find(entry(1))) == content(1)
    second.close()
    second.close()
    assert in_folder(folder, "*.*") == []
    assert second.used_bytes() == 0
    assert folder.stat().st_mode & 0o77 == 0


_HOLDER = f"""
import sys, time
from pathlib import Path
from dali_pipes.storage.cache_entries import entry_of
from dali_pipes.storage.node_cache import NodeCache
cache = NodeCache(Path(sys.argv[1]), {10 * SIZE}, "cache_bytes")

def make():
    print("making", flush=True)
    time.sleep(600)

cache.find_or_make(entry_of("b", "{KEY}", {SIZE}, {2 * SIZE}, {SIZE}), lambda: memoryview(bytes({SIZE})))
cache.find_or_make(entry_of("b", "{KEY}", 0, {SIZE}, {SIZE}), make)
"""


def test_a_holder_that_is_killed_hangs_nobody(folder: Path) -> None:
    """kill -9 while an entry is being made: one that waits for it makes it, and what is whole stays."""
    with subprocess.Popen([sys.executable, "-c", _HOLDER, str(folder)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "making\n"
        cache, results = NodeCache(folder, 10 * SIZE, "cache_bytes"), list[bytes | None]()
        assert bytes_of(cache.find(entry(1))) == bytes(SIZE)
        thread = threading.Thread(target=lambda: results.append(bytes_of(cache.find_or_make(entry(0), made(0)))))
        thread.start()
        thread.join(0.1)
        assert thread.is_alive()  # it waits
        holder.kill()
        thread.join()
        assert results == [content(0)]
    assert [job["most_bytes"] for job in live_jobs(folder)] == [10 * SIZE]
    for path in folder.glob("*.tmp"):
        os.utime(path, (0, 0))  # a minute later
    again = NodeCache(folder, 10 * SIZE, "cache_bytes")
    assert in_folder(folder, "*.tmp") == []
    assert again.used_bytes() == 2 * SIZE
    assert bytes_of(again.find(entry(0))) == content(0)
