"""Plans of windows of documents that the ranks of a node share: each is made by whichever rank needs it first.

    slot   0           1           2           3           in memory that all ranks of the node have (`NodeMemory`)
           window 4    window 1    window 2    window 3    a header and the arrays of a `Packing`
                       free        being made

Every rank of a step needs the windows of the whole step. A rank that finds a window being made by another one makes one
of the next windows meanwhile, so eight ranks make eight windows, and each copies seven. A slot is locked while its
plan is written, and shared while it is read; the system releases the locks of a process that ends. Nothing depends on
the other ranks: what is not there in time is planned again, with the same outcome, and that rank shares no more plans.

Only where a step spans several large windows: one that lasts for several steps costs each of them next to nothing, and
a small one less than the locks.
"""

import contextlib
import errno
import hashlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from dali_pipes import __version__
from dali_pipes.config import LoaderConfig
from dali_pipes.corpus import Corpus
from dali_pipes.errors import BackendError
from dali_pipes.placement.node_memory import NodeMemory
from dali_pipes.rows.document_rows import DocumentRows
from dali_pipes.rows.packing import Packing, PackingCounts
from dali_pipes.runtime.locks import lock_number, unlock_number

_WAIT_S = 2.0
"""After which a plan that another process is still making is made here, as are all others from then on: a window takes
some 10 ms, and a process that was stopped would hold each of them up."""
_FIRST_LOOK_S, _LONGEST_LOOK_S = 0.001, 0.008
_ANSWER_S = 2.0
_HEADER = 16
"""Words: digest of the window (2), rows, pieces, bytes of an entry of each array (4), counts (4)."""
_TOO_MANY_ROWS = -1
_MOST_BYTES = 1 << 30
_LEAST_PIECES = 4096
"""Of a window. The plan of a smaller one takes less time than the locks and the copy."""
_SPARE_SLOTS = 4
"""For the windows of steps that other ranks are ahead by."""
_JOB = ("MASTER_ADDR", "MASTER_PORT")
"""Variables that the ranks of a job have in common: another job may run other code of the same version."""

Make = Callable[[int], Packing]


class _LocksFailedError(Exception):
    """Nothing can be locked any more."""


class _Unread(Enum):
    MISSING = auto()
    BUSY = auto()
    """Another process or thread writes to the slot."""
    TOO_LARGE = auto()
    """For a slot; every rank makes it."""


class PlanShape(NamedTuple):
    """How many windows a step spans, and how much memory the plan of one takes: estimates."""

    windows_a_step: int
    slot_bytes: int
    slots: int
    """Enough that no window is replaced before all ranks have it."""


def plan_shape(sources: Sequence[DocumentRows], global_rows: int) -> PlanShape:
    """Of the rows of one corpus, or of the sources of a mixture, whose steps are taken to be of any one of them."""
    windows, slot_bytes = 1, 0
    for rows in sources:
        pieces, made = rows.window_sizes()
        windows = max(windows, -(-global_rows // made))
        # Twice as much as expected: windows differ, and one that does not fit is planned by every rank.
        slot_bytes = max(slot_bytes, 2 * 4 * (3 * pieces + made))
    slots = 3 * windows + 2 * len(sources) + _SPARE_SLOTS
    return PlanShape(windows, 8 * _HEADER + -(-slot_bytes // 4096) * 4096, slots)


def share_plans(
    config: LoaderConfig, corpora: Iterable[Corpus], sources: Iterable[object], global_rows: int
) -> "NodePlans | None":
    """Let the rows that are made of documents share their plans with those of other ranks; None where none do.

    Blocks until the process that has the memory has answered, 2 s at most.
    """
    # Rows whose length a state may change plan for themselves.
    of_documents = [rows for rows in sources if isinstance(rows, DocumentRows) and rows.lengths is None]
    of_documents = [rows for rows in of_documents if rows.window_sizes()[0] >= _LEAST_PIECES]
    if not of_documents:
        return None
    shape = plan_shape(of_documents, global_rows)
    if shape.windows_a_step == 1 or shape.slots * shape.slot_bytes > _MOST_BYTES:
        return None
    # The files as they are now, and what is read of them; `keep` is in the fingerprint.
    contents = [(corpus.content_key, corpus.fingerprint, corpus.eos_id) for corpus in corpora]
    job = [os.environ.get(name) for name in _JOB]
    settings = config.model_dump(exclude={"rank", "device", "context_parallel"})
    try:
        plans = NodePlans(f"{__version__} {job} {contents} {settings}", shape)
    except (BackendError, OSError):  # too little memory, or a process that was stopped: each rank plans for itself
        return None
    for number, rows in enumerate(of_documents):
        rows.share(partial(plans.plan, number))
    return plans


class NodePlans:
    """The plans of one loader. Safe for several threads.

    key: stands for all that the plans depend on. Raises `BackendError` or OSError without memory or locks.
    """

    def __init__(self, key: str, shape: PlanShape) -> None:
        self._shape, self._ahead = shape, shape.windows_a_step
        size = shape.slots * shape.slot_bytes
        self._memory = NodeMemory(f"plans {key}", size, lambda memory, advance: None, "plans of rows", _ANSWER_S)
        try:
            with contextlib.suppress(BlockingIOError):  # another rank tries it, too
                unlock_number(_locked(self._memory.path, size))
        except OSError:
            self._memory.close()
            raise
        self._words = self._memory.array.view(np.int64).reshape(shape.slots, -1)
        self._closed = threading.Event()
        self._use = threading.Lock()  # while a slot is read or written, so that `close` waits for it
        self.made = self.copied = 0
        """Windows that this rank has planned, and that it has copied from others."""
        _all_plans.add(self)

    def close(self) -> None:
        """Leave the memory to the other ranks. Plans are made here from now on. Idempotent."""
        with self._use:
            self._closed.set()
            self._words = np.empty((0, 0), np.int64)  # not a part of the memory, which would stay
            self._memory.close()

    def begin_child(self) -> None:
        """In a forked child, where nobody releases a lock that a thread of the parent held."""
        self._use = threading.Lock()

    def plan(self, number: int, epoch: int, window: int, make: Make, end: int) -> Packing:
        """The plan of a window of one epoch of a source. Blocks while it is made, here or by another rank.

        make: returns the plan of any window before `end`
        """
        source = (number, epoch)
        found: Packing | _Unread
        try:
            found = self._found(source, window, make, end)
        except _LocksFailedError:
            found = _Unread.BUSY
        if isinstance(found, Packing):
            return found
        if found is not _Unread.TOO_LARGE:
            self.close()
        return self._made(make, window)

    def _found(self, source: tuple[int, int], window: int, make: Make, end: int) -> Packing | _Unread:
        """A plan that was copied, or made and stored; BUSY if another process has been at it for too long."""
        look_s, give_up = _FIRST_LOOK_S, time.monotonic() + _WAIT_S
        others = iter(range(window + 1, min(window + 1 + self._ahead, end)))
        while time.monotonic() < give_up and not self._closed.is_set():
            found = self._read(source, window)
            if isinstance(found, Packing):
                self.copied += 1
                return found
            if found is _Unread.TOO_LARGE:
                return found
            if found is _Unread.MISSING:
                made = self._make(source, window, make)
                if made is not None:
                    return made
            other = next(others, None)
            if other is None:
                self._closed.wait(look_s)
                look_s = min(2 * look_s, _LONGEST_LOOK_S)
            elif self._read(source, other, only_look=True) is _Unread.MISSING:
                self._make(source, other, make)
                give_up = time.monotonic() + _WAIT_S
        return _Unread.BUSY

    def _made(self, make: Make, window: int) -> Packing:
        self.made += 1
        return make(window)

    def _make(self, source: tuple[int, int], window: int, make: Make) -> Packing | None:
        """Plan a window, and store it; None if someone else does."""
        with self._use:
            held = self._lock(source, window)
        if held is None:
            return None
        try:
            packing = self._made(make, window)
            with self._use:
                if not self._closed.is_set():
                    self._write(self._words[self._slot(source, window)], _digest(source, window), packing)
            return packing
        finally:
            unlock_number(held)

    def _lock(self, source: tuple[int, int], window: int, *, shared: bool = False) -> int | None:
        """The lock of a slot; None if another process or thread has it. `_use` is held."""
        if self._closed.is_set():
            return None
        try:
            return _locked(self._memory.path, self._slot(source, window), shared=shared)
        except BlockingIOError:
            return None
        except OSError as error:  # such as too many open files
            raise _LocksFailedError from error

    def _slot(self, source: tuple[int, int], window: int) -> int:
        first = int.from_bytes(_digest(source, 0).tobytes()[:4], "little")
        return (first + window) % self._shape.slots

    def _read(self, source: tuple[int, int], window: int, *, only_look: bool = False) -> Packing | _Unread:
        """A copy of a plan. only_look: an empty one."""
        with self._use:
            held = self._lock(source, window, shared=True)
            if held is None:
                return _Unread.BUSY
            try:
                words = self._words[self._slot(source, window)]
                header = words[:_HEADER].tolist()
                if header[:2] != _digest(source, window).tolist():
                    return _Unread.MISSING
                rows, pieces, *sizes = header[2:8]
                if rows == _TOO_MANY_ROWS:
                    return _Unread.TOO_LARGE
                counts = PackingCounts(*header[8:12])
                content, begin, columns = words[_HEADER:].view(np.uint8), 0, list[Any]()
                for count, item in zip((rows + 1, pieces, pieces, pieces), sizes, strict=True):
                    column = content[begin : begin + (0 if only_look else count * item)].view(f"i{item}")
                    columns.append(column.copy())
                    begin += count * item
                documents, begins, lengths = columns[1:]
                return Packing(columns[0], documents, begins, lengths, counts)
            finally:
                unlock_number(held)

    def _write(self, words: npt.NDArray[np.int64], digest: npt.NDArray[np.int64], packing: Packing) -> None:
        """Into a slot whose lock is held. A reader finds no plan there until all of it is."""
        words[:2] = 0
        columns = packing[:4]
        content, begin = words[_HEADER:].view(np.uint8), 0
        if packing.nbytes > content.nbytes:
            words[2] = _TOO_MANY_ROWS
        else:
            for column in columns:
                content[begin : begin + column.nbytes] = np.ascontiguousarray(column).view(np.uint8)
                begin += column.nbytes
            words[2:12] = (packing.num_rows, columns[1].size, *(column.itemsize for column in columns), *packing.counts)
        words[:2] = digest


_all_plans: "weakref.WeakSet[NodePlans]" = weakref.WeakSet()


def _begin_child() -> None:
    for plans in list(_all_plans):
        plans.begin_child()


os.register_at_fork(after_in_child=_begin_child)


def _locked(path: Path, number: int, *, shared: bool = False) -> int:
    """What `lock_number` returns, but an error also where the system does not support such locks: OSError."""
    held = lock_number(path, number, shared=shared)
    if held is None:
        raise OSError(errno.ENOLCK, "locks of parts of a file do not work here")
    return held


def _digest(source: tuple[int, int], window: int) -> npt.NDArray[np.int64]:
    """Two words that are never 0 together."""
    digest = np.frombuffer(hashlib.sha256(f"{source} {window}".encode()).digest()[:16], np.int64)
    return digest | 1
