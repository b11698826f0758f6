"""Token files of llm.c and modded-nanogpt.

    byte 0            4          8             12           1024
    i32  magic        version    number of ids   zeros ...  ids, back to back
    GPT-2    20240520   1                                   uint16
    Llama-3  20240801   7                                   uint32

Files are little-endian. Magic and version together decide the width of an id; no other pair is known.
"""

import struct
from typing import Any

import numpy as np

from dali_pipes.corpus.data_file import Layout
from dali_pipes.errors import CorpusFormatError
from dali_pipes.storage.local import OpenFile

HEADER_BYTES = 1024
EVALUATION_MAGIC = 20240522
_STORED: dict[tuple[int, int], np.dtype[Any]] = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
MAGICS = frozenset(magic for magic, _ in _STORED) | {EVALUATION_MAGIC}


def parse_llmc(file: OpenFile) -> Layout:
    """Where the ids are. Raises CorpusFormatError for another kind of header, or a size that disagrees with it."""
    if file.size < HEADER_BYTES:
        raise CorpusFormatError(
            f"{file.path}: {file.size} bytes, but an llm.c file starts with a header of {HEADER_BYTES} bytes: "
            f"the file is truncated"
        )
    magic, version, count = struct.unpack("<3i", file.read(0, 12))
    if magic == EVALUATION_MAGIC:
        raise CorpusFormatError(
            f"{file.path}: is an llm.c multiple-choice evaluation file (magic {magic}), not a stream of tokens"
        )
    stored = _STORED.get((magic, version))
    if stored is None:
        known = ", ".join(f"{pair[0]} version {pair[1]} ({dtype.name})" for pair, dtype in _STORED.items())
        raise CorpusFormatError(
            f"{file.path}: llm.c header with magic {magic} and version {version}; known are {known}. "
            f"If the file has no header, say format='flat'."
        )
    if count < 0:
        raise CorpusFormatError(f"{file.path}: the llm.c header claims {count} ids: the header is damaged")
    expected = HEADER_BYTES + count * stored.itemsize
    if file.size != expected:
        raise CorpusFormatError(
            f"{file.path}: the llm.c header claims {count} ids of {stored.itemsize} bytes, so {expected} bytes are "
            f"expected, but the file has {file.size}: it is truncated, or was rewritten. Make or copy it again."
        )
    return Layout(stored, HEADER_BYTES, count)
