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

from dali_pipes.corpus.data_file import Layout
from dali_pipes.errors import CorpusFormatError
from dali_pipes.storage.local import OpenFile

MAGIC = b"\x93NUMPY"
# An honest header of a plain array has 64 to 256 bytes. The bound keeps a damaged one from costing time and memory.
_LONGEST_HEADER = 10_000
_INTEGER = re.compile(r"[<>|=]?[iu][1248]")
_ONE_BYTE = re.compile(r"[<>|=]?[biu]1")


def parse_npy(file: OpenFile) -> Layout:
    """Where the ids are. Raises CorpusFormatError for what is no array of integers, or a size that disagrees."""
    header, data_offset = _read_header(file)
    return _layout(file, header["shape"], header["fortran_order"], _integer_dtype(file, header["descr"]), data_offset)


def parse_npy_mask(file: OpenFile) -> Layout:
    """Where the bytes of a mask are. Raises CorpusFormatError as `parse_npy` does, and for other than one byte each."""
    header, data_offset = _read_header(file)
    descr = header["descr"]
    if not (isinstance(descr, str) and _ONE_BYTE.fullmatch(descr)):
        raise CorpusFormatError(
            f"{file.path}: holds {descr!r}; a mask is bool, or integers of one byte. Save it again with astype('bool')."
        )
    return _layout(file, header["shape"], header["fortran_order"], np.dtype(np.uint8), data_offset)


def _layout(file: OpenFile, shape: Any, fortran_order: Any, stored: np.dtype[Any], data_offset: int) -> Layout:
    if not (isinstance(shape, tuple) and all(type(length) is int and length >= 0 for length in shape)):
        raise CorpusFormatError(
            f"{file.path}: the .npy header has shape {shape!r}, which is not a shape: it is damaged"
        )
    if len(shape) not in (1, 2):
        raise CorpusFormatError(
            f"{file.path}: an array of shape {shape}; tokens are a 1-D array, or 2-D (rows, tokens)"
        )
    if fortran_order is not False:
        raise CorpusFormatError(
            f"{file.path}: fortran_order is {fortran_order!r}: read as a stream, columns would be taken for "
            f"rows. Save it again with numpy.ascontiguousarray."
        )
    count = shape[0] * (shape[1] if len(shape) == 2 else 1)
    expected = data_offset + count * stored.itemsize
    if file.size != expected:
        raise CorpusFormatError(
            f"{file.path}: the .npy header says shape {shape} of {stored.str}, so {expected} bytes are expected, but "
            f"the file has {file.size}: it is truncated, or holds more than one array. Make or copy it again."
        )
    return Layout(stored, data_offset, count)


def _read_header(file: OpenFile) -> tuple[dict[str, Any], int]:
    """The header as a dict with the three keys of the format, and the byte where data starts."""
    if file.size < 10 or file.read(0, 6) != MAGIC:
        raise CorpusFormatError(
            f"{file.path}: has no NumPy header ({file.size} bytes). If it holds ids alone, as files of the Dolma "
            f"toolkit do, say format='flat' and a dtype."
        )
    major, minor = file.read(6, 2)
    if major not in (1, 2, 3) or minor != 0:
        raise CorpusFormatError(f"{file.path}: .npy version {major}.{minor}; known are 1.0, 2.0 and 3.0")
    width, code = (2, "<H") if major == 1 else (4, "<I")
    start = 8 + width
    length: int = struct.unpack(code, file.read(8, width))[0] if file.size >= start else file.size
    if length > _LONGEST_HEADER or start + length > file.size:
        raise CorpusFormatError(
            f"{file.path}: the .npy header should have {length} bytes from byte {start} on, but the file has "
            f"{file.size} (and {_LONGEST_HEADER} is the most that is read): it is truncated or damaged"
        )
    try:
        text = file.read(start, length).decode("utf-8" if major == 3 else "latin-1")
        header = ast.literal_eval(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise CorpusFormatError(f"{file.path}: the .npy header is damaged: {error}") from error
    if not (isinstance(header, dict) and set(header) == {"descr", "fortran_order", "shape"}):
        raise CorpusFormatError(f"{file.path}: the .npy header lacks descr, fortran_order or shape: it is damaged")
    return header, start + length


def _integer_dtype(file: OpenFile, descr: object) -> np.dtype[Any]:
    if isinstance(descr, str) and _INTEGER.fullmatch(descr):
        return np.dtype(descr)
    if isinstance(descr, str) and "O" in descr:
        raise CorpusFormatError(f"{file.path}: holds pickled Python objects ({descr!r}), which are never loaded")
    raise CorpusFormatError(f"{file.path}: holds {descr!r}; token ids are integers of 1, 2, 4 or 8 bytes")
