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
from corpus_files import write_llmc, write_megatron
from hypothesis import example, given, settings
from hypothesis import strategies as st
from profiles import examples
from shard_files import write_tfrecord
from table_files import list_array, table_of, write_arrow, write_parquet

from dali_pipes.corpus import open_corpus
from dali_pipes.errors import CorpusFormatError
from dali_pipes.tools.reports import check_corpus

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
    "an index of old fairseq": lambda: b"TNTIDX\0\0" + IDS,
    "JSON text": lambda: b'{"text": "To be, or not to be, that is the question"}\n' * 2,
    "text, not token ids": lambda: "Löwe, was bist du für ein Gesell!\n".encode() * 300,
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_other_kinds_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(FOREIGN[kind]())
    with pytest.raises(CorpusFormatError, match=rf"a\.bin: is {kind}.*format = 'flat'"):
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


@settings(max_examples=examples(60))
@given(st.lists(st.integers(0, 2**16 - 1), min_size=1, max_size=600), st.sampled_from(["uint16", "int32", "int64"]))
def test_ids_are_hardly_ever_taken_for_another_kind(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], dtype: str
) -> None:
    path = tmp_path_factory.mktemp("ids") / "a.bin"
    np.array(ids).astype(dtype).tofile(path)
    with open_corpus(path, dtype=dtype) as corpus:
        assert corpus.format == "flat"
        np.testing.assert_array_equal(corpus.tokens(0, len(ids)), np.array(ids).astype(dtype))


def header(
    magic: int, count: int, header_bytes: int = 1024, place: int = 2, order: str = "<", wide: bool = False
) -> bytes:
    facts = bytearray(header_bytes)
    struct.pack_into(f"{order}2I", facts, 0, magic, 77_777 if place > 1 else 0)
    struct.pack_into(f"{order}{'Q' if wide else 'I'}", facts, 4 * place, count)
    return bytes(facts)


@settings(max_examples=examples(45))
@given(
    magic=st.sampled_from([20250101, 20240521, 20240802, 20260731, 1 << 16, 0x534B4F54, 2**32 - 1]),
    header_bytes=st.sampled_from([256, 512, 1024, 2048, 4096]),
    place=st.integers(1, 6),
    order=st.sampled_from("<>"),
    is_wide=st.booleans(),
    width=st.sampled_from([1, 2, 4, 8]),
    ids=st.lists(st.integers(0, 255), min_size=1, max_size=40),
    extra=st.sampled_from([0, 0, 0, 1, -1, 8]),
)
def test_a_header_that_is_not_known_is_refused_if_its_count_fits(
    tmp_path_factory: pytest.TempPathFactory,
    magic: int,
    header_bytes: int,
    place: int,
    order: str,
    is_wide: bool,
    width: int,
    ids: list[int],
    extra: int,
) -> None:
    path = tmp_path_factory.mktemp("header") / "a.bin"
    count = len(ids) + extra
    stored = b"".join(value.to_bytes(width, "little") for value in ids)
    path.write_bytes(header(magic, max(count, 0), header_bytes, place, order, is_wide) + stored)
    if count >= 8 and len(stored) in {count * other for other in (1, 2, 4, 8)}:
        with pytest.raises(CorpusFormatError, match=rf"a\.bin: starts with .*magic {magic}, for .*format = 'flat'"):
            open_corpus(path, dtype="uint8")
    else:
        assert _ids(path, format="auto") == list(path.read_bytes())
    assert _ids(path, format="flat") == list(path.read_bytes())  # the user's word holds


def _ids(path: Path, format: str) -> list[int]:
    with open_corpus(path, format=format, dtype="uint8") as corpus:
        return [int(value) for value in corpus.tokens(0, corpus.num_tokens)]


@settings(max_examples=examples(60))
@example([0, 1, 1], 126, [], "<u2")  # as words of 4 bytes 65536, 1, zeros: and one id after 256 bytes
@given(
    st.lists(st.integers(0, 3), max_size=12),
    st.integers(0, 5000),
    st.lists(st.integers(0, 3), max_size=4),
    st.sampled_from(["<u2", "<u4", "<i8", "u1"]),
)
def test_small_ids_and_zeros_are_no_header(
    tmp_path_factory: pytest.TempPathFactory, begin: list[int], zeros: int, end: list[int], dtype: str
) -> None:
    """The first word of a header is larger than two small ids can make, or the count does not fit."""
    ids = np.array([*begin, *[0] * zeros, *end], dtype)
    if not ids.size:
        return
    path = tmp_path_factory.mktemp("small") / "a.bin"
    path.write_bytes(ids.tobytes())
    with open_corpus(path, dtype=np.dtype(dtype).name) as corpus:
        assert corpus.tokens(0, corpus.num_tokens).tolist() == ids.tolist()


def test_check_and_inspect_name_a_header(tmp_path: Path) -> None:
    path = tmp_path / "a.bin"
    path.write_bytes(header(20250101, len(IDS) // 2) + IDS)
    report = check_corpus([str(path)])
    assert [problem.kind for problem in report.problems] == ["format"]
    assert "magic 20250101, for 5,000 ids of 2 bytes" in report.problems[0].message


@pytest.mark.parametrize("format", ["npy", "llmc", "parquet", "arrow", "megatron", "tfrecord"])
def test_what_is_of_a_known_format_is_not_read_as_flat(tmp_path: Path, format: str) -> None:
    ids = np.arange(1000, 2000, dtype=np.uint16)
    if format == "npy":
        np.save(path := tmp_path / "a.npy", ids)
    elif format == "llmc":
        path = write_llmc(tmp_path / "a.bin", ids)
    elif format == "megatron":
        path = write_megatron(tmp_path / "a", [ids]).with_suffix(".idx")
    elif format == "tfrecord":
        path = write_tfrecord(tmp_path / "a", [ids.tobytes()])
    else:
        write = write_parquet if format == "parquet" else write_arrow
        path = write(tmp_path / "a", table_of([list_array([ids.tolist()])]))
    with pytest.raises(CorpusFormatError, match=f"has format {format}; with format = 'flat'"):
        open_corpus(path, format="flat", dtype="uint8")
    if format in ("npy", "llmc"):  # one that does not fit is not a whole file of the format
        path.write_bytes(path.read_bytes() + b"12")
        assert _ids(path, format="flat") == list(path.read_bytes())
