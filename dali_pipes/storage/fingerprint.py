"""Fingerprints of corpora: names, sizes, headers and some bytes of their files; never folders or times.

A file gives at most six pieces of 4 KiB, so a fingerprint costs a few reads a file, whatever its size:

    bytes    0 ...                                                                             size
             [first]        [3]              [1]                 [4]             [2]         [last]

The inner places are multiples of the golden ratio, wrapped to the size: fixed, and spread evenly.
A file of at most 24 KiB is taken whole.

A change between the pieces goes unnoticed. So whatever was found by reading a whole file is cached under the file's
identity as well (`digest_content`): a rewritten file is read again, and so is a copy with another time.
"""

import hashlib
import itertools
import os
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from dali_pipes.storage.byte_file import ByteFile
from dali_pipes.uris import FilePath

MOST_DIGESTS = 24
MOST_MASK_DIGESTS = 12  # what a saved state has room for
PIECE_BYTES = 4096
_INNER_PIECES = 4
_GOLDEN_RATIO_64 = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio


def sample_places(size: int) -> list[tuple[int, int]]:
    """(byte, count) of the pieces that stand for a file of `size` bytes, in rising order; starts are multiples of 8."""
    if size <= PIECE_BYTES * (_INNER_PIECES + 2):
        return [(0, size)] if size else []
    room = size - PIECE_BYTES
    inner = [(place * _GOLDEN_RATIO_64 % 2**64 * room >> 64) // 8 * 8 for place in range(1, _INNER_PIECES + 1)]
    last = room // 8 * 8
    return [(start, PIECE_BYTES) for start in sorted([0, *inner])] + [(last, size - last)]


def read_samples(file: ByteFile) -> list[bytes]:
    """The bytes at `sample_places`. Blocks."""
    places = sample_places(file.size)
    ends = list(itertools.accumulate(count for _, count in places))
    data = bytearray(ends[-1] if ends else 0)
    ranges = [(start, count, end - count) for (start, count), end in zip(places, ends, strict=True)]
    file.read_ranges(ranges, memoryview(data))
    return [bytes(data[place : place + count]) for _, count, place in ranges]


def digest_file(path: FilePath, size: int, stored: np.dtype[Any], header: bytes, samples: Sequence[bytes]) -> bytes:
    """SHA-256 of one file's name, size, id type, header and samples. `header`: whatever else identifies it."""
    digest = hashlib.sha256()
    for part in (os.fsencode(path.name), struct.pack("<Q", size), stored.str.encode(), header, *samples):
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.digest()


def digest_corpus(format: str, dtype: np.dtype[Any], file_digests: Sequence[bytes]) -> str:
    """16 hex digits for the whole corpus: its format, id type, and its files in their order, then their masks."""
    digest = hashlib.sha256(f"dali_pipes corpus 1 {format} {dtype.name} {len(file_digests)} ".encode())
    for file_digest in file_digests:
        digest.update(file_digest)
    return digest.hexdigest()[:16]


def digest_content(digest: bytes, identities: Sequence[str | None]) -> str:
    """16 hex digits of a digest and of the files' identities: the key of what was found by reading them.

    None: not known.
    """
    return hashlib.sha256(digest + b" changed at " + " ".join(map(str, identities)).encode()).hexdigest()[:16]


def short_digests(file_digests: Sequence[bytes], most: int = MOST_DIGESTS) -> tuple[str, ...]:
    """8 hex digits for each file; for more than `most` files, for each run of ceil(files / most) consecutive ones."""
    run = -(-len(file_digests) // most)
    if run <= 1:
        return tuple(digest.hex()[:8] for digest in file_digests)
    starts = range(0, len(file_digests), run)
    return tuple(hashlib.sha256(b"".join(file_digests[at : at + run])).hexdigest()[:8] for at in starts)
