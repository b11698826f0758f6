"""The bytes of a file, decompressed, chunk by chunk, in bounded memory.

gzip files may have several members, zstd files several frames and skippable ones; none needs to state its size. A file
that ends inside of one is an error, not a shorter file.
"""

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

from dali_pipes.errors import CorpusFormatError, CorpusReadError
from dali_pipes.runtime.optional import optional_package

Compression: TypeAlias = Literal["", "gzip", "zstd"]

_READ_BYTES = 256 << 10
_MOST_PLAIN_BYTES = 4 << 20  # what one step of inflating may give: a small file may hold gigabytes of zeros
_ZSTD_READ_BYTES = 32 << 10  # zstd has no such limit; 128 KiB of zeros take 4 bytes of a frame
_GZIP_WINDOW = 31


class ByteMeter:
    """How many bytes of the inputs were read so far, as they lie on the disk."""

    def __init__(self) -> None:
        self.done = 0


def read_chunks(path: Path, compression: Compression, meter: ByteMeter) -> Iterator[bytes]:
    """Chunks of the plain bytes, none empty. Blocks; reading and decompressing release the GIL.

    Raises CorpusReadError for what cannot be read, CorpusFormatError for damaged or cut off data, BackendError for zstd
    without its library.
    """
    if compression == "gzip":
        return _inflated(path, _read(path, meter, _READ_BYTES))
    if compression == "zstd":
        return _unpacked(path, _read(path, meter, _ZSTD_READ_BYTES), zstd_frames())
    return _read(path, meter, _READ_BYTES)


class ChunkReader:
    """Chunks as a file that can be read from start to end."""

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


def zstd_frames() -> Callable[[], Any]:
    """Makes an object that unpacks one zstd frame. BackendError without the library."""
    with optional_package("zstandard", "text", purpose="to read files compressed with zstd"):
        import zstandard
    # Frames made with --long ask for more than the 128 MiB that are allowed by default.
    return zstandard.ZstdDecompressor(max_window_size=2**31).decompressobj


def _read(path: Path, meter: ByteMeter, count: int) -> Iterator[bytes]:
    try:
        with path.open("rb", buffering=0) as file:
            while chunk := os.read(file.fileno(), count):
                meter.done += len(chunk)
                yield chunk
    except OSError as error:
        raise CorpusReadError(f"{path}: cannot be read: {error.strerror or error}") from error


def _inflated(path: Path, chunks: Iterator[bytes]) -> Iterator[bytes]:
    member = zlib.decompressobj(_GZIP_WINDOW)
    number, is_inside = 1, False
    for chunk in chunks:
        data = chunk
        while data:
            if not is_inside and number > 1:
                data = data.lstrip(b"\0")  # tapes and some tools pad files with zeros
                if not data:
                    break
            is_inside = True
            try:
                plain = member.decompress(data, _MOST_PLAIN_BYTES)
            except zlib.error as error:
                raise CorpusFormatError(f"{path}: gzip member {number} is damaged: {error}") from error
            if plain:
                yield plain
            data = member.unconsumed_tail
            if member.eof:
                data = member.unused_data
                member, number, is_inside = zlib.decompressobj(_GZIP_WINDOW), number + 1, False
    if is_inside:
        raise CorpusFormatError(f"{path}: ends inside of gzip member {number}: it is cut off. Make or copy it again.")


def _unpacked(path: Path, chunks: Iterator[bytes], new_frame: Callable[[], Any]) -> Iterator[bytes]:
    import zstandard

    frame, number, is_inside = new_frame(), 1, False
    for chunk in chunks:
        data = chunk
        while data:
            is_inside = True
            try:
                plain = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise CorpusFormatError(f"{path}: zstd frame {number} is damaged: {error}") from error
            if plain:
                yield plain
            data = b""
            if frame.eof:
                data = frame.unused_data
                frame, number, is_inside = new_frame(), number + 1, False
    if is_inside:
        raise CorpusFormatError(f"{path}: ends inside of zstd frame {number}: it is cut off. Make or copy it again.")
