"""Marks of formats whose modules are imported with the first such file: a few bytes, a name, a file next to it.

    b"PAR1"                   Parquet
    b"ARROW1\\0\\0"          Arrow, as a file; a stream begins with a message
    b"MMIDIDX\\0\\0"         the index of Megatron's pairs
    8 bytes and their CRC     TFRecord

A function `is_x(file, head)` is a `Format.recognize`: `head` has the first 4 KiB.
"""

import re
import struct
import zlib

from dali_pipes.corpus.discovery.shard_sets import kind_of_index
from dali_pipes.storage.byte_file import ByteFile, file_size
from dali_pipes.storage.crc32c import crc32c_of_short

ARRAYRECORD_MAGIC = b"\x83\xaf\x70\xd1\x0d\x88\x4a\x3f"
"""Of Riegeli, the container of ArrayRecord."""
ARROW_MAGIC = b"ARROW1"
ARROW_CONTINUATION = b"\xff\xff\xff\xff"
DATATROVE_SUFFIX = ".ds"
MEGATRON_MAGIC = b"MMIDIDX\0\0"
OLD_MEGATRON_MAGIC = b"TNTIDX\0\0"
PARQUET_MAGIC = b"PAR1"
TFRECORD_HEADER_BYTES, TFRECORD_FRAME_BYTES = 12, 16
TFRECORD_MASK = 0xA282EAD8

_TFRECORD_NAME = re.compile(r"\.tfrecords?(?:$|[-._])", re.IGNORECASE)


def is_mds(file: ByteFile, head: bytes) -> bool:
    """Whether it is the index of a set of MDS shards."""
    return kind_of_index(file.path) == "mds"


def is_litdata(file: ByteFile, head: bytes) -> bool:
    """Whether it is the index of a set of LitData chunks."""
    return kind_of_index(file.path) == "litdata"


def is_megatron(file: ByteFile, head: bytes) -> bool:
    """Whether a file starts as the index of a pair does."""
    return head.startswith(MEGATRON_MAGIC)


def has_index_beside(file: ByteFile) -> bool:
    """Whether a file is one of a pair by its name; better an error that names a damaged index than junk ids."""
    path = file.path
    return path.suffix == ".idx" or (path.suffix == ".bin" and file_size(path.with_suffix(".idx")) is not None)


def is_parquet(file: ByteFile, head: bytes) -> bool:
    """Whether a file starts as Parquet does."""
    return head.startswith(PARQUET_MAGIC)


def is_whole_parquet(file: ByteFile) -> bool:
    """Whether the file ends as Parquet does."""
    return file.read(max(0, file.size - len(PARQUET_MAGIC)), min(file.size, len(PARQUET_MAGIC))) == PARQUET_MAGIC


def is_arrow(file: ByteFile, head: bytes) -> bool:
    """Whether a file starts as an Arrow file or stream does."""
    return head.startswith(ARROW_MAGIC + b"\0\0") or is_arrow_stream(file, head)


def is_arrow_stream(file: ByteFile, head: bytes) -> bool:
    """Whether a file starts with a message of Arrow IPC, as the files do that Hugging Face datasets save."""
    if len(head) < 12 or not head.startswith(ARROW_CONTINUATION):
        return False
    length, root = struct.unpack_from("<iI", head, 4)
    return bool(0 < length <= file.size - 8 and length % 8 == 0 and 0 < root < length)


def is_whole_arrow(file: ByteFile) -> bool:
    """Whether it is a file, not a stream, with an end that goes with its start."""
    tail = file.read(max(0, file.size - len(ARROW_MAGIC)), min(file.size, len(ARROW_MAGIC)))
    return file.read(0, min(file.size, len(ARROW_MAGIC))) == tail == ARROW_MAGIC


def is_arrayrecord(file: ByteFile, head: bytes) -> bool:
    """Whether a file starts as Riegeli does."""
    return head.startswith(ARRAYRECORD_MAGIC)


def is_tfrecord(file: ByteFile, head: bytes) -> bool:
    """Whether a file starts with a length and its CRC, or is compressed and named as TFRecord files are."""
    return has_tfrecord_frame(head) or (is_named_tfrecord(file) and deflate_kind(head) is not None)


def has_tfrecord_frame(head: bytes) -> bool:
    """Whether the first bytes are a length and its CRC."""
    if len(head) < TFRECORD_HEADER_BYTES:
        return False
    crc = crc32c_of_short(head[:8])
    masked = ((crc >> 15 | crc << 17) + TFRECORD_MASK) & 0xFFFFFFFF
    return masked == int.from_bytes(head[8:TFRECORD_HEADER_BYTES], "little")


def is_named_tfrecord(file: ByteFile) -> bool:
    """Whether a file is named as TFRecord files are. It may be empty or damaged."""
    return _TFRECORD_NAME.search(file.path.name) is not None


def is_whole_tfrecord(file: ByteFile) -> bool:
    """Whether there is a whole record at its start."""
    head = file.read(0, min(file.size, TFRECORD_HEADER_BYTES))
    return has_tfrecord_frame(head) and int.from_bytes(head[:8], "little") <= file.size - TFRECORD_FRAME_BYTES


def deflate_kind(head: bytes) -> str | None:
    """How a file with this start is compressed, None for other content or other methods than gzip and zlib."""
    if head[:3] == b"\x1f\x8b\x08":
        name, window = "compressed with gzip", 31
    elif head[:2] in (b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda"):
        name, window = "compressed with zlib", 15
    else:
        return None
    inflater = zlib.decompressobj(window)
    try:
        plain = inflater.decompress(head, 1024)
    except zlib.error:
        return None
    return name if plain or inflater.eof else None
