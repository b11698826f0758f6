"""Plain writers of sets of shards for tests, byte by byte. Nothing here uses the package."""

import bz2
import gzip
import hashlib
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cramjam
import numpy as np
import numpy.typing as npt
import xxhash
import zstandard

Tokens = npt.NDArray[Any]
MDS_CODES = {"uint8": 8, "int8": 9, "uint16": 16, "int16": 17, "uint32": 32, "int32": 33, "uint64": 64, "int64": 65}
NUMPY_NUMBERS = {"int8": 0, "int16": 1, "int32": 2, "int64": 3, "uint8": 4, "uint16": 5, "uint32": 6, "uint64": 7}
TENSOR_NUMBERS = {"uint8": 11, "int8": 12, "int16": 14, "int32": 16, "int64": 18, "uint16": 20}
COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "zstd": zstandard.compress,
    "zstd:7": lambda data: zstandard.compress(data, 7),
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "br": lambda data: bytes(cramjam.brotli.compress(data, 5)),
    "snappy": lambda data: bytes(cramjam.snappy.compress_raw(data)),
}


def mds_value(encoding: str, value: Any, dim_bytes: int | None = None) -> bytes:
    """One value of a sample. `dim_bytes`: width of the dimensions, by default the narrowest, as the format's writer."""
    kind, *rest = encoding.split(":")
    if kind == "int":
        return struct.pack("<q", value)
    if kind == "str":
        return bytes(value.encode())
    if kind == "json":
        return json.dumps(value).encode()
    if kind == "bytes" and isinstance(value, bytes):
        return value
    if kind == "bytes" or len(rest) == 2:
        return bytes(value.tobytes())
    width = dim_bytes or next(w for w in (1, 2, 4, 8) if max(value.shape) < 256**w)
    head = bytes([value.ndim << 2 | int(math.log2(width))])
    head += b"".join(size.to_bytes(width, "little") for size in value.shape)
    return (b"" if rest else bytes([MDS_CODES[value.dtype.name]])) + head + bytes(value.tobytes())


def mds_shard(columns: dict[str, str], samples: Sequence[dict[str, Any]], dim_bytes: int | None = None) -> bytes:
    """A shard: columns by name are encodings, in the order of their names; each sample has a value of each."""
    names = sorted(columns)
    bodies = []
    for sample in samples:
        values = {name: mds_value(columns[name], sample[name], dim_bytes) for name in names}
        sizes = [len(values[name]) for name in names if mds_size(columns[name]) is None]
        bodies.append(struct.pack(f"<{len(sizes)}I", *sizes) + b"".join(values[name] for name in names))
    config = json.dumps({**mds_columns(columns), "format": "mds", "version": 2}, sort_keys=True).encode()
    first = 4 * (len(samples) + 2) + len(config)
    offsets = [first + sum(map(len, bodies[:number])) for number in range(len(samples) + 1)]
    return struct.pack(f"<{len(samples) + 2}I", len(samples), *offsets) + config + b"".join(bodies)


def mds_columns(columns: dict[str, str]) -> dict[str, list[Any]]:
    """What index and shard say of the columns."""
    names = sorted(columns)
    return {
        "column_encodings": [columns[name] for name in names],
        "column_names": names,
        "column_sizes": [mds_size(columns[name]) for name in names],
    }


def mds_size(encoding: str) -> int | None:
    """What `column_sizes` says."""
    kind, *rest = encoding.split(":")
    if kind == "int":
        return 8
    return np.dtype(rest[0]).itemsize * math.prod(map(int, rest[1].split(","))) if len(rest) == 2 else None


def write_mds(
    folder: Path,
    columns: dict[str, str],
    shards: Sequence[Sequence[dict[str, Any]]],
    *,
    compression: Sequence[str | None] = (None,),
    hashes: Sequence[str] = (),
    dim_bytes: int | None = None,
) -> Path:
    """A set in `folder`; `compression` of each shard in turn."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, samples in enumerate(shards):
        data = mds_shard(columns, samples, dim_bytes)
        basename, method = f"shard.{number:05}.mds", compression[number % len(compression)]
        entry: dict[str, Any] = {
            **mds_columns(columns),
            "compression": method,
            "format": "mds",
            "hashes": list(hashes),
            "raw_data": {"basename": basename, "bytes": len(data), "hashes": digests(data, hashes)},
            "samples": len(samples),
            "size_limit": 1 << 26,
            "version": 2,
            "zip_data": None,
        }
        if method is not None:
            basename, data = f"{basename}.{method.split(':')[0]}", COMPRESS[method](data)
            entry["zip_data"] = {"basename": basename, "bytes": len(data), "hashes": digests(data, hashes)}
        (folder / basename).write_bytes(data)
        entries.append(entry)
    (folder / "index.json").write_text(json.dumps({"shards": entries, "version": 2}))
    return folder


def digests(data: bytes, algorithms: Sequence[str]) -> dict[str, str]:
    """Hex digests by algorithm."""
    return {
        name: (getattr(xxhash, name)(data) if name.startswith("xxh") else hashlib.new(name, data)).hexdigest()
        for name in algorithms
    }


def litdata_chunk(items: Sequence[Tokens]) -> bytes:
    """A chunk of one run of ids an item."""
    offsets = [4 * (len(items) + 2) + sum(item.nbytes for item in items[:number]) for number in range(len(items) + 1)]
    header = struct.pack(f"<{len(items) + 2}I", len(items), *offsets)
    return header + b"".join(item.tobytes() for item in items)


def write_litdata(
    folder: Path,
    chunks: Sequence[Sequence[Tokens]],
    *,
    kind: str = "numpy",
    compression: str | None = None,
    inflated: Sequence[int] = (),
) -> Path:
    """A set in `folder`; the chunks numbered in `inflated` are there as a reader leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    dtype = next(item.dtype.name for items in chunks for item in items)
    number_of_type = (NUMPY_NUMBERS if kind == "numpy" else TENSOR_NUMBERS)[dtype]
    for number, items in enumerate(chunks):
        data = litdata_chunk(items)
        name = f"chunk-0-{number}.bin"
        entry = {"chunk_bytes": len(data), "chunk_size": len(items), "dim": sum(map(len, items)), "filename": name}
        if len(items) and not len(items[0]):
            entry["dim"] = None
        if compression is not None:
            entry["filename"] = f"chunk-0-{number}.{compression}.bin"
            if number not in inflated:
                name, data = str(entry["filename"]), COMPRESS[compression](data)
        (folder / name).write_bytes(data)
        entries.append(entry)
    config = {
        "chunk_bytes": None,
        "chunk_size": 1000,
        "compression": compression,
        "data_format": [f"no_header_{kind}:{number_of_type}"],
        "encryption": None,
        "item_loader": "TokensLoader",
    }
    (folder / "index.json").write_text(json.dumps({"chunks": entries, "config": config, "updated_at": "1"}))
    return folder


def write_datatrove(
    path: Path, documents: Sequence[Tokens], *, tokenizer: str | None = "gpt2", index: bool = True
) -> Path:
    """A `.ds` file of `documents` (uint16 or uint32), with its index and metadata."""
    ends = np.cumsum([len(document) for document in documents], dtype="<u8")
    total = int(ends[-1]) if len(ends) else 0
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(document.tobytes() for document in documents))
    if index:
        Path(f"{path}.index").write_bytes(ends.tobytes())
    if tokenizer is not None:
        width = documents[0].dtype.itemsize if documents else 2
        Path(f"{path}.metadata").write_text(f"{tokenizer}|{width}\n{total}\n{total} T")
    return path


def write_array_record(path: Path, records: Sequence[bytes], options: str = "group_size:1") -> Path:
    """An ArrayRecord file, by its own library."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return path


def write_tfrecord(path: Path, records: Sequence[bytes]) -> Path:
    """A TFRecord file."""
    path.write_bytes(b"".join(map(tfrecord_frame, records)))
    return path


def tfrecord_frame(record: bytes) -> bytes:
    """One record with its length and checksums."""
    length = struct.pack("<Q", len(record))
    return length + _masked_crc32c(length) + record + _masked_crc32c(record)


def slow_crc32c(data: bytes) -> int:
    """Bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def _masked_crc32c(data: bytes) -> bytes:
    crc = slow_crc32c(data)
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) % 2**32)


def tf_example(features: Mapping[str, Sequence[int | str | float] | None], *, packed: bool = True) -> bytes:
    """A tf.train.Example of lists of int64, strings or floats; None is a Feature without a kind."""

    def varint(value: int) -> bytes:
        value &= 2**64 - 1
        out = bytearray()
        while value >= 0x80:
            out.append(value & 0x7F | 0x80)
            value >>= 7
        return bytes([*out, value])

    def field(number: int, content: bytes) -> bytes:
        return bytes([number << 3 | 2]) + varint(len(content)) + content

    entries = b""
    for name, values in features.items():
        integers = [value for value in values or () if isinstance(value, int)]
        if values is None:
            feature = b""
        elif any(isinstance(value, str) for value in values):
            feature = field(1, b"".join(field(1, str(value).encode()) for value in values))
        elif any(isinstance(value, float) for value in values):
            feature = field(2, field(1, struct.pack(f"<{len(values)}f", *values)))
        elif packed:
            feature = field(3, field(1, b"".join(map(varint, integers))) if values else b"")
        else:
            feature = field(3, b"".join(b"\x08" + varint(value) for value in integers))
        entries += field(1, field(1, name.encode()) + field(2, feature))
    return field(1, entries)
