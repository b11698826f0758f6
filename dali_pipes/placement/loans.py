"""DALI's blocks in the hands of consumers: which memory torch sees, and when it is DALI's again.

A consumer queues work on a block, drops it and goes on long before the work has run. DALI would give the memory away in
the order of its own stream, which knows nothing of the consumer's. So a block stays here until events have passed that
were recorded, after its last tensor was dropped, on every stream that it was handed out for.
"""

import contextlib
import math
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any

import numpy as np

from dali_pipes.placement.cuda import NOT_READY, SUCCESS, Gpu, require_cupy
from dali_pipes.placement.on_device import OnDevice

_CLOSE_WAIT_S, _LOOK_S = 10.0, 5e-4


class _Lent:
    """One output of a block, as torch takes it. Torch holds this object as long as a tensor refers to the memory."""

    def __init__(self, output: Any) -> None:
        given = output.__cuda_array_interface__
        # Version 2 names no stream: `Loans` orders the streams, torch need not. DALI writes types as `struct` does.
        self.__cuda_array_interface__ = {
            "shape": tuple(given["shape"]),
            "typestr": np.dtype(given["typestr"]).str,
            "data": given["data"],
            "version": 2,
            "strides": None,
        }

    def __getitem__(self, part: slice) -> "_LentPart":
        return _LentPart(self, part)


class _LentPart:
    """Some of the first axis of a lent output, which it holds."""

    def __init__(self, whole: _Lent, part: slice) -> None:
        given = whole.__cuda_array_interface__
        length, *others = given["shape"]
        begin, end, step = part.indices(length)
        assert step == 1
        (address, is_read_only), size = given["data"], math.prod(others) * np.dtype(given["typestr"]).itemsize
        data = address + begin * size, is_read_only
        self.__cuda_array_interface__ = {**given, "shape": (max(0, end - begin), *others), "data": data}
        self._whole = whole


class Loan:
    """A block that is lent, and the streams that it was handed out for: none before its consumer gets it."""

    def __init__(self, outputs: list[Any], size: int, gpu: Gpu, ready: Any) -> None:
        self.outputs, self.size, self.ready = outputs, size, ready
        self._gpu = gpu  # DALI frees the outputs in the order of its stream, which must still be there
        self.streams: set[int] = set()
        self.open: set[int] = set()
        """References to outputs that a tensor still refers to."""
        self.events: list[Any] = []


class _LoanReference(weakref.ref[Any]):
    """A weak reference to one lent output that knows its loan."""

    __slots__ = ("loan",)
    loan: Loan


class Loans:
    """DALI's blocks in the hands of consumers of one device, over all loaders. Safe for several threads.

    Work on a stream that a block was not handed out for must have been joined with one of those that it was before the
    last tensor is dropped.
    """

    def __init__(self, device: int) -> None:
        self._cupy, self._number, self._process = require_cupy(), device, os.getpid()
        self._is_broken = False
        self._lock = threading.Lock()
        self._queues: weakref.WeakSet[Any] = weakref.WeakSet()
        self._references: dict[int, _LoanReference] = {}
        self._dropped: deque[_LoanReference] = deque()
        self._live: dict[int, Loan] = {}
        self._passing: list[Loan] = []
        self._events: list[Any] = []
        with OnDevice(self._cupy, device):
            self._probe = self._cupy.cuda.Event(disable_timing=True)

    @property
    def bytes_held(self) -> int:
        """Bytes of blocks that are held, or were dropped and may still be read."""
        return sum(loan.size for loan in list(self._live.values()))

    def lend(self, outputs: list[Any], size: int, gpu: Gpu) -> tuple[list[Any], Loan]:
        """Take a block's outputs, `size` bytes; returns what torch may have of them. Never waits.

        They are ready on the loader's stream `gpu.handover`. Were it the consumer's, another stream that wants the
        block would wait for all that the consumer has queued there.
        """
        with self._lock, OnDevice(self._cupy, self._number):
            loan = Loan(outputs, size, gpu, self._record(gpu.handover))
            self._live[id(loan)] = loan
            try:
                lent = [_Lent(output) for output in outputs]
                for owner in lent:
                    reference = _LoanReference(owner, self._dropped.append)  # in C: no interrupt comes into the call
                    reference.loan = loan
                    loan.open.add(id(reference))
                    self._references[id(reference)] = reference
            except BaseException:  # an interrupt: the block has not been handed out
                self._live.pop(id(loan), None)
                raise
            return lent, loan

    def hand_out(self, loan: Loan, stream: int) -> None:
        """Make a loan's memory ready for `stream`, and keep it until work on that stream has passed, too. Never waits.

        Gives back what has been dropped before, and is not in use any more.
        """
        if stream not in loan.streams:
            with self._lock, OnDevice(self._cupy, self._number):
                self._settle({stream})
                self._cupy.cuda.runtime.streamWaitEvent(stream, loan.ready.ptr)
                loan.streams.add(stream)

    def order(self, before: int, after: int) -> None:
        """Let stream `after` wait for what has been queued on stream `before`. Does not block."""
        if before != after:
            with self._lock, OnDevice(self._cupy, self._number):
                event = self._record(before)
                self._cupy.cuda.runtime.streamWaitEvent(after, event.ptr)
                self._events.append(event)  # a wait that was queued does not mind the event being recorded again

    def enter(self, queue: object) -> None:
        """A queue of blocks begins, whose blocks will settle what was dropped before."""
        self._queues.add(queue)

    def leave(self, queue: object, trim: Callable[[], None], *, is_collected: bool) -> None:
        """A queue has ended: give back what nobody holds, and let DALI's pool return it to the device (`trim`).

        Waits for work on dropped blocks, for some seconds at most: a collective whose other ranks are gone never ends.
        After the last queue, a block that is still held is given back when its last tensor is dropped.

        is_collected: whether the garbage collector calls this, perhaps in the midst of a call that holds the lock; that
                      one's queue then settles what was dropped
        """
        self._queues.discard(queue)
        # Not in a forked child, where CUDA does not work.
        if os.getpid() != self._process or not self._lock.acquire(blocking=not is_collected):
            return
        try:
            self._settle_and_wait()
            if not self._queues:
                for reference in list(self._references.values()):
                    owner = reference()
                    if owner is not None:
                        weakref.finalize(owner, self._settle_late, reference, trim).atexit = False
                    del owner
        finally:
            self._lock.release()
        self._trim(trim)

    def _settle_late(self, reference: _LoanReference, trim: Callable[[], None]) -> None:
        """What `leave` does, for a block that was dropped after it. Called wherever the block's last tensor dies."""
        self._dropped.append(reference)  # it may be called before the reference's own callback
        # This may have interrupted a call that holds the lock, which settles or is followed by one that does.
        if os.getpid() == self._process and self._lock.acquire(blocking=False):
            try:
                self._settle_and_wait()
            finally:
                self._lock.release()
            self._trim(trim)

    def _settle_and_wait(self) -> None:
        with contextlib.suppress(RuntimeError), OnDevice(self._cupy, self._number):
            end = monotonic() + _CLOSE_WAIT_S
            self._has_passed(self._probe)  # notices a failed kernel, even where nothing was dropped
            self._settle(set())
            while self._passing and not self._is_broken and monotonic() < end:
                sleep(_LOOK_S)
                self._settle(set())

    def _trim(self, trim: Callable[[], None]) -> None:
        if not self._is_broken:
            with contextlib.suppress(RuntimeError), OnDevice(self._cupy, self._number):
                trim()

    def _settle(self, streams: set[int]) -> None:
        # Wherever an interrupt cuts this short, the next call does the rest, and what it does again changes nothing.
        while self._dropped:
            reference = self._dropped[0]
            loan = getattr(reference, "loan", None)  # none where an interrupt came between making and naming it
            if loan is not None:
                loan.open.discard(id(reference))
                if not loan.open and id(loan) in self._live and loan not in self._passing:
                    loan.events = [self._record(used) for used in loan.streams | streams]
                    self._passing.append(loan)
            self._references.pop(id(reference), None)
            self._dropped.popleft()
        passed = [loan for loan in self._passing if all(map(self._has_passed, loan.events))]
        for loan in passed:
            self._live.pop(id(loan), None)
            loan.outputs = []  # a block stream may still know the loan
        self._passing = [loan for loan in self._passing if loan not in passed]
        for loan in passed:
            self._events += [*loan.events, loan.ready]

    def _has_passed(self, event: Any) -> bool:
        """Whether all that was queued before the event is done.

        After a failed kernel nothing is, for good: memory is left alone, since DALI may abort if CUDA cannot free it.
        """
        status = self._cupy.cuda.runtime.eventQuery(event.ptr)
        self._is_broken |= status not in (SUCCESS, NOT_READY)
        return bool(status == SUCCESS)

    def _record(self, stream: int) -> Any:
        event = self._events.pop() if self._events else self._cupy.cuda.Event(disable_timing=True)
        self._cupy.cuda.runtime.eventRecord(event.ptr, stream)
        return event


_loans: dict[int, Loans] = {}


def loans_of(device: int) -> Loans:
    """The one ledger of a device: a block that outlives its loader is still accounted for."""
    if device not in _loans:
        _loans.setdefault(device, Loans(device))
    return _loans[device]
