"""Documents come from the index where there is one, else from one scan; either way they tile the corpus."""

import io
import sys
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from corpus_files import write_megatron, write_shard
from document_oracle import offsets_of
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import examples

from dali_pipes.corpus import Corpus, open_corpus
from dali_pipes.documents import Documents, find_documents, scan
from dali_pipes.errors import ConfigError, CorpusError, CorpusReadError, TokenRangeError
from dali_pipes.runtime import progress

E = 9
FORMATS = [
    *(("flat", dtype) for dtype in ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", ">u2", ">i4")),
    *(("llmc", dtype) for dtype in ("uint16", "uint32")),
    *(("npy", dtype) for dtype in ("uint8", "uint16", "uint32", "int64", "uint64", ">u2", ">u8")),
]


def flat(folder: Path, *files: Sequence[int], dtype: str = "uint16") -> Path:
    folder.mkdir(exist_ok=True)
    for number, tokens in enumerate(files):
        np.array(tokens, dtype).tofile(folder / f"s_{number}.bin")
    return folder


def found(folder: Path, end: int | None = None, start: int | None = None, dtype: str = "uint16") -> Documents:
    with open_corpus(folder, format="flat", dtype=dtype, eos_id=end) as corpus:
        documents = find_documents(corpus, start_id=start)
    assert documents.offsets.dtype == np.int64
    assert not documents.offsets.flags.writeable
    assert documents.num_documents == len(documents.offsets) - 1
    return documents


@given(
    st.lists(st.lists(st.sampled_from([7, E]), max_size=6), min_size=1, max_size=6).filter(any),
    st.sampled_from(["end", "start"]),
    st.sampled_from([E, 8, 70_000]),
)
def test_documents_end_at_files_if_asked_for(
    tmp_path_factory: pytest.TempPathFactory, files: list[list[int]], kind: str, token_id: int
) -> None:
    """Empty files, ids that are nowhere or do not fit the type, files that end with their id and files that do not."""
    folder = flat(tmp_path_factory.mktemp("files") / "data", *files)
    tokens = [token for file in files for token in file]
    ends = np.cumsum([len(file) for file in files]).tolist()
    ids: dict[str, Any] = {"end": {"eos_id": token_id}, "start": {}}[kind]
    start = token_id if kind == "start" else None
    with open_corpus(folder, format="flat", **ids) as corpus:
        for at_files, borders in ((True, ends), (False, [])):
            documents = find_documents(corpus, start_id=start, end_at_files=at_files)
            assert documents.offsets.tolist() == offsets_of(tokens, kind, token_id, borders)
            assert not documents.offsets.flags.writeable


@pytest.mark.parametrize(
    ("tokens", "ends", "starts"),
    [
        ([7, 8, E, 6, E, E, 5], [0, 3, 5, 6, 7], [0, 2, 4, 5, 7]),
        ([E, 7, 8, E, E, 6], [0, 1, 4, 5, 6], [0, 3, 4, 6]),
        ([E], [0, 1], [0, 1]),
        ([E, E, E], [0, 1, 2, 3], [0, 1, 2, 3]),
        ([7, E], [0, 2], [0, 1, 2]),
        ([E, 7], [0, 1, 2], [0, 2]),
        ([7, 7, 7, E], [0, 4], [0, 3, 4]),
    ],
)
def test_by_hand(tmp_path: Path, tokens: list[int], ends: list[int], starts: list[int]) -> None:
    by_end, by_start = found(flat(tmp_path / "data", tokens), end=E), found(tmp_path / "data", start=E)
    assert (by_end.offsets.tolist(), by_end.source, by_end.warning) == (ends, "end id 9", None)
    assert (by_start.offsets.tolist(), by_start.source, by_start.warning) == (starts, "start id 9", None)


@pytest.mark.parametrize(("kind", "setting"), [("end", "eos_id"), ("start", "document_start_id")])
def test_an_id_that_never_occurs_gives_one_document_and_a_warning(tmp_path: Path, kind: str, setting: str) -> None:
    flat(tmp_path / "data", [1, 2, 3])
    for _ in range(2):  # found, then kept
        documents = found(tmp_path / "data", *((50256, None) if kind == "end" else (None, 50256)))
        assert documents.offsets.tolist() == [0, 3]
        assert documents.warning is not None
        assert f"{setting} = 50256 does not occur in the corpus (3 tokens of uint16" in documents.warning
        assert documents.source == f"{kind} id 50256"


@pytest.mark.parametrize("token_id", [65536, -1, 2**70])
def test_an_id_that_the_type_cannot_hold_never_occurs(
    tmp_path: Path, token_id: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flat(tmp_path / "data", [0, 65535, 3])  # what 65536 and -1 would be if they wrapped
    monkeypatch.setattr(Corpus, "read_rows", None)  # nothing needs to be read
    documents = found(tmp_path / "data", end=token_id)
    assert documents.offsets.tolist() == [0, 3]
    assert documents.warning is not None
    assert f"eos_id = {token_id} does not occur" in documents.warning
    assert not (tmp_path / "cache").exists()


def test_one_of_two_ids_is_needed(tmp_path: Path) -> None:
    flat(tmp_path / "data", [1, 2, 3])
    with pytest.raises(ConfigError, match="set eos_id to the id that ends every document, or document_start_id"):
        found(tmp_path / "data")
    with pytest.raises(ConfigError, match="eos_id = 2 and document_start_id = 1 are both set"):
        found(tmp_path / "data", end=2, start=1)


@settings(max_examples=examples(35))
@given(
    kind=st.sampled_from(FORMATS),
    shards=st.lists(st.lists(st.integers(0, 3), max_size=40), min_size=1, max_size=6).filter(any),
    delimiter=st.sampled_from(["end", "start"]),
    token_id=st.integers(0, 4),
    chunk_bytes=st.sampled_from([1, 2, 8, 24, 64, 1 << 20]),
)
def test_scan_equals_a_plain_loop(
    tmp_path_factory: pytest.TempPathFactory,
    kind: tuple[str, str],
    shards: list[list[int]],
    delimiter: str,
    token_id: int,
    chunk_bytes: int,
) -> None:
    """Over files and empty files, every format without an index, and chunks that cut anywhere, of one token too."""
    format, dtype = kind
    folder = tmp_path_factory.mktemp("shards")
    for number, shard in enumerate(shards):
        write_shard(folder / f"s_{number}.{'npy' if format == 'npy' else 'bin'}", np.array(shard, dtype), format)
    tokens = [token for shard in shards for token in shard]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scan, "CHUNK_BYTES", chunk_bytes)
        patch.setenv("DALI_PIPES_CACHE", str(tmp_path_factory.mktemp("cache")))
        end, start = (token_id, None) if delimiter == "end" else (None, token_id)
        with open_corpus(folder, format=format, dtype=dtype if format == "flat" else None, eos_id=end) as corpus:
            documents = find_documents(corpus, start_id=start)
            again = find_documents(corpus, start_id=start)
    assert documents.offsets.tolist() == offsets_of(tokens, delimiter, token_id)
    assert again.offsets.tolist() == documents.offsets.tolist()
    assert (documents.warning is not None) == (token_id not in tokens)
    assert again.warning == documents.warning


@pytest.mark.parametrize("chunk_tokens", range(1, 12))
def test_chunks_may_end_before_at_and_behind_an_id(
    tmp_path: Path, chunk_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = [[7, 8, E, 6, E], [E, 5], [5, E, E]]
    monkeypatch.setattr(scan, "CHUNK_BYTES", 2 * chunk_tokens)
    assert found(flat(tmp_path / "data", *tokens), end=E).offsets.tolist() == [0, 3, 5, 6, 9, 10]
    assert found(tmp_path / "data", start=E).offsets.tolist() == [0, 2, 4, 5, 8, 9, 10]


def test_more_documents_than_the_first_array_holds(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 3, 500_000, "uint16")
    flat(tmp_path / "data", tokens.tolist())
    wanted = np.unique([0, *np.flatnonzero(tokens == 1) + 1, len(tokens)])
    np.testing.assert_array_equal(found(tmp_path / "data", end=1).offsets, wanted)
    every = flat(tmp_path / "every", [E] * 200_000)
    np.testing.assert_array_equal(found(every, end=E).offsets, np.arange(200_001))


def test_an_empty_document_first_last_and_between(tmp_path: Path) -> None:
    """Lengths 0 5 0 0 3 1 0: an index knows all seven; nothing is scanned, and an id is not looked at."""
    lengths = [0, 5, 0, 0, 3, 1, 0]
    tokens = np.arange(9, dtype="uint16")
    parts = np.split(tokens, np.cumsum(lengths)[:-1])
    write_megatron(tmp_path / "a", parts)
    with open_corpus(tmp_path / "a", eos_id=4) as corpus:
        documents = find_documents(corpus, start_id=5)
        assert documents.offsets is corpus.document_offsets
    assert np.diff(documents.offsets).tolist() == lengths
    assert (documents.num_documents, documents.source, documents.warning) == (7, "index", None)
    assert not (tmp_path / "cache").exists()


def test_the_same_lengths_with_end_ids(tmp_path: Path) -> None:
    """Where each document carries its end id, an empty one is that id alone and is found by the scan."""
    lengths = [0, 5, 0, 0, 3, 1, 0]
    tokens = [token for length in lengths for token in [*range(length), E]]
    documents = found(flat(tmp_path / "data", tokens), end=E)
    assert np.diff(documents.offsets).tolist() == [length + 1 for length in lengths]


def test_a_corpus_of_empty_documents_is_refused(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [np.zeros(0, "uint16")] * 3)
    with pytest.raises(CorpusError, match="the corpus is empty"):
        open_corpus(tmp_path / "a")


def test_fairseq_pairs_have_no_documents_and_are_scanned(tmp_path: Path) -> None:
    write_megatron(tmp_path / "a", [np.array([1, 2, E, 3], "uint16"), np.array([E, 4], "uint16")], fairseq=True)
    with open_corpus(tmp_path / "a", eos_id=E) as corpus:
        assert find_documents(corpus).offsets.tolist() == [0, 3, 5, 6]


def test_uint64_ids_are_compared_and_refused_as_the_corpus_does(tmp_path: Path) -> None:
    np.save(tmp_path / "good.npy", np.array([1, 2**63 - 1, 3], "uint64"))
    np.save(tmp_path / "bad.npy", np.array([1, 2, 2**63], "uint64"))
    with open_corpus(tmp_path / "good.npy", eos_id=2**63 - 1) as corpus:
        assert find_documents(corpus).offsets.tolist() == [0, 2, 3]
    with open_corpus(tmp_path / "bad.npy", eos_id=2) as corpus, pytest.raises(TokenRangeError, match="token 2 is"):
        find_documents(corpus)
    assert [path.suffix for path in (tmp_path / "cache").iterdir() if path.stat().st_size] == [".npy"]  # of good.npy


def test_a_file_that_shrank_is_an_error(tmp_path: Path) -> None:
    flat(tmp_path / "data", [1, E, 3], [4, 5, E])
    with open_corpus(tmp_path / "data", format="flat", dtype="uint16", eos_id=E) as corpus:
        (tmp_path / "data" / "s_1.bin").write_bytes(b"\1\0")
        with pytest.raises(CorpusReadError, match=r"s_1\.bin"):
            find_documents(corpus)
    assert not list((tmp_path / "cache").glob("*.npy"))


@pytest.mark.parametrize(("is_terminal", "is_long"), [(True, True), (True, False), (False, True)])
def test_progress_is_for_terminals_and_long_scans(
    tmp_path: Path,
    is_terminal: bool,
    is_long: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(progress, "SHOWN_AFTER_S", 0 if is_long else 1000)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    monkeypatch.setenv("TERM", "xterm")
    assert found(flat(tmp_path / "data", [1, E, 3]), end=E).offsets.tolist() == [0, 2, 3]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert ("finding documents" in shown.err) == (is_terminal and is_long)


LLMC = [f"llmc/gpt2_{name}.bin" for name in ("val_000000", "train_000001", "train_000002", "train_000003")]


@pytest.mark.parametrize(
    ("names", "dtype", "vocabulary", "numbers", "end", "start", "added"),
    [
        (["nanogpt/train.bin"], None, "gpt2", range(342), 50256, None, "each"),
        (["nanogpt/cl100k_u32.bin"], "uint32", "cl100k", range(120), 100257, None, "each"),
        (["npy/gpt2_u16.npy"], None, "gpt2", range(150), 50256, None, "each"),
        (LLMC, None, "gpt2", range(380), None, 50256, "each"),
        (["llmc/cl100k_val_000000.bin"], None, "cl100k", range(120), None, 100257, "each"),
        (["megatron/gpt2_text_document"], None, "gpt2", range(380), None, None, "unless empty"),
        (["megatron/gpt2_text_sentence.idx"], None, "gpt2", range(120), None, None, "unless empty"),
        (["megatron/cl100k_text_document.bin"], None, "cl100k", range(120), None, None, "unless empty"),
    ],
)
def test_samples_have_their_true_documents(
    samples: Path,
    names: list[str],
    dtype: str | None,
    vocabulary: str,
    numbers: range,
    end: int | None,
    start: int | None,
    added: str,
) -> None:
    with np.load(io.BytesIO((samples / "truth.npz").read_bytes())) as truth:
        true: npt.NDArray[Any] = np.diff(truth[f"{vocabulary}_offsets"].astype(np.int64))[list(numbers)]
    lengths = true + (1 if added == "each" else true > 0)
    with open_corpus([samples / name for name in names], dtype=dtype, eos_id=end) as corpus:
        documents = find_documents(corpus, start_id=start)
    np.testing.assert_array_equal(np.diff(documents.offsets), lengths)
    assert documents.warning is None


def test_a_scan_holds_a_few_chunks_beside_its_offsets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = np.zeros(8_000_000, "uint16")
    tokens[::100] = E
    (tmp_path / "data").mkdir()
    tokens.tofile(tmp_path / "data" / "s_0.bin")
    monkeypatch.setattr(scan, "CHUNK_BYTES", 100_000)
    with open_corpus(tmp_path / "data", format="flat", eos_id=E) as corpus:
        tracemalloc.start()
        try:
            offsets = scan.scan_offsets(corpus, scan.Delimiter("start", E))
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert len(offsets) == 80_001
    assert peak < 2 * 8 * (1 << 16) + (scan.MOST_THREADS + 1) * 2 * 150_000 + 500_000
