"""The hot path: ids that need no decoding, read straight from the files into the caller's memory.

pieces of a block, local files    one io_submit for what is in the page cache; the kernel starts to read the others,
                                  all together, and one more io_submit waits for them; short or failed: preadv
other storage, or a few pieces    `ByteFile.read_ranges`, once a file

Of buffered files `io_submit` reads one piece after another, so that a disk would have only one request at a time.
"""

import errno
import os
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from dali_pipes.errors import CorpusReadError
from dali_pipes.storage.file_pool import FilePool, out_of_descriptors
from dali_pipes.storage.linux_aio import MOST_READS, READERS, BatchReader, batch_length
from dali_pipes.storage.local import LocalFile
from dali_pipes.storage.object_file import ObjectFile, read_together

Int64Array: TypeAlias = npt.NDArray[np.int64]

_WHOLE: Int64Array = np.zeros(0, np.int64)
"""Of reads that gave what they were asked for, as nearly always."""

_FEWEST_FOR_BATCH = 8  # with fewer rows a call for each is cheaper than one call for all


@lru_cache(256)
def _addresses(first: int, count: int, size: int) -> Int64Array:
    """Of rows of `size` bytes that follow one another. Blocks come back to the same memory again and again."""
    addresses = np.arange(first, first + count * size, size)
    addresses.flags.writeable = False
    return addresses


def as_pieces(
    out: npt.NDArray[Any], places: Int64Array | slice, numbers: npt.NDArray[Any] | int, offsets: Int64Array
) -> tuple[memoryview, Int64Array, Int64Array, Int64Array, Int64Array]:
    """The arguments of `RawReads.read` for those of `RawReads.read_rows`."""
    count, length = len(offsets), out.shape[1]
    files = np.full(count, numbers, np.int64)
    order = np.argsort(files, kind="stable")
    targets = np.arange(len(out))[places][order] * length
    return out.data.cast("B"), targets, np.full(count, length), files[order], offsets[order]


class RawReads:
    """Reads from the files of a pool. Safe for several threads."""

    def __init__(self, pool: FilePool, itemsize: int) -> None:
        self._pool, self._itemsize = pool, itemsize
        self._in_batches = self._without_waiting = True

    def read(
        self, view: memoryview, targets: Int64Array, lengths: Int64Array, numbers: Int64Array | int, offsets: Int64Array
    ) -> None:
        """Read pieces that are in one extent each. Blocks; raises CorpusReadError.

        targets, lengths: places in `view`, in tokens. numbers: of the files, rising, or of the one
            that contains all pieces, which takes fewer steps. offsets: bytes in the files.
        """
        targets, sizes = targets * self._itemsize, lengths * self._itemsize
        begin, end = 0, len(targets)
        reader = READERS.borrow() if self._in_batches and end >= _FEWEST_FOR_BATCH else None
        if reader is not None:
            addresses = targets + np.frombuffer(view, np.uint8).__array_interface__["data"][0]
            while begin < end:
                part, files = slice(begin, begin + MOST_READS), numbers
                if not isinstance(numbers, int):
                    part = slice(begin, begin + batch_length(numbers[part], self._pool.limit))
                    files = numbers[part]
                results = self._batch(reader, addresses[part], sizes[part], files, offsets[part])
                if results is None:
                    break
                if results is not _WHOLE:
                    wrong = np.flatnonzero(results != sizes[part])
                    at = begin + wrong
                    all_files = np.broadcast_to(numbers, end)
                    self._again(view, targets[at], sizes[at], all_files[at], offsets[at], results[wrong])
                begin = part.stop
            READERS.give_back(reader)
        if begin < end:
            all_files = np.broadcast_to(numbers, end)
            self._by_file(view, targets[begin:], sizes[begin:], all_files[begin:], offsets[begin:])

    def read_rows(
        self, out: npt.NDArray[Any], places: Int64Array | slice, numbers: npt.NDArray[Any] | int, offsets: Int64Array
    ) -> None:
        """As `read`, of rows that are in one extent each: into the rows `places` (R,) of `out` (N, L).

        numbers: the files, in any order, or the one that all rows are in. offsets: (R,), the bytes there.

        The same in fewer steps, as most blocks are rows of one length: caches hold data, so that each step costs
        microseconds, and those of `read` come to as much as the reads.
        """
        reader = READERS.borrow() if self._in_batches and len(offsets) >= _FEWEST_FOR_BATCH else None
        if reader is not None:
            done = self._read_rows(reader, out, places, numbers, offsets)
            READERS.give_back(reader)
            if done:
                return
        self.read(*as_pieces(out, places, numbers, offsets))

    def _read_rows(
        self,
        reader: BatchReader,
        out: npt.NDArray[Any],
        places: Int64Array | slice,
        numbers: npt.NDArray[Any] | int,
        offsets: Int64Array,
    ) -> bool:
        """Whether all were read this way. If not, some of them may have been."""
        size = out.strides[0]
        addresses = _addresses(out.__array_interface__["data"][0], len(out), size)[places]
        for begin in range(0, len(offsets), MOST_READS):
            part = slice(begin, begin + MOST_READS)
            files = numbers if isinstance(numbers, int) else numbers[part]
            results = self._batch(reader, addresses[part], size, files, offsets[part])
            if results is None:
                return False
            if results is _WHOLE:
                continue
            wrong = np.flatnonzero(results != size)
            targets = np.arange(len(out))[places][part][wrong] * size
            sizes, files = np.full(len(wrong), size), np.full(len(results), files)[wrong]
            self._again(out.data.cast("B"), targets, sizes, files, offsets[part][wrong], results[wrong])
        return True

    def _batch(
        self,
        reader: BatchReader,
        addresses: Int64Array,
        sizes: Int64Array | int,
        numbers: npt.NDArray[Any] | int,
        offsets: Int64Array,
    ) -> Int64Array | None:
        """What each read gave, or `_WHOLE`; None if they have to be done file by file."""
        try:
            if isinstance(numbers, int):
                file = self._pool.acquire(numbers)  # held while being read, as those below
                if not isinstance(file, LocalFile):
                    return None
                return self._read(reader, file.descriptor, addresses, sizes, offsets)
            different = np.flatnonzero(np.bincount(numbers)).tolist()
            if len(different) > self._pool.limit:
                return None
            files = self._pool.acquire_all(different)
            local = [file.descriptor for file in files if isinstance(file, LocalFile)]
            if len(local) < len(files):
                return None
            descriptors: Int64Array | int = local[0]
            if len(local) > 1:
                by_number = np.zeros(different[-1] + 1, np.int64)
                by_number[different] = local
                descriptors = by_number[numbers]
            return self._read(reader, descriptors, addresses, sizes, offsets)
        except CorpusReadError as error:
            if out_of_descriptors(error):  # too few for all of these files; one by one needs one
                return None
            raise
        except OSError:  # the kernel refuses the call, as for files of some file systems
            self._in_batches = False
            return None

    def _read(
        self,
        reader: BatchReader,
        descriptors: Int64Array | int,
        addresses: Int64Array,
        sizes: Int64Array | int,
        offsets: Int64Array,
    ) -> Int64Array:
        """As `BatchReader.read`, or `_WHOLE`, but a disk is asked for all pieces that are not in memory before one is
        waited for.
        """
        if not self._without_waiting:
            return reader.read(descriptors, addresses, sizes, offsets)
        try:
            results = reader.read(descriptors, addresses, sizes, offsets, waits=False)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise
            self._without_waiting = False  # a file system, or a kernel, that cannot
            return reader.read(descriptors, addresses, sizes, offsets)
        if not np.count_nonzero(results != sizes):
            return _WHOLE
        cold = np.flatnonzero((results == -errno.EAGAIN) | ((results >= 0) & (results < sizes)))
        if len(cold):
            results = results.copy()  # the next call uses the memory again
            all_descriptors, all_sizes = (np.broadcast_to(column, len(results)) for column in (descriptors, sizes))
            columns = all_descriptors[cold], addresses[cold], all_sizes[cold], offsets[cold]
            for descriptor, offset, size in zip(*(columns[place].tolist() for place in (0, 3, 2)), strict=True):
                os.posix_fadvise(descriptor, offset, size, os.POSIX_FADV_WILLNEED)
            results[cold] = reader.read(*columns)
        return results

    def _again(
        self,
        view: memoryview,
        targets: Int64Array,
        sizes: Int64Array,
        numbers: Int64Array,
        offsets: Int64Array,
        results: Int64Array,
    ) -> None:
        """Finish reads of local files that came back short or failed, or raise. Those of a batch wait together."""
        pause = True
        columns = (column.tolist() for column in (targets, sizes, numbers, offsets, results))
        for target, size, number, offset, result in zip(*columns, strict=True):
            file, piece = self._pool.acquire(number), view[target : target + size]
            assert isinstance(file, LocalFile)
            if result >= 0:
                file.finish_read(piece, offset, result)
            else:
                file.finish_read(piece, offset, failure=OSError(-result, os.strerror(-result)), pause=pause)
                pause = False

    def _by_file(
        self, view: memoryview, targets: Int64Array, sizes: Int64Array, numbers: Int64Array, offsets: Int64Array
    ) -> None:
        ranges = list(zip(offsets.tolist(), sizes.tolist(), targets.tolist(), strict=True))
        files, begin = numbers.tolist(), 0
        together: list[tuple[ObjectFile, list[tuple[int, int, int]]]] = []
        while begin < len(files):
            end = begin + 1
            while end < len(files) and files[end] == files[begin]:
                end += 1
            file = self._pool.acquire(files[begin])
            if isinstance(file, ObjectFile):
                together.append((file, ranges[begin:end]))
            else:
                file.read_ranges(ranges[begin:end], view)
            begin = end
        if together:
            read_together(together, view)
