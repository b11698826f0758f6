r"""True NumPy `.npy` files, versions 1 to 3: one array of integers, 1-D, or 2-D with rows read one after another.

    \x93NUMPY  major minor  header length            header                                              data
    6 bytes    u8    u8     u16 (major 1) | u32      {'descr': '<u2', 'fortran_order': False, 'shape': (9,), } ...

The header is a Python literal and is parsed as one; nothing is evaluated or unpickled.
(Format: NumPy Enhancement Proposal 1 and the documentation of `numpy.lib.format`.)
"""

import ast
import re
import struct
from typing import Any

import numpy as np

from dali_pipes.corpus.data_file import DataFile
from dali_pipes.corpus.formats.format import OpenOptions
from dali_pipes.corpus.formats.token_run import Layout, check_stated_type, token_run
from dali_pipes.errors import CorpusFormatError
from dali_pipes.storage.byte_file import ByteFile

MAGIC = b"\x93NUMPY"
# An honest header of a plain array has 64 to 256 bytes. The bound keeps a damaged one from costing time and memory.
_LONGEST_HEADER = 10_000
_INTEGER = re.compile(r"[<>|=]?[iu][1248]")
_ONE_BYTE = re.compile(r"[<>|=]?[biu]1")
_COUNT = re.compile(r"[<>|=]?(b1|[iu][1248])")


def recognize(file: ByteFile, head: bytes) -> bool:
    """Whether a file starts as these do."""
    return head.startswith(MAGIC)


def is_whole(file: ByteFile) -> bool:
    """Whether header and size agree."""
    try:
        parse_npy(file)
    except CorpusFormatError:
        return False
    return True


def inspect(file: ByteFile, options: OpenOptions) -> list[DataFile]:
    """As `Format.inspect`."""
    layout = parse_npy(file)
    check_stated_type(file.path, "npy", layout.stored, options.id_type)
    return [token_run(file, "npy", layout)]


def parse_npy(file: ByteFile) -> Layout:
    """Where the ids are. Raises CorpusFormatError for other than an array of integers, or a size that disagrees."""
    header, data_offset = _read_header(file)
    return _layout(file, header["shape"], header["fortran_order"], _integer_dtype(file, header["descr"]), data_offset)


def parse_npy_mask(file: ByteFile) -> Layout:
    """Where the bytes of a mask are. Raises CorpusFormatError as `parse_npy` does, and for other than one byte each."""
    header, data_offset = _read_header(file)
    descr = header["descr"]
    if not (isinstance(descr, str) and _ONE_BYTE.fullmatch(descr)):
        raise CorpusFormatError(
            f"{file.path}: holds {descr!r} values; a loss mask is bool or one-byte integers. Save it again with "
            "astype('bool')."
        )
    return _layout(file, header["shape"], header["fortran_order"], np.dtype(np.uint8), data_offset)


def parse_npy_counts(file: ByteFile) -> Layout:
    """Where the numbers of documents are. Raises as `parse_npy`, and for other than integers or bool."""
    header, data_offset = _read_header(file)
    descr = header["descr"]
    if not (isinstance(descr, str) and _COUNT.fullmatch(descr)):
        raise CorpusFormatError(f"{file.path}: found {descr!r} values; expected one integer or bool per document")
    return _layout(file, header["shape"], header["fortran_order"], np.dtype(descr), data_offset)


def _layout(file: ByteFile, shape: Any, fortran_order: Any, stored: np.dtype[Any], data_offset: int) -> Layout:
    if not (isinstance(shape, tuple) and all(type(length) is int and length >= 0 for length in shape)):
        raise CorpusFormatError(
            f"{file.path}: the .npy header has the invalid shape {shape!r}: it is damaged. Copy or recreate it."
        )
    if len(shape) not in (1, 2):
        raise CorpusFormatError(
            f"{file.path}: holds an array of shape {shape}; expected one axis (tokens) or two (rows, tokens)"
        )
    if fortran_order is not False:
        raise CorpusFormatError(
            f"{file.path}: fortran_order is {fortran_order!r}, so columns would be read as rows. Save it again with "
            "numpy.ascontiguousarray."
        )
    count = shape[0] * (shape[1] if len(shape) == 2 else 1)
    expected = data_offset + count * stored.itemsize
    if file.size != expected:
        raise CorpusFormatError(
            f"{file.path}: expected {expected:,} bytes for shape {shape} of {stored.str} in the .npy header, but the "
            f"file has {file.size:,}: it is truncated, or holds more than one array. Copy or recreate it."
        )
    return Layout(stored, data_offset, count)


def _read_header(file: ByteFile) -> tuple[dict[str, Any], int]:
    """The header as a dict with the three keys of the format, and the byte where data starts."""
    if file.size < 10 or file.read(0, 6) != MAGIC:
        raise CorpusFormatError(
            f"{file.path}: does not start with a NumPy header ({file.size:,} bytes). If it contains only ids, as files "
            "of the Dolma toolkit do, set format = 'flat' and dtype."
        )
    major, minor = file.read(6, 2)
    if major not in (1, 2, 3) or minor != 0:
        raise CorpusFormatError(f"{file.path}: has .npy version {major}.{minor}; expected 1.0, 2.0 or 3.0")
    width, code = (2, "<H") if major == 1 else (4, "<I")
    start = 8 + width
    length: int = struct.unpack(code, file.read(8, width))[0] if file.size >= start else file.size
    if length > _LONGEST_HEADER or start + length > file.size:
        raise CorpusFormatError(
            f"{file.path}: the .npy header claims {length:,} bytes at byte {start}, but the file has {file.size:,} "
            f"bytes and a header at most {_LONGEST_HEADER:,}: it is truncated or damaged. Copy or recreate it."
        )
    try:
        text = file.read(start, length).decode("utf-8" if major == 3 else "latin-1")
        header = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise CorpusFormatError(f"{file.path}: the .npy header is damaged: {error}") from error
    if not (isinstance(header, dict) and set(header) == {"descr", "fortran_order", "shape"}):
        raise CorpusFormatError(
            f"{file.path}: expected descr, fortran_order and shape in the .npy header: it is damaged"
        )
    return header, start + length


def _integer_dtype(file: ByteFile, descr: object) -> np.dtype[Any]:
    if isinstance(descr, str) and _INTEGER.fullmatch(descr):
        return np.dtype(descr)
    if isinstance(descr, str) and "O" in descr:
        raise CorpusFormatError(f"{file.path}: holds pickled Python objects ({descr!r}), which are never loaded")
    raise CorpusFormatError(f"{file.path}: holds {descr!r} values; token ids are integers of 1, 2, 4 or 8 bytes")
