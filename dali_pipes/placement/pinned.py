"""The placement "pinned": the corpus stays in host memory, page-locked, and the GPU's kernels read it over the bus."""

import contextlib
import mmap
import os

import numpy as np

from dali_pipes.placement.cuda import Array
from dali_pipes.placement.device import DevicePlacement
from dali_pipes.placement.node_memory import Advance, NodeMemory
from dali_pipes.rows.source import Source
from dali_pipes.runtime.threads import ReaderThreads

LOAD_CHUNK_BYTES = 16 << 20
LOAD_THREADS = 8


class PinnedPlacement(DevicePlacement):
    """As `DevicePlacement`, but the corpus is in host memory, which all processes of the node share.

    One of them reads it; each page-locks it for its GPU, which takes a second for some gigabytes.
    """

    keeps_corpus = False
    _memory: NodeMemory | None = None
    _locked: list[int]

    def _hold_corpus(self) -> None:
        source = self._source
        token_bytes = source.rows.span * source.dtype.itemsize
        mask_begin = -(-token_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        size = mask_begin + source.rows.span if source.has_loss_mask else token_bytes
        key = f"{source.content_key} {source.dtype} {source.rows.first_token} {source.rows.span} {source.has_loss_mask}"

        def fill(memory: NodeMemory, advance: Advance) -> None:
            load_span(source, memory, 0, source.dtype, advance)
            if source.has_loss_mask:
                load_span(source, memory, mask_begin, np.dtype(np.uint8), advance, of_loss_mask=True)

        self._locked = []
        self._memory = NodeMemory(key, size, fill, "the corpus")
        corpus = self.gpu.page_lock(self._memory.array, self._locked)
        self._tokens = corpus[:token_bytes].view(source.dtype)
        if source.has_loss_mask:
            self._loss_mask = corpus[mask_begin:]

    def close(self) -> None:
        """Also let go of the corpus, which other processes keep."""
        super().close()
        memory, self._memory = self._memory, None
        if memory is not None:
            with contextlib.suppress(RuntimeError):  # the context is broken, and nothing is read any more
                self.gpu.unlock(self._locked)
            memory.close()


def load_span(
    source: Source,
    memory: NodeMemory,
    begin: int,
    dtype: np.dtype[Array],
    advance: Advance,
    *,
    of_loss_mask: bool = False,
) -> None:
    """Read all ids of a source's rows, or their loss mask, into the memory from byte `begin` on, in several threads."""
    total, item, first = source.rows.span, dtype.itemsize, source.rows.first_token
    chunk = max(1, LOAD_CHUNK_BYTES // item)

    def read(start: int) -> int:
        end = min(start + chunk, total)
        memory.allocate(begin + start * item, begin + end * item)
        part = memory.array[begin + start * item : begin + end * item].view(dtype)
        source.read_span(first + start, part, of_loss_mask=of_loss_mask)
        return part.nbytes

    starts = range(0, total, chunk)
    readers = ReaderThreads(min(LOAD_THREADS, os.cpu_count() or 1, len(starts)))
    futures = [readers.submit(read, start) for start in starts]
    try:
        for future in futures:
            advance(readers.result(future))
    finally:
        for future in futures:
            future.cancel()
        readers.stop()
