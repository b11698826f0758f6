"""Megatron-Core and fairseq pairs of a `.bin` file (ids alone) and an `.idx` file that says where sequences are.

    byte 0            9          17            18             26             34
    MMIDIDX 0 0       u64 = 1    u8 type code  u64 S          u64 D          i32 x S lengths, in ids
                                                                             i64 x S pointers, bytes into .bin
                                                                             i64 x D documents, sequence numbers
                                                                             i8  x S modes (multimodal sets only)

Document k is the sequences [documents[k], documents[k + 1]); equal neighbours are a document without tokens. fairseq
has neither D nor documents (lengths start at byte 26); the size of the file tells the two apart. The tokens of the
corpus are those of sequence 0, 1, 2 ... where the pointers say they are: see `megatron_extents`.
"""

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from dali_pipes.corpus.data_file import DataFile, Int64Array
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.corpus.formats.marks import MEGATRON_MAGIC, OLD_MEGATRON_MAGIC
from dali_pipes.corpus.formats.megatron_extents import SequenceBlock, build_extents
from dali_pipes.corpus.formats.token_run import check_stated_type
from dali_pipes.errors import CorpusFormatError, CorpusReadError
from dali_pipes.storage.byte_file import ByteFile, open_file
from dali_pipes.storage.fingerprint import digest_file, read_samples
from dali_pipes.uris import FilePath

_STORED = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2", 9: "<u4", 10: "<u8"}
_FLOATS = (6, 7)
_BLOCK_ENTRIES = 1 << 20  # bounds the memory that checking an index takes, whatever its size


@dataclass(frozen=True)
class IndexHeader:
    """The fixed part of an index, after a check with the file's size. document_entries: None in fairseq's layout."""

    stored: np.dtype[Any]
    num_sequences: int
    document_entries: int | None
    lengths_offset: int

    @property
    def pointers_offset(self) -> int:
        """Byte of the first sequence pointer."""
        return self.lengths_offset + 4 * self.num_sequences

    @property
    def documents_offset(self) -> int:
        """Byte of the first document entry."""
        return self.lengths_offset + 12 * self.num_sequences

    @property
    def num_documents(self) -> int | None:
        """Documents, empty ones included; None in fairseq's layout."""
        return None if self.document_entries is None else self.document_entries - 1


@dataclass(frozen=True)
class MegatronIndex:
    """A checked index. `checksums`: CRC-32 of lengths, pointers, documents.

    extents: int64 (E, 2): [first byte in .bin, number of ids] of each run of ids, in reading order, none empty
    """

    path: FilePath
    size: int
    header: IndexHeader
    extents: Int64Array
    checksums: tuple[int, int, int]


def inspect(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    """As `Format.inspect`, for the pair that a `.bin` or `.idx` belongs to."""
    if file.path.suffix not in (".bin", ".idx"):
        raise CorpusFormatError(
            f"{file.path}: a file of format megatron must be named .bin or .idx, with the other file of the pair next "
            "to it"
        )
    with open_file(file.path.with_suffix(".idx")) as index_file:
        header = parse_header(index_file)
        check_stated_type(index_file.path, "megatron", header.stored, options.id_type)
        with open_file(file.path.with_suffix(".bin")) as bin_file:
            index = read_index(index_file, header, bin_file)
            about_index = struct.pack("<Q3I", index.size, *index.checksums)
            found = DataFile(
                path=bin_file.path,
                format="megatron",
                size=bin_file.size,
                identity=bin_file.identity,
                stored=header.stored,
                data_offset=0,
                extents=index.extents,
                digest=digest_file(bin_file.path, bin_file.size, header.stored, about_index, read_samples(bin_file)),
                num_documents=header.num_documents,
                read_document_offsets=None if header.num_documents is None else partial(read_document_offsets, index),
            )
    return [found]


def parse_header(file: ByteFile) -> IndexHeader:
    """Raises CorpusFormatError for another kind of file, an unsupported index, or a size that disagrees."""
    if file.size < 26:
        raise CorpusFormatError(
            f"{file.path}: has {file.size:,} bytes, but a Megatron index has a header of at least 26 bytes: it is "
            "empty or half written. Copy or recreate it; to read the .bin file alone, set format = 'flat' and dtype."
        )
    magic, version, code, sequences = struct.unpack("<9sQBQ", file.read(0, 26))
    if magic.startswith(OLD_MEGATRON_MAGIC):
        raise CorpusFormatError(
            f"{file.path}: is an index of old fairseq or Megatron (TNTIDX), which is not supported. Make the data "
            "again as an 'mmap' dataset."
        )
    if magic != MEGATRON_MAGIC:
        raise CorpusFormatError(
            f"{file.path}: does not start with MMIDIDX, so it is not a Megatron index. If the .bin file next to it "
            "contains only ids, set format = 'flat' and dtype."
        )
    if version != 1:
        raise CorpusFormatError(f"{file.path}: has Megatron index version {version}; expected 1")
    if code not in _STORED:
        kind = "means floating-point numbers" if code in _FLOATS else "is unknown"
        raise CorpusFormatError(
            f"{file.path}: type code {code} {kind}; expected a code of integers: {', '.join(map(str, sorted(_STORED)))}"
        )
    stored = np.dtype(_STORED[code])
    if file.size == 26 + 12 * sequences:
        return IndexHeader(stored, sequences, None, 26)
    entries = int.from_bytes(file.read(26, 8), "little") if file.size >= 34 else 0
    expected = 34 + 12 * sequences + 8 * entries
    if file.size not in (expected, expected + sequences):
        raise CorpusFormatError(
            f"{file.path}: expected {expected:,} bytes ({expected + sequences:,} with modes) for {sequences:,} "
            f"sequences and {entries:,} document entries, but the index has {file.size:,}: it is truncated, half "
            "written or damaged. Copy or recreate it."
        )
    if entries == 0:
        raise CorpusFormatError(f"{file.path}: the document index is empty; expected at least one entry, 0")
    return IndexHeader(stored, sequences, entries, 34)


def read_index(file: ByteFile, header: IndexHeader, bin_file: ByteFile) -> MegatronIndex:
    """Read and check an index against its `.bin`. Blocks; needs memory for its extents and one block of entries.

    Raises CorpusFormatError, naming file and entry, for an index that is damaged or disagrees with the `.bin`.
    """
    checksums = [0, 0]
    blocks = _sequence_blocks(file, header, checksums)
    extents = build_extents(blocks, header.stored.itemsize, file.path, bin_file.path, bin_file.size)
    documents_checksum = _check_documents(file, header)
    return MegatronIndex(file.path, file.size, header, extents, (checksums[0], checksums[1], documents_checksum))


def read_document_offsets(index: MegatronIndex) -> Int64Array:
    """Token position of each document's start, and the end: int64 (num_documents + 1,). Reads the index again; blocks.

    Raises CorpusReadError if the index is not the one that was checked.
    """
    changed = CorpusReadError(f"{index.path}: changed after the corpus was opened. Open the corpus again.")
    with open_file(index.path) as file:
        if file.size != index.size or parse_header(file) != index.header:
            raise changed
        header = index.header
        assert header.document_entries is not None
        data = file.read(header.documents_offset, 8 * header.document_entries)
        if zlib.crc32(data) != index.checksums[2]:
            raise changed
        documents = np.frombuffer(data, "<i8")
        offsets = np.zeros(len(documents), np.int64)
        tokens, checksum = 0, 0
        for first, lengths in _blocks(file, header.lengths_offset, header.num_sequences, "<i4"):
            checksum = zlib.crc32(lengths.data, checksum)
            # ends[i]: tokens up to the end of sequence first + i
            ends = tokens + np.cumsum(lengths, dtype=np.int64)
            begin, end = np.searchsorted(documents, [first, first + len(lengths)], side="right")
            offsets[begin:end] = ends[documents[begin:end] - first - 1]
            tokens = int(ends[-1])
        if checksum != index.checksums[0]:
            raise changed
        return offsets


def _blocks(file: ByteFile, offset: int, count: int, code: str) -> Iterator[tuple[int, npt.NDArray[Any]]]:
    """(number of its first entry, entries) of each block of an array of `count` entries at byte `offset`."""
    width = np.dtype(code).itemsize
    for first in range(0, count, _BLOCK_ENTRIES):
        entries = min(_BLOCK_ENTRIES, count - first)
        yield first, np.frombuffer(file.read(offset + first * width, entries * width), code)


def _sequence_blocks(file: ByteFile, header: IndexHeader, checksums: list[int]) -> Iterator[SequenceBlock]:
    """The sequences, block by block. `checksums` becomes the CRC-32 of the lengths and of the pointers so far."""
    count = header.num_sequences
    length_blocks = _blocks(file, header.lengths_offset, count, "<i4")
    pointer_blocks = _blocks(file, header.pointers_offset, count, "<i8")
    for (first, lengths), (_, pointers) in zip(length_blocks, pointer_blocks, strict=True):
        checksums[:] = zlib.crc32(lengths.data, checksums[0]), zlib.crc32(pointers.data, checksums[1])
        yield SequenceBlock(first, lengths.astype(np.int64), pointers)


def _check_documents(file: ByteFile, header: IndexHeader) -> int:
    """The checksum of the document index, 0 for fairseq's layout. Refuses one that does not increase from 0 to S."""
    if header.document_entries is None:
        return 0
    checksum, before = 0, 0
    for first, documents in _blocks(file, header.documents_offset, header.document_entries, "<i8"):
        checksum = zlib.crc32(documents.data, checksum)
        if first == 0 and documents[0] != 0:
            _refuse_document(file.path, 0, int(documents[0]), "expected 0")
        # Compared, not subtracted: a damaged entry may be anything, and a difference may overflow.
        earlier = np.concatenate(([before], documents[:-1]))
        falls = np.flatnonzero(documents < earlier)
        if len(falls):
            entry = int(falls[0])
            _refuse_document(
                file.path,
                first + entry,
                int(documents[entry]),
                f"expected at least {int(earlier[entry]):,}, the entry before",
            )
        before = int(documents[-1])
    if before != header.num_sequences:
        expectation = f"expected {header.num_sequences:,}, the number of sequences"
        _refuse_document(file.path, header.document_entries - 1, before, expectation)
    return checksum


def _refuse_document(path: FilePath, entry: int, value: int, expectation: str) -> NoReturn:
    raise CorpusFormatError(
        f"{path}: document entry {entry:,} is {value:,}; {expectation}. The index is damaged; recreate it."
    )
