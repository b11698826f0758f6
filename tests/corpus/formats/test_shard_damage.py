"""Sets of shards that are damaged, half written or made to mislead: an error at opening, or the right ids."""

import contextlib
import itertools
import json
import os
import re
import struct
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples
from shard_files import COMPRESS, mds_shard, write_datatrove, write_litdata, write_mds

from dali_pipes.corpus import open_corpus
from dali_pipes.corpus.formats.mds import shard_set as mds
from dali_pipes.corpus.formats.mds import shards as mds_shards
from dali_pipes.errors import BackendError, ConfigError, CorpusError, CorpusFormatError, CorpusReadError, DaliPipesError

ARRAY = {"tokens": "ndarray:uint16"}
IDS = [np.arange(10 * number, 10 * number + 7, dtype=np.uint16) for number in range(30)]
EVERYTHING = np.concatenate(IDS).tolist()
Change = Callable[[dict[str, Any]], object]


def make_mds(folder: Path, compression: str | None = None, **arguments: Any) -> Path:
    """Three shards of ten samples."""
    shards = [[{"tokens": ids, "text": "a"} for ids in IDS[first : first + 10]] for first in (0, 10, 20)]
    return write_mds(folder, {**ARRAY, "text": "str"}, shards, compression=[compression], **arguments)


def make_litdata(folder: Path, compression: str | None = None) -> Path:
    return write_litdata(folder, [IDS[first : first + 10] for first in (0, 10, 20)], compression=compression)


def make_datatrove(folder: Path) -> Path:
    for number in range(3):
        write_datatrove(folder / f"{number:05}_unshuffled.ds", IDS[10 * number : 10 * number + 10])
    return folder


def change_index(folder: Path, change: Change) -> None:
    index = json.loads((folder / "index.json").read_text())
    change(index)
    (folder / "index.json").write_text(json.dumps(index))


def cut(path: Path, count: int) -> None:
    path.write_bytes(path.read_bytes()[:-count])


def refused(folder: Path, *parts: str, error: type[Exception] = CorpusFormatError, **arguments: Any) -> None:
    """Opening fails with an error that has all of `parts` (regular expressions) in this order."""
    with pytest.raises(error, match="(?s)" + ".*".join(parts)):
        open_corpus(folder, **arguments)


@pytest.mark.parametrize("make", [make_mds, make_litdata])
def test_shards_and_index_that_disagree(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    folder = make(tmp_path / "whole")
    second = sorted(folder.glob("*[0-9].*"))[1]
    size = second.stat().st_size
    cut(second, 40)
    refused(folder, re.escape(str(second)), f"has {size - 40} bytes", f"expects {size}")
    make(folder)
    second.write_bytes(second.read_bytes() + b"1")
    refused(folder, re.escape(str(second)), f"has {size + 1} bytes", f"expects {size}")
    make(folder)
    second.unlink()
    refused(folder, re.escape(str(second)), "is missing")
    make(folder)
    (folder / ".shard.00003.mds.tmp").write_bytes(b"half")
    (folder / "shard.00003.mds.tmp").write_bytes(b"half")
    with open_corpus(folder) as corpus:
        assert corpus.tokens(0, corpus.num_tokens).tolist() == EVERYTHING


def test_counts_that_disagree(tmp_path: Path) -> None:
    folder = make_mds(tmp_path / "mds")
    change_index(folder, lambda index: index["shards"][1].update(samples=11))
    refused(folder, r"shard\.00001\.mds", "the index claims 11 samples, but the shard 10")
    folder = make_litdata(tmp_path / "litdata")
    change_index(folder, lambda index: index["chunks"][1].update(chunk_size=11, dim=68))
    refused(folder, r"chunk-0-1\.bin", "the index claims 11 items, but the chunk 10")
    change_index(folder, lambda index: index["chunks"][1].update(chunk_size=10, dim=69))
    refused(folder, r"chunk-0-1\.bin", r"chunks\[1\] claims 69 ids, but its bytes are 70 of uint16")
    change_index(folder, lambda index: index["chunks"][1].update(chunk_size=10**6))
    refused(folder, r"chunk-0-1\.bin", "header of 1,000,000 items")


@pytest.mark.parametrize("make", [make_mds, make_litdata])
@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.99])
def test_an_index_that_is_half_written(tmp_path: Path, make: Callable[[Path], Path], part: float) -> None:
    folder = make(tmp_path / "set")
    text = (folder / "index.json").read_bytes()
    (folder / "index.json").write_bytes(text[: int(part * len(text))])
    refused(folder, re.escape(str(folder / "index.json")), "not valid JSON")
    (folder / "index.json").unlink()
    refused(folder, "name its folder")


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({3: 10}, "sample 2 starts at byte .* ends before that, at byte 10"),
        ({0: 4}, "sample 0 starts at byte 4, inside the header"),
        ({10: 10**6}, "the samples end at byte 1,000,000, but the shard has"),
        ({-1: 9}, "the index claims 10 samples, but the shard 9"),
    ],
)
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_offsets_that_cannot_be(tmp_path: Path, table: dict[int, int], message: str, compression: str | None) -> None:
    folder = make_mds(tmp_path, compression)
    path = next(folder.glob("shard.00001*"))
    data = bytearray(path.read_bytes() if compression is None else zstandard.decompress(path.read_bytes()))
    for entry, value in table.items():
        struct.pack_into("<I", data, 4 + 4 * entry, value)
    path.write_bytes(data if compression is None else zstandard.compress(bytes(data)))
    change_index(folder, lambda index: (index["shards"][1]["zip_data"] or {}).update(bytes=path.stat().st_size))
    refused(folder, r"shard\.00001\.mds", message)


def test_offsets_of_litdata_that_cannot_be(tmp_path: Path) -> None:
    for entry, value, message in (
        (3, 10, "item 2 starts at byte .* ends before that, at byte 10"),
        (0, 52, "item 0 starts at byte 52, expected 48"),
        (10, 10**6, "the items end at byte 1,000,000"),
        (4, 48 + 57, "item 4 starts at byte 105, inside an id of uint16"),
    ):
        folder = make_litdata(tmp_path)
        data = bytearray((folder / "chunk-0-1.bin").read_bytes())
        struct.pack_into("<I", data, 4 + 4 * entry, value)
        (folder / "chunk-0-1.bin").write_bytes(data)
        refused(folder, r"chunk-0-1\.bin", message)


def test_samples_that_disagree_with_themselves(tmp_path: Path) -> None:
    for at, value, message in (
        (0, 250, "sample 0: its columns .* 266 bytes, but the offsets leave 17"),
        (8 + 1, 2 << 2, "sample 0: its shape is 0 ids of 2 bytes, but 13 bytes follow"),
        (8 + 2, 8, "sample 0: its shape is 8 ids of 2 bytes, but 14 bytes follow"),
        (8 + 1, 63 << 2, "sample 0: a value of 16 bytes ends inside its shape"),
    ):
        folder = make_mds(tmp_path)
        data = bytearray((folder / "shard.00000.mds").read_bytes())
        data[int.from_bytes(data[4:8], "little") + at] = value  # of sample 0
        (folder / "shard.00000.mds").write_bytes(data)
        refused(folder, r"shard\.00000\.mds", message)
    write_mds(tmp_path / "b", {"tokens": "ndarray"}, [[{"tokens": IDS[0]}]])
    data = bytearray((tmp_path / "b" / "shard.00000.mds").read_bytes())
    data[data.index(bytes([16, 4, 7]))] = 34
    (tmp_path / "b" / "shard.00000.mds").write_bytes(data)
    refused(tmp_path / "b", "sample 0: type code 34, expected")


@pytest.mark.parametrize(
    "name", ["../out.mds", "a/../../out.mds", "/etc/hostname", "", ".", "a\\b", "a\0b", "a/", 7, None]
)
@pytest.mark.parametrize("make", [make_mds, make_litdata])
def test_names_may_not_leave_the_folder(tmp_path: Path, make: Callable[[Path], Path], name: object) -> None:
    folder = make(tmp_path / "set")
    (tmp_path / "out.mds").write_bytes((folder / sorted(os.listdir(folder))[0]).read_bytes())

    def rename(index: dict[str, Any]) -> None:
        if "shards" in index:
            index["shards"][0]["raw_data"]["basename"] = name
        else:
            index["chunks"][0]["filename"] = name

    change_index(folder, rename)
    refused(folder, r"(shards|chunks)\[0\]\.(raw_data\.)?(basename|filename)", "expected")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.update(version=1), "version 1; expected 2"),
        (lambda index: index["shards"][0].update(format="json"), "'json'; expected 'mds'"),
        (lambda index: index["shards"][0].update(compression=5), "compression is 5, expected a string or null"),
        (lambda index: index["shards"][0].update(column_encodings=["str", "pkl"]), "a pickle, which is never loaded"),
        (lambda index: index["shards"][0].update(column_encodings=["str", "ndarray:float32"]), "arrays of 'float32'"),
        (lambda index: index["shards"][0].update(column_sizes=[None]), "2 column names, 2 encodings and 1 sizes"),
        (lambda index: index["shards"][0].update(column_sizes=[None, 14]), "has size 14"),
        (lambda index: index["shards"][0].update(column_sizes=[None, "x"]), "column size 'x'"),
        (lambda index: index["shards"][0].update(column_names=["text", "text"]), "expected distinct strings"),
        (lambda index: index["shards"][2].update(column_names=["text", "b"]), r"shards\[2\]: .* column 'tokens'"),
        (lambda index: index["shards"][0].update(samples=-1), "samples is -1, expected an integer"),
        (lambda index: index["shards"][0].update(samples=True), "samples is True, expected an integer"),
        (lambda index: index["shards"][0].update(samples=10**9), "1,000,000,000 samples"),
        (lambda index: index["shards"][0].update(raw_data=None), r"raw_data is None, expected an object"),
        (lambda index: index["shards"][0]["raw_data"].update(bytes=2**32), "bytes is 4294967296, expected"),
        (lambda index: index["shards"].append(5), r"shards\[3\] is 5, expected an object"),
        (lambda index: index.update(shards={}), "shards is {}, expected a list"),
    ],
)  # fmt: skip
def test_an_mds_index_that_cannot_be(tmp_path: Path, change: Change, message: str) -> None:
    folder = make_mds(tmp_path)
    change_index(folder, change)
    refused(folder, "index.json", message)


def test_a_compression_that_is_not_read(tmp_path: Path) -> None:
    folder = make_mds(tmp_path, "zstd")
    change_index(folder, lambda index: index["shards"][0].update(compression="lz4"))
    refused(folder, r"shards\[0\]\.compression is 'lz4'; expected one of zstd, gz, bz2, br, snappy")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"encryption": {"algorithm": "fernet"}}, "encrypted"),
        ({"item_loader": "PyTreeLoader"}, "item_loader is 'PyTreeLoader'"),
        ({"compression_batch_size": 5}, "compressed in batches"),
        ({"compression": "lz4"}, "compression is 'lz4'"),
        ({"data_format": ["no_header_numpy:5", "int"]}, "expected one no_header_numpy"),
        ({"data_format": ["no_header_numpy:8"]}, "a code of integers"),
        ({"data_format": ["no_header_tensor:5"]}, "a code of integers"),
        ({"data_format": ["jpeg"]}, "expected one no_header_numpy"),
        ({"data_format": None}, "expected one no_header_numpy"),
    ],
)
def test_a_litdata_configuration_that_is_not_read(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    folder = make_litdata(tmp_path)
    change_index(folder, lambda index: index["config"].update(change))
    refused(folder, "index.json", message)


def test_sets_without_shards(tmp_path: Path) -> None:
    (tmp_path / "index.json").write_text('{"shards": [], "version": 2}')
    refused(tmp_path, "does not list any shards", error=CorpusError)
    (tmp_path / "index.json").write_text('{"chunks": [], "config": {"data_format": "no_header_numpy:5"}}')
    refused(tmp_path, "does not list any chunks", error=CorpusError)


def test_formats_that_were_said_and_are_not_there(tmp_path: Path) -> None:
    folder = make_mds(tmp_path / "mds")
    refused(folder, "a set of format mds, but format = 'litdata'", format="litdata")
    refused(
        folder / "shard.00000.mds",
        "is not an index.json that lists shards, but format = .mds",
        format="mds",
    )
    refused(folder, "uint16 ids, but dtype = 'int32'", dtype="int32")
    refused(make_litdata(tmp_path / "lit"), "uint16 ids, but dtype = 'int32'", dtype="int32")
    refused(make_litdata(tmp_path / "lit"), "litdata .*checksums", verify=True, error=ConfigError)


def test_datatrove_files_that_do_not_go_together(tmp_path: Path) -> None:
    path = make_datatrove(tmp_path) / "00001_unshuffled.ds"
    index, metadata = Path(f"{path}.index"), Path(f"{path}.metadata")
    ends = np.fromfile(index, "<u8")
    cases: list[tuple[Path, bytes, str]] = [
        (path, path.read_bytes()[:-1], "139 bytes are not a multiple of 2"),
        (path, path.read_bytes()[:-40], r"metadata claims 70 ids, but the file has 50"),
        (index, index.read_bytes()[:-4], "76 bytes are not a multiple of 8"),
        (index, index.read_bytes()[:-8], "the last entry is 63, but .* has 70 ids"),
        (index, b"", "the last entry is 0, but .* has 70 ids"),
        (index, np.array([*ends[:4], 7, *ends[5:]], "<u8").tobytes(), "entry 4 is 7, expected at least 28"),
        (
            index,
            np.array([*ends[:4], 2**64 - 1, *ends[5:]], "<u8").tobytes(),
            "entry 5 is 42, expected at least 18,446,744,073,709,551,615",
        ),
        (metadata, b"", "line 1 is '', expected TOKENIZER|WIDTH"),
        (metadata, b"gpt2|3\n70\n", "expected TOKENIZER|WIDTH"),
        (metadata, b"gpt2|2\nmany\n", "line 2 is 'many'"),
        (metadata, b"gpt2|4\n70\n", r"metadata claims 70 ids, but the file has 35"),
    ]
    for file, content, message in cases:
        before = file.read_bytes()
        file.write_bytes(content)
        refused(tmp_path, r"00001_unshuffled\.ds", message)
        file.write_bytes(before)
    refused(tmp_path, "uint16 ids, but dtype = 'int64'", dtype="int64")


@pytest.mark.parametrize("compression", [None, "zstd", "gz", "bz2", "br", "snappy"])
def test_checksums(tmp_path: Path, compression: str | None) -> None:
    folder = make_mds(tmp_path, compression, hashes=["sha1", "sha256", "xxh64", "xxh3_64", "xxh128", "xxh32"])
    with open_corpus(folder, verify=True) as corpus:
        assert corpus.tokens(0, corpus.num_tokens).tolist() == EVERYTHING
    for kind in ("raw_data", "zip_data"):
        if kind == "zip_data" and compression is None:
            continue
        for algorithm in ("sha256", "xxh3_64"):
            before = json.loads((folder / "index.json").read_text())["shards"][1][kind]["hashes"][algorithm]

            def put(value: str, kind: str = kind, algorithm: str = algorithm) -> None:
                change_index(folder, lambda index: index["shards"][1][kind]["hashes"].update({algorithm: value}))

            put("00" + before[2:])
            refused(folder, r"shard\.00001\.mds", algorithm, before, f"expects 00{before[2:]}", verify=True)
            put(before)
    change_index(folder, lambda index: index["shards"][2]["raw_data"]["hashes"].update(sha0="12"))
    refused(folder, r"shard\.00002\.mds", "unknown kind 'sha0'", verify=True)
    with open_corpus(folder) as corpus:
        assert corpus.num_tokens == len(EVERYTHING)


def test_extras_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_mds(tmp_path, "zstd", hashes=["xxh64"])
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "xxhash", None)
        refused(folder, "xxhash", r"dali-pipes\[shards\]", error=BackendError, verify=True)
    monkeypatch.setitem(sys.modules, "zstandard", None)
    refused(folder, "zstandard", r"dali-pipes\[shards\]", error=BackendError)
    monkeypatch.setitem(sys.modules, "cramjam", None)
    for method in ("br", "snappy"):
        folder = make_mds(tmp_path / method, method)
        refused(folder, "cramjam", method, r"dali-pipes\[shards\]", error=BackendError)


@pytest.mark.parametrize("compression", ["zstd", "gz", "bz2", "br", "snappy"])
def test_more_than_should_be_is_not_decompressed(tmp_path: Path, compression: str) -> None:
    folder = make_mds(tmp_path, compression)
    path = next(folder.glob("shard.00001*"))
    path.write_bytes(COMPRESS[compression](bytes(100 << 20)))
    change_index(folder, lambda index: index["shards"][1]["zip_data"].update(bytes=path.stat().st_size))
    tracemalloc.start()
    said = "cannot be decompressed" if compression in ("br", "snappy") else "decompresses to more bytes"
    refused(folder, r"shard\.00001\.mds", said)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 << 20


def test_shards_that_change_later(tmp_path: Path) -> None:
    for number, compression in enumerate((None, "zstd")):
        folder = make_mds(tmp_path / str(number), compression)
        path = next(folder.glob("shard.00002*"))
        with open_corpus(folder) as corpus:
            path.write_bytes(path.read_bytes() + b"1")
            with pytest.raises((CorpusReadError, CorpusFormatError), match=r"shard\.00002"):
                corpus.tokens(0, corpus.num_tokens)
    folder = make_litdata(tmp_path / "lit")
    with open_corpus(folder) as corpus:
        data = bytearray((folder / "chunk-0-1.bin").read_bytes())
        struct.pack_into("<I", data, 8, 50)
        (folder / "chunk-0-1.bin").write_bytes(data)
        with pytest.raises(CorpusReadError, match=r"chunk-0-1\.bin: changed"):
            _ = corpus.document_offsets


def test_lengths_are_found_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mds, "_KEPT_FROM_BYTES", 0)
    for compression in (None, "zstd"):
        folder = make_mds(tmp_path / str(compression), compression)
        with open_corpus(folder) as corpus:
            fingerprint, offsets = corpus.fingerprint, corpus.document_offsets
        with monkeypatch.context() as patch:
            patch.setattr(mds, "find_samples", None)
            with open_corpus(folder) as corpus:
                assert corpus.fingerprint == fingerprint
                np.testing.assert_array_equal(corpus.document_offsets, offsets)
                assert corpus.tokens(0, corpus.num_tokens).tolist() == EVERYTHING


def test_fixed_sizes_need_no_decompression(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_mds(tmp_path / "a", {"tokens": "ndarray:uint16:7"}, [[{"tokens": ids} for ids in IDS]], compression=["zstd"])
    make_litdata(tmp_path / "b", "zstd")
    monkeypatch.setattr(mds_shards, "inflate", None)
    monkeypatch.setattr("dali_pipes.corpus.formats.litdata.inflate", None)
    for name in ("a", "b"):
        with open_corpus(tmp_path / name) as corpus:
            assert (corpus.num_tokens, corpus.num_documents) == (210, 30)


def test_sparse_shards_past_two_gib(tmp_path: Path) -> None:
    """Ids behind byte 2^31 of a shard; one of more than 2^32 bytes cannot be told from one that is damaged."""
    count, columns = 600_000_000, b"{}"
    head = bytes([1 << 2 | 2]) + struct.pack("<I", count)
    sample = 4 + len(head) + 2 * count
    first = 4 * 5 + len(columns)
    size = first + 3 * sample
    path = tmp_path / "shard.00000.mds"
    with path.open("wb") as file:
        file.write(struct.pack("<5I", 3, *(first + number * sample for number in range(4))) + columns)
        for number in range(3):
            file.seek(first + number * sample)
            file.write(struct.pack("<I", sample - 4) + head + np.arange(8, dtype="<u2").tobytes())
        file.truncate(size)
    write_mds(tmp_path / "small", ARRAY, [[]])
    index = json.loads((tmp_path / "small" / "index.json").read_text())
    index["shards"][0].update(samples=3)
    index["shards"][0]["raw_data"]["bytes"] = size
    (tmp_path / "index.json").write_text(json.dumps(index))
    with open_corpus(tmp_path) as corpus:
        assert corpus.num_tokens == 3 * count
        assert corpus.tokens(2 * count - 2, 10).tolist() == [0, 0, *range(8)]
        assert corpus.document_offsets is not None
        assert corpus.document_offsets.tolist() == [0, count, 2 * count, 3 * count]
    with path.open("r+b") as file:  # as a counter of 32 bits leaves it
        file.truncate(size + 2**30)
        file.seek(4 + 4 * 3)
        file.write(struct.pack("<I", (size + 2**30) % 2**32))
    index["shards"][0]["raw_data"]["bytes"] = size + 2**30
    (tmp_path / "index.json").write_text(json.dumps(index))
    refused(tmp_path, r"shards\[0\]\.raw_data\.bytes is 4673741871|shards\[0\]\.raw_data\.bytes is", "to 4,294,967,295")


@settings(max_examples=examples(50))
@given(
    make=st.sampled_from(["mds", "mds zstd", "mds br", "mds snappy", "litdata", "litdata zstd", "datatrove"]),
    file=st.integers(0, 100),
    at=st.integers(0, 10**6),
    flip=st.integers(0, 255),
    end=st.none() | st.integers(0, 10**4),
)
def test_any_damage_is_an_error_or_tokens(
    tmp_path_factory: pytest.TempPathFactory, make: str, file: int, at: int, flip: int, end: int | None
) -> None:
    """Bytes flipped, files cut: no crash, no hang, no memory beyond what the files are worth."""
    kind, _, compression = make.partition(" ")
    folder = tmp_path_factory.mktemp("damage")
    {
        "mds": lambda: make_mds(folder, compression or None),
        "litdata": lambda: make_litdata(folder, compression or None),
        "datatrove": lambda: make_datatrove(folder),
    }[kind]()
    names = sorted(os.listdir(folder))
    path = folder / names[file % len(names)]
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= flip
    path.write_bytes(bytes(data[:end]))
    tracemalloc.start()
    try:
        with contextlib.suppress(DaliPipesError), open_corpus(folder) as corpus:
            ids = corpus.tokens(0, corpus.num_tokens)
            offsets = corpus.document_offsets
            assert offsets is None or (offsets[-1] == len(ids) and (np.diff(offsets) >= 0).all())
            if flip == 0 and (end is None or end >= len(data)):
                assert ids.tolist() == EVERYTHING
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 30 << 20


def test_an_index_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    """Readers get the old set or the new one, or one of our errors where the writer writes in place."""
    folder = make_mds(tmp_path)
    old = (folder / "index.json").read_bytes()
    index = json.loads(old)
    index["shards"] = index["shards"][:2]
    new = json.dumps(index).encode()
    seen: set[object] = set()
    done = threading.Event()

    def write() -> None:
        for number in itertools.count():
            if done.is_set():
                return
            content = new if number % 2 else old
            if number % 7 == 0:
                (folder / "index.json").write_bytes(content)
            else:
                (folder / "index.tmp").write_bytes(content)
                os.replace(folder / "index.tmp", folder / "index.json")

    def read() -> None:
        for _ in range(25):
            try:
                with open_corpus(folder) as corpus:
                    seen.add(tuple(corpus.tokens(0, corpus.num_tokens).tolist()))
            except DaliPipesError:
                seen.add("refused")
            except BaseException as error:
                seen.add(repr(error))
                raise

    writer, readers = threading.Thread(target=write), [threading.Thread(target=read) for _ in range(8)]
    for thread in (writer, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    done.set()
    writer.join()
    assert seen <= {tuple(EVERYTHING), tuple(EVERYTHING[:140]), "refused"}
    assert seen & {tuple(EVERYTHING), tuple(EVERYTHING[:140])}


def test_a_shard_named_alone_is_told_from_ids(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(mds_shard(ARRAY, [{"tokens": ids} for ids in IDS]))
    refused(tmp_path / "a.bin", "is an MDS shard")


@pytest.mark.parametrize(
    ("make", "compression"),
    [*((make_mds, method) for method in ("zstd", "gz", "bz2", "br", "snappy")), (make_litdata, "zstd")],
)
def test_a_claim_that_no_compression_keeps(tmp_path: Path, make: Any, compression: str) -> None:
    """Two gigabytes of a hundred bytes, which as many ids would be asked for; a run of zeros is no such claim."""

    def claim(index: Any) -> None:
        for entry in index.get("shards", []):
            entry["raw_data"]["bytes"] = 2**31
        for entry in index.get("chunks", []):
            entry["chunk_bytes"] = 2**31

    folder = make(tmp_path / "set", compression)
    change_index(folder, claim)
    refused(folder, r"\d+ bytes of \w+ cannot decompress", "to 2,147,483,648 bytes", "claims")
    zeros = [np.zeros(3_000_000, np.uint16)]
    if make is make_mds:
        samples = [[{"tokens": ids} for ids in zeros]]
        write_mds(tmp_path / "zeros", {"tokens": "ndarray:uint16"}, samples, compression=[compression])
    else:
        write_litdata(tmp_path / "zeros", [zeros], compression=compression)
    with open_corpus(tmp_path / "zeros") as corpus:
        assert corpus.num_tokens == 3_000_000
        assert not corpus.tokens(0, 3_000_000).any()
