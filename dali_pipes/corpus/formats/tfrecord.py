"""TFRecord files, as TensorFlow writes them. `record_content` finds out what the records are.

    u64 length   u32 CRC of the length   data   u32 CRC of the data      ... and so on; a file of 0 bytes has no records

The file does not store where records start, so its lengths are followed once, and the offsets are kept. The CRCs are
masked CRC-32C. That scan verifies the CRCs of lengths; decoding records, also to count their ids, verifies both.
Files that are compressed as a whole are refused, because their records cannot be read one by one.
(Format: https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details)
"""

import itertools
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from dali_pipes.corpus.data_file import DataFile, Int64Array
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.corpus.formats.marks import (
    TFRECORD_FRAME_BYTES,
    TFRECORD_HEADER_BYTES,
    TFRECORD_MASK,
    deflate_kind,
    has_tfrecord_frame,
)
from dali_pipes.corpus.formats.records import inspect_records, is_kept
from dali_pipes.errors import CorpusFormatError, CorpusReadError
from dali_pipes.runtime import offset_cache
from dali_pipes.storage.byte_file import ByteFile, open_file
from dali_pipes.storage.crc32c import crc32c
from dali_pipes.storage.fingerprint import digest_content, digest_file, read_samples
from dali_pipes.uris import FilePath

_WINDOW_BYTES = 1 << 16  # longer records are jumped over when lengths are followed
_STREAM_BYTES = 1 << 20


class TFRecords:
    """The records of one file; a `Records`. Holds no descriptor.

    starts: int64 (N + 1,): first byte of each frame, and the size of the file
    """

    def __init__(self, path: FilePath, starts: Int64Array) -> None:
        self.path, self._starts = path, starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, first: int, last: int) -> list[bytes]:
        """As `Records.read`, after comparing the CRCs of lengths and data."""
        starts = self._starts[first : last + 1].tolist()
        if first == last:
            return []
        with open_file(self.path) as file:
            if file.size != self._starts[-1]:
                raise CorpusReadError(
                    f"{self.path}: was replaced or modified after the corpus was opened ({self._starts[-1]:,} bytes "
                    f"then, {file.size:,} now). Open the corpus again."
                )
            data = memoryview(file.read(starts[0], starts[-1] - starts[0]))
        frames = [data[start - starts[0] : end - starts[0]] for start, end in itertools.pairwise(starts)]
        for number, frame in enumerate(frames, first):
            length = int.from_bytes(frame[:8], "little")
            if length != len(frame) - TFRECORD_FRAME_BYTES:
                raise CorpusReadError(
                    f"{self.place(number)}: its length is {length:,} bytes, but was "
                    f"{len(frame) - TFRECORD_FRAME_BYTES:,} when the corpus was opened: the file was modified. "
                    "Open the corpus again."
                )
        return _contents(self.place, first, frames)

    def place(self, number: int) -> str:
        """As `Records.place`."""
        return f"{self.path}: record {number:,} at byte {self._starts[number]:,}"


def inspect(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    """As `inspect_records`. Of a large file the places of records are kept, and checked when records are read."""
    samples = read_samples(file)

    def is_plausible(kept: Int64Array) -> bool:
        return bool(kept[-1] == file.size and offset_cache.may_be_offsets(kept, strictly=True))

    def scan() -> Int64Array:
        return find_starts(file)

    if not is_kept(file.size):
        starts = scan()
    else:
        digest = digest_file(file.path, file.size, np.dtype(np.uint8), b"tfrecord", samples)
        about = f"dali_pipes tfrecord places 1 {digest_content(digest, [file.identity])}".encode()
        starts, _ = offset_cache.find_or_make([file.path], "tfrecord-places", about, is_plausible, scan)
    records = TFRecords(file.path, starts)
    if options.verify:
        with offset_cache.made_anew():  # counting the ids compares all CRCs
            return inspect_records(file, records, "tfrecord", options)
    return inspect_records(file, records, "tfrecord", options)


def find_starts(file: ByteFile) -> Int64Array:
    """First byte of each record, and the size of the file, int64 (N + 1,). Blocks; jumps over long records.

    Raises CorpusFormatError for a length whose CRC differs, and for a last record that is not whole.
    """
    starts, at, size = [0], 0, file.size
    while at < size:
        window, begin = file.read(at, min(_WINDOW_BYTES, size - at)), at
        headers: list[bytes] = []
        while at < size and at - begin + TFRECORD_HEADER_BYTES <= len(window):
            header = window[at - begin : at - begin + TFRECORD_HEADER_BYTES]
            headers.append(header)
            at += int.from_bytes(header[:8], "little") + TFRECORD_FRAME_BYTES
            starts.append(at)
            if at > size:
                break
        first = len(starts) - 1 - len(headers)
        bad = _differing([header[:8] for header in headers], [header[8:] for header in headers])
        if bad is not None:
            number = first + bad
            place = f"{file.path}: record {number:,} at byte {starts[number]:,}"
            raise _bad_length(file.path, place, headers[bad], b"" if number else window)
        if at > size or not headers:
            number = len(starts) - 1 if not headers else len(starts) - 2
            raise _truncated(f"{file.path}: record {number:,} at byte {starts[number]:,}", size - starts[number])
    return np.array(starts, np.int64)


def stream_records(path: FilePath, read: Callable[[int], bytes]) -> Iterator[bytes]:
    """The records of a stream, after comparing all CRCs. Blocks. `read`: the next bytes, fewer at the end.

    Raises CorpusFormatError as `find_starts` and for data whose CRC differs; records are numbered from 1.
    """
    number, at = 1, 0
    starts: list[int] = []
    frames: list[memoryview] = []

    def place(number: int) -> str:
        return f"{path}: record {number:,} at byte {starts[number - 1 - done]:,}"

    done = 0
    while header := read(TFRECORD_HEADER_BYTES):
        starts.append(at)
        if len(header) == TFRECORD_HEADER_BYTES and not has_tfrecord_frame(header):
            raise _bad_length(path, place(number), header, b"" if at else header + read(_WINDOW_BYTES))
        length = int.from_bytes(header[:8], "little")
        rest = read(length + 4) if len(header) == TFRECORD_HEADER_BYTES else b""
        if len(header) + len(rest) < length + TFRECORD_FRAME_BYTES:
            raise _truncated(place(number), len(header) + len(rest))
        frames.append(memoryview(header + rest))
        at += length + TFRECORD_FRAME_BYTES
        number += 1
        if at - starts[0] >= _STREAM_BYTES:
            yield from _contents(place, done + 1, frames)
            done += len(frames)
            starts.clear()
            frames.clear()
    yield from _contents(place, done + 1, frames)


def _contents(place: Callable[[int], str], first: int, frames: Sequence[memoryview]) -> list[bytes]:
    """The data of frames, the first of which is record `first`."""
    contents = [bytes(frame[TFRECORD_HEADER_BYTES:-4]) for frame in frames]
    parts: list[bytes | memoryview] = [frame[:8] for frame in frames]
    bad = _differing([*parts, *contents], [*(frame[8:12] for frame in frames), *(frame[-4:] for frame in frames)])
    if bad is not None:
        number, what = first + bad % len(frames), "its length" if bad < len(frames) else "its data"
        raise CorpusFormatError(
            f"{place(number)}: the checksum of {what} ({len(contents[bad % len(frames)]):,} bytes) differs from the "
            "recorded one: the file is damaged. Copy or recreate it."
        )
    return contents


def _differing(strings: Sequence[bytes | memoryview], recorded: Sequence[bytes | memoryview]) -> int | None:
    """The first string whose masked CRC is not the recorded one, little-endian; None if all are."""
    crcs = crc32c(strings)
    masked = (crcs >> np.uint32(15) | crcs << np.uint32(17)) + np.uint32(TFRECORD_MASK)
    different = np.flatnonzero(masked != np.frombuffer(b"".join(recorded), "<u4"))
    return int(different[0]) if len(different) else None


def _bad_length(path: FilePath, place: str, header: bytes, head: bytes) -> CorpusFormatError:
    kind = deflate_kind(head)
    if kind is not None:
        return CorpusFormatError(
            f"{path}: is {kind} as a whole, but its records must be readable one by one. Decompress it, or write it "
            "without compression."
        )
    return CorpusFormatError(
        f"{place}: the checksum of its length ({int.from_bytes(header[:8], 'little'):,} bytes) differs from the "
        "recorded one: the file is damaged or not a TFRecord file. Copy or recreate it."
    )


def _truncated(place: str, found: int) -> CorpusFormatError:
    return CorpusFormatError(
        f"{place}: the file ends within this record, after {found:,} of its bytes. It is truncated or still being "
        "written; copy or recreate it."
    )
