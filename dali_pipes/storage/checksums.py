"""Checksums that a set records of its shards, compared when the user asks for it."""

import hashlib
from collections.abc import Mapping
from typing import Any

from dali_pipes.errors import CorpusFormatError
from dali_pipes.runtime.optional import optional_package
from dali_pipes.storage.byte_file import open_file
from dali_pipes.uris import FilePath

_XXHASH = ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128")
_STEP_BYTES = 1 << 20


def check_file(path: FilePath, size: int, expected: Mapping[str, str]) -> None:
    """Compare the file at `path` with hex digests by algorithm. Reads all of it; blocks.

    Raises CorpusFormatError for a digest that differs or an unknown algorithm, BackendError for a missing package.
    """
    hashes = _start(path, expected)
    with open_file(path) as file:
        for start in range(0, size, _STEP_BYTES):
            piece = file.read(start, min(_STEP_BYTES, size - start))
            for one in hashes.values():
                one.update(piece)
    _compare(path, "", hashes, expected)


def check_content(path: FilePath, content: bytes, expected: Mapping[str, str]) -> None:
    """As `check_file`, for the decompressed content of the file at `path`."""
    hashes = _start(path, expected)
    for one in hashes.values():
        one.update(content)
    _compare(path, " decompressed", hashes, expected)


def _start(path: FilePath, expected: Mapping[str, str]) -> dict[str, Any]:
    return {algorithm: _new_hash(path, algorithm) for algorithm in expected}


def _new_hash(path: FilePath, algorithm: str) -> Any:
    if algorithm in _XXHASH:
        with optional_package("xxhash", "shards", purpose=f"to verify the {algorithm} checksum of {path}"):
            import xxhash
        return getattr(xxhash, algorithm)()
    # Digests of the shake functions have any length, so a whole one cannot be told from a part.
    if algorithm in hashlib.algorithms_available and not algorithm.startswith("shake"):
        return hashlib.new(algorithm, usedforsecurity=False)
    raise CorpusFormatError(
        f"{path}: the index records a checksum of the unknown kind {algorithm!r}. Set verify_checksums = False, or "
        "write the set with another hash."
    )


def _compare(path: FilePath, state: str, hashes: Mapping[str, Any], expected: Mapping[str, str]) -> None:
    for algorithm, digest in expected.items():
        found = hashes[algorithm].hexdigest()
        if found != digest.lower():
            raise CorpusFormatError(
                f"{path}: the {algorithm} of the{state} file is {found}, but the index expects {digest}: the file is "
                "damaged or belongs to another index. Copy it again."
            )
