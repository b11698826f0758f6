"""Two windows of an order by blocks in GPU memory: kernels read one while the next one arrives.

    reader threads    whole blocks, sequential reads ─▶ pinned buffers ─▶ copies ─┐
    half 0            window 4 of the pass, a block in each slot                  │     ◀─ kernels
    half 1            window 5                              ◀─────────────────────┘

A slot holds a block and the tokens that its last row reads after it, so that each row lies in one slot. Windows take
the halves in turn. The thread that queues kernels says which windows it has come to (`enter`) and gone past (`leave`),
which frees a half and starts the load of the next window. No load waits for anything but its reads, for an event on the
device, and for the end of a load that it replaces; so nothing can wait in a circle.
"""

import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import LoaderClosedError
from dali_pipes.placement.cuda import Array, Gpu
from dali_pipes.placement.pool_order import HALVES, PoolOrder, PoolWindow
from dali_pipes.rows.source import Source
from dali_pipes.runtime.progress import progress_bar
from dali_pipes.runtime.threads import ReaderThreads, Task, stop_with_process, to_keep

LOAD_CHUNK_BYTES = 4 << 20
"""Of each of a thread's two pinned buffers."""
LOAD_THREADS = 8
_CLOSED = "this loader is closed and no longer loads windows; create a new one"


class _Load:
    """A window on its way to the device."""

    def __init__(self, num_slots: int, num_bytes: int, after: "_Load | None", *, is_awaited: bool) -> None:
        self.left, self.num_bytes, self.after = num_slots, num_bytes, after
        self.done: Task[bool] = Task()
        """True: all copies are queued. False: it was given up."""
        self.error: BaseException | None = None
        self.is_ended = False
        self.shows_progress = is_awaited
        self.advance: Callable[[int], None] = _ignore


class _Half:
    def __init__(self, gpu: Gpu, first: int) -> None:
        self.first = first
        """Its first token in the pool."""
        self.window: PoolWindow | None = None
        self.load: _Load | None = None
        self.is_free = True
        """Whether it may be loaded with another window."""
        self.loaded, self.used = gpu.event(), gpu.event()


class PoolWindows:
    """The pool's memory, and the threads that fill it."""

    def __init__(self, source: Source, gpu: Gpu, order: PoolOrder) -> None:
        self._source, self._gpu, self._order = source, gpu, order
        self._lock = threading.Lock()
        self._is_ended = False
        self._readers: ReaderThreads | None = None
        self.tokens: Array = gpu.empty((order.padding_start + source.rows.row_tokens,), source.dtype)
        self.loss_mask: Array = gpu.empty(self.tokens.shape, np.uint8) if source.has_loss_mask else None
        self._halves = [_Half(gpu, number * order.half_tokens) for number in range(HALVES)]
        self._num_threads = min(LOAD_THREADS, os.cpu_count() or 1, order.num_slots)
        item = source.dtype.itemsize
        chunk = max(1, min(order.slot_tokens, LOAD_CHUNK_BYTES // item)) * item
        self._rings = deque(
            deque((gpu.empty_pinned((chunk,), np.uint8), gpu.event()) for _ in range(2))
            for _ in range(self._num_threads)
        )
        stop_with_process(self)

    def wait(self, windows: Sequence[PoolWindow]) -> None:
        """Block until windows are loaded, which starts if there is a free half for them; not for a half to be free.

        For reader threads. Raises what reading raised, or `LoaderClosedError`.
        """
        for window in windows:
            half = self._half(window)
            with self._lock:
                if half.window != window and half.is_free:
                    self._begin(half, window, is_awaited=True)
                load = half.load if half.window == window else None
            if load is not None:
                self._result(half, load)

    def enter(self, windows: Sequence[PoolWindow]) -> None:
        """Let kernels queued from now on read these windows, of which no two share a half.

        Does not block if `wait` has loaded them. What the halves held is read by no kernel that is queued later.
        """
        for window in windows:
            half = self._half(window)
            while True:
                with self._lock:
                    if half.window != window:
                        self._begin(half, window, is_awaited=True)
                    half.is_free = False
                    load = half.load
                assert load is not None
                if self._result(half, load):
                    break
            self._gpu.hold_back(self._gpu.stream, half.loaded)

    def leave(self, windows: Sequence[PoolWindow]) -> None:
        """All kernels of a block that reads these windows are queued; the last one is read on. Loads the next one."""
        for window in windows:
            self._gpu.record(self._half(window).used)
        last = windows[-1]
        following = self._order.after(last)
        half = self._half(following)
        with self._lock:
            for one in self._halves:
                one.is_free = one.window not in (last, following)
            if half.is_free and not self._is_ended:
                self._begin(half, following, is_awaited=False)

    def restart(self) -> None:
        """Blocks may come from another place: any half may be loaded anew. What is there stays as long as it fits."""
        with self._lock:
            for half in self._halves:
                half.is_free = True

    def stop(self) -> None:
        """End loads at the next chunk, and start no other. Does not block; safe anywhere."""
        self._is_ended = True

    def close(self) -> None:
        """`stop`, and wait for the reads under way: no copy is queued any more. Idempotent."""
        self.stop()
        if self._readers is not None:
            self._readers.stop()

    def forget_memory(self) -> None:
        """Drop the memory, after the last copy and kernel."""
        self.tokens = self.loss_mask = None
        self._rings.clear()

    def _half(self, window: PoolWindow) -> _Half:
        return self._halves[self._order.half(window)]

    def _begin(self, half: _Half, window: PoolWindow, *, is_awaited: bool) -> None:
        """Start to load a window, in place of another one if need be. The lock is held."""
        if self._is_ended:
            raise LoaderClosedError(_CLOSED)
        if self._readers is None:
            self._readers = ReaderThreads(self._num_threads)
        before = half.load
        if before is not None:
            before.is_ended = True
        blocks = self._order.blocks(window)
        num_bytes = sum(count for _, count in blocks) * self._source.token_bytes
        load = _Load(len(blocks), num_bytes, before, is_awaited=is_awaited)
        half.window, half.load, half.is_free = window, load, False
        self._gpu.hold_back(self._gpu.copies, half.used)
        for slot, (position, count) in enumerate(blocks):
            target = half.first + slot * self._order.slot_tokens
            self._readers.submit(self._load_slot, half, load, target, position, count)

    def _result(self, half: _Half, load: _Load) -> bool:
        """Block until a load is done. Raises what its reads raised, after which the next call loads anew."""
        assert self._readers is not None
        try:
            if load.shows_progress and not load.done.done():
                load.shows_progress = False
                with progress_bar(f"window to cuda:{self._gpu.number}", load.num_bytes, in_bytes=True) as load.advance:
                    try:
                        is_loaded = self._readers.result(load.done)
                    finally:
                        load.advance = _ignore
            else:
                is_loaded = self._readers.result(load.done)
        except BaseException:
            with self._lock:
                if half.load is load and load.done.done():
                    half.window, half.is_free = None, True
            raise
        if self._is_ended and not is_loaded:
            raise LoaderClosedError(_CLOSED)
        return bool(is_loaded)

    def _load_slot(self, half: _Half, load: _Load, target: int, position: int, count: int) -> None:
        """Read a block and queue its copies; in a reader thread."""
        try:
            if load.after is not None:  # whose threads may still write to this half
                load.after.done.wait()
            if not (load.is_ended or self._is_ended):
                self._gpu.adopt_thread()
                self._copy(load, self.tokens, target, position, count, of_loss_mask=False)
                if self.loss_mask is not None:
                    self._copy(load, self.loss_mask, target, position, count, of_loss_mask=True)
        except BaseException as error:
            load.error = load.error or to_keep(error)
            load.is_ended = True
        with self._lock:
            load.left -= 1
            is_last = load.left == 0
        if is_last:
            self._finish(half, load)

    def _finish(self, half: _Half, load: _Load) -> None:
        """All slots of a load are done, or were given up."""
        load.after = None
        try:
            if load.error is None and not load.is_ended and not self._is_ended:
                self._gpu.record(half.loaded, self._gpu.copies)
                load.done.finish(True)
                return
        except BaseException as error:  # whoever waits must hear of it
            load.error = to_keep(error)
        if load.error is not None:
            load.done.finish(error=load.error)
        else:
            load.done.finish(False)

    def _copy(self, load: _Load, array: Array, target: int, position: int, count: int, *, of_loss_mask: bool) -> None:
        ring = self._rings.popleft()  # there is one for each thread
        try:
            chunk = len(ring[0][0]) // array.dtype.itemsize
            for begin in range(0, count, chunk):
                if load.is_ended or self._is_ended:
                    load.is_ended = True
                    return
                buffer, copied = ring[0]
                ring.rotate()
                self._gpu.wait(copied)
                size = min(chunk, count - begin)
                part: npt.NDArray[Any] = buffer[: size * array.dtype.itemsize].view(array.dtype)
                self._source.read_span(position + begin, part, of_loss_mask=of_loss_mask)
                self._gpu.copy(array[target + begin : target + begin + size], part, self._gpu.copies)
                self._gpu.record(copied, self._gpu.copies)
                load.advance(part.nbytes)
        finally:
            self._rings.append(ring)


def _ignore(num_bytes: int) -> None:
    """What nobody waits for does not report its progress."""
