"""Ids copied from maps of the files: `reads = "mapped"`, in place of `batched_reads`.

A map saves the kernel's copy of each row. The price: where a file shrinks or a disk fails during a copy, the process
dies of SIGBUS instead of raising an error. Sizes are compared before each block, which is no guarantee.
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from dali_pipes.storage.batched_reads import as_pieces
from dali_pipes.storage.file_pool import FilePool
from dali_pipes.storage.linux_aio import runs_of_equal
from dali_pipes.storage.local import LocalFile

Int64Array = npt.NDArray[np.int64]
Bytes = npt.NDArray[np.uint8]

_PART_BYTES = 1 << 17
"""Bytes gathered at a time, through memory that stays in the core's own cache."""

_MOST_GATHERED = 1 << 21
"""Bytes in new memory: more may go back to the system when it is freed, to be cleared for the next rows."""


class MappedReads:
    """Reads from the files of a pool. Safe for several threads."""

    def __init__(self, pool: FilePool, itemsize: int) -> None:
        self._pool, self._itemsize = pool, itemsize

    def read(
        self, view: memoryview, targets: Int64Array, lengths: Int64Array, numbers: Int64Array | int, offsets: Int64Array
    ) -> None:
        """As `RawReads.read`: blocks for pages that are not in memory, and releases the GIL for equal lengths."""
        out = np.frombuffer(view, np.uint8)
        numbers = np.broadcast_to(numbers, len(offsets))
        firsts, counts = runs_of_equal(numbers)
        for first, count in zip(firsts.tolist(), counts.tolist(), strict=True):
            here = slice(first, first + count)
            places, sizes, begins = targets[here] * self._itemsize, lengths[here] * self._itemsize, offsets[here]
            file = self._pool.acquire(int(numbers[first]))
            if isinstance(file, LocalFile):
                _copy(file.mapped(), begins, sizes, places, out)
            else:
                ranges = zip(begins.tolist(), sizes.tolist(), places.tolist(), strict=True)
                file.read_ranges(ranges, view)

    def read_rows(
        self, out: npt.NDArray[Any], places: Int64Array | slice, numbers: npt.NDArray[Any] | int, offsets: Int64Array
    ) -> None:
        """As `RawReads.read_rows`."""
        if isinstance(numbers, int) and isinstance(file := self._pool.acquire(numbers), LocalFile):
            _gather(file.mapped(), offsets, out.view(np.uint8)[places])
            return
        self.read(*as_pieces(out, places, numbers, offsets))

    def gathered(self, number: int, offsets: Int64Array, size: int) -> Bytes | None:
        """The `size` bytes from each of the `offsets` (R,) of one file, in a new array (R, size), in one step.

        None where that would be large, and for a file that is not local. Otherwise as `RawReads.read_rows`.
        """
        if len(offsets) * size > _MOST_GATHERED or not isinstance(file := self._pool.acquire(number), LocalFile):
            return None
        return _windows(file.mapped(), size)[offsets]


def _copy(source: Bytes, begins: Int64Array, sizes: Int64Array, places: Int64Array, out: Bytes) -> None:
    size = int(sizes[0])
    if size > 0 and (sizes == size).all() and (np.diff(places) == size).all():
        first = int(places[0])
        _gather(source, begins, out[first : first + len(places) * size].reshape(-1, size))
        return
    ends, stops = begins + sizes, places + sizes
    assert int(ends.max()) <= len(source), "positions were checked against the size of the file"
    for begin, end, place, stop in zip(begins.tolist(), ends.tolist(), places.tolist(), stops.tolist(), strict=True):
        out[place:stop] = source[begin:end]


def _gather(source: Bytes, begins: Int64Array, rows: Bytes) -> None:
    """Copy the bytes from each of `begins` (R,) to the rows of `rows` (R, L), which is a view."""
    size = rows.shape[1]
    windows, part = _windows(source, size), max(1, _PART_BYTES // size)
    for first in range(0, len(begins), part):
        rows[first : first + part] = windows[begins[first : first + part]]


def _windows(source: Bytes, size: int) -> Bytes:
    """The `size` bytes from each byte on: a view, (N, size). An index past the end is an IndexError."""
    return np.ndarray((len(source) - size + 1, size), np.uint8, source, strides=(1, 1))
