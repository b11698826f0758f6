"""The hot path: ids that can be read as they lie, straight from the files into the caller's memory.

    pieces of a block    one io_submit for all of them    what came back short or failed: preadv, one by one

Without the kernel's native AIO, or for a few pieces, all are read one by one.
"""

import os
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import CorpusReadError
from dali_pipes.storage.linux_aio import MOST_READS, BatchReader, BatchReaders, batch_length, runs_of_equal
from dali_pipes.storage.local import DescriptorPool, out_of_descriptors

Int64Array: TypeAlias = npt.NDArray[np.int64]

_FEWEST_FOR_BATCH = 8  # rows from which on one call for all is cheaper than a call for each
_MOST_FILES_AT_ONCE = 64  # descriptors that one batch of reads may hold, if the pool may keep as many


class RawReads:
    """Reads from the files of a pool. Safe for several threads."""

    def __init__(self, pool: DescriptorPool, itemsize: int) -> None:
        self._pool, self._itemsize = pool, itemsize
        self._readers = BatchReaders()

    def read(
        self, view: memoryview, targets: Int64Array, lengths: Int64Array, numbers: Int64Array, offsets: Int64Array
    ) -> None:
        """Read pieces that lie in one extent each. Blocks; raises CorpusReadError.

        targets, lengths: places in `view`, in tokens. numbers: the files. offsets: the bytes there.
        """
        targets, sizes = targets * self._itemsize, lengths * self._itemsize
        reader = self._readers.borrow() if len(targets) >= _FEWEST_FOR_BATCH else None
        if reader is None:
            self._one_by_one(view, targets, sizes, numbers, offsets)
            return
        address = np.frombuffer(view, np.uint8).ctypes.data
        most_files = min(_MOST_FILES_AT_ONCE, self._pool.limit)
        begin = 0
        while begin < len(targets):
            part = slice(begin, begin + batch_length(numbers[begin : begin + MOST_READS], most_files))
            addresses = (address + targets[part]).astype(np.uint64)
            results = self._batch(reader, addresses, sizes[part], numbers[part], offsets[part])
            if results is None:
                break
            wrong = np.flatnonzero(results != sizes[part])
            if len(wrong):
                at = begin + wrong
                self._again(view, targets[at], sizes[at], numbers[at], offsets[at], results[wrong])
            begin = part.stop
        self._readers.give_back(reader)
        self._one_by_one(view, targets[begin:], sizes[begin:], numbers[begin:], offsets[begin:])

    def close(self) -> None:
        """Let the kernel's contexts go. Idempotent."""
        self._readers.give_up()

    def _batch(
        self,
        reader: BatchReader,
        addresses: npt.NDArray[np.uint64],
        sizes: Int64Array,
        numbers: Int64Array,
        offsets: Int64Array,
    ) -> Int64Array | None:
        """What each read gave, or None if they have to be done one by one."""
        firsts, counts = runs_of_equal(numbers)
        try:
            files = [self._pool.acquire(number) for number in numbers[firsts].tolist()]  # held while being read
            descriptors = np.repeat([file.descriptor for file in files], counts)
            return reader.read(descriptors, addresses, sizes, offsets)
        except CorpusReadError as error:
            if out_of_descriptors(error):  # too few for so many files at once; one by one needs one
                return None
            raise
        except OSError:  # the kernel refuses the call: in a forked child, for one
            self._readers.give_up()
            return None

    def _again(
        self,
        view: memoryview,
        targets: Int64Array,
        sizes: Int64Array,
        numbers: Int64Array,
        offsets: Int64Array,
        results: Int64Array,
    ) -> None:
        """Finish reads that came back short or failed, or tell what is wrong. Those of a batch wait together."""
        pause = True
        columns = (column.tolist() for column in (targets, sizes, numbers, offsets, results))
        for target, size, number, offset, result in zip(*columns, strict=True):
            file, piece = self._pool.acquire(number), view[target : target + size]
            if result >= 0:
                file.read_into(piece, offset, result)
            else:
                file.read_into(piece, offset, failure=OSError(-result, os.strerror(-result)), pause=pause)
                pause = False

    def _one_by_one(
        self, view: memoryview, targets: Int64Array, sizes: Int64Array, numbers: Int64Array, offsets: Int64Array
    ) -> None:
        preadv, current = os.preadv, -1
        columns = (column.tolist() for column in (targets, sizes, numbers, offsets))
        for target, size, number, offset in zip(*columns, strict=True):
            if number != current:
                file = self._pool.acquire(number)  # held while its descriptor is in use
                current, descriptor = number, file.descriptor
            piece = view[target : target + size]
            try:
                got = preadv(descriptor, [piece], offset)
            except OSError as error:
                file.read_into(piece, offset, failure=error)
                continue
            if got != size:
                file.read_into(piece, offset, got)
