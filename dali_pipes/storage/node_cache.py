"""A cache of the node: ids in files that its processes share, each fetched or decoded by whichever needs it first.

    4711-5f2c9a01.job              budget and position of a process that lives (`live_jobs`)
    locks                          a lock for each entry, by number
    used, *.ids, *.tmp             entries, and their number of bytes (`cache_folder`)

The folder is on a disk, or in memory (/dev/shm). An entry appears under its name when it is whole, is never changed,
and is compared with its checksum when a process first opens it. The name stands for the content, with the versions of
all files of the corpus, so a replaced file has other entries.

A cache never fails a run: what cannot be stored is used without it.
"""

import contextlib
import errno
import hashlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from enum import Enum, auto
from pathlib import Path
from typing import BinaryIO

from dali_pipes.monitoring.stats import CacheStats
from dali_pipes.runtime.locks import lock_number, unlock_number
from dali_pipes.runtime.messages import say_once
from dali_pipes.storage.cache_entries import Content, Found, Made, header_of, ids_bytes, intact_number
from dali_pipes.storage.cache_folder import CacheFolder
from dali_pipes.storage.eviction import Entry, NextUses, Order, choose_victims, next_uses
from dali_pipes.storage.live_jobs import LiveJob, live_jobs

_COUNTS = ("hits", "misses", "fetched_bytes", "evictions", "damaged")
_SPARE_PART = 64
"""An eviction frees this part of the budget, so that not every new entry has to look through the folder."""
_LOOK_PART = 20
"""Times the duration of a look for room in vain, before the next one: that takes a twentieth of the time at most."""
LOCK_WAIT_S = 60.0
"""After which an entry that another process is still making is made without storing it: it may have been stopped."""
FETCHES_AHEAD = 2
"""Entries that a process makes ahead at a time, of all corpora: they share the line with what batches wait for."""
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.02


class Ahead(Enum):
    """What became of an entry that was to be made ahead."""

    THERE = auto()
    ELSEWHERE = auto()
    """Someone else is making it."""
    NO_ROOM = auto()


class NodeCache:
    """The cache in a folder, as one process uses it. Safe for several threads.

    most_bytes: budget of the folder; of several jobs that live, the largest counts
    setting:    the name of that setting, for messages
    formula:    when entries are needed again; see `eviction`
    in_memory:  the folder is in memory: the last process to close it removes the entries
    """

    def __init__(
        self,
        folder: Path,
        most_bytes: int,
        setting: str,
        formula: NextUses = lambda order, begins, ends: None,
        *,
        in_memory: bool = False,
    ) -> None:
        self.folder, self.most_bytes, self.setting = folder, most_bytes, setting
        self._files = CacheFolder(folder)
        self._formula, self._in_memory = formula, in_memory
        self._lock = threading.Lock()  # of the counts and orders, and of what is published
        self._orders: dict[str, Order] = {}
        self._verified: dict[str, bytes] = {}
        self._job = LiveJob(folder)
        self._can_store, self._has_ended = True, False
        self._turns = threading.Semaphore(FETCHES_AHEAD)
        self._look_again_s = [0.0, 0.0]  # for what is needed now, and for what is made ahead
        self._counts: dict[str, dict[str, int]] = {}
        try:
            folder.mkdir(mode=0o700 if in_memory else 0o777, parents=True, exist_ok=True)
            with self._files.locked():
                self._publish()
                self._make_room(None)
        except OSError as error:
            self._give_up(error)

    @property
    def can_store(self) -> bool:
        """False once the folder could not be written, for the rest of the run."""
        return self._can_store

    def used_bytes(self) -> int:
        """Bytes of the entries, as far as they have been counted. Does not block."""
        try:
            return self._files.used_bytes()
        except OSError:
            return 0

    def set_orders(self, orders: Sequence[Order]) -> None:
        """Let all processes know when this one needs the entries of corpora again. Blocks to write a small file."""
        with self._lock:
            self._orders |= {order["corpus"]: order for order in orders}
            try:
                self._publish()
            except OSError as error:
                self._give_up(error)

    def find(self, entry: Entry) -> Found | None:
        """The entry, if it is there and intact; one that is damaged is removed and counted. Blocks."""
        descriptor = self._opened(entry)
        if descriptor is None:
            return None
        with contextlib.suppress(OSError):  # a folder that is read-only
            os.utime(descriptor)
        self.add(entry.corpus, hits=1)
        return Found(descriptor)

    def find_or_make(self, entry: Entry, make: Callable[[], memoryview]) -> Content | None:
        """The entry, made by another process meanwhile, or the bytes that `make` returns, which are stored.

        None if there is no room for it that is not needed sooner: then nothing has been made. Blocks while another
        process makes it; if that one is killed, this one goes on. Raises what `make` raises.
        """
        held = self._hold(entry)
        try:
            found = self.find(entry)
            if found is not None:
                return found
            self.add(entry.corpus, misses=1)
            file = None if held is None else self._reserve(entry)
            return None if file is None else Made(self._made(entry, file, make))
        finally:
            if held is not None:
                unlock_number(held)

    def make_ahead(self, entry: Entry, make: Callable[[], memoryview]) -> Ahead:
        """Make an entry that is needed later, unless it is there, being made, or would replace what is needed sooner.

        One that is there is compared with its checksum, so that its first `find` need not do that. Blocks while `make`
        runs, and while other threads of this process make `FETCHES_AHEAD`. Raises what `make` raises.
        """
        with self._turns:
            return Ahead.THERE if self._is_checked(entry) else self._make_ahead(entry, make)

    def _make_ahead(self, entry: Entry, make: Callable[[], memoryview]) -> Ahead:
        held = self._hold(entry, waits=False)
        if held is None:
            return Ahead.NO_ROOM if self._has_ended or not self._can_store else Ahead.ELSEWHERE
        try:
            if not self._is_checked(entry):
                file = self._reserve(entry, ahead=True)
                if file is None:
                    return Ahead.NO_ROOM
                self.add(entry.corpus, misses=1)
                self._made(entry, file, make)
            return Ahead.THERE
        finally:
            unlock_number(held)

    def add(self, corpus: str, **counts: int) -> None:
        """Add to the counts of a corpus, which have the names of `CacheStats`."""
        with self._lock:
            own = self._counts.setdefault(corpus, dict.fromkeys(_COUNTS, 0))
            for name, count in counts.items():
                own[name] += count

    def stats(self, corpus: str, all_bytes: int) -> CacheStats:
        """The counts of one corpus, by the key of its content, and the size of the folder. Does not block for long."""
        with self._lock:
            own = dict(self._counts.get(corpus, dict.fromkeys(_COUNTS, 0)))
        return CacheStats(
            num_bytes=self.used_bytes(),
            most_bytes=self.most_bytes,
            all_bytes=all_bytes,
            folder=str(self.folder),
            setting=self.setting,
            **own,
        )

    def end(self) -> None:
        """Store nothing more, and do not wait for others: what is not there is read without the cache. Idempotent."""
        self._has_ended = True

    def close(self) -> None:
        """Leave the folder, after all reads; a folder in memory is emptied by the last process. Idempotent."""
        could_store, self._can_store = self._can_store, False
        with self._lock:
            self._job.close()
        if self._in_memory and could_store:
            with contextlib.suppress(OSError), self._files.locked():
                if not live_jobs(self.folder):
                    for entry in self._files.entries():
                        (self.folder / entry.name).unlink()
                    self._files.set_used(0)

    def _is_checked(self, entry: Entry) -> bool:
        """Whether an entry is there and intact; what this process has compared once may have been damaged since."""
        if entry.name in self._verified and (self.folder / entry.name).exists():
            return True
        descriptor = self._opened(entry)
        if descriptor is not None:
            os.close(descriptor)
        return descriptor is not None

    def _opened(self, entry: Entry) -> int | None:
        """A descriptor of an entry that is there and intact; one that is damaged is removed and counted."""
        try:
            descriptor = os.open(self.folder / entry.name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            if self._is_intact(entry, descriptor):
                return descriptor
            self._remove_damaged(entry, descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)
        return None

    def _remove_damaged(self, entry: Entry, descriptor: int) -> None:
        """Remove the entry that `descriptor` has open, unless another thread or process has done so, and count it."""
        path = self.folder / entry.name
        with contextlib.suppress(OSError), self._files.locked():
            about = os.fstat(descriptor)
            if path.stat().st_ino == about.st_ino:
                path.unlink()
                self._files.add_used(-ids_bytes(about.st_size))
                self.add(entry.corpus, damaged=1)

    def _made(self, entry: Entry, file: BinaryIO, make: Callable[[], memoryview]) -> memoryview:
        """What `make` returns, also stored in a reserved file, which is closed."""
        try:
            data = make()
            assert len(data) == entry.num_bytes, "an entry has the size that its name says"
        except BaseException:
            self._drop(entry, file)
            raise
        self.add(entry.corpus, fetched_bytes=len(data))
        try:
            header, number = header_of(data)
            file.write(header)
            file.write(data)
            file.flush()  # the disk may take its time: what a power cut leaves does not have its checksum
            with self._files.locked():  # who counts the folder sees it under one name or the other
                Path(file.name).replace(self.folder / entry.name)
            self._verified[entry.name] = number
            file.close()
        except FileNotFoundError:  # someone has emptied the folder
            self._drop(entry, file)
        except OSError as error:
            self._drop(entry, file)
            self._give_up(error)
        return data

    def _drop(self, entry: Entry, file: BinaryIO) -> None:
        with contextlib.suppress(OSError), self._files.locked():
            Path(file.name).unlink()
            self._files.add_used(-entry.num_bytes)
        with contextlib.suppress(OSError):
            file.close()

    def _reserve(self, entry: Entry, *, ahead: bool = False) -> BinaryIO | None:
        """A temporary file of the size of an entry, counted and locked; None without room for it."""
        try:
            with self._files.locked():
                fits = self._files.used_bytes() + entry.num_bytes <= self.most_bytes
                if not (fits and entry.num_bytes <= self._files.free_bytes()):
                    begin = time.monotonic()
                    if begin < self._look_again_s[ahead]:
                        return None
                    if not self._make_room(entry):
                        self._look_again_s[ahead] = (now := time.monotonic()) + _LOOK_PART * (now - begin)
                        return None
                return self._files.reserve(entry.num_bytes)
        except OSError as error:
            self._give_up(error)
            return None

    def _make_room(self, entry: Entry | None) -> bool:
        """Count the folder, and remove entries until they and another one fit. False if that fails."""
        self._files.remove_leftovers()
        jobs, entries, free = live_jobs(self.folder), list(self._files.entries()), self._files.free_bytes()
        limit = max([self.most_bytes, *(job["most_bytes"] for job in jobs)])
        used = self._files.count(entries)
        size = 0 if entry is None else entry.num_bytes
        needed = max(used + size - limit, size - free)
        victims: list[Entry] | None = []
        if needed > 0:
            orders = [order for job in jobs for order in job["orders"]]
            uses = next_uses(entries if entry is None else [*entries, entry], orders, self._formula)
            new_use = float("nan") if entry is None else float(uses[-1])
            victims = choose_victims(entries, uses[: len(entries)], needed, new_use, limit // _SPARE_PART)
        for victim in victims or ():
            (self.folder / victim.name).unlink(missing_ok=True)
            used -= victim.num_bytes
        if entry is not None:
            self.add(entry.corpus, evictions=len(victims or ()))
        self._files.set_used(used)
        if victims is None and size > free:
            say_once(f"{self.folder}: the disk is full, so this cache stores nothing new for now. The run continues.")
        return victims is not None

    def _hold(self, entry: Entry, *, waits: bool = True) -> int | None:
        """The lock of an entry, once nobody else has it; None if that takes too long. OSError gives up storing."""
        number = int.from_bytes(hashlib.sha256(entry.name.encode()).digest()[:7], "little")
        until, pause = time.monotonic() + LOCK_WAIT_S, _FIRST_LOOK_S
        while self._can_store and not self._has_ended:
            try:
                return lock_number(self.folder / "locks", number)
            except BlockingIOError:
                if not waits or time.monotonic() >= until:
                    break
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_LOOK_S)
            except OSError as error:
                self._give_up(error)
        return None

    def _is_intact(self, entry: Entry, descriptor: int) -> bool:
        number = intact_number(entry, descriptor, self._verified.get(entry.name))
        if number is not None:
            self._verified[entry.name] = number
        return number is not None

    def _publish(self) -> None:
        if self._can_store:
            self._job.publish(self.most_bytes, list(self._orders.values()))

    def _give_up(self, error: OSError) -> None:
        if self._can_store:
            self._can_store = False
            reason = "the disk is full" if error.errno == errno.ENOSPC else error.strerror or str(error)
            say_once(
                f"{self.folder}: this cache cannot be written ({reason}). The run continues without storing in it."
            )
