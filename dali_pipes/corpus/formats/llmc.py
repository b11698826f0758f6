"""Token files of llm.c and modded-nanogpt.

    byte 0            4          8             12           1024
    i32  magic        version    number of ids   zeros ...  ids, back to back
    GPT-2    20240520   1                                   uint16
    Llama-3  20240801   7                                   uint32

Files are little-endian. Magic and version together decide the width of an id; other pairs are refused.
"""

import struct
from typing import Any

import numpy as np

from dali_pipes.corpus.data_file import DataFile
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.corpus.formats.token_run import Layout, check_stated_type, token_run
from dali_pipes.errors import CorpusFormatError
from dali_pipes.storage.byte_file import ByteFile

HEADER_BYTES = 1024
EVALUATION_MAGIC = 20240522
_STORED: dict[tuple[int, int], np.dtype[Any]] = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
MAGICS = frozenset(magic for magic, _ in _STORED) | {EVALUATION_MAGIC}


def recognize(file: ByteFile, head: bytes) -> bool:
    """Whether a file starts as these do."""
    return len(head) >= 8 and struct.unpack_from("<i", head)[0] in MAGICS


def is_whole(file: ByteFile) -> bool:
    """Whether header and size agree."""
    try:
        parse_llmc(file)
    except CorpusFormatError:
        return False
    return True


def inspect(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    """As `Format.inspect`."""
    layout = parse_llmc(file)
    check_stated_type(file.path, "llmc", layout.stored, options.id_type)
    return [token_run(file, "llmc", layout)]


def parse_llmc(file: ByteFile) -> Layout:
    """Where the ids are. Raises CorpusFormatError for another kind of header, or a size that disagrees with it."""
    if file.size < HEADER_BYTES:
        raise CorpusFormatError(
            f"{file.path}: has {file.size:,} bytes, fewer than the header of an llm.c file ({HEADER_BYTES:,}): it is "
            "truncated. Copy or recreate it."
        )
    magic, version, count = struct.unpack("<3i", file.read(0, 12))
    if magic == EVALUATION_MAGIC:
        raise CorpusFormatError(
            f"{file.path}: is a multiple-choice evaluation file of llm.c (magic {magic}), not a stream of tokens"
        )
    stored = _STORED.get((magic, version))
    if stored is None:
        known = ", ".join(f"{pair[0]} version {pair[1]} ({dtype.name})" for pair, dtype in _STORED.items())
        raise CorpusFormatError(
            f"{file.path}: has an llm.c header with magic {magic} and version {version}; expected {known}. If it "
            "contains only ids, set format = 'flat'."
        )
    if count < 0:
        raise CorpusFormatError(f"{file.path}: the llm.c header claims {count:,} ids: it is damaged. Recreate it.")
    expected = HEADER_BYTES + count * stored.itemsize
    if file.size != expected:
        raise CorpusFormatError(
            f"{file.path}: expected {expected:,} bytes for the {count:,} ids ({stored.name}) in the llm.c header, but "
            f"the file has {file.size:,}: it is truncated or was rewritten. Copy or recreate it."
        )
    return Layout(stored, HEADER_BYTES, count)
