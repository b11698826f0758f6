"""Plain writers of every corpus format for tests, byte by byte. Nothing here uses the package."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[Any]
MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8, "uint32": 9, "uint64": 10}
LLMC_HEADERS = {"uint16": (20240520, 1), "uint32": (20240801, 7)}


def write_llmc(path: Path, tokens: Tokens, count: int | None = None) -> Path:
    """`tokens` (uint16 or uint32) behind the header of llm.c; `count` is a lie to tell there."""
    header = np.zeros(256, "<i4")
    header[:3] = (*LLMC_HEADERS[tokens.dtype.name], len(tokens) if count is None else count)
    path.write_bytes(header.tobytes() + tokens.tobytes())
    return path


def npy_bytes(descr: str, shape: object, data: bytes, fortran_order: object = False, version: int = 1) -> bytes:
    """A `.npy` file made by hand, so that its header can say anything."""
    text = f"{{'descr': {descr}, 'fortran_order': {fortran_order}, 'shape': {shape}, }}"
    prefix = 10 if version == 1 else 12
    text += " " * (-(prefix + len(text) + 1) % 64) + "\n"
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode("latin-1") + data


def write_megatron(
    prefix: Path,
    sequences: Sequence[Tokens],
    documents: Sequence[int] | None = None,
    *,
    lengths: Sequence[int] | None = None,
    pointers: Sequence[int] | None = None,
    modes: bool = False,
    fairseq: bool = False,
    code: int | None = None,
    magic: bytes = b"MMIDIDX\0\0",
    version: int = 1,
) -> Path:
    """PREFIX.bin and PREFIX.idx; returns the `.bin`. By default a document a sequence; the rest are lies to tell."""
    width = sequences[0].dtype.itemsize
    sizes = [len(sequence) for sequence in sequences]
    offsets = [width * sum(sizes[:number]) for number in range(len(sizes))]
    entries = list(range(len(sizes) + 1)) if documents is None else list(documents)
    index = magic + struct.pack("<QBQ", version, code or MEGATRON_CODES[sequences[0].dtype.name], len(sizes))
    index += b"" if fairseq else struct.pack("<Q", len(entries))
    index += np.array(sizes if lengths is None else lengths, "<i4").tobytes()
    index += np.array(offsets if pointers is None else pointers, "<i8").tobytes()
    index += b"" if fairseq else np.array(entries, "<i8").tobytes()
    index += bytes(len(sizes)) if modes else b""
    bin_path = Path(f"{prefix}.bin")
    bin_path.write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    Path(f"{prefix}.idx").write_bytes(index)
    return bin_path


def write_shard(path: Path, tokens: Tokens, format: str) -> Path:
    """One shard of `tokens` in `format`; a Megatron shard is cut into sequences of at most 7 ids."""
    if format == "flat":
        path.write_bytes(tokens.tobytes())
    elif format == "llmc":
        write_llmc(path, tokens)
    elif format == "npy":
        with path.open("wb") as file:
            np.save(file, tokens)
    else:
        cuts = range(0, len(tokens) + 1, 7)
        write_megatron(path.with_suffix(""), [tokens[cut : cut + 7] for cut in cuts])
    return path
