"""Megatron pairs: the index rules, and is checked entry by entry against the `.bin`."""

import os
import struct
import subprocess
import sys
import threading
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpus_files import MEGATRON_CODES, write_megatron
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes.corpus import TokenLocation, open_corpus
from dali_pipes.corpus.formats import megatron
from dali_pipes.errors import CorpusError, CorpusFormatError, CorpusReadError

ABC = [np.array([1, 2, 3], "uint16"), np.array([4, 5], "uint16"), np.array([6, 7, 8, 9], "uint16")]
SPARSE_INDEX = struct.Struct("<9sQBQQ")


def tokens(path: Path) -> list[int]:
    with open_corpus(path) as corpus:
        assert corpus.format == "megatron"
        return [int(token) for token in corpus.tokens(0, corpus.num_tokens)]


def offsets(path: Path) -> list[int]:
    with open_corpus(path) as corpus:
        assert corpus.document_offsets is not None
        assert corpus.document_offsets.dtype == np.int64
        assert not corpus.document_offsets.flags.writeable
        assert corpus.num_documents == len(corpus.document_offsets) - 1
        return [int(offset) for offset in corpus.document_offsets]


@pytest.mark.parametrize("name", ["a", "a.bin", "a.idx"])
def test_pair_by_hand(tmp_path: Path, name: str) -> None:
    """Documents: sequences 0 and 1, nothing, sequence 2."""
    write_megatron(tmp_path / "a", ABC, documents=[0, 2, 2, 3])
    with open_corpus(tmp_path / name) as corpus:
        assert corpus.files == (tmp_path / "a.bin",)
        assert corpus.tokens(0, 9).tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
        assert corpus.num_documents == 3
        assert offsets(tmp_path / name) == [0, 5, 5, 9]
        assert corpus.document_offsets is corpus.document_offsets


def test_documents_of_several_pairs_and_empty_ones(tmp_path: Path) -> None:
    write_megatron(tmp_path / "p_2", ABC, documents=[0, 0, 1, 3, 3])
    write_megatron(tmp_path / "p_10", [ABC[1], ABC[1][:0], ABC[0]], documents=[0, 1, 2, 3])
    write_megatron(tmp_path / "p_1", [ABC[0][:0]], documents=[0, 1])
    assert tokens(tmp_path) == [1, 2, 3, 4, 5, 6, 7, 8, 9, 4, 5, 1, 2, 3]
    assert offsets(tmp_path) == [0, 0, 0, 3, 9, 9, 11, 11, 14]


@pytest.mark.parametrize("dtype", MEGATRON_CODES)
def test_type_codes(tmp_path: Path, dtype: str) -> None:
    """Codes 9 and 10 are fairseq's."""
    path = write_megatron(tmp_path / "a", [np.array([1, 100], dtype), np.array([7], dtype)])
    with open_corpus(path) as corpus:
        assert corpus.dtype == np.dtype("int64" if dtype == "uint64" else dtype)
        assert corpus.tokens(0, 3).tolist() == [1, 100, 7]


def test_modes_are_tolerated_and_fairseq_has_no_documents(tmp_path: Path) -> None:
    write_megatron(tmp_path / "modes", ABC, modes=True)
    assert offsets(tmp_path / "modes") == [0, 3, 5, 9]
    write_megatron(tmp_path / "fairseq", ABC, fairseq=True)
    assert tokens(tmp_path / "fairseq") == list(range(1, 10))
    with open_corpus(tmp_path / "fairseq") as corpus:
        assert (corpus.num_documents, corpus.document_offsets) == (None, None)
    with open_corpus([tmp_path / "modes", tmp_path / "fairseq"]) as corpus:
        assert (corpus.num_documents, corpus.document_offsets) == (None, None)


def test_pointers_rule_over_the_order_in_the_file(tmp_path: Path) -> None:
    """The sequences lie in the order 2 0 1, with a gap of two ids behind 2."""
    content = [np.array([*ABC[2], 77, 77, *ABC[0], *ABC[1]], "uint16"), ABC[0][:0], ABC[0][:0]]
    path = write_megatron(tmp_path / "a", content, lengths=[3, 2, 4], pointers=[12, 18, 0])
    assert tokens(path) == list(range(1, 10))
    assert offsets(path) == [0, 3, 5, 9]
    with open_corpus(path) as corpus:
        assert [corpus.locate(position).offset for position in range(9)] == [6, 7, 8, 9, 10, 0, 1, 2, 3]
        out = np.zeros((2, 4), "uint16")
        corpus.read_rows([3, 0], out)
        assert out.tolist() == [[4, 5, 6, 7], [1, 2, 3, 4]]


@pytest.mark.parametrize("block", [1, 2, 5])
@settings(max_examples=examples(18))
@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=20), data=st.data())
def test_shuffled_sequences_and_documents_equal_a_slow_reader(
    tmp_path_factory: pytest.TempPathFactory, block: int, lengths: list[int], data: st.DataObject
) -> None:
    """Sequences lie in any order with gaps between; the index is read in blocks of any size."""
    folder = tmp_path_factory.mktemp("pair")
    cuts = sorted(data.draw(st.lists(st.integers(0, len(lengths)), max_size=5)))
    documents = [0, *cuts, len(lengths)]
    content, pointers = [], [0] * len(lengths)
    for number in data.draw(st.permutations(range(len(lengths)))):
        content += [999] * data.draw(st.integers(0, 2)) if lengths[number] else []
        pointers[number] = 4 * len(content)
        content += [100 * number + place for place in range(lengths[number])]
    expected = [100 * number + place for number, length in enumerate(lengths) for place in range(length)]
    sequences = [np.array(content, "int32")] + [np.zeros(0, "int32")] * (len(lengths) - 1)
    path = write_megatron(folder / "a", sequences, documents, lengths=lengths, pointers=pointers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron, "_BLOCK_ENTRIES", block)
        if not expected:
            with pytest.raises(CorpusError, match="the corpus is empty"):
                open_corpus(path)
            return
        assert tokens(path) == expected
        assert offsets(path) == [sum(lengths[:document]) for document in documents]


def sparse_pair(prefix: Path, documents: int, marked: int, pointers: list[int] | None = None) -> Path:
    """`documents` sequences of 900,000,000 uint16 ids; the first 8 of number `marked` are 1 to 8, all others 0."""
    length = 900_000_000
    true_pointers = [2 * length * number for number in range(documents)]
    index = SPARSE_INDEX.pack(b"MMIDIDX\0\0", 1, 8, documents, documents + 1)
    index += struct.pack(f"<{documents}i", *[length] * documents)
    index += struct.pack(f"<{documents}q", *(pointers or true_pointers))
    index += struct.pack(f"<{documents + 1}q", *range(documents + 1))
    prefix.with_suffix(".idx").write_bytes(index)
    with prefix.with_suffix(".bin").open("wb") as file:
        file.truncate(2 * length * documents)
        file.seek(true_pointers[marked])
        file.write(np.arange(1, 9, dtype="uint16").tobytes())
    return prefix.with_suffix(".bin")


@pytest.mark.parametrize(("documents", "marked"), [(3, 2), (4, 3)])
def test_pointers_beyond_32_bits(tmp_path: Path, documents: int, marked: int) -> None:
    """Marks at bytes 3.6e9 and 5.4e9."""
    path = sparse_pair(tmp_path / "a", documents, marked)
    first = 900_000_000 * marked
    with open_corpus(path) as corpus:
        assert corpus.num_tokens == 900_000_000 * documents
        assert corpus.tokens(first - 3, 13).tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 0, 0]
        assert corpus.document_offsets is not None
        assert corpus.document_offsets[marked] == first
        assert corpus.locate(first) == TokenLocation(path, first)


@pytest.mark.parametrize(
    ("pointers", "message"),
    [
        ([0, 1_800_000_000, 3_600_000_000 - 2**32, 5_400_000_000 - 2**32], "entry 2 has pointer -694,967,296"),
        (
            [0, 1_800_000_000, 3_600_000_000, 5_400_000_000 - 2**32],
            "entry 3 has pointer 1,105,032,704, expected 5,400,000,000",
        ),
        (
            [0, 1_800_000_000, 3_600_000_000, 3_600_000_002],
            r"entry 3 \(900,000,000 ids at byte 3,600,000,002\) overlaps entry 0",
        ),
        (
            [0, 1_800_000_000, 3_600_000_000, 2**63 - 1],
            "entry 3 has 900,000,000 ids of 2 bytes at byte 9,223,372,036,854,775,807",
        ),
    ],
)
def test_wrapped_pointers_are_refused(tmp_path: Path, pointers: list[int], message: str) -> None:
    """As a sum of 32 bits leaves them."""
    path = sparse_pair(tmp_path / "a", 4, 3, pointers)
    with pytest.raises(CorpusFormatError, match=rf"a\.idx: {message}"):
        open_corpus(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pointers": [0, 6, 14]},
            r"a\.idx: entry 2 has 4 ids of 2 bytes at byte 14, up to byte 22, but .*bin has 18",
        ),
        ({"pointers": [0, 6, 19]}, r"a\.idx: entry 2 has 4 ids of 2 bytes at byte 19"),
        (
            {"pointers": [0, 4, 10]},
            r"a\.idx: entry 1 \(2 ids at byte 4\) overlaps e",
        ),
        ({"pointers": [0, 0, 10]}, r"a\.idx: entry 1 \(\d ids at byte 0\) overlaps"),
        ({"pointers": [0, -6, 10]}, r"a\.idx: entry 1 has pointer -6"),
        ({"pointers": [0, 7, 10]}, r"a\.idx: entry 1 has pointer 7, .*multiple of 2"),
        ({"lengths": [3, -2, 4]}, r"a\.idx: entry 1 has length -2"),
        ({"lengths": [3, 2, 3]}, r"a\.bin: has 18 bytes, .*a\.idx accounts for 16"),
        ({"documents": [1, 2, 3]}, r"a\.idx: document entry 0 is 1; expected 0"),
        ({"documents": [0, 1, 2]}, r"a\.idx: document entry 2 is 2; expected 3"),
        ({"documents": [0, 2, 1, 3]}, r"a\.idx: document entry 2 is 1; expected at least 2"),
        ({"documents": [0, 4, 3]}, r"a\.idx: document entry 2 is 3; expected at least 4"),
        ({"documents": [0, -1, 3]}, r"a\.idx: document entry 1 is -1; expected at least 0"),
        ({"documents": [0, -(2**63), 2**63 - 1, 3]}, r"a\.idx: document entry 1 is -9,223,372,036,854,775,808"),
        ({"documents": []}, r"a\.idx: the document index is empty"),
        ({"version": 2}, r"a\.idx: .*version 2; expected 1"),
        ({"code": 7}, r"a\.idx: type code 7 .*floating-point"),
        ({"code": 11}, r"a\.idx: type code 11 is unknown"),
        ({"code": 4}, r"a\.idx: .*pointer|a\.idx: entry 2 has 4 ids of 4 bytes"),
        ({"magic": b"TNTIDX\0\0\0"}, r"a\.idx: is an index of old fairseq or Megatron \(TNTIDX\)"),
        ({"magic": b"SOMETHING"}, r"a\.idx: does not start with MMIDIDX.*format = 'flat'"),
    ],
)
def test_damaged_index_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    path = write_megatron(tmp_path / "a", ABC, **changes)
    for entry in (path, path.with_suffix(".idx"), tmp_path):
        with pytest.raises(CorpusFormatError, match=message):
            open_corpus(entry)


def test_bin_and_index_cut_or_grown_are_refused(tmp_path: Path) -> None:
    """Each is found at opening, with the expected and the found size."""
    path = write_megatron(tmp_path / "a", ABC)
    index = path.with_suffix(".idx")
    bin_bytes, index_bytes = path.read_bytes(), index.read_bytes()
    path.write_bytes(bin_bytes[:-2])
    with pytest.raises(CorpusFormatError, match=r"entry 2 .* up to byte 18, but .*a\.bin has 16 bytes"):
        open_corpus(path)
    path.write_bytes(bin_bytes + b"\1\0")
    with pytest.raises(CorpusFormatError, match=r"a\.bin: has 20 bytes, .* accounts for 18"):
        open_corpus(path)
    path.write_bytes(bin_bytes)
    for size in (0, 20, 30, len(index_bytes) // 2, len(index_bytes) - 1, len(index_bytes) + 1):
        index.write_bytes((index_bytes + b"\0")[:size])
        with pytest.raises(CorpusFormatError, match=rf"a\.idx: .*{size}"):
            open_corpus(path)


def test_missing_half_of_a_pair_is_named(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a", ABC)
    content = path.read_bytes()
    path.unlink()
    for entry in (tmp_path / "a", tmp_path / "a.idx", tmp_path):
        with pytest.raises(CorpusReadError, match=r"a\.bin: cannot be opened: No such file"):
            open_corpus(entry)
    path.write_bytes(content)
    path.with_suffix(".idx").unlink()
    with pytest.raises(CorpusReadError, match=r"a\.idx: cannot be opened"):
        open_corpus(path, format="megatron")
    (tmp_path / "b.npy").write_bytes(content)
    with pytest.raises(CorpusFormatError, match=r"b\.npy: .*named .bin or .idx"):
        open_corpus(tmp_path / "b.npy", format="megatron")


def test_other_dtype_is_refused_and_flat_reads_the_bin_alone(tmp_path: Path) -> None:
    path = write_megatron(tmp_path / "a", ABC)
    with pytest.raises(CorpusFormatError, match=r"a\.idx: the megatron file holds uint16 ids, but dtype = 'int32'"):
        open_corpus(path, dtype="int32")
    with open_corpus(path, format="flat") as corpus:
        assert (corpus.format, corpus.num_tokens, corpus.num_documents) == ("flat", 9, None)


@pytest.mark.parametrize("changes", [{"documents": [0, 1, 1, 3]}, {"lengths": [2, 3, 4], "pointers": [0, 4, 10]}])
def test_index_replaced_before_documents_are_asked_for(tmp_path: Path, changes: dict[str, Any]) -> None:
    path = write_megatron(tmp_path / "a", ABC, documents=[0, 1, 2, 3])
    with open_corpus(path) as corpus:
        write_megatron(tmp_path / "b", ABC, **changes)
        (tmp_path / "b.idx").replace(tmp_path / "a.idx")
        assert corpus.tokens(0, 9).tolist() == list(range(1, 10))
        with pytest.raises(CorpusReadError, match=r"a\.idx: .*after the corpus was opened"):
            _ = corpus.document_offsets


WRITER = """
import os, pathlib, sys, time
index = pathlib.Path(sys.argv[1])
versions = [pathlib.Path(name).read_bytes() for name in sys.argv[2:]]
print("ready", flush=True)
for turn in range(400):
    temporary = index.with_suffix(".tmp")
    temporary.write_bytes(versions[turn % 2])
    os.replace(temporary, index)
    time.sleep(0.002)
"""


def test_index_replaced_while_eight_readers_open_it(tmp_path: Path) -> None:
    """A reader gets the old documents or the new ones, never a mixture."""
    generator = np.random.default_rng(0)
    ids = generator.integers(0, 65536, 3000).astype("uint16")
    expected = {}
    for name, cuts in (("old", range(0, 3001, 3)), ("new", range(0, 3001, 5))):
        pieces = [ids[begin:end] for begin, end in pairwise(cuts)]
        expected[name] = [sum(len(piece) for piece in pieces[:number]) for number in range(len(pieces) + 1)]
        write_megatron(tmp_path / name, pieces)
    path = write_megatron(tmp_path / "pair", [ids])
    write = [sys.executable, "-c", WRITER, *(str(tmp_path / f"{name}.idx") for name in ("pair", "old", "new"))]
    seen: list[str] = []

    def read() -> None:
        while writer.poll() is None:
            try:
                with open_corpus(path) as corpus:
                    assert corpus.document_offsets is not None
                    found = corpus.document_offsets.tolist()
                    seen.extend(name for name in expected if expected[name] == found)
                    if found not in expected.values() or not np.array_equal(corpus.tokens(0, 3000), ids):
                        seen.append("wrong")
            except CorpusError as error:
                seen.append("changed" if "changed after" in str(error) else f"wrong: {error}")

    with subprocess.Popen(write, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        while open_documents(path) == 1:
            os.sched_yield()
        readers = [threading.Thread(target=read) for _ in range(8)]
        for reader in readers:
            reader.start()
        for reader in readers:
            reader.join()
    assert {"old", "new"} <= set(seen) <= {"old", "new", "changed"}


def open_documents(path: Path) -> int | None:
    with open_corpus(path) as corpus:
        return corpus.num_documents
