"""Files that are not token files, recognized by their first bytes, so that a run does not train on them.

A short mark can also be two ordinary token ids, so each mark of fewer than four bytes is confirmed by more of the file.
"""

import itertools
import struct

import numpy as np

from dali_pipes.corpus.formats.marks import OLD_MEGATRON_MAGIC, deflate_kind
from dali_pipes.errors import CorpusFormatError
from dali_pipes.storage.byte_file import ByteFile

_HEADER_BYTES = (256, 512, 1024, 2048, 4096)
_HEADER_FACTS_BYTES = 32  # of an unknown header; the rest is zeros
_LEAST_MAGIC = 1 << 16  # a smaller first word is more likely an id
_LEAST_COUNT = 8  # so is a smaller count: two small ids make a large word

_KNOWN_MARKS = {
    b"PARE": "an encrypted Parquet file",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\x04\x22\x4d\x18": "compressed with lz4",
    b"\xfd7zXZ\0": "compressed with xz",
    b"\xff\x06\x00\x00sNaPpY": "compressed with snappy",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"LDFZ01\0\0": "a LitData chunk compressed with zstd",
    b"\x89HDF\r\n\x1a\n": "an HDF5 file",
    b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20": "a PyTorch pickle",
    b"SQLite format 3\0": "an SQLite database",
    b"GGUF": "a GGUF model",
    b"LITPKDS": "a packed chunk of lit-gpt (PackedDataset)",
}
_CONTROL_BYTES = (frozenset(range(0x20)) | {0x7F}) - frozenset(b"\t\n\f\r")
_PICKLE_SUFFIXES = (".pkl", ".pickle", ".pt", ".pth")


def refuse_foreign(file: ByteFile, head: bytes, *, may_be_text: bool) -> None:
    """Raise CorpusFormatError for a file of another kind, naming it. Blocks for a few reads.

    head: its first 4 KiB. may_be_text: ids of one byte may look like text
    """
    header = _unknown_header(file, head)
    if header is not None:
        raise CorpusFormatError(
            f"{file.path}: starts with {header}. This format is unknown, and the header would be read as ids. Save "
            "the file in llm.c's format or as .npy. If it contains only ids, set format = 'flat' and dtype."
        )
    kind = _foreign_kind(file, head, may_be_text)
    if kind is not None:
        raise CorpusFormatError(
            f"{file.path}: is {kind}, not token ids. Convert it, or for text set tokenizer = 'tokenizer.json'; if it "
            "contains only ids, set format = 'flat' and dtype."
        )


def _unknown_header(file: ByteFile, head: bytes) -> str | None:
    """A header like that of llm.c, but with an unknown magic, in words for a message; else None.

        byte 0      4 ... 32                             header_bytes
        magic       version, number of ids N ...  zeros  N ids of 1, 2, 4 or 8 bytes, and nothing else

    Ids of a flat file look like this only if everything coincides: a large first word, hundreds of zero bytes, and the
    number of the ids after them.
    """
    for header_bytes in _HEADER_BYTES:
        if len(head) < header_bytes or any(head[_HEADER_FACTS_BYTES:header_bytes]):
            return None  # a longer header would have zeros there, too
        payload = file.size - header_bytes
        for order in "<>":
            words = np.frombuffer(head, f"{order}u4", _HEADER_FACTS_BYTES // 4).tolist()
            if words[0] < _LEAST_MAGIC:
                continue
            pairs = itertools.pairwise(words[1:])
            wide = [low + (high << 32) if order == "<" else high + (low << 32) for low, high in pairs]
            for count in [*words[1:], *wide]:
                width = payload // count if count else 0
                if count >= _LEAST_COUNT and width in (1, 2, 4, 8) and width * count == payload:
                    return (
                        f"what looks like a header of {header_bytes:,} bytes, with magic {words[0]}, for {count:,} ids "
                        f"of {width} bytes"
                    )
    return None


def _foreign_kind(file: ByteFile, head: bytes, may_be_text: bool) -> str | None:
    for mark, kind in _KNOWN_MARKS.items():
        if head.startswith(mark):
            return kind
    if head.startswith(OLD_MEGATRON_MAGIC):
        return "an index of old fairseq or Megatron (TNTIDX)"
    if head[257:262] == b"ustar":
        return "a tar archive"
    if head.startswith(b"PK\x03\x04"):
        return _zip_kind(head)
    for check in (_shard_kind, _deflate_kind, _bzip2_kind, _safetensors_kind, _pickle_kind):
        if (found := check(file, head)) is not None:
            return found
    return None if may_be_text else text_kind(head)


def _zip_kind(head: bytes) -> str:
    first_name = head[30 : 30 + int.from_bytes(head[26:28], "little")]
    if first_name.endswith(b"data.pkl"):
        return "a PyTorch checkpoint (a pickle in a zip archive)"
    return "a NumPy .npz archive" if first_name.endswith(b".npy") else "a zip archive"


def _shard_kind(file: ByteFile, head: bytes) -> str | None:
    """A chunk of LitData or a shard of MDS: a count N, then N + 1 offsets, the last one the file's size."""
    if len(head) < 12:
        return None
    count, first = struct.unpack_from("<II", head)
    header_bytes = 4 * (count + 2)
    if not header_bytes <= first <= file.size or file.read(header_bytes - 4, 4) != struct.pack("<Q", file.size)[:4]:
        return None
    if first == header_bytes:
        return "a LitData chunk (name its folder, which has the index.json)"
    columns = file.read(header_bytes, 1)
    return "an MDS shard (name its folder, which has the index.json)" if columns == b"{" else None


def _deflate_kind(file: ByteFile, head: bytes) -> str | None:
    return deflate_kind(head)


def _bzip2_kind(file: ByteFile, head: bytes) -> str | None:
    return "compressed with bzip2" if head[:3] == b"BZh" and head[4:10] == b"1AY&SY" else None


def _safetensors_kind(file: ByteFile, head: bytes) -> str | None:
    return "a safetensors file" if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") <= file.size - 8 else None


def _pickle_kind(file: ByteFile, head: bytes) -> str | None:
    framed = head[:2] in (b"\x80\x04", b"\x80\x05") and head[2:3] == b"\x95"
    if framed and int.from_bytes(head[3:11], "little") <= file.size - 11:
        return "a Python pickle (which is never loaded)"
    return "a Python pickle (which is never loaded)" if file.path.suffix.lower() in _PICKLE_SUFFIXES else None


def text_kind(head: bytes) -> str | None:
    """The kind of text that `head` starts, None for other content. Text is UTF-8 without control characters.

    Ids below 256 have zero bytes between them, larger ones any byte.
    """
    if len(head) < 64 or not _CONTROL_BYTES.isdisjoint(head) or len(set(head)) < 10:
        return None
    try:
        head.decode("utf-8")
    except UnicodeDecodeError as error:
        if error.start < len(head) - 3:  # the head may end within a character
            return None
    if head.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        return "an HTML page, such as a proxy or a web server's folder sends"
    return "JSON text" if head.lstrip()[:1] in (b"{", b"[") else "text"
