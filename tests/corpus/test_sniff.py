"""Files of other kinds are refused by name; ids that happen to start like them are not."""

import bz2
import gzip
import io
import lzma
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dali_pipes.corpus import open_corpus
from dali_pipes.errors import CorpusFormatError

IDS = np.random.default_rng(0).integers(0, 50257, 5000).astype("<u2").tobytes()


def tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        member = tarfile.TarInfo("0001.tokens.npy")
        member.size = len(IDS)
        archive.addfile(member, io.BytesIO(IDS))
    return file.getvalue()


def zipped(name: str) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, IDS)
    return file.getvalue()


def npz() -> bytes:
    file = io.BytesIO()
    np.savez(file, tokens=np.arange(5))
    return file.getvalue()


def tfrecord() -> bytes:
    """A record of 1184 bytes; the second number is the checksum of its length as TensorFlow writes it."""
    return struct.pack("<QI", 1184, 0xABCF0C6B) + IDS[:1184] + bytes(4)


FOREIGN: dict[str, Callable[[], bytes]] = {
    "an encrypted Parquet file": lambda: b"PARE" + IDS + b"PARE",
    "an MDS shard": lambda: struct.pack("<3I", 1, 20, 12 + 8 + len(IDS)) + b'{"a": 1}' + IDS,
    "a LitData chunk .name its folder": lambda: struct.pack("<3I", 1, 12, 12 + len(IDS)) + IDS,
    "compressed with gzip": lambda: gzip.compress(IDS),
    "compressed with zlib": lambda: zlib.compress(IDS),
    "compressed with bzip2": lambda: bz2.compress(IDS),
    "compressed with xz": lambda: lzma.compress(IDS),
    "compressed with zstd": lambda: b"\x28\xb5\x2f\xfd" + IDS,
    "a tar archive": tar,
    "a zip archive": lambda: zipped("tokens.bin"),
    "a NumPy .npz archive": npz,
    "a PyTorch checkpoint": lambda: zipped("archive/data.pkl"),
    "an HDF5 file": lambda: b"\x89HDF\r\n\x1a\n" + IDS,
    "a Python pickle": lambda: pickle.dumps(list(range(100)), protocol=4),
    "a LitData chunk": lambda: b"LDFZ01\0\0" + IDS,
    "a safetensors file": lambda: struct.pack("<Q", 50) + b'{"tokens":' + IDS,
    "a TFRecord file": tfrecord,
    "an index of old fairseq": lambda: b"TNTIDX\0\0" + IDS,
    "JSON text": lambda: b'{"text": "To be, or not to be, that is the question"}\n' * 2,
    "text, not token ids": lambda: "Löwe, was bist du für ein Gesell!\n".encode() * 300,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_kinds_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(FOREIGN[kind]())
    with pytest.raises(CorpusFormatError, match=rf"a\.bin: is {kind}.*format='flat'"):
        open_corpus(path)


@pytest.mark.parametrize("kind", FOREIGN)
def test_said_format_overrides_what_is_recognised(tmp_path: Path, kind: str) -> None:
    content = FOREIGN[kind]()
    (tmp_path / "a.bin").write_bytes(content)
    with open_corpus(tmp_path / "a.bin", format="flat", dtype="uint8") as corpus:
        assert corpus.tokens(0, corpus.num_tokens).tobytes() == content


def test_pickle_of_any_protocol_is_known_by_its_suffix(tmp_path: Path) -> None:
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"itos": {0: "a"}}, protocol=2))
    with pytest.raises(CorpusFormatError, match=r"meta\.pkl: is a Python pickle"):
        open_corpus(tmp_path / "meta.pkl")


@pytest.mark.parametrize(
    ("side", "content", "kind"),
    [
        ("index.json", '{"chunks": [{"filename": "a.bin"}], "config": {}}', "shard of format litdata"),
        ("index.json", '{"shards": [], "version": 2}', "shard of format mds"),
    ],
)
def test_parts_of_a_set_are_known_by_its_index(tmp_path: Path, side: str, content: str, kind: str) -> None:
    (tmp_path / "a.bin").write_bytes(IDS)
    (tmp_path / side).write_text(content)
    with pytest.raises(CorpusFormatError, match=rf"a\.bin: looks like a {kind}"):
        open_corpus(tmp_path / "a.bin")
    with open_corpus(tmp_path, format="flat") as corpus:
        assert corpus.num_tokens == 5000


@pytest.mark.parametrize(
    "start",
    [
        b"\x1f\x8b",
        b"\x1f\x8b\x08",
        b"\x78\x01",
        b"\x78\x9c",
        b"\x78\xda",
        b"BZh9",
        b"\x80\x04",
        b"\x80\x02",
        b"PK",
        b"\xff\xff\xff\xff",
        b"\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\xff\xff\xff\xff\x08\x00\x00\x00\xff\xff\xff\xff",
    ],
)
@pytest.mark.parametrize("size", [14, 40, 10_000])
def test_ids_that_start_like_another_kind_are_ids(tmp_path: Path, start: bytes, size: int) -> None:
    content = (start + IDS)[:size]
    (tmp_path / "a.bin").write_bytes(content)
    with open_corpus(tmp_path / "a.bin") as corpus:
        assert corpus.tokens(0, size // 2).tobytes() == content


def test_bytes_of_text_are_ids_of_a_byte_level_vocabulary(tmp_path: Path) -> None:
    text = b"To be, or not to be, that is the question. " * 10
    (tmp_path / "a.bin").write_bytes(text)
    with pytest.raises(CorpusFormatError, match="is text"):
        open_corpus(tmp_path / "a.bin")
    with open_corpus(tmp_path / "a.bin", dtype="uint8") as corpus:
        assert corpus.tokens(0, corpus.num_tokens).tobytes() == text


@settings(max_examples=300)
@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=600), st.sampled_from(["uint16", "int32", "int64"]))
def test_ids_are_hardly_ever_taken_for_another_kind(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], dtype: str
) -> None:
    path = tmp_path_factory.mktemp("ids") / "a.bin"
    np.array(ids).astype(dtype).tofile(path)
    with open_corpus(path, dtype=dtype) as corpus:
        assert corpus.format == "flat"
        np.testing.assert_array_equal(corpus.tokens(0, len(ids)), np.array(ids).astype(dtype))
