"""Many positioned reads in one system call, without the interpreter lock: Linux native AIO.

    rows        0        1        2                one io_submit: the kernel reads them one after another
    offsets     8190     40950    0                one io_getevents: how many bytes each read gave

A reader thread that calls `os.preadv` row by row releases and reacquires the interpreter lock at every row, and each
time it may have to wait for the trainer's thread, or make it wait. One call for a block of rows does this once. For
files opened without O_DIRECT, `io_submit` does the reads before it returns; the call blocks as `preadv` would.

If the kernel does not offer it (another system, a container that forbids it, too many contexts), `create` returns None
and the caller reads row by row: the same bytes at a higher price.
"""

import contextlib
import ctypes
import errno
import os
import platform
import sys
from collections import deque
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

MOST_READS = 256
"""Reads in one call."""

_PREAD = 0  # IOCB_CMD_PREAD
# System call numbers of io_setup, io_destroy, io_submit, io_getevents (the C library has no functions for them).
_CALLS = {"x86_64": (206, 207, 209, 208), "aarch64": (0, 1, 2, 4)}

_IOCB = np.dtype(  # struct iocb of linux/aio_abi.h, little-endian: 64 bytes
    {
        "names": ["data", "flags", "opcode", "descriptor", "buffer", "bytes", "offset"],
        "formats": ["<u8", "<u4", "<u2", "<u4", "<u8", "<u8", "<i8"],
        "offsets": [0, 12, 16, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
_NO_ARGUMENTS = (0,) * 5
_EVENT = np.dtype([("data", "<i8"), ("iocb", "<u8"), ("result", "<i8"), ("result2", "<i8")])


def _syscall_of(library: Any) -> Any:
    library.syscall.restype = ctypes.c_long
    library.syscall.argtypes = (ctypes.c_long,) * (1 + len(_NO_ARGUMENTS))
    return library.syscall


_SYSCALL: Final = _syscall_of(ctypes.CDLL(None, use_errno=True))
_SYSCALL_LOCKED: Final = _syscall_of(ctypes.PyDLL(None, use_errno=True))
"""Keeps the interpreter lock: for calls that return immediately."""


class BatchReader:
    """One AIO context and its memory; for one thread at a time. Not usable in a forked child."""

    def __init__(self, calls: tuple[int, int, int, int]) -> None:
        """Raises OSError if the kernel refuses a context."""
        self._setup, self._destroy, self._submit, self._getevents = calls
        self._context = ctypes.c_ulong(0)
        self._system_call(self._setup, MOST_READS, ctypes.addressof(self._context))
        # Views and addresses are made here once: with cold caches, each costs as much as some of the reads.
        iocbs, events = np.zeros(MOST_READS, _IOCB), np.zeros(MOST_READS, _EVENT)
        iocbs["opcode"] = _PREAD
        iocbs["data"] = np.arange(MOST_READS)
        self._flags, self._descriptors, self._buffers = iocbs["flags"], iocbs["descriptor"], iocbs["buffer"]
        self._sizes, self._offsets = iocbs["bytes"], iocbs["offset"]
        self._event_numbers, self._event_results = events["data"], events["result"]
        self._events_address: Final = events.ctypes.data
        self._pointers = iocbs.ctypes.data + _IOCB.itemsize * np.arange(MOST_READS, dtype=np.uint64)
        self._pointers_address: Final = self._pointers.ctypes.data
        self._results: npt.NDArray[np.int64] = np.zeros(MOST_READS, np.int64)

    @classmethod
    def create(cls) -> Self | None:
        """A reader, or None if the kernel does not offer one."""
        calls = _CALLS.get(platform.machine())
        if not sys.platform.startswith("linux") or sys.byteorder != "little" or calls is None:
            return None
        try:
            return cls(calls)
        except OSError:
            return None

    def read(
        self,
        descriptors: npt.NDArray[Any] | int,
        addresses: npt.NDArray[np.int64],
        count_bytes: npt.NDArray[np.int64] | int,
        offsets: npt.NDArray[np.int64],
        *,
        waits: bool = True,
    ) -> npt.NDArray[np.int64]:
        """Read `count_bytes` (each, or one for all) from byte offsets (N,) of the files to memory. Blocks.

        N <= MOST_READS.
        waits: for a disk; else what is not in the page cache comes back short, or as -EAGAIN

        Returns the result of each read: bytes, or a negative error number. Raises OSError if the kernel refuses the
        call, EOPNOTSUPP if a file system cannot read without waiting. The kernel does not write to the addresses after
        this returns or raises.
        """
        count = len(offsets)
        self._flags[:count] = 0 if waits else os.RWF_NOWAIT
        self._descriptors[:count], self._buffers[:count] = descriptors, addresses
        self._sizes[:count], self._offsets[:count] = count_bytes, offsets
        submitted = 0
        try:
            while submitted < count:
                pointers = self._pointers_address + 8 * submitted
                submitted += self._system_call(self._submit, self._context.value, count - submitted, pointers)
        finally:
            self._collect(submitted)
        return self._results[:count]

    def close(self) -> None:
        """Release the context; waits for reads in progress. Idempotent."""
        context, self._context = self._context, ctypes.c_ulong(0)
        if context.value:
            self._system_call(self._destroy, context.value)

    def __del__(self) -> None:
        if sys.is_finalizing():  # the kernel destroys them all together
            return
        with contextlib.suppress(OSError, AttributeError):  # in a forked child; or __init__ got no context
            self.close()

    def _collect(self, count: int) -> None:
        done = 0
        while done < count:
            # Without O_DIRECT all of them are there, so the first call does not give the interpreter lock away.
            waits, call = (0, _SYSCALL_LOCKED) if done == 0 else (1, _SYSCALL)
            got = self._system_call(
                self._getevents, self._context.value, waits, count - done, self._events_address, 0, call=call
            )
            self._results[self._event_numbers[:got]] = self._event_results[:got]
            done += got

    def _system_call(self, number: int, *arguments: int, call: Any = _SYSCALL) -> int:
        while True:
            result = int(call(number, *arguments, *_NO_ARGUMENTS[len(arguments) :]))
            if result >= 0:
                return result
            error = ctypes.get_errno()
            if error != errno.EINTR:
                raise OSError(error, os.strerror(error))


class BatchReaders:
    """Readers that several threads borrow and give back. Thread-safe; does not block."""

    MOST_IDLE = 16
    """Readers kept, of 256 reads each; a system allows 65,536 reads for all processes together by default."""

    def __init__(self) -> None:
        self._idle: deque[BatchReader] = deque()
        self._available = True

    def borrow(self) -> BatchReader | None:
        """A reader for the calling thread, or None if the kernel does not offer one."""
        if not self._available:
            return None
        try:
            return self._idle.pop()
        except IndexError:
            reader = BatchReader.create()
            self._available = reader is not None
            return reader

    def give_back(self, reader: BatchReader) -> None:
        """Let others borrow it. A reader that is not given back is closed when its last reference goes."""
        if len(self._idle) < self.MOST_IDLE:
            self._idle.append(reader)

    def forget(self) -> None:
        """Drop the idle readers: in a forked process their contexts do not exist."""
        self._idle.clear()


READERS: Final = BatchReaders()
"""Of the process, since the kernel takes 20 to 80 ms to destroy a context: no corpus has to wait for that."""
os.register_at_fork(after_in_child=READERS.forget)


def runs_of_equal(numbers: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Starts and lengths of the runs of equal numbers in increasing `numbers` (at least one)."""
    if numbers[0] == numbers[-1]:
        return np.zeros(1, np.int64), np.array([len(numbers)])
    borders = np.flatnonzero(numbers[1:] != numbers[:-1]) + 1  # np.diff takes twice as long
    firsts = np.concatenate(([0], borders))
    return firsts, np.concatenate((borders, [len(numbers)])) - firsts


def batch_length(numbers: npt.NDArray[np.int64], most_files: int) -> int:
    """Number of rows, in the order of their files, that are in the first `most_files` files."""
    firsts, _ = runs_of_equal(numbers)
    return len(numbers) if len(firsts) <= most_files else int(firsts[most_files])
