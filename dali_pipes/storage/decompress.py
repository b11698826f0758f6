"""Decompress whole files in memory, never to more bytes than their index says."""

import bz2
import gzip
import io
import zlib
from collections.abc import Callable
from typing import Any

from dali_pipes.errors import CorpusFormatError
from dali_pipes.runtime.optional import optional_package
from dali_pipes.storage.byte_file import open_file
from dali_pipes.uris import FilePath

SUFFIXES = ("zstd", "gz", "bz2", "br", "snappy")
"""The compressions that can be read, by the names that MDS and LitData use."""
_STEP_BYTES = 1 << 20
_MOST_BYTES_FOR_ONE = {"zstd": 1 << 15, "gz": 1 << 11, "bz2": 1 << 21, "br": 1 << 21, "snappy": 22}
"""Upper bounds of compression ratios: 4 bytes of zstd, for one, are a block of at most 128 KiB."""
_OF_CRAMJAM = ("br", "snappy")


def check_method(method: str, where: str) -> str:
    """The suffix of files compressed by `method`, which may say a level (`zstd:7`): one of `SUFFIXES`.

    Raises CorpusFormatError naming `where` for another one, BackendError if the package that it takes is missing.
    """
    suffix = method.split(":")[0]
    if suffix not in SUFFIXES:
        raise CorpusFormatError(
            f"{where} is {method!r}; expected one of {', '.join(SUFFIXES)}. Decompress the shards, or write them again."
        )
    if suffix == "zstd":
        _open_zstd(io.BytesIO())
    elif suffix in _OF_CRAMJAM:
        _cramjam(suffix)
    return suffix


def check_claim(path: FilePath, suffix: str, size: int, inflated_bytes: int, where: str) -> None:
    """Raise CorpusFormatError if a file of `size` bytes cannot decompress to as many as `where`, its index, claims.

    The claim says how many ids there are before anything is decompressed.
    """
    if inflated_bytes > size * _MOST_BYTES_FOR_ONE[suffix]:
        raise CorpusFormatError(
            f"{path}: {size:,} bytes of {suffix} cannot decompress to {inflated_bytes:,} bytes, as {where} claims: the "
            "index is damaged or belongs to other files. Copy the set again."
        )


def inflate(path: FilePath, suffix: str, size: int, inflated_bytes: int) -> bytes:
    """The content of the file at `path`, which has `size` bytes and `inflated_bytes` when decompressed. Blocks.

    Memory: both. Raises CorpusFormatError for damaged data or another size, CorpusReadError if it cannot be read.
    """
    with open_file(path) as file:
        if file.size != size:
            raise CorpusFormatError(
                f"{path}: was replaced or modified after the corpus was opened ({size:,} bytes then, {file.size:,} "
                "now). Open the corpus again."
            )
        packed = io.BytesIO(file.read(0, size))
    return inflate_bytes(packed, path, suffix, inflated_bytes)


def inflate_bytes(packed: io.BytesIO, path: FilePath, suffix: str, inflated_bytes: int) -> bytes:
    """As `inflate`, of bytes that were read from `path`."""
    content = bytearray()
    try:
        if suffix in _OF_CRAMJAM:
            return _inflated_by_cramjam(packed.getvalue(), suffix, inflated_bytes)
        with _OPENERS[suffix](packed) as stream:
            # One byte more than there should be, which tells of too many without taking them.
            while len(content) <= inflated_bytes:
                step = stream.read(min(_STEP_BYTES, inflated_bytes + 1 - len(content)))
                if not step:
                    break
                content += step
    except _failures(suffix) as error:
        raise CorpusFormatError(
            f"{path}: cannot be decompressed ({suffix}) to {inflated_bytes:,} bytes, as its index expects: {error}. "
            "Copy it again."
        ) from error
    if len(content) != inflated_bytes:
        found = "more bytes" if len(content) > inflated_bytes else f"{len(content):,} bytes"
        raise CorpusFormatError(
            f"{path}: decompresses to {found}, but its index expects {inflated_bytes:,} bytes: the file is truncated "
            "or belongs to another index. Copy it again."
        )
    return bytes(content)


def _open_gzip(packed: io.BytesIO) -> Any:
    return gzip.GzipFile(fileobj=packed)


def _open_zstd(packed: io.BytesIO) -> Any:
    with optional_package("zstandard", "shards", purpose="to read shards compressed with zstd"):
        import zstandard
    return zstandard.ZstdDecompressor().stream_reader(packed, read_across_frames=True)


def _inflated_by_cramjam(packed: bytes, suffix: str, inflated_bytes: int) -> bytes:
    """It fills memory of the right size, so more than the index says is an error and not written anywhere.

    Snappy: the raw format, without frames, as MosaicML Streaming writes it.
    """
    cramjam, content = _cramjam(suffix), bytearray(inflated_bytes)
    inflate_into = cramjam.brotli.decompress_into if suffix == "br" else cramjam.snappy.decompress_raw_into
    count = inflate_into(packed, content)
    if count != inflated_bytes:
        raise EOFError(f"it ends after {count:,} bytes")
    return bytes(content)


def _cramjam(suffix: str) -> Any:
    with optional_package("cramjam", "shards", purpose=f"to read shards compressed with {suffix}"):
        import cramjam
    return cramjam


def _failures(suffix: str) -> tuple[type[Exception], ...]:
    """What damaged data may raise."""
    if suffix in _OF_CRAMJAM:
        return EOFError, _cramjam(suffix).DecompressionError
    if suffix != "zstd":
        return OSError, EOFError, ValueError, zlib.error
    import zstandard

    return (zstandard.ZstdError,)


_OPENERS: dict[str, Callable[[io.BytesIO], Any]] = {"zstd": _open_zstd, "gz": _open_gzip, "bz2": bz2.BZ2File}
