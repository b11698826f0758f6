"""The bytes of a file, decompressed, chunk by chunk, in bounded memory.

gzip files may have several members, zstd files several frames and skippable ones, without stating their size. A file
that ends inside one is an error, not a shorter file.
"""

import os
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from dali_pipes.errors import CorpusFormatError, CorpusReadError
from dali_pipes.runtime.optional import optional_package
from dali_pipes.storage.byte_file import open_file
from dali_pipes.uris import FilePath, Uri

Compression: TypeAlias = Literal["", "gzip", "zstd"]

_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd")

_READ_BYTES = 256 << 10
_MOST_REQUESTED_BYTES = 32 << 20  # of an object, in several requests together; the first ones ask for less
_MOST_PLAIN_BYTES = 4 << 20  # from one step: a small file may hold gigabytes of zeros
_ZSTD_READ_BYTES = 32 << 10  # zstd has no such limit; 128 KiB of zeros take 4 bytes of a frame
_GZIP_WINDOW = 31


def compression_of(head: bytes) -> Compression:
    """The compression of a file, by its first bytes."""
    if head.startswith(b"\x1f\x8b\x08"):
        return "gzip"
    is_skippable_frame = head[1:4] == b"\x2a\x4d\x18" and 0x50 <= head[0] <= 0x5F
    return "zstd" if head.startswith(b"\x28\xb5\x2f\xfd") or is_skippable_frame else ""


def suffix_inside(path: FilePath) -> str:
    """The suffix of a file in lower case, without that of its compression or a number: .csv for rows.csv.gz.1."""
    suffixes = [suffix.lower() for suffix in Path(path.name).suffixes]
    while suffixes and suffixes[-1][1:].isdigit():
        suffixes.pop()
    if suffixes and suffixes[-1] in _SUFFIXES:
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


class ByteMeter:
    """How many bytes of the inputs were read so far, as they are on disk."""

    def __init__(self) -> None:
        self.done = 0


def read_chunks(
    path: FilePath, compression: Compression, meter: ByteMeter, known: tuple[int, str] | None = None
) -> Iterator[bytes]:
    """Decompressed chunks, none empty. Blocks; reading and decompressing release the GIL.

    known: size and identity of an object; then every read of it is compared with them. Not used for local files.

    Raises CorpusReadError for a file that cannot be read, CorpusFormatError for damaged or truncated data, BackendError
    for zstd without its package.
    """
    if compression == "gzip":
        return _decompressed(path, _read(path, meter, _READ_BYTES, known), _gzip())
    if compression == "zstd":
        return _decompressed(path, _read(path, meter, _ZSTD_READ_BYTES, known), _zstd())
    return _read(path, meter, _READ_BYTES, known)


class ChunkReader:
    """Chunks as a file that is read once, from start to end."""

    def __init__(self, chunks: Iterator[bytes]) -> None:
        self._chunks = chunks
        self._rest = b""

    def read(self, count: int) -> bytes:
        """The next `count` bytes, fewer at the end."""
        pieces, missing = [], count
        while missing > 0:
            if not self._rest:
                self._rest = next(self._chunks, b"")
                if not self._rest:
                    break
            piece = self._rest[:missing]
            self._rest = self._rest[missing:]
            pieces.append(piece)
            missing -= len(piece)
        return b"".join(pieces)


class _Decompression(NamedTuple):
    """How to decompress. part: what a file consists of, each with an object of `new`. padding: may follow a part."""

    part: str
    new: Callable[[], Any]
    error: type[Exception]
    limit: tuple[int, ...] = ()
    padding: bytes = b""


def _gzip() -> _Decompression:
    # Tapes and some tools pad files with zeros.
    new = partial(zlib.decompressobj, _GZIP_WINDOW)
    return _Decompression("gzip member", new, zlib.error, (_MOST_PLAIN_BYTES,), b"\0")


def _zstd() -> _Decompression:
    with optional_package("zstandard", "text", purpose="to read files compressed with zstd"):
        import zstandard
    # Frames made with --long ask for more than the 128 MiB that are allowed by default.
    decompressor = zstandard.ZstdDecompressor(max_window_size=2**31)
    return _Decompression("zstd frame", decompressor.decompressobj, zstandard.ZstdError)


def _read(path: FilePath, meter: ByteMeter, count: int, known: tuple[int, str] | None) -> Iterator[bytes]:
    if isinstance(path, Uri):
        yield from _read_object(path, meter, count, known)
        return
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := os.read(file.fileno(), count):
                meter.done += len(chunk)
                yield chunk
    except OSError as error:
        raise CorpusReadError(f"{path}: cannot be read: {error.strerror or error}") from error


def _read_object(uri: Uri, meter: ByteMeter, count: int, known: tuple[int, str] | None) -> Iterator[bytes]:
    with open_file(uri, known=known) as file:
        at, step = 0, count
        while at < file.size:
            data = file.read(at, min(step, file.size - at))
            for begin in range(0, len(data), count):
                chunk = data[begin : begin + count]
                meter.done += len(chunk)
                yield chunk
            at, step = at + len(data), min(4 * step, _MOST_REQUESTED_BYTES)


def _decompressed(path: FilePath, chunks: Iterator[bytes], method: _Decompression) -> Iterator[bytes]:
    part, number, is_inside = method.new(), 1, False
    for chunk in chunks:
        data = chunk
        while data:
            if not is_inside and number > 1:
                data = data.lstrip(method.padding)
                if not data:
                    break
            is_inside = True
            try:
                plain = part.decompress(data, *method.limit)
            except method.error as error:
                raise CorpusFormatError(
                    f"{path}: {method.part} {number} is damaged ({error}); copy or recreate the file"
                ) from error
            if plain:
                yield plain
            data = part.unconsumed_tail
            if part.eof:
                data = part.unused_data
                part, number, is_inside = method.new(), number + 1, False
    if is_inside:
        raise CorpusFormatError(f"{path}: ends inside {method.part} {number}: it is truncated; copy or recreate it")
